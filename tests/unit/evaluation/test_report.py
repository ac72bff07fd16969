"""Rows of an evaluation: every figure of the library's dictionary once, with its own standard error."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from atoll.node.evaluation.report import Metric, task_results

NAMES = st.text(st.characters(codec="ascii", exclude_characters=","), min_size=1, max_size=8)
FIGURES = st.floats() | st.just("N/A") | st.integers(-9, 9)


@given(st.dictionaries(st.tuples(NAMES, NAMES), st.tuples(FIGURES, FIGURES), min_size=1, max_size=6))
def test_every_figure_has_one_row_with_its_standard_error(figures) -> None:
    figures = {key: pair for key, pair in figures.items() if not key[0].endswith("_stderr")}
    values = {"alias": "reef", "sample_len": 3}
    for (metric, chosen), (value, stderr) in figures.items():
        values |= {f"{metric},{chosen}": value, f"{metric}_stderr,{chosen}": stderr}
    rows = task_results({"results": {"reef": values}})
    found = [metric for row in rows for metric in row.metrics]
    assert [(one.metric, one.filter) for one in found] == list(figures)
    for one in found:
        for number, said in zip((one.value, one.stderr), figures[one.metric, one.filter], strict=True):
            finite = not isinstance(said, str) and math.isfinite(said)
            assert number == (said if finite else None)


def test_counts_versions_and_directions_are_those_of_the_task() -> None:
    found = {
        "results": {
            "reef": {"name": "reef", "alias": "Reef", "sample_len": 5, "acc,none": 0.5, "acc_stderr,none": 0.1},
            "empty": {"name": "empty", "alias": "a group that aggregates nothing"},
            "all": {"alias": "all", "sample_len": 5, "acc,none": 0.5, "acc_stderr,none": "N/A"},
        },
        "versions": {"reef": 2.0, "all": None},
        "n-shot": {"reef": 4},
        "n-samples": {"reef": {"original": 90, "effective": 5}},
        "higher_is_better": {"reef": {"acc": True}},
    }
    reef, group = task_results(found)
    assert (reef.task, reef.version, reef.few_shot, reef.samples, reef.samples_in_all) == ("reef", "2.0", 4, 5, 90)
    assert reef.metrics == (Metric("acc", "none", 0.5, 0.1, True),)
    assert (group.version, group.few_shot, group.samples, group.samples_in_all) == ("", None, 5, None)
    assert group.metrics == (Metric("acc", "none", 0.5, None, None),)
