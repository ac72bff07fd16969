"""Export keeps one tensor in memory at a time and writes files of a bounded size."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hf_runs import CONFIGS, config_of, model_section, pretrained, spec_text
from support.small_state import of_vectors, stored
from typer.testing import CliRunner

from atoll.core.errors import AtollError, CheckpointCorrupt, NotFound, UnsupportedModel
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.node.cli.main import app
from atoll.node.evaluation.exported_model import open_export
from atoll.node.export import safetensors_writer
from atoll.node.export.huggingface_export import export_huggingface
from atoll.node.model.run_model import run_model
from atoll.node.state.checkpoint import CheckpointState, CheckpointStore
from atoll.node.state.tensor_file import LayerLayout

BUILT_IN = """[model]
dimension = {dimension}
layers = {layers}
heads = 4
kv_heads = 4
hidden_dimension = {hidden}
"""
MEGABYTES = 20  # that an export may take
MERGED_MEGABYTES = 40  # with a layer, and what `peft` loads late

PROGRAM = """
import sys
from contextlib import ExitStack
from pathlib import Path
import peft.tuners.lora, torch, transformers
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.core_model_loading import revert_weight_conversion
from atoll.node.state.checkpoint import read_checkpoint
from atoll.node.export.stored_model import join_checkpoints, open_checkpoint
from atoll.node.export import huggingface_export as export
from atoll.node.export import transformers_model as export_run
from atoll.node.training.device import (limit_host_memory)
torch.set_num_threads(1)
target, megabytes, base, *checkpoints = sys.argv[1:]
limit_host_memory(int(megabytes) << 20)
with ExitStack() as held:
    model = join_checkpoints([open_checkpoint(Path(path), held) for path in checkpoints])
    export.export_huggingface(model, Path(target), "fp32", Path(base) if base else None, 20e6)
try:
    [read_checkpoint(Path(path)) for path in checkpoints]
except RuntimeError:
    print("the whole model does not fit")
