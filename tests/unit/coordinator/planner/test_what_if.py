"""`atollctl plan what-if`: from a file to a layout, its reasons, and what would help."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner
from unit.coordinator.planner.worlds import GB, MBIT, TRAINING, machine, swarm

from atoll.coordinator.cli import main
from atoll.coordinator.planner.explain import Explanation, explain
from atoll.coordinator.planner.problem import Pin, Problem, Reach, Wishes
from atoll.coordinator.planner.solve import Solution, solve
from atoll.coordinator.planner.what_if import read_what_if
from atoll.core.clock import SystemClock
from atoll.core.errors import ConfigError, PlanInputInvalid

ROOT = Path(__file__).parents[4]
EXAMPLE = ROOT / "deploy/examples/what-if.toml"
TOPOLOGIES = sorted(path for path in EXAMPLE.parent.glob("*.toml") if path.name != "run.toml")
DOCS = ROOT / "docs/explain/planner.md"


def solved(problem: Problem) -> Solution:
    return solve(problem, clock=SystemClock(), rng=random.Random(0), seconds=10)


def explained(problem: Problem) -> Explanation:
    return explain(solved(problem), clock=SystemClock(), rng=random.Random(0), seconds=1)


def test_the_example_is_planned_and_explained() -> None:
    result = CliRunner().invoke(main.app, ["plan", "what-if", str(EXAMPLE), "--seconds", "2", "-o", "json"])
    assert result.exit_code == 0
    plan = json.loads(result.stdout)["plan"]
    machines = {place["machine"] for place in plan["places"]} | {item["machine"] for item in plan["left_out"]}
    assert machines == {"rack-1", "rack-2", "home-1", "home-2", "home-3", "attic"}
    assert plan["tokens_per_second"] > 0
    assert {item["what"] for item in plan["help"]} >= {"one more l4", "one more rtx3060"}
    assert all(0 < place["computing"] <= 1 for place in plan["places"])
    assert all(place["memory_bytes"] <= place["memory_lent_bytes"] for place in plan["places"])


@pytest.mark.parametrize("path", TOPOLOGIES, ids=lambda path: path.stem)
def test_every_topology_in_the_docs_says_what_limits_it_who_is_idle_and_what_to_buy(path: Path) -> None:
    result = CliRunner().invoke(main.app, ["plan", "what-if", str(path), "--seconds", "2", "-o", "json"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)["plan"]
    assert plan["bottleneck"]
    assert plan["help"]
    assert plan["curve"]
    assert all(item["reason"] for item in plan["left_out"])
    assert path.name in DOCS.read_text()


def test_the_report_names_the_bottleneck_and_idle_machines() -> None:
    result = CliRunner().invoke(main.app, ["plan", "what-if", str(EXAMPLE), "--seconds", "2"])
    assert "bottleneck: " in result.stdout
    assert "left out: attic" in result.stdout
    assert "with one more l4: " in result.stdout


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("blocks = 22", "blocks = 0", "model.blocks"),
        ("blocks = 22", "blocks = 22\ncode = 1", "model.code"),
        ("tflops = 25", "tflops = nan", r'machine]] 1 \("rack"\).tflops'),
        ("memory_gb = 22", "memory_gb = -1", r'machine]] 1 \("rack"\).memory_gb'),
        ('between = ["homes", "cloud"]', 'between = ["homes", "moon"]', "'moon'"),
        ('between = ["homes", "cloud"]', 'between = ["homes", "homes"]', "two .* between homes and homes"),
        ("[model]", "[model", "not TOML"),
        ("count = 2", "count = 2000000", r'machine]] 1 \("rack"\).count'),
    ],
)
def test_an_invalid_field_is_named(old: str, new: str, words: str) -> None:
    text = EXAMPLE.read_text()
    assert old in text
    with pytest.raises(PlanInputInvalid, match=words):
        read_what_if(text.replace(old, new), "rented.toml")


def test_a_missing_file_gives_a_readable_error() -> None:
    result = CliRunner().invoke(main.app, ["plan", "what-if", "nowhere.toml"])
    assert isinstance(result.exception, ConfigError)
    assert "cannot read nowhere.toml" in str(result.exception)


def test_each_machine_left_out_has_a_reason() -> None:
    machines = [
        machine("ann"),
        machine("ben"),
        machine("slow", uplink_bytes_per_second=2 * MBIT),
        machine("tiny", device_memory_bytes=0.1 * GB),
        machine("out"),
    ]
    problem = swarm(machines, training=TRAINING, wishes=Wishes(pins=(Pin("out", None),)))
    reasons = {item.machine: item.reason for item in explained(problem).left_out}
    assert reasons.keys() == {"slow", "tiny", "out"}
    assert "worse" in reasons["slow"]
    assert "cannot hold any layer" in reasons["tiny"]
    assert "pinned out" in reasons["out"]


def test_a_machine_without_a_path_to_any_other_is_refused(tmp_path: Path) -> None:
    text, path = EXAMPLE.read_text(), tmp_path / "mine.toml"
    path.write_text(text[: text.index("[[path]]")])
    result = CliRunner().invoke(main.app, ["plan", "what-if", str(path)])
    assert isinstance(result.exception, PlanInputInvalid)
    assert "no [[path]] connects" in str(result.exception)
    assert "between = [" in result.exception.remedy


def test_a_route_that_needs_hole_punching_says_so() -> None:
    homes = [machine(name, reach=Reach.RELAYED, device_memory_bytes=14 * GB) for name in ("ann", "ben")]
    [assumed] = explained(swarm(homes)).assumed
    assert "ann and ben" in assumed or "ben and ann" in assumed
    reachable = [homes[0], machine("ben", device_memory_bytes=14 * GB)]
    assert not explained(swarm(reachable)).assumed


def test_a_minimum_step_of_an_owner_is_kept_and_named_as_the_bottleneck() -> None:
    problem = swarm([machine("fast"), machine("paced", minimum_step_seconds=60.0)])
    assert explained(problem).bottleneck == "paced, in route 2: its owner set a minimum step of 60 s"
    rates = [route.tokens_per_second for route in solved(problem).evaluation.routes]
    assert rates[1] == pytest.approx(TRAINING.micro_batch_tokens * TRAINING.micro_batches / 60)
    assert rates[0] > 10 * rates[1]


def test_the_bottleneck_names_its_machine() -> None:
    machines = [
        machine("fast", device_memory_bytes=14 * GB),
        machine("slow", device_memory_bytes=14 * GB, flops_per_second=1e12),
    ]
    found = explained(swarm(machines))
    assert found.bottleneck.startswith("slow, in route 1: its computing")
    assert {place.waits_for for place in found.places if place.machine == "fast"} == {
        "slow: its computing sets the pace"
    }
