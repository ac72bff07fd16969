"""Document masks over a route: bounds of documents travel with every micro-batch, and are checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.documents import TOKENS, document_spec, gradient_of, unpacked, windows_of, write_documents
from support.routes import RouteStages
from unit.pipeline.test_message_codec import carried

from atoll.core.errors import PeerMisbehaved
from atoll.node.data.corpus import Corpus, load_corpus
from atoll.node.data.held_out import HeldOutLoss
from atoll.node.model.run_model import RunModel, run_model
from atoll.node.model.span import Span
from atoll.node.pipeline.evaluation import Evaluation
from atoll.node.pipeline.message_codec import LinkFormat, pack
from atoll.node.pipeline.messages import Activation, Begin, Message
from atoll.node.pipeline.stage_checks import MicroBatchShape
from atoll.node.training.loop import InnerLoop
from atoll.v1 import pipeline_pb2 as pb

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return load_corpus(document_spec(), str(write_documents(tmp_path / "text.jsonl")))


def route_of(run: RunModel, stages: int, family: str = "", *, masks: bool = True) -> RouteStages:
    spec = document_spec(family, masks=masks)
    link_format = LinkFormat.of(spec, run.table, 1, 0)
    room, carry = MicroBatchShape.of(spec), carried(link_format, "fp32")
    return RouteStages(run.architecture, stages, spec.optimizer, room, carry=carry, document_masks=masks)


def initial_weights(run: RunModel) -> torch.Tensor:
    drawn = run.initial_parameters(Span(0, run.architecture.layers - 1))
    return 5 * torch.cat([values.flatten() for _, values in drawn])


@pytest.mark.parametrize("family", ["", "llama"])
@pytest.mark.parametrize("stages", [2, 3])
def test_a_flush_and_an_evaluation_equal_unpacked_documents(corpus: Corpus, family: str, stages: int) -> None:
    run = run_model(document_spec(family), 256)
    weights_E = initial_weights(run)
    parts = route_of(run, stages, family)
    parts.load(weights_E)
    windows = list(range(6))
    loss, gradient_E = unpacked(run, weights_E, windows_of(corpus, windows))
    found = parts.route.flush(list(torch.split(torch.from_numpy(corpus.windows(windows)), 3)))
    assert abs(found.loss - loss) < 1e-5
    torch.testing.assert_close(gradient_of(weights_E - parts.weights()), gradient_E, atol=1e-5, rtol=1e-5)

    for stage in parts.stages:
        stage.anchor = stage.model.weights.read()
    results: list[object] = []
    evaluation = Evaluation(corpus, 2, 0, results.append)  # five samples: flushes of two sizes
    while not results:
        evaluation.add(parts.route.flush(evaluation.next(8), anchor=0).loss)
    held_out, _ = unpacked(run, parts.weights(), windows_of(corpus, corpus.validation_windows()))
    assert isinstance(results[0], HeldOutLoss)
    assert abs(results[0].value - held_out) < 1e-5


def test_a_route_has_the_steps_of_the_trainer_s_loop(corpus: Corpus) -> None:
    spec = document_spec()
    loop = InnerLoop(spec, corpus, "cpu")
    try:
        weights_E = initial_weights(loop.run)
        loop.load(weights_E, ranges=((0, 1000),))
        parts = route_of(loop.run, 2)
        parts.load(weights_E)
        for start in range(0, 30, 6):
            windows = [corpus.window(sample) for sample in range(start, start + 6)]
            flushed = parts.route.flush(list(torch.split(torch.from_numpy(corpus.windows(windows)), 3)))
            assert flushed.loss == loop.step().loss
        assert torch.equal(parts.weights(), loop.weights_E)
    finally:
        loop.close()


# --- messages ---------------------------------------------------------------------------------------------

LINK_FORMAT = LinkFormat(3, 1, samples=3, tokens=5, dimension=8, vocabulary=11, incarnation=9, document_masks=True)


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=3))
def test_document_starts_travel_as_one_bit_a_token(starts: list[list[bool]]) -> None:
    starts_BT = torch.tensor(starts)
    targets_BT = torch.full(starts_BT.shape, -100)
    message = Activation(7, 2, torch.ones(len(starts), 5, 8), targets_BT, starts_BT)
    arrived = carried(LINK_FORMAT, "fp32")(message)
    assert isinstance(arrived, Activation)
    assert arrived.starts_BT is not None
    assert torch.equal(arrived.starts_BT, starts_BT)
    assert torch.equal(arrived.targets_BT, targets_BT)
    plain = Activation(7, 2, message.x_BTD, targets_BT)
    assert len(pack(message, LINK_FORMAT)[1]) == len(pack(plain, LINK_FORMAT)[1]) + -(-starts_BT.numel() // 8)


def test_without_the_key_messages_are_those_of_earlier_releases(corpus: Corpus) -> None:
    sent: list[Message] = []
    run = run_model(document_spec(masks=False), 256)
    parts = route_of(run, 2, masks=False)
    parts.route._carry = lambda message: sent.append(message) or message  # type: ignore[func-returns-value]
    parts.route.flush([windows_of(corpus, [0, 1])])
    begin = next(each for each in sent if isinstance(each, Begin))
    header, _ = pack(begin, LinkFormat(1, 0, 3, TOKENS, 64, 256))
    assert header.begin == pb.FlushBegin(micro_batches=1)
    activation = next(each for each in sent if isinstance(each, Activation))
    assert activation.starts_BT is None


X_BTD, TARGETS_BT = torch.zeros(2, TOKENS, 64), torch.zeros(2, TOKENS, dtype=torch.int64)
STARTS_BT = torch.arange(TOKENS).expand(2, TOKENS) == 0
BAD: dict[str, tuple[bool, Message, str]] = {
    "no starts": (True, Activation(1, 1, X_BTD, TARGETS_BT), "does not tell"),
    "starts without masks": (False, Activation(1, 1, X_BTD, TARGETS_BT, STARTS_BT), "tells where"),
    "fewer samples": (True, Activation(1, 1, X_BTD, TARGETS_BT, STARTS_BT[:1]), r"bool \[1, 24\]"),
    "fewer tokens": (True, Activation(1, 1, X_BTD, TARGETS_BT, STARTS_BT[:, :9]), r"bool \[2, 9\]"),
    "another dtype": (True, Activation(1, 1, X_BTD, TARGETS_BT, STARTS_BT.long()), "int64"),
    "no first document": (True, Activation(1, 1, X_BTD, TARGETS_BT, ~STARTS_BT), "begins with no document"),
    "an unknown negative target": (True, Activation(1, 1, X_BTD, TARGETS_BT - 7, STARTS_BT), "targets from -7"),
    "too many targets": (True, Begin(2, 1, None, 3 * TOKENS + 1), "has 73 targets"),
}


@pytest.mark.parametrize("name", BAD)
def test_bounds_that_do_not_fit_are_refused_and_the_flush_goes_on(corpus: Corpus, name: str) -> None:
    masks, message, words = BAD[name]
    run = run_model(document_spec(masks=masks), 256)
    disturbed, plain = route_of(run, 2, masks=masks), route_of(run, 2, masks=masks)
    coded_BT = corpus.windows([0, 1]) if masks else windows_of(corpus, [0, 1]).numpy()
    tokens = [torch.from_numpy(coded_BT[:1]), torch.from_numpy(coded_BT[1:])]
    for parts in (disturbed, plain):
        parts.load(initial_weights(run))
    flush = disturbed.route.begin(tokens)
    while disturbed.machines[0].in_flight == 0:
        disturbed.route.turn()
    receiver = disturbed.machines[1]
    while receiver._inbox.get(Begin) is None:
        disturbed.route.turn()
    with pytest.raises(PeerMisbehaved, match=words):
        receiver.deliver(0, message)
    while any(machine.last_flush < flush for machine in disturbed.machines):
        assert disturbed.route.turn(), "it stands still"
    plain.route.flush(tokens)
    assert torch.equal(disturbed.weights(), plain.weights())
