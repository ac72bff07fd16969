"""The demo's deadline."""

import asyncio
from datetime import timedelta
from typing import cast

import pytest

from atoll.core.errors import DeadlineExceeded
from atoll.lab import demo_watch
from atoll.lab.launcher import LocalSwarm


class Endless:
    """A swarm that never finishes."""

    def check(self):
        pass

    def status(self, _name):
        return {"state": "training"}


async def test_a_run_past_the_deadline_names_the_limit_and_the_option_that_raises_it(monkeypatch):
    async def nothing(_view):
        pass

    monkeypatch.setattr(demo_watch, "fetch_run_view", nothing)
    view = demo_watch.DemoView(title="demo", started=0.0, stop_tokens=1)
    faults = asyncio.create_task(asyncio.sleep(0))
    limit = timedelta(minutes=0.001)
    with pytest.raises(DeadlineExceeded, match=r"within 0.001 min") as caught:
        await demo_watch.watch(cast(LocalSwarm, Endless()), limit, ["node-1"], view, lambda _: None, faults)
    assert "--minutes" in caught.value.remedy