"""

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft about transformers


def spec_of(section: str) -> RunSpec:
    return parse_run_spec(
        f'version = 1\n[run]\nname = "reef"\nstop_tokens = 1000\n{section}'
        '[data]\npath = "corpus"\nsequence_length = 64\n[sync]\nround_tokens = 100\n'
    )


def state_of(spec: RunSpec, base: Path | None = None, number: int = 7) -> CheckpointState:
    layers = LayerLayout.of(run_model(spec, 256, base).table)
    anchor_E = torch.randn(layers.elements, generator=torch.Generator().manual_seed(2)) * 0.05
    return of_vectors(number, anchor_E, torch.zeros_like(anchor_E), layers, spec.run.name)


def part_of(state: CheckpointState, first: int, last: int) -> CheckpointState:
    layers = state.layers.part(slice(first, last + 1))
    start = state.layers.offsets[first]
    where = slice(start, start + layers.elements)
    return CheckpointState(state.head, layers, state.anchor_E[where], state.momentum_E[where])


def written(directory: Path, spec: RunSpec, state: CheckpointState) -> Path:
    return CheckpointStore(directory, spec, keep=1).write(state)


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize("kind", ["built in", "from spans", "huggingface", "merged"])
def test_the_whole_model_is_never_in_memory(kind: str, tmp_path: Path) -> None:
    base, megabytes, blocks = None, *((MERGED_MEGABYTES, 20) if kind == "merged" else (MEGABYTES, 10))
    large = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": blocks, "num_key_value_heads": 4}
    if kind == "merged":
        base = pretrained(tmp_path / "base", "llama", **large)
        spec = parse_run_spec(spec_text(model_section(config_of("llama", **large), base, ["q_proj"])))
    elif kind == "huggingface":
        spec = parse_run_spec(spec_text(model_section(config_of("llama", **large))))
    else:
        spec = spec_of(BUILT_IN.format(dimension=256, layers=10, hidden=2048))
    state = state_of(spec, base)
    parts = [part_of(state, 0, 4), part_of(state, 4, 11)] if kind == "from spans" else [state]
    paths = [written(tmp_path / str(number), spec, part) for number, part in enumerate(parts)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "out", str(megabytes), base or "", *paths],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    if kind != "merged":  # whose adapters are small
        assert done.stdout.strip() == "the whole model does not fit"
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert sum(sizes) > 3 * megabytes << 20
    assert max(sizes) < 21e6


def test_files_are_those_that_the_format_s_library_writes(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "b.weight": torch.randn(7, 5, generator=generator),
        "a.weight": torch.randn((1 << 20) + 3, generator=generator),  # more than one piece
        "empty": torch.zeros(0),
        "c": torch.randn(6, 4, generator=generator).T,
    }
    parts = [
        safetensors_writer.TensorGroup({name: tuple(each.shape)}, partial(dict, {name: each}))
        for name, each in tensors.items()
    ]
    for dtype in (torch.float32, torch.bfloat16):
        directory = tmp_path / str(dtype)
        directory.mkdir()
        safetensors_writer.write(safetensors_writer.OutputFormat(directory, dtype), parts)
        save_file(
            {name: each.to(dtype).contiguous() for name, each in tensors.items()}, tmp_path / "theirs", {"format": "pt"}
        )
        assert bytes_of(directory) == {"model.safetensors": (tmp_path / "theirs").read_bytes()}


def test_a_group_that_makes_other_tensors_than_announced_is_an_error(tmp_path: Path) -> None:
    for number, made in enumerate(({"a": torch.zeros(3, 2)}, {"b": torch.zeros(2, 3)}, {})):
        (tmp_path / str(number)).mkdir()
        form, part = (
            safetensors_writer.OutputFormat(tmp_path / str(number), torch.float32),
            safetensors_writer.TensorGroup({"a": (2, 3)}, partial(dict, made)),
        )
        with pytest.raises(AtollError, match="announced"):
            safetensors_writer.write(form, [part])


@pytest.mark.parametrize("family", [None, *CONFIGS])
def test_shards_contain_the_tensors_of_one_file_and_transformers_loads_them(family: str | None, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    if family is None:
        spec = spec_of(BUILT_IN.format(dimension=32, layers=3, hidden=48))
    else:
        spec = parse_run_spec(spec_text(model_section(config_of(family, tie_word_embeddings=True))))
    with stored(spec, state_of(spec)) as model:
        export_huggingface(model, tmp_path / "one")
        export_huggingface(model, tmp_path / "many", shard_bytes=15_000)
    one, many = bytes_of(tmp_path / "one"), bytes_of(tmp_path / "many")
    index = json.loads(many.pop("model.safetensors.index.json"))
    found = {}
    for name in sorted({name for name in many if name.endswith(".safetensors")}):
        tensors = load_file(tmp_path / "many" / name)
        assert sum(each.nbytes for each in tensors.values()) <= 15_000 or len(tensors) == 1
        assert {index["weight_map"][each] for each in tensors} == {name}
        found |= tensors
        del many[name]
    whole = load_file(tmp_path / "one/model.safetensors")
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in whole.values())
    del one["model.safetensors"]
    assert many == one
    tokens_BT = torch.randint(0, 256, (1, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        both = [
            AutoModelForCausalLM.from_pretrained(tmp_path / name, local_files_only=True).eval()(tokens_BT).logits
            for name in ("one", "many")
        ]
    assert torch.equal(*both)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")  # of peft, which merges otherwise
@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]], ids=["blocks", "head"])
def test_a_tied_head_stays_tied_unless_adapters_are_merged_into_it(targets: list[str], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def load(directory: Path):
        return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype=torch.float32).eval()

    small = {"tie_word_embeddings": True, "num_hidden_layers": 1}
    base = pretrained(tmp_path / "base", "llama", **small)
    spec = parse_run_spec(spec_text(model_section(config_of("llama", **small), base, targets)))
    with stored(spec, state_of(spec, base)) as model:
        export_huggingface(model, tmp_path / "adapter")
        export_huggingface(model, tmp_path / "merged", base=base)
    adapters = open_export(tmp_path / "adapter", base)
    assert (adapters.origin, adapters.trained_by_atoll) == (open_export(tmp_path / "merged", None).origin, True)
    merged = load(tmp_path / "merged")
    assert merged.config.tie_word_embeddings is ("lm_head" not in targets)
    assert ("lm_head.weight" in load_file(tmp_path / "merged/model.safetensors")) is ("lm_head" in targets)
    tokens_BT = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(load(base), tmp_path / "adapter", local_files_only=True).eval()
        torch.testing.assert_close(merged(tokens_BT).logits, adapted(tokens_BT).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_directory_equals_one_that_transformers_saves(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    spec = parse_run_spec(spec_text(model_section(config_of(family))))
    with stored(spec, state_of(spec)) as model:
        export_huggingface(model, tmp_path / "ours", "bf16")
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours", local_files_only=True).save_pretrained(tmp_path / "theirs")
    ours, theirs = bytes_of(tmp_path / "ours"), bytes_of(tmp_path / "theirs")
    assert {name: ours[name] for name in theirs} == theirs


def test_parameters_that_become_one_tensor_are_converted_a_layer_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `transformers` does for families whose published tensors are made of several parameters."""

    def fuse(_: object, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = dict(tensors)
        for layer in range(2):
            names = [f"model.layers.{layer}.mlp.{name}_proj.weight" for name in ("gate", "up")]
            if all(name in made for name in names):
                made[f"model.layers.{layer}.mlp.both"] = torch.cat([made.pop(name) for name in names])
        return made

    spec = parse_run_spec(spec_text(model_section(config_of("llama"))))
    with stored(spec, state_of(spec)) as model:
        export_huggingface(model, tmp_path / "plain")
        monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", fuse)
        export_huggingface(model, tmp_path / "fused")
        monkeypatch.setattr(
            "transformers.core_model_loading.revert_weight_conversion",
            lambda _, tensors: {"all": torch.zeros(len(tensors))} if len(tensors) > 9 else dict(tensors),
        )
        with pytest.raises(UnsupportedModel, match="several layers"):
            export_huggingface(model, tmp_path / "none")
    plain, fused = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "fused"))
    expected = fuse(None, plain)
    assert fused.keys() == expected.keys()
    assert all(torch.equal(fused[name], expected[name]) for name in fused)
    assert not (tmp_path / "none").exists()


