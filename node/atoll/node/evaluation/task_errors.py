"""Errors of tasks: their code and data come from other people and can raise any exception.

Needs neither `lm_eval` nor the network.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from httpx import TransportError

from atoll.core.errors import AtollError, ModelTooLarge, TaskUnusable, Unreachable

LEAVE_OUT = "leave out this task"


@contextmanager
def task_errors(what: str) -> Iterator[None]:
    """Convert exceptions of `what` ("task 'arc_easy'") to `TaskUnusable`, which names the place."""
    try:
        yield
    except AtollError:
        raise
    except torch.OutOfMemoryError as error:
        raise ModelTooLarge("the device has too little memory for a batch", "lower --batch-size") from error
    except ModuleNotFoundError as error:
        raise TaskUnusable(
            f"{what} needs the package {error.name}", "install it into the environment of atoll, or leave the task out"
        ) from error
    except (ConnectionError, TransportError) as error:
        raise Unreachable(
            f"the data set of {what} could not be downloaded: {_sentence(error)}",
            "connect to the internet once, or copy the cache of Hugging Face from a machine that has it (HF_HOME)",
        ) from error
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise TaskUnusable(
            f"{what} cannot be run: {_sentence(error)} ({Path(place.filename).name}, line {place.lineno})",
            "correct its YAML, data or code, or leave it out",
        ) from error


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip(": ").splitlines()[0]


@contextmanager
def no_downloaded_metrics(library: Any) -> Iterator[None]:
    """Refuse metrics whose code would come from the Hub: `library.load` (that of `evaluate`) raises `TaskUnusable`.

    Callers of `library.load` may catch the error, so it is raised again at the end.
    """
    refused: list[TaskUnusable] = []

    def refuse(path: str, *_: Any, **__: Any) -> Any:
        error = TaskUnusable(f"the metric {path!r} is code on the Hugging Face Hub, and Atoll runs none", LEAVE_OUT)
        refused.append(error)
        raise error

    original, library.load = library.load, refuse
    try:
        yield
    except AtollError as error:
        if refused and error is not refused[0]:
            raise refused[0] from error
        raise
    finally:
        library.load = original
    if refused:
        raise refused[0]
