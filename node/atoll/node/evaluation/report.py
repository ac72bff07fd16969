"""Results of an evaluation, as rows: one for each task or group of tasks, with its metrics.

`task_results` reads the dictionary that `lm_eval.evaluate` returns. Its keys of values are "METRIC,FILTER", and
"METRIC_stderr,FILTER" for standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_STDERR = "_stderr"


@dataclass(frozen=True)
class Metric:
    """One metric of a task."""

    metric: str
    filter: str  # how the answer was extracted from the model's output; "none" if it was not
    value: float | None  # None if it is not a finite number
    stderr: float | None  # None if the metric or the number of samples gives none
    higher_is_better: bool | None  # None if the task does not define it


@dataclass(frozen=True)
class TaskResult:
    """All metrics of a task, or of a group of tasks."""

    task: str
    version: str
    few_shot: int | None  # solved examples in each prompt; None if the tasks of a group differ
    samples: int | None  # that were evaluated
    samples_in_all: int | None  # in the task's data; None for a group
    metrics: tuple[Metric, ...]


@dataclass(frozen=True)
class Evaluation:
    """The metrics of a model, with the facts needed to reproduce them."""

    results: tuple[TaskResult, ...]
    truncated_requests: int  # requests longer than the model's context, whose beginning was cut off
    settings: Mapping[str, object]


def task_results(found: Mapping[str, Any]) -> tuple[TaskResult, ...]:
    """Return a row for each task, in the order of the evaluation. Groups without aggregated metrics have no row."""
    rows = []
    for name, values in found["results"].items():
        better = found.get("higher_is_better", {}).get(name) or {}
        if not (metrics := _metrics(values, better)):
            continue
        version, few_shot = found.get("versions", {}).get(name), found.get("n-shot", {}).get(name)
        samples = found.get("n-samples", {}).get(name) or {}
        of_group = max((values.get("sample_count") or {}).values(), default=values.get("sample_len"))
        rows.append(
            TaskResult(
                task=name,
                version="" if version is None else str(version),
                few_shot=few_shot if isinstance(few_shot, int) else None,
                samples=samples.get("effective", of_group),
                samples_in_all=samples.get("original"),
                metrics=metrics,
            )
        )
    return tuple(rows)


def _metrics(values: Mapping[str, Any], better: Mapping[str, bool | None]) -> tuple[Metric, ...]:
    found = []
    for key, value in values.items():
        metric, comma, chosen = key.rpartition(",")
        of_another = metric.endswith(_STDERR) and f"{metric.removesuffix(_STDERR)},{chosen}" in values
        if not comma or of_another:
            continue
        stderr = values.get(f"{metric}{_STDERR},{chosen}")
        found.append(Metric(metric, chosen, _number(value), _number(stderr), better.get(metric)))
    return tuple(found)


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):  # "N/A", or a metric that is not a number
        return None
    return number if math.isfinite(number) else None