# --- the command -----------------------------------------------------------------------------------------


SPEC = spec_of(BUILT_IN.format(dimension=32, layers=2, hidden=48))


def atoll(*arguments: object):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def named(*paths: Path) -> list[object]:
    return [word for path in paths for word in ("--checkpoint", path)]


@pytest.fixture
def route(tmp_path: Path) -> list[Path]:
    """Checkpoints of the stages of a route of three."""
    state = state_of(SPEC)
    spans = ((0, 0), (1, 2), (3, 3))
    return [written(tmp_path / f"stages/{first}", SPEC, part_of(state, first, last)) for first, last in spans]


def test_checkpoints_of_spans_export_the_bytes_of_a_whole_checkpoint(route: list[Path], tmp_path: Path) -> None:
    whole = written(tmp_path / "whole", SPEC, state_of(SPEC))
    assert atoll("--to", tmp_path / "a", *named(whole)).exit_code == 0
    assert atoll("--to", tmp_path / "b", *named(*reversed(route))).exit_code == 0
    for number, path in enumerate(route):
        path.rename(tmp_path / f"stages/{number}-of-3")
    assert atoll("--to", tmp_path / "c", *named(tmp_path / "stages")).exit_code == 0
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b") == bytes_of(tmp_path / "c")
    done = atoll("--to", tmp_path / "d", *named(whole), "--shard-gigabytes", "0.00001")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "d/model.safetensors.index.json").exists()


def test_missing_layers_are_named(route: list[Path], tmp_path: Path) -> None:
    for given, missing in ((route[:1], "layers 1-3"), (route[1:2], "layers 0, 3"), (route[:2], "layer 3")):
        error = atoll("--to", tmp_path / "out", *named(*given)).exception
        assert isinstance(error, NotFound)
        assert f"holds {missing} of round 7" in str(error)
    assert not (tmp_path / "out").exists()


def test_checkpoints_of_two_rounds_are_refused(route: list[Path], tmp_path: Path) -> None:
    other = written(tmp_path / "other", SPEC, part_of(state_of(SPEC, number=8), 3, 3))
    error = atoll("--to", tmp_path / "out", *named(*route[:2], other)).exception
    assert isinstance(error, CheckpointCorrupt)
    assert "not of one round" in str(error)


@pytest.mark.parametrize("name", ["anchor.safetensors", "momentum.safetensors"])
@pytest.mark.parametrize("how", ["altered", "truncated", "longer", "another header", "gone"])
def test_a_damaged_checkpoint_of_a_span_is_not_exported(name: str, how: str, route: list[Path], tmp_path: Path) -> None:
    path = route[1] / name
    data = path.read_bytes()
    spoiled = {
        "altered": data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
        "truncated": data[:-4],
        "longer": data + bytes(4),
        "another header": data.replace(b"block.0", b"block.9"),
    }
    path.unlink()
    if how in spoiled:
        path.write_bytes(spoiled[how])
    assert isinstance(atoll("--to", tmp_path / "out", *named(*route)).exception, CheckpointCorrupt)
    assert not (tmp_path / "out").exists()


def test_recomputed_checksums_do_not_hide_an_altered_file(route: list[Path], tmp_path: Path) -> None:
    import hashlib

    for name in ("anchor.safetensors", "momentum.safetensors"):
        path = route[1] / name
        data = bytearray(path.read_bytes())
        before = hashlib.sha256(data).hexdigest()
        data[-1] ^= 1
        path.write_bytes(data)
        sums = (route[1] / "SHA256SUMS").read_text()
        (route[1] / "SHA256SUMS").write_text(sums.replace(before, hashlib.sha256(data).hexdigest()))
        error = atoll("--to", tmp_path / "out", *named(*route)).exception
        assert isinstance(error, CheckpointCorrupt)
        assert "digest in the manifest" in str(error)
        data[-1] ^= 1
        path.write_bytes(data)
        (route[1] / "SHA256SUMS").write_text(sums)
    assert atoll("--to", tmp_path / "out", *named(*route)).exit_code == 0
