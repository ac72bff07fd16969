"""The part of `atoll doctor` about a joined run: does the coordinator accept this node, and can it train the model?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace

from atoll.core.errors import AtollError, Unreachable
from atoll.core.units import bytes_text
from atoll.node.cli.doctor import Finding
from atoll.node.config import NodeConfig
from atoll.node.control.credentials import Credentials
from atoll.node.control.standing import ask_standing, needs_of_member
from atoll.node.preflight.run_checks import Request, check_disk, size_of
from atoll.node.preflight.start_checker import check_run_apart
from atoll.v1 import membership_pb2 as mb


def training_findings(config: NodeConfig, credentials: Credentials, *, running: bool) -> Iterator[Finding]:
    """Ask the coordinator, then check weights, memory, disk and text. A running node reads its text itself."""
    standing: mb.StandingResponse | None = None
    try:
        standing = asyncio.run(ask_standing(credentials))
        drains = ", and asks this node to leave" if standing.draining else ""
        yield Finding("standing", True, f"the coordinator knows this node{drains}")
    except Unreachable:
        pass  # `doctor` reports this separately; training continues without the coordinator
    except AtollError as error:
        yield Finding("standing", False, str(error), error.remedy)
    try:
        needs = needs_of_member(credentials, standing, time.time())
        if not needs.trains:
            return
        request = replace(Request.of(config, needs), read_text=not running)
        found = asyncio.run(check_run_apart(request))
        check_disk(config, needs, found.share)
    except AtollError as error:
        yield Finding("training", False, str(error), error.remedy)
        return
    size = size_of(needs)
    part = "all layers fit" if found.share == 1 else f"about {found.share:.0%} of the layers fit"
    memory = f"{bytes_text(size.training_bytes)} for all, {bytes_text(found.memory_bytes)} there" if size else "–"
    text = "" if running else "; weights and text are the run's" if needs.corpus_digest else "; the text can be read"
    yield Finding("training", True, f"{part} on {found.device} ({memory}){text}")
