"""A layout as a picture."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

from typer.testing import CliRunner
from unit.coordinator.planner.worlds import GB, machine, swarm

from atoll.coordinator.cli import main
from atoll.coordinator.planner.explain import explain
from atoll.coordinator.planner.layout_svg import layout_svg
from atoll.coordinator.planner.solve import solve
from atoll.core.clock import SystemClock

EXAMPLE = Path(__file__).parents[4] / "deploy/examples/what-if.toml"
SVG = "{http://www.w3.org/2000/svg}"


def test_every_machine_has_a_box_over_its_layers_and_names_are_text() -> None:
    wild = ("<script>alert(1)</script>", "a & b", "\x1b[31mred")
    machines = [machine(name, device_memory_bytes=10 * GB) for name in wild]
    found = solve(swarm(machines), clock=SystemClock(), rng=random.Random(0), seconds=5)
    why = explain(found, clock=SystemClock(), rng=random.Random(0), seconds=0.2)
    root = ElementTree.fromstring(layout_svg(found, why))
    assert root.find(f".//{SVG}script") is None
    told = {str(item.text).split(": ")[0]: item for item in root.iter(f"{SVG}title")}
    assert told.keys() == {"<script>alert(1)</script>", "a & b", "[31mred"}
    boxes = [group.find(f"{SVG}rect") for group in root.iter(f"{SVG}g")]
    ends = sorted((float(box.get("x")), float(box.get("x")) + float(box.get("width"))) for box in boxes)
    assert len(ends) == len(why.places) == 3
    assert all(before[1] <= after[0] for before, after in pairwise(ends))


def test_a_picture_is_written_and_an_unwritable_path_is_refused(tmp_path: Path) -> None:
    words = ["plan", "what-if", str(EXAMPLE), "--seconds", "1", "--svg"]
    assert CliRunner().invoke(main.app, [*words, str(tmp_path / "plan.svg")]).exit_code == 0
    assert ElementTree.parse(tmp_path / "plan.svg").getroot().tag == f"{SVG}svg"
    refused = CliRunner().invoke(main.app, [*words, str(tmp_path / "missing/plan.svg")])
    assert "cannot write" in str(refused.exception)
