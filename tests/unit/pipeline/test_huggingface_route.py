"""Trainer sessions that hold spans of Hugging Face decoders: on a route they make the steps of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.eventually import eventually
from support.hf_runs import TARGETS, config_of, model_section, pretrained, spec_of, spec_text, text_of
from support.memory_network import MemoryHub
from support.stage_threads import StageThread, connected_route, trainers_of

from atoll.core.errors import PretrainedWeightsUnusable
from atoll.node.model.run_model import allocate_span, run_model
from atoll.node.model.span import Span
from atoll.node.pipeline.dispatcher import RouteDispatcher
from atoll.node.trainer import messages

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


SPANS = [(0, 0), (1, 2), (3, 3)]
NAMES = ("reef", "lagoon", "atoll")
PIPELINE = 'round_max_seconds = 60\n[pipeline]\ncodec = "fp32"'
OPTIMIZER = 'schedule = "constant"\nlearning_rate = 0.01\nclip_norm = 0.5\nmicro_batch_samples = 2\naccumulate = 3'
RANGES = ((0, 10_000),)
CASES = [
    ("llama", True, "seeded"),
    ("llama", True, "lora"),
    ("llama", False, "base"),
    ("qwen3", False, "seeded"),
    ("gpt_neox", False, "lora"),
    ("mixtral", True, "seeded"),
    ("qwen3_moe", False, "base"),
]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(text_of())
    return path


async def begun(session: StageThread, genesis_E: torch.Tensor) -> None:
    """At genesis, training; the layers of a route out of those of the whole model."""
    assert session.ready.span is not None
    await session.order(messages.Initialise())
    first, last = session.ready.span
    offsets = session.offsets
    assert torch.equal(session.anchor, genesis_E[offsets[first] : offsets[last + 1]])
    await session.order(messages.Load(RANGES if first == 0 else (), 0))
    await session.order(messages.Train())


@pytest.mark.parametrize(
    ("family", "tied", "kind"),
    CASES,
    ids=[f"{family}, {kind}{', tied' if tied else ''}" for family, tied, kind in CASES],
)
async def test_a_route_makes_the_steps_of_one_process(
    family: str, tied: bool, kind: str, text: Path, tmp_path: Path
) -> None:
    """And its evaluation is the loss of the whole model; genesis in a file has the bits of genesis in memory."""
    changed = {"tie_word_embeddings": tied}
    base = pretrained(tmp_path / "base", family, shard="20KB", **changed) if kind != "seeded" else None
    targets = TARGETS.get(family, ["q_proj", "v_proj"]) if kind == "lora" else None
    spec = spec_text(model_section(config_of(family, **changed), base, targets), OPTIMIZER, PIPELINE)
    hub = MemoryHub()
    networks = [hub.join(name) for name in NAMES]
    dispatchers = [RouteDispatcher(network) for network in networks]
    try:
        async with trainers_of(spec, str(text), [*SPANS, None], base) as (*stages, whole):
            await whole.order(messages.Initialise())
            genesis_E = whole.anchor.clone()
            await whole.order(messages.WriteInitial(str(tmp_path / "genesis")))
            assert (tmp_path / "genesis").read_bytes() == genesis_E.numpy().tobytes()
            for stage in stages:
                await begun(stage, genesis_E)
            async with connected_route(stages, networks, dispatchers):
                driver = stages[0]
                await eventually(lambda: driver.status.steps >= 4)
                route_loss = await driver.order(messages.Evaluate())
                await driver.order(messages.Pause())
                await eventually(lambda: len({stage.status.steps for stage in stages}) == 1)
                steps = driver.status.steps
                loop = whole.session._loop
                loop.load(genesis_E, ranges=RANGES)
                while loop.progress.steps_total < steps:
                    loop.work()
                assert torch.equal(torch.cat([stage.weights for stage in stages]), loop.weights_E)
                assert not torch.equal(genesis_E, loop.weights_E)
            assert route_loss.value == pytest.approx((await whole.order(messages.Evaluate())).value, rel=1e-6)
    finally:
        await hub.close()


def test_a_span_reads_its_own_files_alone_and_none_that_is_not_the_run_s(tmp_path: Path) -> None:
    base = pretrained(tmp_path / "base", shard="20KB")
    spec = spec_of(model_section(config_of("llama"), base, ["q_proj"]))
    names = sorted(path.name for path in base.glob("*.safetensors"))
    assert len(names) > 3
    damaged = base / names[0]  # the embedding lies there
    held = damaged.read_bytes()
    damaged.write_bytes(held[:-1] + bytes([held[-1] ^ 1]))
    run = run_model(spec, 256, base)
    assert allocate_span(run, Span(3, 3), torch.device("cpu")).frozen_E.any()
    for look in (lambda: allocate_span(run, Span(0, 1), torch.device("cpu")), lambda: run.check(None)):
        with pytest.raises(PretrainedWeightsUnusable, match=names[0]) as caught:
            look()
        assert "--base" in caught.value.remedy
    run.check(Span(3, 3))
    for directory, words in ((None, "has no directory of them"), (tmp_path, "lacks model-00001")):
        with pytest.raises(PretrainedWeightsUnusable, match=words):
            run_model(spec, 256, directory)
    damaged.write_bytes(held)
    run_model(spec, 256, base).check(None)
    index = base / "model.safetensors.index.json"
    whole = spec_of(model_section(config_of("llama"), pretrained(tmp_path / "whole"), ["q_proj"]))
    (tmp_path / "whole" / index.name).write_bytes(index.read_bytes())  # an index that the run does not know
    with pytest.raises(PretrainedWeightsUnusable, match="not one of the files of the run's"):
        allocate_span(run_model(whole, 256, tmp_path / "whole"), Span(0, 0), torch.device("cpu"))
