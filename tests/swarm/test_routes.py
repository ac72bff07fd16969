"""A swarm in which two nodes hold half of the model each, beside one that holds all of it."""

import asyncio
import json
import math
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from support.process_swarm import READY, SWARM_TEST, ProcessSwarm, nothing_left, process_swarm

from atoll.core.built_in_shape import resolve_shape
from atoll.core.manifest import Head, changed_layers
from atoll.lab.faults import kill
from atoll.node.model.flat_layout import FlatLayout
from atoll.node.model.llama import Decoder
from atoll.node.state.checkpoint import read_checkpoint

SPANS = {"ann": None, "bob": (0, 1), "cleo": (2, 3)}  # layers; the model has four
HALVES = ("bob", "cleo")
SPARE = "dan"

BIN = Path(sys.executable).parent

pytestmark = SWARM_TEST


async def begin(swarm: ProcessSwarm, tokens: int) -> None:
    """Everybody is pinned before the run begins."""
    await swarm.begin(nodes=3, tokens=tokens, round_tokens=3000, codec="int8")
    for name, span in SPANS.items():
        await swarm.node(name, 0.1)
        if span is not None:
            await pinned(swarm, name, span)


async def begin_halves(swarm: ProcessSwarm) -> None:
    """The two stages, and nobody who holds the whole model."""
    await swarm.begin(nodes=2, tokens=10**9, round_tokens=3000, codec="int8")
    for name in HALVES:
        await swarm.node(name, 0.1)
        await pinned(swarm, name, SPANS[name])


async def pinned(swarm: ProcessSwarm, name: str, span: tuple[int, int]) -> None:
    async with asyncio.timeout(READY.total_seconds()):
        while name not in await swarm.ctl("node", "list"):
            await asyncio.sleep(0.2)
    await swarm.ctl("plan", "pin", name, "--layers", f"{span[0]}-{span[1]}")


def on_route(swarm: ProcessSwarm, name: str) -> bool:
    status = swarm.status(name)
    span = SPANS["cleo"] if name == SPARE else SPANS[name]
    return status is not None and status["route_ready"] and status["layers"] == list(span or ())


def stands_by(swarm: ProcessSwarm, name: str) -> bool:
    status = swarm.status(name)
    return status is not None and "standby" in status["detail"] and status["route"] is None


