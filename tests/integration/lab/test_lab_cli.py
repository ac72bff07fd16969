"""`atoll lab` as a person meets it, root or not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.wan import needs_wan

ATOLL = str(Path(sys.executable).parent / "atoll")
NOT_ROOT = "import os; os.geteuid = lambda: 1000; from atoll.lab.cli.main import main; main()"
TINY = """
[defaults]
uplink_mbit = 20
downlink_mbit = 30
[public]
region = "here"
[[host]]
name = "ann"
region = "here"
nat = true
[[route]]
between = ["here", "here"]
rtt_ms = 20
"""


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_the_list_is_for_people_and_programs():
    text, document = run(ATOLL, "lab", "list"), json.loads(run(ATOLL, "lab", "list", "-o", "json").stdout)
    names = [it["name"] for it in document["topologies"]]
    assert names == [line.split()[0] for line in text.stdout.splitlines()]
    assert document["version"] == 1
    assert {"name": "nat-1", "nat": True}.items() <= document["topologies"][names.index("nat-4")]["host"][1].items()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([ATOLL, "lab", "check", "nowhere"], ["cannot read the topology nowhere", "home-4"]),
        ([ATOLL, "lab", "check", "home4"], ["cannot read the topology home4", "did you mean home-4?"]),
        ([sys.executable, "-c", NOT_ROOT, "lab", "check"], ["needs root", "run it as root"]),
    ],
)
def test_what_cannot_be_checked_is_one_sentence_and_what_to_do(command, words):
    done = run(*command)
    assert (done.returncode, done.stdout) == (78, "")
    assert "Traceback" not in done.stderr
    assert [word for word in words if word not in done.stderr] == []


SPEC = (Path(__file__).parents[3] / "deploy" / "examples" / "run.toml").read_text()


@pytest.mark.parametrize(
    ("nodes", "text", "words"),
    [
        (5, "here.txt", ["run.min_nodes is 5", "home-4 has only 4 hosts"]),
        (4, "nowhere", ["no training text at", "nowhere", "[data]"]),
    ],
)
def test_a_run_that_cannot_begin_in_a_lab_is_refused_before_anything_is_built(tmp_path, nodes, text, words):
    (tmp_path / "here.txt").write_text("text")
    spec = SPEC.replace("min_nodes = 2 ", f"min_nodes = {nodes} ").replace("/srv/corpus", str(tmp_path / text))
    (tmp_path / "run.toml").write_text(spec)
    done = run(ATOLL, "lab", "run", "home-4", "--run", str(tmp_path / "run.toml"))
    assert (done.returncode, done.stdout) == (78, "")
    assert [word for word in words if word not in done.stderr] == []
    assert "building the network" not in done.stderr


@needs_wan[0]
@needs_wan[1]
def test_the_rows_of_a_check_are_for_programs_too(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    for _ in range(5):  # a machine that stops for a moment measures something else
        done = run(ATOLL, "lab", "check", str(tmp_path / "tiny.toml"), "--seconds", "3", "-o", "json")
        result = json.loads(done.stdout)["lab_check"]
        assert done.returncode == (0 if result["ok"] else 1)
        assert (result["topology"], result["congestion"]) == ("tiny", "cubic")
        rows = {(row["quantity"], row["host"]): row for row in result["measurements"]}
        assert rows["uplink_mbit", "ann"]["set"] == 20
        measured = [rows[quantity, "ann"]["measured"] for quantity in ("uplink_mbit", "downlink_mbit")]
        if 15 < measured[0] < 20.5 and 23 < measured[1] < 31 and rows["inbound_calls", "ann"]["ok"]:
            break
    else:
        raise AssertionError(rows)
