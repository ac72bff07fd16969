"""Catch-up over real libp2p streams, from donors of which some lie."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from support.donors import GENESIS, OPERATOR, commit, history, plan_of
from support.loopback_hosts import SOON, Lab

from atoll.core.errors import Busy, Unreachable
from atoll.node.state import heads as heads_of_members
from atoll.node.state.anchor import AnchorState
from atoll.node.state.catchup import catch_up
from atoll.node.state.manifests import ManifestStore
from atoll.node.state.state_client import StateClient
from atoll.node.state.state_server import StateServer
from atoll.node.swarm.host import SwarmHost

ELEMENTS = 1 << 20
OFFSETS = (0, ELEMENTS // 4, ELEMENTS // 2, ELEMENTS - 1000, ELEMENTS)


def state_of(seed: int) -> AnchorState:
    generator = torch.Generator().manual_seed(seed)
    state = AnchorState(torch.randn(ELEMENTS, generator=generator), OFFSETS)
    state.momentum_E = torch.randn(ELEMENTS, generator=generator)
    return state


async def test_three_of_four_poisoned_and_one_forged_head_do_not_keep_anyone_out(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        heads_of_members, "_STRAGGLERS_TIMEOUT", timedelta(seconds=60)
    )  # the only honest one may be slow
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
    plan = plan_of(*members, lab.identity("us"), seats=members)
    empty = AnchorState(torch.zeros(ELEMENTS), OFFSETS)
    async with asyncio.timeout(120):
        fetched = await catch_up(us, plan, empty, None, operator_key=OPERATOR.public_key)
    assert fetched is not None
    assert fetched.head.hash == head.hash
    assert torch.equal(fetched.anchor_E, true.anchor_E)
    assert torch.equal(fetched.momentum_E, true.momentum_E)
    assert not any(host.handler_crashes for host in hosts)


async def test_a_spent_allowance_stops_state_and_not_heads(lab: Lab, tmp_path: Path) -> None:
    """A peer cannot make a volunteer exceed the allowance by more than one frame."""
    true = state_of(1)
    us = await lab.start("us", relay_service=True)
    ann = await lab.start("ann", seeds=us.multiaddrs())
    head = commit(true, 1, [lab.identity("ann")], after=GENESIS)
    store = ManifestStore(tmp_path / "ann", "r")
    for item in history(head):
        store.append(item)
    StateServer(ann, "r", store, lambda: (head, true))
    await ann.ready()
    us.learn_addresses(ann.peer_id, ann.multiaddrs())
    plan = plan_of(lab.identity("ann"), lab.identity("us"), seats=(lab.identity("ann"),))
    empty = AnchorState(torch.zeros(ELEMENTS), OFFSETS)
    ann.traffic.set_remaining_bytes(allowed := 12 * ELEMENTS)  # both vectors are 8 bytes an element
    async with asyncio.timeout(120):
        assert await catch_up(us, plan, empty, None, operator_key=OPERATOR.public_key) is not None
        with pytest.raises(Unreachable, match="monthly traffic allowance is spent"):
            await catch_up(us, plan, empty, None, operator_key=OPERATOR.public_key)
    assert allowed <= ann.traffic.bytes_total < allowed + 3 * ELEMENTS
    conversation = await StateClient.connect(us, ann.peer_id, "r", SOON)
    assert (await conversation.manifest(None)).hash == head.hash
    await conversation.request_slice("anchor", head.hash, 0, 1)  # not even a small piece
    with pytest.raises(Busy):
        await conversation.receive_slice(1)
    await conversation.close()
