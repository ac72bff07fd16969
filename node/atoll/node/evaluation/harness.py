"""Evaluation of an exported model with lm-evaluation-harness (the library `lm_eval`, of the extra `eval`).

The library brings tasks, prompts and metrics. It computes log-likelihoods and text with a model of `transformers`, and
every export is one. `HarnessModel` makes it read text as nodes do in training, and counts prompts that do not fit.

Tasks of the library are part of its package. Tasks that a user includes may run code (`!function` in their YAML), for
which the user is responsible. Nothing else runs: neither code of data sets, nor metrics that the library would
download, nor code that the model writes.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import torch
from lm_eval.evaluator import evaluate as run_tasks
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from atoll.core.errors import NotFound, TaskUnusable
from atoll.node.evaluation.exported_model import ExportedModel, LoadedModel, load
from atoll.node.evaluation.report import Evaluation, task_results
from atoll.node.evaluation.task_errors import LEAVE_OUT, no_downloaded_metrics, task_errors
from atoll.node.training.device import choose_device

_SEED = 1234  # the library's default for few-shot examples
_LIBRARIES = ("atoll", "lm_eval", "transformers", "torch", "datasets")


@dataclass(frozen=True)
class EvaluationOptions:
    """Options of an evaluation."""

    tasks: tuple[str, ...]  # names of tasks, groups or tags
    include: tuple[Path, ...] = ()  # directories of the user's own tasks
    limit: int | None = None  # samples of each task; None: all
    few_shot: int | None = None  # solved examples in each prompt; None: the task's default
    batch_size: int | str = 1  # or "auto"
    device: str = "auto"


class HarnessModel(HFLM):  # type: ignore[misc]  # the library has no types
    """A loaded export with the interface that the library needs."""

    def __init__(self, export: ExportedModel, loaded: LoadedModel, batch_size: int | str) -> None:
        self.truncated_requests = 0
        self._end_token = loaded.end_token
        alone = export.trained_by_atoll
        super().__init__(
            pretrained=loaded.model,
            tokenizer=loaded.tokenizer,
            batch_size=batch_size,
            add_bos_token=False if alone else None,
            prefix_token_id=loaded.end_token if alone else None,
        )

    @property
    def eot_token_id(self) -> int:
        """The token at which generated text ends."""
        return self._needed(self._end_token)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: the one that preceded each document in training."""
        return self._needed(super().prefix_token_id)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **more: Any) -> list[int]:
        """Convert text to token numbers. Nodes add no special tokens to training text."""
        alone = self.add_bos_token is False
        return list(super().tok_encode(string, False if alone else add_special_tokens, **more))

    def tok_batch_encode(
        self, strings: list[str], padding_side: str = "left", left_truncate_len: int | None = None, **more: Any
    ) -> Any:
        """Convert prompts to token numbers [B, T] and their mask [B, T]."""
        if left_truncate_len is not None:
            self.truncated_requests += sum(len(self.tok_encode(text)) > left_truncate_len for text in strings)
        return super().tok_batch_encode(strings, padding_side, left_truncate_len, **more)

    def _loglikelihood_tokens(self, requests: Sequence[Any], *positional: Any, **more: Any) -> Any:
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise TaskUnusable(
                    f"an answer has {len(continuation)} tokens, and the model's context only {self.max_length}",
                    "leave out the task, or train with a larger [data] sequence_length",
                )
            self.truncated_requests += len(context) + len(continuation) > self.max_length + 1
        return super()._loglikelihood_tokens(requests, *positional, **more)

    @staticmethod
    def _needed(token: int | None) -> int:
        if token is None:
            raise TaskUnusable(
                "the tokenizer has no token that ends a document, and a task needs it",
                "leave out tasks that generate text or score text without a context",
            )
        return token


def evaluate_export(export: ExportedModel, options: EvaluationOptions) -> Evaluation:
    """Run the tasks. Results are equal for equal files, options and versions, except for rounding.

    Raises `NotFound` for an unknown task or directory, `Unreachable` if data cannot be downloaded, `TaskUnusable`,
    `ConfigError`, `ModelTooLarge`.
    """
    logging.getLogger("lm_eval").setLevel(logging.CRITICAL)  # its errors are raised or counted here
    device = choose_device(options.device)
    with no_downloaded_metrics(evaluate), redirect_stdout(sys.stderr):  # the library prints
        tasks = _load_tasks(options)
        loaded = load(export, device)
        model = HarnessModel(export, loaded, options.batch_size)
        random.seed(_SEED)
        np.random.seed(_SEED)  # tasks use the global generator
        torch.manual_seed(_SEED)
        with task_errors("the tasks"):
            found = run_tasks(lm=model, task_dict=tasks, limit=options.limit, log_samples=False)
    settings = {
        "device": str(device),
        "dtype": loaded.dtype,
        "batch_size": options.batch_size,
        "limit": options.limit,
        "include": [str(path) for path in options.include],
        "seed": _SEED,
        "context_tokens": model.max_length,
        "special_tokens": not export.trained_by_atoll,
        "versions": {name: version(name) for name in _LIBRARIES},
    }
    return Evaluation(task_results(found), model.truncated_requests, settings)


def _load_tasks(options: EvaluationOptions) -> Any:
    """Load the tasks and their data, which may be downloaded."""
    manager = _manager(options)
    for name in options.tasks:
        if name not in manager.all_tasks:
            near = ", ".join(get_close_matches(name, manager.all_tasks, 3))
            meant = f"did you mean {near}? " if near else ""
            raise NotFound(
                f"there is no task {name!r}",
                f"{meant}name the directory of your own tasks' YAML with --include",
            )
    chosen: list[Any] = []
    for name in options.tasks:  # one at a time, so that an error can name it
        with task_errors(f"task {name!r}"):
            part = manager.load([name])
            chosen += [part["groups"][name]] if name in part["groups"] else part["tasks"].values()
    with task_errors("the tasks"):
        tasks = manager.load(chosen)
    for name, task in tasks["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise TaskUnusable(f"task {name!r} runs code that the model writes, which Atoll does not do", LEAVE_OUT)
        _set_few_shot(task, options.few_shot)
    return tasks


def _manager(options: EvaluationOptions) -> Any:
    """Index the tasks. Use only the user's own if they suffice: indexing the library's 14,000 takes ten seconds."""
    for directory in options.include:
        if not directory.is_dir():
            raise NotFound(f"{directory} is not a directory", "name the directory of your tasks' YAML with --include")
    include = list(options.include)
    own = TaskManager(include_path=include, include_defaults=False)
    return own if set(options.tasks) <= set(own.all_subtasks) else TaskManager(include_path=include)


def _set_few_shot(task: Any, wanted: int | None) -> None:
    """Set the number of examples in prompts. A task that is defined without examples stays so, as in the library."""
    own = task.get_config("num_fewshot")
    if own is None or (wanted is not None and own != 0):
        task.set_config(key="num_fewshot", value=wanted or 0)
    task.set_fewshot_seed(seed=_SEED)
