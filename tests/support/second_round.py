"""One run of two fragments with a whole model, a route of two stages and a second whole model, at its second round."""

from dataclasses import replace
from typing import Any

from support.machine_plans import GENESIS, OFFSETS, POLICY, layers_after, make_plan, policies

from atoll.core.fragments import split_into_fragments
from atoll.core.manifest import Head
from atoll.core.plan import Base, Plan
from atoll.core.round_id import RoundId
from atoll.node.exchange.codecs import CODECS
from atoll.node.rounds.decide import build_start, manifest_payload
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

WHOLE, FRONT, BACK, SECOND = "p0", "p1", "p2", "p3"
PEERS = [WHOLE, FRONT, BACK, SECOND]
ROUTES = [[(WHOLE, 0, 2)], [(FRONT, 0, 1), (BACK, 2, 2)], [(SECOND, 0, 2)]]
CAP = 10_000
EPOCH = 2  # the plan that recovered last
TWO = replace(POLICY, fragments=split_into_fragments(OFFSETS, 2))
POLICIES = policies(TWO)


def plan_of(version: int, routes: Any = ROUTES) -> Plan:
    plan = make_plan(PEERS, version, Base(GENESIS.hash, (FRONT, WHOLE, SECOND), 0, EPOCH), routes)
    shares = {FRONT: 9}
    shared = (replace(it, max_reduce_bytes_per_second=shares.get(it.peer_id, 1)) for it in plan.assignments)
    return replace(plan, assignments=tuple(shared))


PLAN = plan_of(5)
POLICY_CUT = POLICIES(PLAN)
READY = {
    WHOLE: dp.Ready(tokens=101, samples=4, mark=b"of whole"),
    FRONT: dp.Ready(tokens=60, samples=3, mark=b"of front"),
    BACK: dp.Ready(mark=b"of back."),
    SECOND: dp.Ready(tokens=41, samples=2),
}


def committed(payload: bytes) -> Head:
    return Head(manifest_pb2.CommittedManifest(payload=payload))


def made(
    head: Head,
    attempt: int = 1,
    plan: Plan = PLAN,
    present: list[str] | None = None,
    members: list[str] = PEERS,
    **settled: Any,
) -> tuple[dp.Start, bytes]:
    """The Start of an attempt after `head`, and the result that it comes to."""
    policy = POLICIES(plan)
    number = head.round + 1
    round_id = RoundId("r", plan.version, policy.fragment_of(number).index, number, attempt)
    ready = {peer: READY[peer] for peer in members}
    start = build_start(policy, plan, round_id, ready, codec=CODECS["int4"], unix_ms=77, exchange_seconds=5)
    there = [peer for peer in round_id.order(ready) if present is None or peer in present]
    settle = dp.Settle(present=there, **settled)
    return start, manifest_payload(policy, plan, head, start, settle, layers_after(policy, head, b"%032d" % number))


HEAD = committed(made(GENESIS, present=[WHOLE, FRONT, SECOND])[1])  # round 1 changed layers 0 and 1
START, RESULT = made(HEAD)  # round 2 changes layer 2: FRONT is its witness
