"""Three stages, of which none holds the whole model: one is gone for good, and a neighbour has its layers, too."""

import asyncio

import pytest
from support.reef import READY, Reef, reef

from atoll.core.manifest import changed_layers
from atoll.node.lab.trouble import kill

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]

SPANS = {"ann": (0, 2), "bob": (3, 5), "cid": (6, 9)}
MEGABYTES = "211"  # for six of the ten layers, not for all
MODEL = """[pipeline]
micro_batches = 8
[model]
preset = "nano"
dimension = 256
layers = 8
heads = 4
kv_heads = 4
hidden_dimension = 768"""


async def begin(swarm: Reef) -> None:
    """One route, which the planner could change from then on."""
    await swarm.begin(nodes=3, tokens=10**9, round_tokens=8000, round_growth=1e6, codec="int8", model=MODEL)
    for name, span in SPANS.items():
        await swarm.node(name, 0.5, "--memory-megabytes", MEGABYTES)
        async with asyncio.timeout(60):
            while name not in await swarm.ctl("node", "list"):
                await asyncio.sleep(0.2)
        await swarm.ctl("plan", "pin", name, "--layers", f"{span[0]}-{span[1]}")
    for name in SPANS:
        await swarm.until(lambda name=name: on_route(swarm, name, SPANS[name]), f"{name} is on no route", READY)
    for name in SPANS:
        await swarm.ctl("plan", "unpin", name)


def on_route(swarm: Reef, name: str, span: tuple[int, int]) -> bool:
    status = swarm.status(name)
    return status is not None and status["route_ready"] and status["layers"] == list(span)


async def copies(swarm: Reef) -> dict[str, list[tuple[int, int]]]:
    """By name: the layers of a neighbour that each has."""
    nodes = (await swarm.json("plan", "show"))["nodes"]
    return {node["name"]: [(span["first"], span["last"]) for span in node["copies"]] for node in nodes}


async def test_a_neighbour_takes_the_layers_of_a_stage_that_held_them_alone(tmp_path):
    async with reef(tmp_path) as swarm:
        await begin(swarm)
        async with asyncio.timeout(READY.total_seconds()):
            while (await copies(swarm))["ann"] != [SPANS["bob"]]:
                await asyncio.sleep(0.5)
        while changed_layers(max(swarm.chain("ann").items())[1].manifest).start != SPANS["bob"][0]:
            await swarm.rounds("ann", 1)
        await swarm.rounds("ann", 1)  # of others' layers: the copy has had the time of a round to follow
        await kill(swarm, "bob")
        await swarm.until(lambda: on_route(swarm, "ann", (0, 5)), "nobody took the layers of who was killed", READY)
        steps = {name: swarm.status(name)["steps"] for name in ("ann", "cid")}
        await swarm.until(
            lambda: all(swarm.status(name)["steps"] > before for name, before in steps.items()),
            "the route makes no steps",
            READY,
        )
        events = await swarm.ctl("events")
        assert "ann fetches a second copy of layers 3–5 of bob" in events
        assert "ann takes the layers of bob, too" in events
        await swarm.rounds("ann", 3)
        assert "run.recovered" not in await swarm.ctl("events")
        chains = [swarm.chain(name) for name in ("ann", "cid")]
        for number in chains[0].keys() & chains[1].keys():
            assert chains[0][number].hash == chains[1][number].hash
        await swarm.restart_member("bob")
        await swarm.until(lambda: (swarm.status("bob") or {}).get("layers"), "who is back gets no layers", READY)
        await swarm.rounds("bob", 2)
        assert "run.recovered" not in await swarm.ctl("events")
