"""Benchmarks compare recipes in a swarm in one process: its bits are those of real processes."""

import pytest
from support.process_swarm import SWARM_TEST, ProcessSwarm, process_swarm
from support.replay import History, check, find_carries

from atoll.core.plan import Plan
from atoll.core.run_spec import parse_run_spec
from atoll.node.data.corpus import load_corpus
from atoll.v1 import plan_pb2

pytestmark = SWARM_TEST
PACES = {"ann": 0.08, "bob": 0.08, "cid": 0.16}  # seconds a step: some are made while a round is settled, and few


@pytest.mark.parametrize("fragments", [pytest.param(1, marks=pytest.mark.soak), 2])
async def test_a_virtual_swarm_makes_the_rounds_of_real_processes_bit_for_bit(tmp_path, fragments):
    """Genesis, data, inner steps at unequal speeds, carry, codec, screening, sums, outer steps: every digest."""
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=3, tokens=16_000, codec="int4", fragments=fragments)
        for name, pace in PACES.items():
            await swarm.node(name, pace)
        for name in PACES:
            await swarm.reach(name, "finished")
        chain = swarm.chain("ann")
        versions = {head.manifest.round.plan_version for head in chain.values()}
        plans = {version: await _plan(swarm, version) for version in versions}
    spec = parse_run_spec((tmp_path / "run.toml").read_text())
    history = History(spec, [chain[number] for number in sorted(chain)], plans)
    assert len(history.heads) >= 3
    corpus = load_corpus(spec, None)
    carries = find_carries(history, corpus)
    check(history, corpus, carries)
    assert any(sum(carry.values()) for carry in carries)


async def _plan(swarm: ProcessSwarm, version: int) -> Plan:
    shown = await swarm.json("plan", "show", "--version", str(version))
    return Plan.from_proto(plan_pb2.Plan.FromString(bytes.fromhex(shown["signed"]["payload"])))
