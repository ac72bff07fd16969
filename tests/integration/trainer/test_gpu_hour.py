"""`benchmarks.gpu_hour --cpu`: parts write what they measured, and one that hangs costs only itself."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks import gpu_parts
from benchmarks.gpu_hour import PARTS, _run_part, judge
from benchmarks.gpu_session import write_corpus

ROOT = Path(__file__).parents[3]


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_parts_that_need_no_gpu_write_their_figures_and_those_of_others_stay(tmp_path: Path) -> None:
    before = {"part": "speed", "case": "of an earlier session", "step_ms": 1.0}
    (tmp_path / "gpu_hour.jsonl").write_text(json.dumps(before) + "\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.gpu_hour",
            "--cpu",
            "--parts",
            "rounds",
            "memory",
            "--output",
            str(tmp_path),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    lines = lines_of(tmp_path / "gpu_hour.jsonl")
    assert lines[0] == before
    ended = {line["part"]: line["exit"] for line in lines if line["case"] == "end"}
    assert ended == {"rounds": 0, "memory": 0}, done.stdout
    cases = [line["case"] for line in lines if line["part"] == "memory"]
    assert len(cases) == 4  # three pairs, and the end
    assert any("pageable" in line and "locked" in line for line in lines)


def test_a_part_that_hangs_is_ended_and_said_so(tmp_path: Path) -> None:
    corpus, figures = tmp_path / "corpus.txt", tmp_path / "lines.jsonl"
    write_corpus(corpus, small=True)
    arguments = argparse.Namespace(cpu=True, output=tmp_path)
    asyncio.run(_run_part("speed", 0.1, figures, corpus, arguments))  # importing torch takes longer
    (line,) = lines_of(figures)
    assert (line["part"], line["case"], line["exit"]) == ("speed", "end", "stopped after its 0 s")


def test_figures_are_judged(tmp_path: Path) -> None:
    from benchmarks.common import Report

    report = Report("gpu_hour")
    figures = {"tests": {"passed": 3, "failed": ["a test"]}, "memory": {"estimate_over_peak": 0.99}}
    report.cell(part="tests", case="tests/gpu", figures=figures["tests"])
    report.cell(part="tests", case="end", figures={"exit": 0})
    report.cell(part="memory", case="a pair", figures=figures["memory"])
    report.cell(part="memory", case="another", figures={"estimate_over_peak": 1.04})
    report.cell(part="hot_loop", case="a size", figures={"waits_a_step": 2})
    judge(report)
    assert [row["holds"] for row in report.acceptance] == [True, False, False, True, False]


def test_every_part_has_a_limit_and_every_limit_a_part() -> None:
    assert list(PARTS) == list(gpu_parts.PARTS)
