"""What tasks raise becomes an error that names the task, the place and the way out."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import httpx
import pytest
import torch

from atoll.core.errors import AtollError, ModelTooLarge, NotFound, TaskUnusable, Unreachable
from atoll.node.evaluation.task_errors import no_downloaded_metrics, task_errors


@pytest.mark.parametrize(
    ("raised", "error", "told"),
    [
        (KeyError("answer"), TaskUnusable, "task 'reef' cannot be run: KeyError: 'answer' (test_task_errors.py, line"),
        (ValueError(), TaskUnusable, "task 'reef' cannot be run: ValueError ("),
        (ModuleNotFoundError("no", name="langdetect"), TaskUnusable, "task 'reef' needs the package langdetect"),
        (
            ConnectionError("no 'a/b'\nmore"),
            Unreachable,
            "task 'reef' could not be downloaded: ConnectionError: no 'a/b'",
        ),
        (httpx.ConnectError("no route"), Unreachable, "no route"),
        (torch.OutOfMemoryError("2 GiB"), ModelTooLarge, "too little memory"),
        (NotFound("its own", "x"), NotFound, "its own"),
    ],
)
def test_each_cause_has_its_error(raised, error, told):
    with pytest.raises(AtollError) as caught, task_errors("task 'reef'"):
        raise raised
    assert type(caught.value) is error
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


def test_interrupts_pass():
    with pytest.raises(KeyboardInterrupt), task_errors("task 'reef'"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("swallowed", [True, False])
@pytest.mark.parametrize("later", [None, NotFound("a consequence")])
def test_a_metric_of_the_hub_is_refused_also_if_the_task_catches_that(swallowed, later):
    def load(path: str) -> None:
        pytest.fail("the metric's code was loaded")

    library = SimpleNamespace(load=load)

    def task() -> None:
        with contextlib.suppress(TaskUnusable) if swallowed else contextlib.nullcontext():
            library.load("rouge", module_type="metric")
        if later:
            raise later

    with pytest.raises(TaskUnusable, match="'rouge' is code"), no_downloaded_metrics(library):
        task()
    assert library.load is load


def test_without_such_a_metric_nothing_is_refused():
    library = SimpleNamespace(load=None)
    with no_downloaded_metrics(library):
        pass
    with pytest.raises(NotFound), no_downloaded_metrics(library):
        raise NotFound("no task")