async def test_a_route_and_a_whole_model_train_to_one_state(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await begin(swarm, tokens=30_000)
        for name in SPANS:
            await swarm.reach(name, "finished")
        history: dict[int, Head] = {}
        for name in SPANS:
            for number, head in swarm.chain(name).items():
                assert history.setdefault(number, head).hash == head.hash
        last = history[max(history)]
        cut = [head for head in history.values() if head.manifest.fragments == 2]
        assert {tuple(changed_layers(head.manifest)) for head in cut} == {(0, 1), (2, 3)}
        saved = {
            name: read_checkpoint(tmp_path / name / "runs/reef/checkpoints" / f"{last.round:09d}") for name in SPANS
        }
        ann, bob, cleo = (saved[name] for name in SPANS)
        assert {found.head.hash for found in saved.values()} == {last.hash}
        assert torch.equal(torch.cat([bob.anchor_E, cleo.anchor_E]), ann.anchor_E)
        assert torch.equal(torch.cat([bob.momentum_E, cleo.momentum_E]), ann.momentum_E)
        both = [head for head in cut if sum(item.weight > 0 for item in head.manifest.contributions) == 2]
        assert len(both) >= 2
        losses = (await swarm.json("run", "show", "reef"))["run"]["evaluations"]
        assert losses[-1]["loss"] < 0.75 * losses[0]["loss"]
        assert all(before["round"] < after["round"] for before, after in pairwise(losses))


async def test_a_killed_stage_comes_back_to_its_layers_and_the_route_goes_on(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await begin(swarm, tokens=10**9)
        for name in ("bob", "cleo"):
            await swarm.until(lambda name=name: on_route(swarm, name), f"{name} is on no route", READY)
        await swarm.rounds("ann", 2)
        await kill(swarm, "cleo")
        await swarm.rounds("ann", 2)  # the rest goes on
        await swarm.restart_member("cleo")
        for name in ("bob", "cleo"):
            await swarm.until(lambda name=name: on_route(swarm, name), f"{name} did not come back to its route", READY)
        steps = swarm.status("bob")["steps"]
        await swarm.until(lambda: swarm.status("bob")["steps"] > steps + 3, "the route makes no steps", READY)
        await swarm.rounds("cleo", 2)


async def test_a_drained_stage_hands_its_layers_over_before_it_goes(tmp_path):
    """Nobody else has them."""
    async with process_swarm(tmp_path) as swarm:
        await begin_halves(swarm)
        await swarm.rounds("bob", 2)
        await swarm.node(SPARE, 0.1)
        await pinned(swarm, SPARE, SPANS["cleo"])
        await swarm.until(lambda: (swarm.status(SPARE) or {}).get("state") == "ready", "the spare is not ready", READY)
        await swarm.ctl("node", "drain", "cleo")
        async with asyncio.timeout(READY.total_seconds()):
            assert await swarm.programs.pop("cleo").child.wait() == 0
        for name in ("bob", SPARE):
            await swarm.until(lambda name=name: on_route(swarm, name), f"{name} is on no route after the drain", READY)
        lines = (tmp_path / SPARE / "log").read_text().splitlines()
        fetched = next(number for number, line in enumerate(lines) if "layers of the next plan fetched" in line)
        came = max(number for number, line in enumerate(lines) if "plan received" in line)
        assert fetched < came
        assert not any("cannot synchronise" in line for line in lines[came:])
        assert "fetch their layers: dan 2-3" in await swarm.ctl("events")
        await swarm.rounds(SPARE, 2)
        assert "run.recovered" not in await swarm.ctl("events")


async def test_who_stands_by_takes_the_place_of_a_killed_stage_that_held_layers_alone(tmp_path):
    """Nothing is lost but what was not averaged yet; who was killed stands by when it is back."""
    async with process_swarm(tmp_path) as swarm:
        await begin_halves(swarm)
        await swarm.rounds("bob", 2)
        began = swarm.status("bob")["route_incarnations"]
        await swarm.node(SPARE, 0.1, "--compute-share", "0.3")  # slow, so that it gets nobody's place
        await pinned(swarm, SPARE, SPANS["cleo"])
        await swarm.until(lambda: stands_by(swarm, SPARE), "the spare does not stand by", READY)
        await swarm.rounds(SPARE, 2)  # it follows them
        assert swarm.status("bob")["plan_version"] == 2
        assert swarm.status("bob")["route_incarnations"] == began  # another plan, the same route: it goes on
        await kill(swarm, "cleo")
        await swarm.until(lambda: on_route(swarm, SPARE), "nobody took the place of who was killed", READY)
        steps, round_before = swarm.status("bob")["steps"], swarm.round("bob")
        await swarm.until(lambda: swarm.status("bob")["steps"] > steps + 3, "the route makes no steps", READY)
        await swarm.rounds("bob", 2)
        assert f"{SPARE} takes the place of cleo" in await swarm.ctl("events")
        await swarm.restart_member("cleo")
        both = ("cleo", SPARE)  # the planner may find that the one which is back computes faster
        await swarm.until(lambda: any(stands_by(swarm, name) for name in both), "nobody stands by", READY)
        await swarm.until(lambda: any(on_route(swarm, name) for name in both), "nobody is on the route", READY)
        await swarm.rounds("cleo", 2)
        assert "run.recovered" not in await swarm.ctl("events")
        chains = [swarm.chain(name) for name in ("bob", SPARE)]
        common = chains[0].keys() & chains[1].keys()
        assert max(common) > round_before
        assert all(chains[0][number].hash == chains[1][number].hash for number in common)


@pytest.mark.soak
async def test_after_a_power_cut_a_swarm_of_stages_goes_on_from_a_round_that_is_whole(tmp_path, monkeypatch):
    """Nobody holds the whole model, and the cut came before one of them had written the newest round."""
    monkeypatch.setenv("ATOLL_CHECKPOINT_INTERVAL_SECONDS", "0")
    monkeypatch.setenv("ATOLL_CHECKPOINT_KEEP", "6")
    async with process_swarm(tmp_path) as swarm:
        await begin_halves(swarm)
        await swarm.rounds("bob", 5)
        for name in HALVES:
            await kill(swarm, name)
        saved = {name: tmp_path / name / "runs/reef/checkpoints" for name in HALVES}
        for newest in sorted(path for path in saved["cleo"].iterdir() if path.name.isdecimal())[-2:]:
            shutil.rmtree(newest)  # one of them at least was a round of its layers
        rounds = {name: {path.name for path in saved[name].iterdir() if path.name.isdecimal()} for name in HALVES}
        whole = int(max(rounds["bob"] & rounds["cleo"]))
        assert max(map(max, rounds.values())) > f"{whole:09d}"
        for name in HALVES:
            await swarm.restart_member(name)
        async with asyncio.timeout(2 * READY.total_seconds()):
            while "run.recovered" not in await swarm.ctl("events"):
                await asyncio.sleep(1)
        assert f"continues from round {whole}" in await swarm.ctl("events")
        for name in HALVES:
            await swarm.until(lambda name=name: on_route(swarm, name), f"{name} did not come back to its route", READY)
        await swarm.rounds("bob", 3)
        chains = [swarm.chain(name) for name in HALVES]
        for number in chains[0].keys() & chains[1].keys():
            assert chains[0][number].hash == chains[1][number].hash


@pytest.mark.soak
async def test_the_pipeline_demo_prints_what_it_promises(tmp_path):
    """As a person runs it: a model that none of five nodes may hold, a killed stage, an export that loads."""
    command = [BIN / "atoll", "demo", "--pipeline", "--output", "json", "--keep", tmp_path / "kept", "--minutes", "12"]
    with nothing_left(tmp_path):
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
    it = json.loads(done.stdout)["demo"]
    assert sorted(len(route) for route in it["routes"]) == [2, 3]
    assert it["training_state_bytes"] > it["largest_node_cap_bytes"]
    assert it["layers_equal"]
    assert it["chains_equal"]
    assert it["kills"] == 1
    assert it["micro_batches_counted_twice"] == 0
    assert it["val_loss_last"] < 0.75 * math.log(256)
    model = transformers.AutoModelForCausalLM.from_pretrained(it["export"])
    kept = tmp_path / "kept"
    spans = [kept / stage["name"] / "runs/demo/checkpoints" for stage in min(it["routes"], key=len)]
    parts = [read_checkpoint(max(path for path in span.iterdir() if path.name.isdecimal())) for span in spans]
    decoder = Decoder(resolve_shape(parts[0].spec.model, 256))
    parameters = dict(FlatLayout.of(decoder).views(torch.cat([part.anchor_E for part in parts])))
    tokens_BT = torch.arange(64).view(1, 64)
    with torch.no_grad():
        ours = torch.func.functional_call(decoder, parameters, (tokens_BT,))
        assert torch.allclose(model(tokens_BT).logits, ours, atol=1e-5)
