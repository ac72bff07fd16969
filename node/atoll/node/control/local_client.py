"""The asking side of the local socket (`localapi.py` answers): standard library only, so commands start at once."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from atoll.core.errors import DeadlineExceeded, NotRunning, ProtocolMismatch, Unreachable, error_class
from atoll.node.system.socket_paths import SocketDirectory

SOCKET_NAME = "atoll.sock"
MAX_LINE = 1 << 20
_TIMEOUT = timedelta(seconds=5)

Answer = dict[str, Any]


def call(data_dir: Path, command: str, timeout: timedelta = _TIMEOUT, **arguments: object) -> Answer:
    """Ask the daemon of `data_dir`. Raises `NotRunning` when there is none, and whatever it answers.

    `DeadlineExceeded` when it does not answer, `Unreachable` when it hung up, `ProtocolMismatch` when that makes no
    sense.
    """
    try:
        with socket_path(data_dir) as path, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout.total_seconds())
            connection.connect(path)
            connection.sendall(json.dumps({"command": command, **arguments}).encode() + b"\n")
            line = connection.makefile("rb").readline(MAX_LINE)
    except (TimeoutError, BlockingIOError) as error:  # the latter: many wait for it already
        raise DeadlineExceeded(
            f"the daemon on {data_dir} did not answer within {timeout.total_seconds():.0f} s",
            "it may still do what it was asked for: see `atoll status`",
        ) from error
    except (ConnectionResetError, BrokenPipeError) as error:
        raise _hung_up(data_dir) from error
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError) as error:
        raise NotRunning(
            f"no atoll daemon runs on {data_dir}", "start one with `atoll join`, or name its directory with --data-dir"
        ) from error
    except OSError as error:
        raise Unreachable(f"the daemon on {data_dir} cannot be asked: {error.strerror}") from error
    if not line:
        raise _hung_up(data_dir)
    try:
        answer = json.loads(line)
        if "error" not in answer:
            return dict(answer["ok"])
        problem = answer["error"]
        told = error_class(problem["reason"])(str(problem["message"]), str(problem["remedy"]))
    except (ValueError, TypeError, KeyError, RecursionError) as cause:
        raise ProtocolMismatch(
            f"what answers on {data_dir} does not speak as this release of atoll does",
            "restart the daemon after an upgrade, or name its directory with --data-dir",
        ) from cause
    raise told


def _hung_up(data_dir: Path) -> Unreachable:
    return Unreachable(f"the daemon on {data_dir} hung up", "see its log")


@contextlib.contextmanager
def socket_path(data_dir: Path) -> Iterator[str]:
    """The path of the daemon's socket, however deep `data_dir` lies."""
    directory = SocketDirectory.open(data_dir, SOCKET_NAME)
    try:
        yield str(directory.path / SOCKET_NAME)
    finally:
        directory.close()
