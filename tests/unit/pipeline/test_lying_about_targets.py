"""A stage that lies about the number of targets ends the incarnation, before any weight moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.documents import document_spec, windows_of, write_documents
from support.routes import RouteStages
from torch import Tensor

from atoll.core.errors import PeerMisbehaved
from atoll.node.data.corpus import Corpus, load_corpus
from atoll.node.model.run_model import RunModel, run_model
from atoll.node.model.span import Span
from atoll.node.pipeline.messages import Activation, Begin, Message
from atoll.node.pipeline.stage_checks import MicroBatchShape
from atoll.node.training.targets import IGNORED

pytestmark = pytest.mark.usefixtures("one_thread")
Lie = Callable[[Message], Message]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return load_corpus(document_spec(), str(write_documents(tmp_path / "text.jsonl")))


def begin(change: Callable[[Begin], int | None]) -> Lie:
    return lambda message: replace(message, targets=change(message)) if isinstance(message, Begin) else message


def activation(micro_batch: int, change: Callable[[Tensor], Tensor]) -> Lie:
    def lie(message: Message) -> Message:
        if not isinstance(message, Activation) or message.micro_batch != micro_batch:
            return message
        return replace(message, targets_BT=change(message.targets_BT.clone()))

    return lie


def none_counts(targets_BT: Tensor) -> Tensor:
    return torch.full_like(targets_BT, IGNORED)


def one_less(targets_BT: Tensor) -> Tensor:
    flat = targets_BT.view(-1)
    flat[int((flat != IGNORED).nonzero()[0])] = IGNORED
    return targets_BT


LIES: dict[str, tuple[bool, Lie]] = {  # with document masks, so that the flush tells a number; what is sent instead
    "one more": (True, begin(lambda message: (message.targets or 0) + 1)),
    "one less": (True, begin(lambda message: (message.targets or 0) - 1)),
    "none": (True, begin(lambda _: 0)),
    "all, and some are input only": (True, begin(lambda _: None)),
    "fewer than all": (False, begin(lambda _: 7)),
    "a first micro-batch with fewer": (True, activation(0, one_less)),
    "a last micro-batch with fewer": (True, activation(1, one_less)),
    "a micro-batch of which none count": (False, activation(0, none_counts)),
}


def route_of(run: RunModel, stages: int, masks: bool, carry: Callable[[Message], Message]) -> RouteStages:
    spec = document_spec(masks=masks)
    parts = RouteStages(
        run.architecture, stages, spec.optimizer, MicroBatchShape.of(spec), carry=carry, document_masks=masks
    )
    drawn = run.initial_parameters(Span(0, run.architecture.layers - 1))
    parts.load(torch.cat([values.flatten() for _, values in drawn]))
    return parts


@pytest.mark.parametrize("liar", [0, 1])
@pytest.mark.parametrize("name", LIES)
def test_a_lie_about_targets_is_found_by_the_next_stage_and_moves_no_weight(
    corpus: Corpus, name: str, liar: int
) -> None:
    masks, lie = LIES[name]
    run = run_model(document_spec(masks=masks), 256)
    passed: dict[object, int] = {}
    lies = True

    def carry(message: Message) -> Message:
        """Each message passes two links downstream; the liar's is the first or the second."""
        if not isinstance(message, Begin | Activation):
            return message
        key = (type(message), message.flush, getattr(message, "micro_batch", 0))
        passed[key] = passed.get(key, -1) + 1
        return lie(message) if lies and passed[key] == liar else message

    parts, honest = route_of(run, 3, masks, carry), route_of(run, 3, masks, lambda message: message)
    before = parts.weights().clone()
    windows = [0, 1, 2, 3, 4, 5]
    tokens_BT = torch.from_numpy(corpus.windows(windows)) if masks else windows_of(corpus, windows)
    batch = list(torch.split(tokens_BT, 3))
    with pytest.raises(PeerMisbehaved, match=f"stage {liar} sent stage {liar + 1} micro-batch . of flush 1 with"):
        parts.route.flush(batch)
    assert torch.equal(parts.weights(), before)
    assert {stage.steps for stage in parts.stages} == {0}
    lies = False
    parts.route.reconnect()  # what a lost incarnation does
    assert parts.route.flush(batch) == honest.route.flush(batch)
    assert torch.equal(parts.weights(), honest.weights())


def test_micro_batches_of_two_sizes_need_a_number_of_targets(corpus: Corpus) -> None:
    """Without one, all micro-batches weigh the same."""
    run = run_model(document_spec(masks=False), 256)
    parts = route_of(run, 2, False, lambda message: message)
    tokens_BT = windows_of(corpus, [0, 1, 2])
    with pytest.raises(PeerMisbehaved, match="of another size"):
        parts.route.flush([tokens_BT[:2], tokens_BT[2:]])
