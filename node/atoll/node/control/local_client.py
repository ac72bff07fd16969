"""Client of the local API (`local_api.py`). It imports only the standard library and errors, so commands start fast."""

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
CREDENTIALS_FILE = "credentials.json"
MAX_LINE = 1 << 20
_TIMEOUT = timedelta(seconds=5)

Answer = dict[str, Any]


def call(data_dir: Path, command: str, timeout: timedelta = _TIMEOUT, **arguments: object) -> Answer:
    """Call a command of the daemon of `data_dir`. Raises the error in the daemon's answer, and also:

    `NotRunning` without a daemon, `DeadlineExceeded` without an answer, `Unreachable` if the daemon closes the
    connection, `ProtocolMismatch` for an answer of another release.
    """
    try:
        with socket_path(data_dir) as path, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout.total_seconds())
            connection.connect(path)
            connection.sendall(json.dumps({"command": command, **arguments}).encode() + b"\n")
            line = connection.makefile("rb").readline(MAX_LINE)
    except (TimeoutError, BlockingIOError) as error:  # BlockingIOError: the daemon's backlog of connections is full
        raise DeadlineExceeded(
            f"the daemon on {data_dir} did not answer within {timeout.total_seconds():.0f} s",
            "it may still carry out the command: see `atoll status`",
        ) from error
    except (ConnectionResetError, BrokenPipeError) as error:
        raise _connection_closed(data_dir) from error
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError) as error:
        verb = "up" if (data_dir / CREDENTIALS_FILE).exists() else "join"  # a node that left is still a member
        remedy = f"start one with `atoll {verb}`, or name its directory with --data-dir"
        raise NotRunning(f"no atoll daemon runs on {data_dir}", remedy) from error
    except OSError as error:
        raise Unreachable(f"cannot connect to the daemon on {data_dir}: {error.strerror}") from error
    if not line:
        raise _connection_closed(data_dir)
    try:
        answer = json.loads(line)
        if "error" not in answer:
            return dict(answer["ok"])
        problem = answer["error"]
        answered = error_class(problem["reason"])(str(problem["message"]), str(problem["remedy"]))
    except (ValueError, TypeError, KeyError, RecursionError) as cause:
        raise ProtocolMismatch(
            f"the daemon on {data_dir} answered in a format of another release of atoll",
            "restart the daemon after an upgrade, or name its directory with --data-dir",
        ) from cause
    raise answered


def _connection_closed(data_dir: Path) -> Unreachable:
    return Unreachable(f"the daemon on {data_dir} closed the connection without an answer", "see its log")


@contextlib.contextmanager
def socket_path(data_dir: Path) -> Iterator[str]:
    """Yield a path of the daemon's socket that is short enough for the kernel, even for a long path of `data_dir`."""
    directory = SocketDirectory.open(data_dir, SOCKET_NAME)
    try:
        yield str(directory.path / SOCKET_NAME)
    finally:
        directory.close()
