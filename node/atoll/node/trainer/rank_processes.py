"""Rank 0's handle on the processes for a node's other devices, which are its children.

Each rank runs the same program as rank 0, over the same kind of socket and on the same shared memory. Rank 0 sends it
every order that touches the model, and every step. All ranks execute them at the same time and meet in the collective
operations of `training/fsdp_model.py`. If one rank ends, all end: the daemon sees its trainer die and starts another.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from atoll.core import log
from atoll.core.errors import ChildDied
from atoll.node.trainer import messages
from atoll.node.training.device_names import parse_device_names

# the kernel closes all sockets of a dead rank together, including its control socket
_LOSS_TIMEOUT = timedelta(seconds=10)
# less than the daemon's `ORDER_TIMEOUT`, since the daemon cannot tell which rank is late
_ANSWER_TIMEOUT = timedelta(minutes=9)

_log = log.get("trainer")


class RankProcesses:
    """All ranks but rank 0. They share its standard error and die with it."""

    def __init__(
        self,
        config: messages.TrainerConfig,
        descriptors: tuple[int, int, int],
        lost: Callable[[messages.Refused], None],
    ) -> None:
        """Start the processes. `descriptors`: anchor, pseudo-gradient and rendezvous.

        `lost` is called in a thread when a rank ends, or with the reason why it cannot start.
        """
        self._lost, self._stopping = lost, False
        self._names = parse_device_names(config.device)
        self._controls: list[socket.socket] = []
        self._answers: list[queue.SimpleQueue[messages.Envelope]] = []
        self._readers: list[threading.Thread] = []
        self._order_numbers = 0
        for rank in range(1, len(self._names)):
            self._start(replace(config, rank=rank), descriptors)

    def _start(self, config: messages.TrainerConfig, descriptors: tuple[int, int, int]) -> None:
        ours, theirs = socket.socketpair()
        anchor, gradient, rendezvous = descriptors
        command = [sys.executable, "-P", "-m", "atoll.node.trainer.worker", f"--control-fd={theirs.fileno()}"]
        command += [f"--anchor-fd={anchor}", f"--gradient-fd={gradient}", f"--rendezvous-fd={rendezvous}"]
        command.append(f"--parent-pid={os.getpid()}")
        with theirs:
            subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno(), *descriptors])
        answers: queue.SimpleQueue[messages.Envelope] = queue.SimpleQueue()
        self._controls.append(ours)
        self._answers.append(answers)
        ours.sendall(messages.Envelope(0, config).line())
        name = self._names[config.rank]
        self._readers.append(
            threading.Thread(target=self._read, args=(ours, answers, name), name=f"rank-{name}", daemon=True)
        )
        self._readers[-1].start()

    def send_to_ranks(self, order: messages.Order) -> int:
        """Send an order to all ranks. Returns its number, for `await_ranks`."""
        self._order_numbers += 1
        line = messages.Envelope(self._order_numbers, order).line()
        self._stopping = self._stopping or isinstance(order, messages.Stop)
        for control in self._controls:
            with contextlib.suppress(OSError):  # the reading thread reports a closed socket
                control.sendall(line)
        return self._order_numbers

    def await_ranks(self, number: int, *, refused: bool = False) -> None:
        """Wait until all ranks have executed the order, or, with `refused`, have refused it as rank 0 did.

        Raises `RuntimeError` if a rank does not answer, or its result differs from rank 0's: the ranks have diverged.
        """
        for name, answers in zip(self._names[1:], self._answers, strict=True):
            answer = messages.Envelope(0, messages.Done())
            while answer.number < number:
                try:
                    answer = answers.get(timeout=_ANSWER_TIMEOUT.total_seconds())
                except queue.Empty:
                    seconds = _ANSWER_TIMEOUT.total_seconds()
                    raise RuntimeError(f"the trainer's process for {name} did not answer for {seconds:.0f} s") from None
            if isinstance(answer.body, messages.Refused) is not refused:
                accepted = "it accepted an order that rank 0 refused"
                why = answer.body.message if isinstance(answer.body, messages.Refused) else accepted
                raise RuntimeError(f"the process for {name} diverged from the other ranks: {why}")

    def report_loss(self) -> None:
        """After an error of rank 0: if a lost rank caused it, call `lost` with that rank's name, within a deadline.

        A collective operation fails in rank 0 as soon as another rank dies, often before `_read` notices the closed
        socket.
        """
        deadline = time.monotonic() + _LOSS_TIMEOUT.total_seconds()
        while time.monotonic() < deadline and all(reader.is_alive() for reader in self._readers):
            self._readers[0].join(0.1)

    def _read(self, control: socket.socket, answers: queue.SimpleQueue[messages.Envelope], name: str) -> None:
        with contextlib.suppress(OSError), control.makefile("rb") as lines:
            for line in lines:
                envelope = messages.Envelope.parse(line)
                if envelope.number == 0 and isinstance(envelope.body, messages.Refused):
                    self._lost(envelope.body)
                answers.put(envelope)
        if not self._stopping:
            gone = ChildDied(f"the trainer's process for {name} ended")
            _log.error("device_lost", device=name)
            self._lost(messages.Refused(gone.reason, str(gone), ""))
