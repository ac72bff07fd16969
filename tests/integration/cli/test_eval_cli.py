"""`atoll eval` as people and scripts use it: output, exit codes, and messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support.eval_tasks import write_choices, write_texts
from support.exports import MODELS, trained
from support.small_state import stored

from atoll.node.export.huggingface_export import export_huggingface
from atoll.node.state.checkpoint import CheckpointStore

PROGRAM = "from atoll.lab.cli.main import main; main()"
needs_library = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="the extra `eval` is not installed: `atoll eval` is not tested as a program"
)


def atoll_eval(
    folder: Path, *arguments: object, program: str = PROGRAM, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, "eval", *map(str, arguments)]
    homes = {"HF_HOME": str(folder / "cache"), "ATOLL_DATA_DIR": str(folder / "node"), "TMPDIR": str(folder)}
    environment = {**os.environ, **homes, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, its export, and two tasks."""
    folder = tmp_path_factory.mktemp("eval")
    torch.manual_seed(6)
    _, spec, state = trained(MODELS["tied"])
    CheckpointStore(folder / "checkpoints", spec, keep=1).write(state)
    with stored(spec, state) as model:
        export_huggingface(model, folder / "export")
    write_choices(folder / "tasks", "choices", [{"question": "a", "choices": ["b", "b"], "answer": 0}])
    write_texts(folder / "tasks", "texts", ["a reef is a ring of islands"] * 3)
    return folder


@needs_library
def test_an_export_and_its_checkpoint_have_the_same_figures(folder):
    tasks = ("--tasks", "choices, texts", "--include", folder / "tasks", "--device", "cpu", "--limit", 2)
    found = []
    for model in (folder / "export", folder / "checkpoints"):
        done = atoll_eval(folder, model, *tasks, "-o", "json")
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)  # nothing else is on stdout
        assert document["version"] == 1
        found.append(document["evaluation"])
    one, other = found
    assert one["results"] == other["results"]
    assert [(row["task"], row["samples"], row["samples_in_all"]) for row in one["results"]] == [
        ("choices", 1, 1),
        ("texts", 2, 3),
    ]
    for evaluation in found:
        assert (evaluation["checkpoint"]["run"], evaluation["checkpoint"]["round"]) == ("reef", 7)
        assert len(evaluation["checkpoint"]["manifest"]) == 64
        assert evaluation["settings"]["versions"].keys() == {"atoll", "lm_eval", "transformers", "torch", "datasets"}
    assert one["checkpoint"]["files"] == other["checkpoint"]["files"]
    assert not list(folder.glob("atoll-*")), "the temporary export is deleted"


@needs_library
def test_people_get_a_table(folder):
    tasks = ("--tasks", "texts", "--tasks", "choices", "--include", folder / "tasks", "--device", "cpu")
    done = atoll_eval(folder, folder / "export", *tasks)
    assert done.returncode == 0, done.stderr
    assert "round 7 of run 'reef'" in done.stderr
    lines = [line.replace("┃", "│") for line in done.stdout.splitlines() if line[0] in "│┃"]
    header, *rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    assert header == ["task", "metric", "value", "± stderr", "samples", "few-shot"]
    named = [(task, metric, samples, few_shot) for task, metric, _, _, samples, few_shot in rows]
    assert named == [
        ("texts", "word_perplexity ↓", "3", "0"),
        ("", "byte_perplexity ↓", "", ""),
        ("", "bits_per_byte ↓", "", ""),
        ("choices", "acc ↑", "1", "0"),
        ("", "acc_norm ↑", "", ""),
    ]


@needs_library
def test_offline_a_missing_data_set_ends_with_69(folder):
    done = atoll_eval(folder, folder / "export", "--tasks", "hellaswag", HF_HUB_OFFLINE="1")
    assert (done.returncode, done.stdout) == (69, ""), done.stderr
    assert "hellaswag" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_library_the_extra_is_named(folder):
    program = f"import sys; sys.modules['lm_eval'] = sys.modules['evaluate'] = None\n{PROGRAM}"
    done = atoll_eval(folder, folder / "export", "--tasks", "hellaswag", program=program)
    assert (done.returncode, done.stdout) == (78, "")
    assert "lm_eval is not installed" in done.stderr
    assert "pip install -c constraints.txt '.[eval]'" in done.stderr


@pytest.mark.parametrize("wrong", [("--tasks", ","), ("--tasks", "a", "--batch-size", "0"), ()])
def test_a_wrong_call_ends_with_2(folder, wrong):
    done = atoll_eval(folder, folder / "export", *wrong)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
