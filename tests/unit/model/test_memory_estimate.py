"""Memory estimates of stages and replicas, compared with the tensors that they allocate."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from benchmarks.common import RESULTS
from support.documents import write_documents
from support.families import config_of, lora_of
from support.hf_runs import config_of as run_config
from support.hf_runs import model_section, pretrained, spec_text, text_of
from support.live_bytes import LiveBytes

from atoll.core.built_in_shape import ModelShape, layer_table
from atoll.core.document_masks import mask_memory
from atoll.core.errors import InvalidRequest
from atoll.core.run_spec import OptimizerSection, RunSpec, parse_run_spec
from atoll.node.data.corpus import load_corpus
from atoll.node.model.built_in import BuiltInArchitecture
from atoll.node.model.hf_layer_table import layer_table as table_of
from atoll.node.model.huggingface import HuggingFaceArchitecture
from atoll.node.model.memory_estimate import SpanMemory, StageTraffic, span_memory
from atoll.node.model.run_model import RunModel, run_model
from atoll.node.model.span import Span
from atoll.node.model.span_model import Architecture, SpanModel
from atoll.node.pipeline.stage import Stage
from atoll.node.pipeline.stage_checks import MicroBatchShape
from atoll.node.training.loop import InnerLoop
from atoll.v1 import plan_pb2

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SAMPLES, TOKENS, CREDITS = 2, 96, 3
TRAFFIC = StageTraffic(SAMPLES * TOKENS, TOKENS, CREDITS)
SHAPES = {
    "wide": ModelShape(256, 192, 3, 6, 2, 640),
    "large vocabulary": ModelShape(3000, 64, 3, 4, 4, 176),
    "tied": ModelShape(1000, 128, 3, 4, 2, 352, tie_embeddings=True),
}
SPANS = [Span(0, 0), Span(0, 2), Span(1, 1), Span(1, 3), Span(3, 4), Span(4, 4), Span(0, 4)]


def peak_bytes(architecture: Architecture, span: Span, masks: bool = False) -> tuple[int, int]:
    """Of weights and gradients, and of everything at worst in a flush that is not the first."""
    with LiveBytes() as live:
        stage = Stage(
            SpanModel(architecture.span_definition(span), torch.device("cpu")),
            OptimizerSection(name="adamw", learning_rate=2e-3, weight_decay=0.1),
            MicroBatchShape(SAMPLES, TOKENS, masks),
        )
        built = live.now
        flush(stage, masks)
        live.peak = live.now
        flush(stage, masks)
    return built, live.peak


def flush(stage: Stage, masks: bool = False) -> None:
    """With as many micro-batches at once as there are credits; the last stage has none waiting."""
    span_definition = stage.model.span_definition
    stage.begin(CREDITS)
    targets_BT = [torch.zeros(SAMPLES, TOKENS, dtype=torch.int64) for _ in range(CREDITS)]
    waiting = (
        targets_BT
        if span_definition.is_first
        else [torch.randn(SAMPLES, TOKENS, span_definition.dimension) for _ in range(CREDITS)]
    )
    inputs = [x.clone() for x in waiting]
    del waiting
    for number in range(CREDITS):
        starts_BT = torch.arange(TOKENS).expand(SAMPLES, TOKENS) % 40 == 0 if masks else None
        output = stage.forward(number, inputs.pop(0), targets_BT[number], starts_BT)
        if span_definition.is_last:
            stage.backward(number, None)
    if not span_definition.is_last:
        gradient_BTD = torch.ones_like(output)
        del output
        for number in range(CREDITS):
            stage.backward(number, gradient_BTD)
    stage.step(1.0)


def built_in_table(shape: ModelShape) -> plan_pb2.LayerTable:
    spec = parse_run_spec(
        'version = 1\n[run]\nname = "t"\nstop_tokens = 10\n[data]\npath = "x"\n'
        f"sequence_length = {TOKENS}\n[sync]\nround_tokens = 9\n"
    )
    return layer_table(spec, shape)


@pytest.mark.parametrize("span", SPANS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_built_in_decoder_takes_the_estimated_memory(shape: ModelShape, span: Span) -> None:
    built, peak = peak_bytes(BuiltInArchitecture(shape), span)
    estimate = span_memory(built_in_table(shape), span, TRAFFIC)
    assert built == pytest.approx(estimate.weights + estimate.gradients, abs=64)
    assert peak == pytest.approx(estimate.total, rel=0.05)


@pytest.mark.parametrize("span", [Span(0, 1), Span(2, 3), Span(3, 4)], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "mixtral"])
def test_other_families_take_about_the_estimated_memory(family: str, span: Span) -> None:
    config = config_of(family, hidden_size=128, intermediate_size=288, num_hidden_layers=3, max_position_embeddings=96)
    architecture = HuggingFaceArchitecture(config)
    built, peak = peak_bytes(architecture, span)
    estimate = span_memory(table_of(architecture, TOKENS, ""), span, TRAFFIC)
    assert built == pytest.approx(estimate.weights + estimate.gradients, rel=0.001)
    assert peak == pytest.approx(estimate.total, rel=0.15)


MASKED = "document_masks = true"


@pytest.mark.parametrize("heads", [(8, 1), (8, 8)], ids=["grouped", "not grouped"])
@pytest.mark.parametrize("family", ["", "llama"])
@pytest.mark.parametrize("span", [Span(0, 3), Span(1, 3)], ids=str)
def test_stages_with_document_masks_take_the_estimated_memory(span: Span, family: str, heads: tuple[int, int]) -> None:
    """Repeated keys and values are a large part of it where eight heads share one."""
    sizes = {"hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 4, "max_position_embeddings": TOKENS}
    config = run_config(family or "llama", **sizes, num_attention_heads=heads[0], num_key_value_heads=heads[1])
    section = f"[model]\ndimension = 128\nlayers = 4\nheads = {heads[0]}\nkv_heads = {heads[1]}\nhidden_dimension = 160"
    text = spec_text(model_section(config) if family else section, "").replace("[data]\n", f"[data]\n{MASKED}\n")
    spec = parse_run_spec(re.sub(r"sequence_length = \d+", f"sequence_length = {TOKENS}", text))
    run = run_model(spec, 256)
    masks = mask_memory(spec, run.table.layers, SAMPLES)
    _, peak = peak_bytes(run.architecture, span, masks=True)
    estimate = span_memory(run.table, span, StageTraffic(SAMPLES * TOKENS, TOKENS, CREDITS, masks))
    assert peak == pytest.approx(estimate.total, rel=0.15 if family else 0.05)


def test_adapters_need_no_gradients_or_moments_of_frozen_parameters() -> None:
    architecture = HuggingFaceArchitecture(config_of("llama", hidden_size=128), lora_of("llama"))
    rows = architecture.span_definition(Span(0, 3)).parameters
    trained = [sum(each.numel() for each in row.values() if each.requires_grad) for row in rows]
    built, peak = peak_bytes(architecture, Span(1, 2))
    estimate = span_memory(table_of(architecture, TOKENS, ""), Span(1, 2), TRAFFIC)
    assert estimate.gradients == 4 * sum(trained[1:3])
    assert estimate.optimizer == 2 * estimate.gradients
    assert built == pytest.approx(estimate.weights + estimate.gradients, rel=0.001)
    assert 0.9 * peak <= estimate.total <= 1.3 * peak


def test_credits_cost_inputs_and_nothing_else() -> None:
    table = built_in_table(SHAPES["wide"])

    def of(credits: int) -> SpanMemory:
        return span_memory(table, Span(1, 2), StageTraffic(SAMPLES * TOKENS, TOKENS, credits))

    assert of(9).total - of(1).total == 8 * SAMPLES * TOKENS * (4 * 192 + 8)
    with pytest.raises(InvalidRequest, match="layers 0 to 4"):
        span_memory(table, Span(1, 5), TRAFFIC)


def peak_of_a_step(text: str, corpus_path: Path, base: Path | None = None) -> tuple[RunSpec, RunModel, int]:
    """Bytes of a trainer of all layers at worst, in a step beside a snapshot."""
    spec = parse_run_spec(text)
    run = run_model(spec, 256, base)
    corpus = load_corpus(spec, str(corpus_path))
    with LiveBytes() as live:
        loop = InnerLoop(spec, corpus, "cpu", run=run)
        try:
            loop.load(torch.ones(loop.layout.elements) * 0.01, ranges=((0, 100),))
            loop.step()
            loop.snapshot()
            live.peak = live.now
            loop.step()
        finally:
            loop.close()
    return spec, run, live.peak


@pytest.mark.parametrize(
    ("family", "optimizer", "masks"),
    [
        (family, optimizer, False)
        for family in ("llama", "gpt_neox", "mixtral")
        for optimizer in ("", "activation_checkpointing = true", 'precision = "bf16"')
    ]
    + [("llama", "", True), ("llama", "activation_checkpointing = true", True)],
)
def test_a_whole_replica_takes_about_the_estimated_memory(
    family: str, optimizer: str, masks: bool, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text(text_of())
    sizes = {"hidden_size": 128, "intermediate_size": 288, "num_hidden_layers": 4, "max_position_embeddings": 96}
    text = spec_text(model_section(run_config(family, **sizes)), optimizer).replace("length = 16", "length = 96")
    if masks:
        write_documents(tmp_path / "text.txt")
        text = text.replace("[data]\n", '[data]\nsource = "jsonl"\ndocument_masks = true\n')
        text = text.replace("length = 96", "length = 384").replace("embeddings = 96", "embeddings = 384")
        text = text.replace("validation_samples = 8", "validation_samples = 2")
    spec, run, peak = peak_of_a_step(text, tmp_path / "text.txt")
    assert peak <= run.whole_model_bytes(spec.optimizer.micro_batch_samples) <= 1.4 * peak


@pytest.mark.parametrize("optimizer", ["", 'precision = "bf16"', "activation_checkpointing = true"])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "up_proj", "down_proj"]])
def test_a_replica_with_adapters_takes_at_most_the_estimated_memory(
    targets: list[str], optimizer: str, tmp_path: Path
) -> None:
    """A frozen matrix keeps no input for a gradient of its own; the estimate counts it."""
    (tmp_path / "text.txt").write_text(text_of())
    sizes = {"hidden_size": 128, "intermediate_size": 288, "num_hidden_layers": 4, "max_position_embeddings": 96}
    base = pretrained(tmp_path / "base", **sizes)
    model = model_section(run_config("llama", **sizes), base, targets)
    text = spec_text(model, optimizer).replace("length = 16", "length = 96")
    spec, run, peak = peak_of_a_step(text, tmp_path / "text.txt", base)
    assert peak <= run.whole_model_bytes(spec.optimizer.micro_batch_samples) <= 1.6 * peak


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("sizes", [(256, 4, 8), (8000, 4, 8), (256, 1, 1)], ids=["usual", "vocabulary", "one sample"])
def test_a_replica_of_the_built_in_decoder_takes_the_estimated_memory(
    sizes: tuple[int, int, int], optimizer: str, checkpointing: bool, precision: str, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text(text_of())
    vocabulary, kv_heads, samples = sizes
    spec, run, peak = peak_of_a_step(
        f'version = 1\n[run]\nname = "t"\nstop_tokens = 1000000\n[model]\ndimension = 128\nlayers = 4\nheads = 4\n'
        f"kv_heads = {kv_heads}\nhidden_dimension = 344\nvocabulary = {vocabulary}\n[data]\npath = 'x'\n"
        f"sequence_length = 192\nvalidation_samples = 4\n[sync]\nround_tokens = 1000\n[optimizer]\n"
        f'name = "{optimizer}"\nprecision = "{precision}"\nmicro_batch_samples = {samples}\n'
        f"activation_checkpointing = {str(checkpointing).lower()}\n",
        tmp_path / "text.txt",
    )
    assert peak <= run.whole_model_bytes(spec.optimizer.micro_batch_samples) <= 1.05 * peak


def test_peaks_that_a_gpu_had_are_the_estimated_ones() -> None:
    """`python -m benchmarks.gpu_hour` measured them; 32000 tokens, bf16 and fp32, with activations kept and not."""
    cells = json.loads((RESULTS / "gpu_hour.json").read_text())["cells"]
    peaks = {cell["case"]: cell["figures"] for cell in cells if cell["part"] == "memory"}
    pairs = 0
    for case, figures in peaks.items():
        if "estimate_gib" not in figures:
            continue
        preset, batch, optimizer, precision, *rest = case.split()
        samples, length = map(int, batch.split("×"))
        spec = parse_run_spec(
            f'version = 1\n[run]\nname = "t"\nstop_tokens = 1000000\n[model]\npreset = "{preset}"\nvocabulary = 32000\n'
            f'[data]\npath = "x"\nsequence_length = {length}\n[sync]\nround_tokens = 1000\n[optimizer]\n'
            f'name = "{optimizer}"\nprecision = "{precision}"\nmicro_batch_samples = {samples}\n'
            f"activation_checkpointing = {str('checkpointing' in rest).lower()}\n"
        )
        estimate = run_model(spec, 256).whole_model_bytes(samples, cuda=True) / 2**30
        peak = max(value for name, value in figures.items() if name.endswith("_gib") and name != "estimate_gib")
        assert peak <= estimate <= 1.05 * peak, case
        pairs += 1
    assert pairs >= 7
