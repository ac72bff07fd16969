"""One stage of the pipeline benchmark, in a lab's host: swarm process and trainer as nodes have them.

{"contacts": [...]}  where the others are, as far as known  →  {"contact": ...}
{"begin": {...}}     toml, span, seconds (of a micro-batch forward and backward; null: it computes)  →  {"begun": true}
{"look": true}       →  {"ended", "most", "aborted", "trouble", "sent", "cpu_seconds"}
{"end": true}        the stage leaves its route  →  {"ended": true}
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch

from atoll.lab.corpus import write_python_corpus
from atoll.node.pipeline.dispatcher import RouteDispatcher
from atoll.node.pipeline.route import RoutePlace
from atoll.node.start import use_huge_pages
from atoll.node.swarm.host import SwarmHost
from atoll.node.trainer.trainer import Trainer, TrainerConfig
from benchmarks.json_lines import serve
from benchmarks.member_host import greet_all, peer_of, start_member
from benchmarks.stage_process import StageProcess

KNOWN = (("embedding", 1e-6, 1e-6), ("block", 1e-6, 1e-6), ("head", 1e-6, 1e-6))
_CORPUS_BYTES = 1 << 18
_CLOSE = timedelta(seconds=5)


class FlushRecordingTrainer(Trainer):
    """Runs the program that notes when flushes ended."""

    program = "benchmarks.pipeline_trainer"


class Member:
    """What answers the benchmark."""

    def __init__(self, index: int, address: str, directory: Path, direct: bool) -> None:
        self._index, self._address, self._directory, self._direct = index, address, directory, direct
        self._host: SwarmHost | None = None
        self._dispatcher: RouteDispatcher | None = None
        self._stage: StageProcess | None = None
        self._contacts: list[Any] = []
        self._notes = directory / f"notes-{index}.json"

    async def connect(self, contacts: list[Any]) -> Any:
        """Start, or learn where the others are; returns where we are."""
        if self._host is None:
            self._host = await start_member(
                self._directory, self._index, contacts, run_id="pipeline", address=self._address, direct=self._direct
            )
            self._dispatcher = RouteDispatcher(self._host)
            return self._host.multiaddrs()
        self._contacts = contacts
        await greet_all(self._host, contacts)
        return None

    async def begin(self, toml: str, span: list[int], seconds: list[float] | None) -> None:
        """Take the place on the route that is ours: everybody's, in the order of the hosts."""
        assert self._dispatcher is not None
        corpus = self._directory / f"corpus-{self._index}.txt"
        if not corpus.exists():
            write_python_corpus(corpus, _CORPUS_BYTES)
        os.environ["STAGE_NOTES"] = str(self._notes)
        os.environ.pop("STAGE_SECONDS", None)
        if seconds is not None:
            os.environ["STAGE_SECONDS"] = f"{seconds[0]} {seconds[1]}"
        config = TrainerConfig(toml, str(corpus), device="cpu", span=(span[0], span[1]), layer_times=KNOWN)
        place = RoutePlace(1, 0, tuple(map(peer_of, self._contacts)), self._index)
        self._stage = await StageProcess.start(
            self._dispatcher,
            place,
            config,
            self._directory / f"trainer-{self._index}.log",
            kind=FlushRecordingTrainer,
            initialise=seconds is None,
        )

    def look(self) -> dict[str, Any]:
        """Where this stage stands. Raises `RuntimeError` when its trainer has died."""
        assert self._stage is not None
        if self._stage.trainer.died.done():
            raise RuntimeError(str(self._stage.trainer.died.result()))
        status = self._stage.trainer.status
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        times = [process.cpu_times() for process in family]
        return {
            "aborted": status.flushes_aborted,
            "trouble": status.route_trouble,
            **(json.loads(self._notes.read_text()) if self._notes.exists() else {"ended": [], "most": 0}),
            "sent": psutil.net_io_counters(pernic=False).bytes_sent,
            "cpu_seconds": sum(it.user + it.system for it in times),
        }

    async def end(self) -> None:
        """Leave the route."""
        if self._stage is not None:
            await self._stage.stop()
            self._stage = None
            self._notes.unlink(missing_ok=True)

    async def close(self) -> None:
        """Leave nothing."""
        await self.end()
        if self._host is not None:
            await self._host.close(_CLOSE)


async def serve_requests(method: str, index: int, address: str, directory: Path) -> None:
    """Until the input ends."""
    member = Member(index, address, directory, direct=method == "atoll")

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        if "contacts" in request:
            return {"contact": await member.connect(request["contacts"])}
        if "begin" in request:
            await member.begin(**request["begin"])
            return {"begun": True}
        if "end" in request:
            await member.end()
            return {"ended": True}
        return member.look()

    try:
        await serve(answer)
    finally:
        await member.close()


if __name__ == "__main__":
    use_huge_pages()
    torch.set_num_threads(1)
    os.environ["PYTHONPATH"] = os.pathsep.join((os.getcwd(), os.environ.get("PYTHONPATH", "")))
    asyncio.run(serve_requests(sys.argv[1], int(sys.argv[2]), sys.argv[4], Path(sys.argv[5])))
