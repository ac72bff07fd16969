"""Joining over real libp2p streams, among donors that lie."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from support.donors import GENESIS, OPERATOR, commit, history, plan_of
from support.swarm_lab import Lab

from atoll.node.state.anchor import AnchorState
from atoll.node.state.catchup import catch_up
from atoll.node.state.manifests import ManifestStore
from atoll.node.state.serve import StateServer
from atoll.node.swarm.host import SwarmHost

ELEMENTS = 1 << 20
OFFSETS = (0, ELEMENTS // 4, ELEMENTS // 2, ELEMENTS - 1000, ELEMENTS)


def state_of(seed: int) -> AnchorState:
    generator = torch.Generator().manual_seed(seed)
    state = AnchorState(torch.randn(ELEMENTS, generator=generator), OFFSETS)
    state.momentum_E = torch.randn(ELEMENTS, generator=generator)
    return state


async def test_three_of_four_poisoned_and_one_forged_head_do_not_keep_anyone_out(lab: Lab, tmp_path: Path) -> None:
    true, poison = state_of(1), state_of(2)
    us = await lab.start("us", relay_service=True)
    names = ("ann", "bob", "dan", "eve", "fay")
    members = [lab.identity(name) for name in names]
    head = commit(true, 1, members, after=GENESIS)
    forged = commit(poison, 99, [members[4]], after=head)
    holdings = {
        "ann": (true, history(head)),
        **{name: (poison, history(head)) for name in ("bob", "dan", "eve")},
        "fay": (poison, history(head, forged)),
    }
    hosts: list[SwarmHost] = []
    for name in names:
        host = await lab.start(name, seeds=us.multiaddrs())
        state, heads = holdings[name]
        store = ManifestStore(tmp_path / name, "r")
        for item in heads:
            store.append(item)
        StateServer(host, "r", store, lambda state=state, head=heads[-1]: (head, state))
        await host.ready()
        us.learn_addresses(host.peer_id, host.multiaddrs())
        hosts.append(host)
    plan = plan_of(*members, lab.identity("us"), voters=tuple(members))
    empty = AnchorState(torch.zeros(ELEMENTS), OFFSETS)
    async with asyncio.timeout(30):
        fetched = await catch_up(us, plan, empty, None, operator_key=OPERATOR.public_key)
    assert fetched is not None
    assert fetched.head.hash == head.hash
    assert torch.equal(fetched.anchor_E, true.anchor_E)
    assert torch.equal(fetched.momentum_E, true.momentum_E)
    assert not any(host.handler_crashes for host in hosts)
