"""Directories that can be evaluated, and those that are refused before a figure comes of them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from support.exports import MODELS, trained
from support.small_state import stored

from atoll.core.errors import AtollError, ConfigError, NotFound, UsageError
from atoll.node.evaluation.exported_model import load, open_export
from atoll.node.export.huggingface_export import export_huggingface

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of the byte tokenizer's run `reef`, round 7."""
    _, spec, state = trained(MODELS["tied"])
    directory = tmp_path_factory.mktemp("export") / "out"
    with stored(spec, state) as model:
        export_huggingface(model, directory)
    return directory


@pytest.fixture
def export(written: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(written, tmp_path / "out"))


def change_config(directory: Path, **changed: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def refusal(directory: Path, base: Path | None = None) -> AtollError:
    with pytest.raises(AtollError) as caught:
        load(open_export(directory, base), CPU)
    assert caught.value.remedy
    return caught.value


def test_an_export_tells_its_origin_and_loads_with_its_document_end(export):
    opened = open_export(export, None)
    assert (opened.origin["run"], opened.origin["round"]) == ("reef", 7)
    assert opened.trained_by_atoll
    loaded = load(opened, CPU)
    assert (loaded.end_token, loaded.dtype, loaded.model.training) == (0, "float32", False)


def test_padding_needs_no_new_token_and_changes_no_text(export):
    tokenizer = load(open_export(export, None), CPU).tokenizer
    assert (tokenizer.pad_token_id, len(tokenizer)) == (0, 256)
    text = f"Lagune {tokenizer.pad_token} \0 <|pad|>"
    assert tokenizer.encode(text) == list(text.encode())


def test_the_digests_are_those_of_all_files(export):
    digests = open_export(export, None).digests()
    assert digests == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in export.iterdir()}
    change_config(export, rope_theta=1.0)
    assert {name for name, digest in open_export(export, None).digests().items() if digest != digests[name]} == {
        "config.json"
    }


@pytest.mark.parametrize("said", [None, "reef", {"run": "reef"}, {"run": 1, "round": "x", "manifest": 0}])
def test_an_origin_that_atoll_did_not_write_is_none(export, said):
    change_config(export, atoll=said)
    opened = open_export(export, None)
    assert not opened.origin
    assert not opened.trained_by_atoll


def test_what_is_no_export_is_refused(export, tmp_path):
    assert isinstance(refusal(tmp_path / "nowhere"), NotFound)
    assert isinstance(refusal(export, tmp_path), UsageError)
    (export / "config.json").write_text("[]")
    assert "not a JSON object" in str(refusal(export))
    (export / "config.json").write_text("{")
    assert "not JSON" in str(refusal(export))
    (export / "config.json").unlink()
    assert isinstance(refusal(export), ConfigError)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (export / name).unlink()
    assert "no tokenizer" in str(refusal(export))


def test_pickled_weights_are_not_read(export):
    (export / "model.safetensors").rename(export / "pytorch_model.bin")
    assert "safetensors" in str(refusal(export))


def test_weights_that_are_missing_are_not_made_up(export):
    change_config(export, num_hidden_layers=3)
    assert "model.layers.2." in str(refusal(export))


def test_damaged_weights_are_named(export):
    data = (export / "model.safetensors").read_bytes()
    (export / "model.safetensors").write_bytes(data[:5000])
    assert "cannot be loaded" in str(refusal(export))


def test_code_beside_a_model_does_not_run(export, tmp_path):
    mark = tmp_path / "it ran"
    (export / "own.py").write_text(f"open({str(mark)!r}, 'w')\n")
    change_config(export, model_type="own", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})
    refusal(export)
    assert not mark.exists()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(export):
    settings = json.loads((export / "tokenizer_config.json").read_text())
    (export / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": "<more>"}))
    assert "257 tokens" in str(refusal(export))


def test_adapters_need_their_base_and_safetensors(export, tmp_path):
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text("{}")
    shutil.copy(export / "tokenizer.json", adapters)
    assert "--base" in refusal(adapters).remedy
    (adapters / "adapter_model.bin").write_bytes(b"pickle")
    assert "adapter_model.safetensors" in str(refusal(adapters, export))


@pytest.mark.parametrize("said", ["", "[" * 100_000, "[]", "{}", '{"run": "reef", "round": "x"}'])
def test_adapters_without_an_origin_are_those_of_others(export, tmp_path, said):
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text("{}")
    (adapters / "adapter_model.safetensors").touch()
    shutil.copy(export / "tokenizer.json", adapters)
    assert not open_export(adapters, export).trained_by_atoll
    (adapters / "atoll.json").write_text(said)
    assert not open_export(adapters, export).trained_by_atoll
