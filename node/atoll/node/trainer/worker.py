"""Entry point of the trainer process: `python -m atoll.node.trainer.worker`.

The daemon starts it (`trainer_process.py`). For a node's other devices, rank 0 of the trainer starts it and takes the
daemon's role (`rank_processes.py`).

This module guarantees, before torch is imported, that the process never outlives its parent. The kernel kills it when
the parent dies. Elsewhere, a thread that reads the control socket ends it at end of file, even while torch computes.
The process ignores SIGINT and SIGTERM: the daemon decides when it ends. `session.py` executes its orders.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from atoll.core import log
from atoll.core.errors import AtollError
from atoll.node.system.malloc_arenas import return_freed_memory_to_os
from atoll.node.trainer.messages import Answer, Envelope, Pushed, Refused, TrainerConfig

PR_SET_PDEATHSIG = 1
EXIT_ORPHANED = 86
EXIT_CRASHED = 1


def die_with_parent(parent: int) -> None:
    """Ask Linux for SIGKILL when the parent ends. On other systems the end of the control socket ends the process."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the request
        os._exit(EXIT_ORPHANED)


class ControlChannel:
    """The child's end of the control socket: puts orders into a queue, sends answers and status."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._sending = threading.Lock()
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()  # orders, and events from the stage socket
        threading.Thread(target=self._read, name="control", daemon=True).start()

    def answer(self, number: int, body: Answer | Pushed) -> None:
        """Send one message. `number` is the order's number, or 0 for pushed messages."""
        try:
            with self._sending:
                self._control.sendall(Envelope(number, body).line())
        except OSError:  # the daemon has ended, so this process ends
            os._exit(EXIT_ORPHANED)

    def _read(self) -> None:
        try:
            with self._control.makefile("rb") as lines:
                for line in lines:
                    self.events.put(Envelope.parse(line))
        except (OSError, ValueError):
            traceback.print_exc()
        os._exit(EXIT_ORPHANED)


def _crash(args: threading.ExceptHookArgs) -> None:
    """Supervision boundary of all threads: if any thread fails, the process ends."""
    if args.exc_value is not None:
        traceback.print_exception(args.exc_value)
    sys.stderr.flush()
    os._exit(EXIT_CRASHED)


class OrderLoop(Protocol):
    """A process that has loaded its model: a `TrainerSession` or a `RankProcess`."""

    def serve(self) -> None:
        """Execute orders until `Stop`."""
        ...


def _prepare(channel: ControlChannel, options: argparse.Namespace) -> Callable[[TrainerConfig], OrderLoop]:
    """Import torch before the configuration arrives, but after `die_with_parent`."""
    from atoll.node.trainer.rank_process import RankProcess
    from atoll.node.trainer.session import TrainerSession

    def begin(config: TrainerConfig) -> OrderLoop:
        if config.memory_bytes:
            return_freed_memory_to_os()
        if options.rendezvous_fd is not None:
            return RankProcess(config, channel, options.anchor_fd, options.gradient_fd, options.rendezvous_fd)
        stage_socket = socket.socket(fileno=options.stage_fd) if config.span is not None else None
        return TrainerSession(config, channel, options.anchor_fd, options.gradient_fd, stage_socket)

    return begin


def main() -> int:
    """Run until `Stop`. The exit status is 0 only after `Stop`."""
    parser = argparse.ArgumentParser(description="internal: the trainer process of an atoll node")
    for name in ("--control-fd", "--anchor-fd", "--gradient-fd", "--parent-pid"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--stage-fd", type=int, help="stage socket of a trainer that may hold a span")
    parser.add_argument("--rendezvous-fd", type=int, help="rendezvous file of a rank other than rank 0")
    options = parser.parse_args()
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    die_with_parent(options.parent_pid)
    log.configure(output="json")  # standard error is the log file that the parent opened
    threading.excepthook = _crash
    channel = ControlChannel(socket.socket(fileno=options.control_fd))
    try:
        begin = _prepare(channel, options)
        config = channel.events.get().body
        assert isinstance(config, TrainerConfig)
        serving = begin(config)
    except AtollError as error:
        channel.answer(0, Refused(error.reason, str(error), error.remedy))
        return int(error.exit_code)
    except Exception:  # supervision boundary: the log has the traceback, the daemon sees the child end
        traceback.print_exc()
        return EXIT_CRASHED
    try:
        serving.serve()
    except Exception:  # supervision boundary, as above
        traceback.print_exc()
        return EXIT_CRASHED
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no destructors: a CUDA context or a loader thread must not delay the exit
