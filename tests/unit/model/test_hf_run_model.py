"""Hugging Face decoders in the inner loop: the bits of a plain loop, and exports that the libraries load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.hf_runs import (
    CONFIGS,
    TARGETS,
    config_of,
    model_section,
    named_of,
    plain_loop,
    pretrained,
    spec_text,
    text_of,
)
from support.small_state import of_vectors, stored

from atoll.core.clock import SystemClock
from atoll.core.errors import ModelTooLarge, UsageError
from atoll.core.run_spec import parse_run_spec
from atoll.node.data.corpus import load_corpus
from atoll.node.export.huggingface_export import export_huggingface
from atoll.node.model.run_model import run_model, write_initial_weights
from atoll.node.model.span import Span
from atoll.node.state.tensor_file import LayerLayout
from atoll.node.trainer.loading import load_trainer_state as load_trainer
from atoll.node.trainer.loading import measure_layer_times
from atoll.node.trainer.messages import TrainerConfig
from atoll.node.training.device import DeviceFacts, device_facts
from atoll.node.training.loop import InnerLoop

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of peft about transformers
]

RANGES = ((0, 4000),)
STEPS = 5
CASES = [(family, tied, kind) for family in CONFIGS for tied, kind in ((False, "seeded"), (True, "lora"))]
CASES += [("llama", True, "seeded"), ("llama", False, "lora"), ("llama", True, "base"), ("mixtral", False, "base")]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(text_of())
    return path


def load(directory: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("family", "tied", "kind"),
    CASES,
    ids=[f"{family}, {kind}{', tied' if tied else ''}" for family, tied, kind in CASES],
)
def test_the_inner_loop_has_the_bits_of_a_plain_loop_and_exports_its_weights(
    family: str, tied: bool, kind: str, text: Path, tmp_path: Path
) -> None:
    base = pretrained(tmp_path / "base", family, tie_word_embeddings=tied) if kind != "seeded" else None
    targets = TARGETS.get(family, ["q_proj", "v_proj"]) if kind == "lora" else None
    toml = spec_text(model_section(config_of(family, tie_word_embeddings=tied), base, targets))
    spec = parse_run_spec(toml)
    loop = InnerLoop(spec, load_corpus(spec, str(text)), "cpu", run=run_model(spec, 256, base))
    try:
        genesis_E = torch.empty(loop.layout.elements)
        loop.initialise_into(genesis_E)
        loop.load(genesis_E, ranges=RANGES)
        first = loop.evaluate(genesis_E)
        losses = [loop.step().loss for _ in range(STEPS)]
        assert loop.evaluate(loop.weights_E) < first
    finally:
        loop.close()
    with plain_loop(toml, text, RANGES, named_of(toml, genesis_E, base)) as (plain, loader):
        assert [plain.step([loader.next().tokens_BT]) for _ in range(STEPS)] == losses
    assert torch.equal(plain.weights(), loop.weights_E)

    layers = LayerLayout.of(loop.run.table)
    state = of_vectors(7, loop.weights_E, torch.zeros_like(loop.weights_E), layers, "t")
    tokens_BT = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), stored(spec, state) as checkpoint:
        ours = plain.model.eval()(tokens_BT).logits
        if kind == "lora":
            from peft import PeftModel

            export_huggingface(checkpoint, tmp_path / "adapter")
            adapted = PeftModel.from_pretrained(load(base), tmp_path / "adapter", local_files_only=True).eval()
            assert torch.equal(adapted(tokens_BT).logits, ours)
        else:
            with pytest.raises(UsageError, match="adapters"):
                export_huggingface(checkpoint, tmp_path / "out", base=tmp_path)
        export_huggingface(checkpoint, tmp_path / "out", base=base if kind == "lora" else None)
        theirs = load(tmp_path / "out")(tokens_BT).logits
    assert (ours - theirs).abs().max() <= (1e-4 if kind == "lora" else 0)
    assert ours.abs().max() > 0.1


@pytest.mark.parametrize("family", CONFIGS)
def test_a_layer_is_initialised_by_its_family_and_equally_in_every_span(family: str) -> None:
    run = run_model(parse_run_spec(spec_text(model_section(config_of(family, initializer_range=0.05)))), 256)
    last = run.architecture.layers - 1
    whole = {name: values.clone() for name, values in run.initial_parameters(Span(0, last))}
    for span in (Span(0, 1), Span(2, 2), Span(3, last)):
        for name, values in run.initial_parameters(span):
            assert torch.equal(whole.pop(name), values)
    assert not whole
    for name, values in run.initial_parameters(Span(0, last)):
        if values.dim() > 1:
            assert 0.04 < float(values.std()) < 0.06, name
        else:
            assert torch.equal(values, torch.full_like(values, 0.0 if name.endswith("bias") else 1.0)), name


def test_blocks_that_differ_have_different_kinds() -> None:
    """A mixture whose first block is dense, and windows in one block alone."""
    mixture = config_of("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[0])
    windows = config_of(
        "qwen3",
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    )
    for config, kinds in ((mixture, ["block", "block-2", "block-2"]), (windows, ["block", "block-2", "block"])):
        spec = parse_run_spec(spec_text(model_section(config)))
        run = run_model(spec, 256)
        assert [row.kind for row in run.table.layers] == ["embedding", *kinds, "head"]
        times = measure_layer_times(spec, run, device_facts(torch.device("cpu")), SystemClock())
        assert [kind for kind, _, _ in times] == ["embedding", "block", "block-2", "head"]


def test_a_node_too_small_for_the_model_starts_without_it_and_can_write_its_genesis(text: Path, tmp_path: Path) -> None:
    base = pretrained(tmp_path / "base", num_hidden_layers=6)
    toml = spec_text(model_section(config_of("llama", num_hidden_layers=6), base))
    config = TrainerConfig(toml, str(text), base_path=str(base))
    spec = parse_run_spec(toml)
    needed = run_model(spec, 256, base).whole_model_bytes(spec.optimizer.micro_batch_samples)
    small = DeviceFacts("cpu", "a small machine", int(0.9 * needed))
    loaded = load_trainer(config, small, None, SystemClock())
    assert loaded.loop is None
    assert loaded.span is None
    ready = loaded.ready_message(0.0)
    assert ready.whole_model_bytes > small.memory_bytes
    assert [kind for kind, forward, backward in ready.layer_times if forward > 0 <= backward] == [
        *("embedding", "block", "head")
    ]
    write_initial_weights(loaded.run, tmp_path / "genesis")
    genesis_E = torch.from_file(str(tmp_path / "genesis"), size=LayerLayout.of(loaded.run.table).elements)
    theirs = load(base)
    assert torch.equal(genesis_E, torch.cat([values.detach().flatten() for values in theirs.parameters()]))
    with pytest.raises(ModelTooLarge, match="layers 0 to 7"):
        load_trainer(replace(config, span=(0, 7)), small, None, SystemClock())
