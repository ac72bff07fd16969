"""Three stages, of which none holds the whole model: one is gone for good, and a neighbour has its layers, too."""

import asyncio
from dataclasses import dataclass

from support.process_swarm import READY, SWARM_TEST, ProcessSwarm, process_swarm

from atoll.core.manifest import changed_layers
from atoll.lab.faults import kill

pytestmark = SWARM_TEST

SPANS = {"ann": (0, 2), "bob": (3, 5), "cid": (6, 9)}
MEGABYTES = "211"  # for six of the ten layers, not for all, with AdamW's two moments
MODEL = """[pipeline]
micro_batches = 8
[model]
preset = "nano"
dimension = 256
layers = 8
heads = 4
kv_heads = 4
hidden_dimension = 768"""


async def begin(swarm: ProcessSwarm) -> None:
    """One route, which the planner could change from then on."""
    sizes = {"round_tokens": 8000, "round_growth": 1e6, "codec": "int8", "model": MODEL}
    await swarm.begin(nodes=3, tokens=10**9, optimizer='name = "adamw"', **sizes)
    for name, span in SPANS.items():
        await swarm.node(name, 0.5, "--memory-megabytes", MEGABYTES)
        async with asyncio.timeout(READY.total_seconds()):
            while name not in await swarm.ctl("node", "list"):
                await asyncio.sleep(0.2)
        await swarm.ctl("plan", "pin", name, "--layers", f"{span[0]}-{span[1]}")
    for name in SPANS:
        await swarm.until(lambda name=name: on_route(swarm, name, SPANS[name]), f"{name} is on no route", READY)
    for name in SPANS:
        await swarm.ctl("plan", "unpin", name)


def on_route(swarm: ProcessSwarm, name: str, span: tuple[int, int]) -> bool:
    status = swarm.status(name)
    return status is not None and status["route_ready"] and status["layers"] == list(span)


@dataclass(frozen=True)
class Stage:
    name: str
    span: tuple[int, int]  # first and last layer
    copies: list[tuple[int, int]]  # a neighbour's layers that it has, too


async def stages(swarm: ProcessSwarm) -> list[Stage]:
    """Of the one route, in order: the planner may have changed who has what since nobody is pinned."""
    nodes = (await swarm.json("plan", "show"))["nodes"]
    found = [Stage(node["name"], bounds(node["span"]), [bounds(it) for it in node["copies"]]) for node in nodes]
    return sorted(found, key=lambda it: it.span)


def bounds(span: dict[str, int]) -> tuple[int, int]:
    return span["first"], span["last"]


async def first_with_a_copy(swarm: ProcessSwarm) -> list[Stage]:
    """The stages, once the first has the second's layers as of a round that changed them."""
    while True:
        first, second, *_ = found = await stages(swarm)
        if first.copies == [second.span] and newest_change(swarm, first.name) == second.span[0]:
            await swarm.rounds(first.name, 1)  # of others' layers: the copy has had the time of a round to follow
            if await stages(swarm) == found:
                return found
        await asyncio.sleep(0.5)


def newest_change(swarm: ProcessSwarm, name: str) -> int:
    """The first of the layers that the newest round changed."""
    return changed_layers(max(swarm.chain(name).items())[1].manifest).start


async def test_a_neighbour_takes_the_layers_of_a_stage_that_held_them_alone(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await begin(swarm)
        async with asyncio.timeout(2 * READY.total_seconds()):
            keeper, alone, last = await first_with_a_copy(swarm)
        await kill(swarm, alone.name)
        both = keeper.span[0], alone.span[1]
        await swarm.until(lambda: on_route(swarm, keeper.name, both), "nobody took the layers of who was killed", READY)
        steps = {it.name: swarm.status(it.name)["steps"] for it in (keeper, last)}
        await swarm.until(
            lambda: all(swarm.status(name)["steps"] > before for name, before in steps.items()),
            "the route makes no steps",
            READY,
        )
        events = await swarm.ctl("events")
        assert "fetches a second copy of layers" in events  # perhaps other ones: plans may have moved layers since
        assert f"{keeper.name} takes over the layers of {alone.name} beside its own" in events
        await swarm.rounds(keeper.name, 3)
        assert "run.recovered" not in await swarm.ctl("events")
        chains = [swarm.chain(it.name) for it in (keeper, last)]
        for number in chains[0].keys() & chains[1].keys():
            assert chains[0][number].hash == chains[1][number].hash
        await swarm.restart_member(alone.name)
        back = "who is back gets no layers"
        await swarm.until(lambda: (swarm.status(alone.name) or {}).get("layers"), back, READY)
        await swarm.rounds(alone.name, 2)
        assert "run.recovered" not in await swarm.ctl("events")
