"""What the demo says when it takes too long."""

import asyncio
from datetime import timedelta
from typing import cast

import pytest

from atoll.core.errors import DeadlineExceeded
from atoll.lab import demo
from atoll.lab.launcher import LocalSwarm


class Endless:
    """A swarm that trains for ever."""

    def check(self):
        pass

    def status(self, _name):
        return {"state": "training"}


async def test_it_names_the_limit_and_how_to_give_it_more(monkeypatch):
    async def nothing(_view):
        pass

    monkeypatch.setattr(demo, "fetch_run_view", nothing)
    view = demo.DemoView(title="demo", started=0.0, stop_tokens=1)
    trouble = asyncio.create_task(asyncio.sleep(0))
    limit = timedelta(minutes=0.001)
    with pytest.raises(DeadlineExceeded, match=r"within 0.001 min") as caught:
        await demo.watch(cast(LocalSwarm, Endless()), limit, ["node-1"], view, lambda _: None, trouble)
    assert "--minutes" in caught.value.remedy
