"""An exported directory is a Llama that `transformers` loads, with our logits."""

import json
import os
import resource
from pathlib import Path

import pytest
import torch
from support.exports import MODELS, spec_of, trained
from support.small_state import stored
from typer.testing import CliRunner

from atoll.core.errors import (
    AlreadyExists,
    Ambiguous,
    CheckpointCorrupt,
    ConfigError,
    DataDirUnusable,
    NotFound,
    UsageError,
)
from atoll.node.cli.main import app
from atoll.node.export.huggingface_export import export_huggingface
from atoll.node.state.checkpoint import CheckpointStore, read_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def export(spec, state, target: Path, *how, **more) -> None:
    with stored(spec, state) as model:
        export_huggingface(model, target, *how, **more)


def load(directory: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True).eval()


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_transformers_gives_our_logits(tmp_path, model):
    decoder, spec, state = trained(model)
    export(spec, state, tmp_path / "out")
    loaded = load(tmp_path / "out")
    tokens_BT = torch.randint(0, 256, (2, 128), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = decoder(tokens_BT), loaded(tokens_BT).logits
    assert type(loaded).__name__ == "LlamaForCausalLM"
    assert theirs.dtype is torch.float32
    assert ours.abs().max() > 0.5
    assert (ours - theirs).abs().max() <= 1e-5
    assert loaded.num_parameters() == state.layers.elements


def test_a_bf16_export_has_the_rounded_weights(tmp_path):
    _, spec, state = trained(MODELS["grouped"])
    export(spec, state, tmp_path / "out", "bf16")
    loaded = load(tmp_path / "out")
    assert loaded.dtype is torch.bfloat16
    embedding = state.anchor_E[: 256 * 96].view(256, 96)
    assert torch.equal(loaded.get_input_embeddings().weight, embedding.to(torch.bfloat16))


def test_it_generates_and_stops_at_a_document_s_end(tmp_path):
    _, spec, state = trained(MODELS["tied"])
    export(spec, state, tmp_path / "out")
    loaded = load(tmp_path / "out")
    assert loaded.generation_config.eos_token_id == 0
    made = loaded.generate(torch.tensor([[65, 66]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert made.shape[1] <= 6


def test_the_byte_tokenizer_is_exported(tmp_path):
    from transformers import AutoTokenizer

    _, spec, state = trained(MODELS["tied"])
    export(spec, state, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    everything = bytes(range(256)).decode("latin-1") + " Lagune, 礁, 🪸 \r\n\t two  spaces ."
    assert tokenizer.encode(everything, add_special_tokens=False) == list(everything.encode())
    assert tokenizer.decode(list(everything.encode())) == everything
    assert len(tokenizer) == 256


def test_a_run_s_hugging_face_tokenizer_is_exported(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = {"<end>": 0, "reef": 1, "lagoon": 2}
    made = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(tmp_path / "tokenizer")
    _, spec, state = trained(MODELS["tied"], tokenizer=str(tmp_path / "tokenizer"), vocabulary=3)
    export(spec, state, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("lagoon reef") == [2, 1]
    assert load(tmp_path / "out").config.vocab_size == 3


def test_nothing_is_overwritten_and_no_partial_export_is_left(tmp_path):
    _, spec, state = trained(MODELS["tied"])
    (tmp_path / "out").mkdir()
    with pytest.raises(AlreadyExists):
        export(spec, state, tmp_path / "out")
    with pytest.raises(ConfigError):
        export(spec_of("layers = 9"), state, tmp_path / "two")
    with pytest.raises(ConfigError):
        export(spec_of(MODELS["tied"], str(tmp_path / "none")), state, tmp_path / "three")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failing_disk_is_reported_and_no_partial_export_is_left(tmp_path):
    _, spec, state = trained(MODELS["tied"])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with stored(spec, state) as model:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # what a full disk says
        try:
            with pytest.raises(DataDirUnusable, match="cannot write") as refusal:
                export_huggingface(model, tmp_path / "out")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "--to" in refusal.value.remedy
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(DataDirUnusable):
        export(spec, state, tmp_path / "file" / "out")


def test_all_files_are_synced_before_the_directory_is_renamed(tmp_path, monkeypatch):
    synced, fsync = set(), os.fsync

    def remember(descriptor: int) -> None:
        assert not (tmp_path / "out").exists() or Path(os.readlink(f"/proc/self/fd/{descriptor}")) == tmp_path
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", remember)
    _, spec, state = trained(MODELS["tied"])
    export(spec, state, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} < synced


# --- the command -----------------------------------------------------------------------------------------


def atoll(*arguments: object):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def node_with(data_dir: Path, run: str, *rounds: int) -> CheckpointStore:
    for number in rounds:
        _, spec, state = trained(MODELS["tied"], run, number)
        store = CheckpointStore(data_dir / "runs" / run / "checkpoints", spec, keep=9)
        store.write(state)
    return store


def test_the_newest_complete_checkpoint_is_exported(tmp_path):
    store = node_with(tmp_path / "node", "reef", 3, 4, 5)
    (store.path(5) / "manifest").write_bytes(b"")
    done = atoll("--to", tmp_path / "out", "--data-dir", tmp_path / "node", "-o", "json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["export"]["round"] == 4
    assert store.path(5).exists(), "setting aside is for the daemon"
    assert json.loads((tmp_path / "out/config.json").read_text())["atoll"]["round"] == 4


def test_a_round_a_run_and_a_directory_can_be_named(tmp_path):
    node_with(tmp_path / "node", "reef", 3, 4)
    store = node_with(tmp_path / "node", "lagoon", 5)
    where = ("--data-dir", tmp_path / "node")
    assert atoll("--to", tmp_path / "a", *where, "--run", "reef", "--round", 3).exit_code == 0
    store.path(5).rename(tmp_path / "pulled")
    assert atoll("--to", tmp_path / "b", "--checkpoint", tmp_path / "pulled").exit_code == 0
    rounds = [json.loads((tmp_path / name / "config.json").read_text())["atoll"]["round"] for name in "ab"]
    assert rounds == [3, 5]


def test_state_of_a_deleted_run_is_neither_a_run_nor_exported(tmp_path):
    runs = tmp_path / "node" / "runs"
    node_with(tmp_path / "node", "reef", 3)
    (runs / "reef").rename(runs / "reef.1700000000000")
    where = ("--data-dir", tmp_path / "node")
    for run in ((), ("--run", "reef"), ("--run", "reef.1700000000000")):
        assert isinstance(atoll("--to", tmp_path / "none", *where, *run).exception, NotFound)
    node_with(tmp_path / "node", "reef", 5)
    done = atoll("--to", tmp_path / "out", *where, "-o", "json")
    assert json.loads(done.stdout)["export"]["round"] == 5


def test_an_export_says_when_the_node_has_a_newer_round(tmp_path, monkeypatch):
    node_with(tmp_path / "node", "reef", 3)
    status: dict[str, object] = {"run": "reef", "round": 3}
    monkeypatch.setattr("atoll.node.cli.export.call", lambda data_dir, command: status)
    where = ("--data-dir", tmp_path / "node")
    assert "the node is at round" not in atoll("--to", tmp_path / "a", *where).output
    status["round"] = 18
    assert "the node is at round 18 now" in atoll("--to", tmp_path / "b", *where).output
    assert "the node is at round" not in atoll("--to", tmp_path / "c", *where, "--round", 3).output
    status["run"] = "lagoon"
    assert "the node is at round" not in atoll("--to", tmp_path / "d", *where).output


def test_a_checkpoint_that_cannot_be_exported_is_refused_with_the_reason(tmp_path):
    node_with(tmp_path / "node", "reef", 3)
    node_with(tmp_path / "node", "lagoon", 3)
    where = ("--to", tmp_path / "out", "--data-dir", tmp_path / "node")
    cases = {
        (): Ambiguous,
        ("--run", "atlantis"): NotFound,
        ("--run", "reef", "--round", 4): NotFound,
        ("--run", "reef", "--checkpoint", tmp_path): UsageError,
        ("--checkpoint", tmp_path): CheckpointCorrupt,
        ("--checkpoint", tmp_path / "nowhere"): CheckpointCorrupt,
    }
    for arguments, error in cases.items():
        assert isinstance(atoll(*where, *arguments).exception, error), arguments
    assert not (tmp_path / "out").exists()


def test_a_wrong_byte_is_found_before_anything_is_written(tmp_path):
    store = node_with(tmp_path / "node", "reef", 3)
    anchor = store.path(3) / "anchor.safetensors"
    data = bytearray(anchor.read_bytes())
    data[-2] ^= 1
    anchor.write_bytes(data)
    with pytest.raises(CheckpointCorrupt):
        read_checkpoint(store.path(3))
    assert isinstance(atoll("--to", tmp_path / "out", "--checkpoint", store.path(3)).exception, CheckpointCorrupt)
    assert not (tmp_path / "out").exists()
