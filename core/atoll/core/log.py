"""Structured logs on stderr: one event with named values per line; coloured text on a terminal, JSON elsewhere."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, Literal, Protocol, TextIO, cast

import structlog

Format = Literal["auto", "console", "json"]


class TextWriter(Protocol):
    """A file to which lines are appended."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...


class _LossyStderr:
    """Standard error that drops lines it cannot write (full disk, closed pipe), so that the program continues."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            return sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()


def configure(
    level: str = "info",
    output: Format = "auto",
    *,
    file: TextWriter | None = None,
    file_only: bool = False,
    **bound: str,
) -> None:
    """Set up this process's logs. Every line contains the `bound` values (node, run).

    `file` also gets each line as JSON. With `file_only`, standard error gets no lines.
    """
    human = sys.stderr.isatty() if output == "auto" else output == "console"
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        *([_copier(file, file_only)] if file is not None else []),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if human else "iso", utc=not human),
    ]
    if human:
        shared.append(_console(sys.stderr.isatty()))
    else:
        shared += _json()
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=shared,
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _LossyStderr())),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=max(number, logging.WARNING), stream=_LossyStderr(), force=True)
    if file is not None and not file_only:  # with `file_only`, standard error already goes to the file
        logging.getLogger().addHandler(logging.StreamHandler(file))
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**bound)


def _json() -> list[Any]:
    # never log the locals of a frame: they may contain a token or a key
    frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [structlog.processors.ExceptionRenderer(frames), structlog.processors.JSONRenderer()]


def _copier(file: TextWriter, file_only: bool) -> Callable[[Any, str, Any], Any]:
    """Return a processor that writes each entry to `file` as a line of JSON."""
    steps = [structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso", utc=True), *_json()]

    def copy(logger: Any, method: str, entry: Any) -> Any:
        line: Any = dict(entry)
        for step in steps:
            line = step(logger, method, line)
        file.write(f"{line}\n")
        if file_only:
            raise structlog.DropEvent
        return entry

    return copy


def get(component: str) -> structlog.stdlib.BoundLogger:
    """Return a logger whose lines name the component."""
    return cast("structlog.stdlib.BoundLogger", structlog.get_logger(component=component))


def json_line_formatter(colors: bool) -> Callable[[str], str]:
    """Return a function that formats a JSON log line for people, in local time.

    Control characters are removed from other lines.
    """
    console = _console(colors)

    def read(line: str) -> str:
        try:
            entry = json.loads(line)
            when = datetime.fromisoformat(entry["timestamp"]).astimezone()
            trouble = [_trace(error) for error in entry.pop("exception", ())]
            told = {
                _replace_control_characters(key): _replace_control_characters(it) if isinstance(it, str) else it
                for key, it in entry.items()
            }
            first = str(console(None, "", {**told, "timestamp": when.strftime("%H:%M:%S")}))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return _replace_control_characters(line)
        return "\n".join([first, *map(_replace_control_characters, "\n".join(trouble).splitlines())])

    return read


def _console(colors: bool) -> structlog.dev.ConsoleRenderer:
    return structlog.dev.ConsoleRenderer(
        colors=colors, pad_event_to=32, exception_formatter=structlog.dev.plain_traceback
    )


def _trace(error: dict[str, Any]) -> str:
    """Format a traceback as Python does, without the source lines; the innermost frame is last."""
    frames = (f"  {it['filename']}:{it['lineno']} in {it['name']}" for it in error["frames"])
    return "\n".join([*frames, f"{error['exc_type']}: {error['exc_value']}"])


def _replace_control_characters(text: str) -> str:
    """Replace characters that could move a terminal's cursor."""
    return "".join(it if it.isprintable() or it in "\n\t" else "\N{REPLACEMENT CHARACTER}" for it in text)
