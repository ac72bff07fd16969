"""What the members of a simulated run agree on before its first round: the policy, genesis and plans."""

import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache
from itertools import pairwise

from atoll.core import protocol
from atoll.core.fragments import split_into_fragments
from atoll.core.manifest import Head
from atoll.core.plan import Assignment, Base, Plan
from atoll.core.quorum import next_seats
from atoll.node.exchange.screening import Screen
from atoll.node.rounds.types import PolicyOf, RoundPolicy
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2

OFFSETS = (0, 256, 512, 1024)  # of the layers
POLICY = RoundPolicy(
    run_id="r",
    fragments=split_into_fragments(OFFSETS, 1),
    part_elements=256,
    codecs=("int4",),
    screen=Screen(max_change_per_token=1.0),
    due_tokens=lambda committed, members: 100,
    round_max=timedelta(seconds=60),
    exchange_share=1.0,
    stop_tokens=10**9,
    round_samples=8,
    ready_timeout=timedelta(seconds=4),
    exchange_timeout=timedelta(seconds=4),
    decision_timeout=timedelta(seconds=4),
)


def genesis() -> Head:
    layers = [
        manifest_pb2.LayerState(layer=layer, anchor_digest=bytes(32), momentum_digest=bytes(32))
        for layer in range(POLICY.layers)
    ]
    payload = manifest_pb2.Manifest(
        protocol=protocol.ours(), round=pb.RoundId(run_id="r"), layers=layers
    ).SerializeToString()
    return Head(manifest_pb2.CommittedManifest(payload=payload))


GENESIS = genesis()


Routes = Sequence[Sequence[tuple[str, int, int]]]  # of peers with the first and last layers that they hold


def make_plan(
    members: list[str],
    version: int = 1,
    base: Base | None = None,
    routes: Routes | None = None,
    strangers: Collection[str] = (),
) -> Plan:
    """For `members`, each of which holds all layers, or for stages of `routes`: who has no place there stands by.

    `strangers` are on probation, unless there is nobody else.
    """
    ordered = sorted(members)
    routes = routes or [[(peer, 0, POLICY.layers - 1)] for peer in ordered]
    spans = {peer: (first, last) for route in routes for peer, first, last in route}
    drivers = {route[0][0] for route in routes}
    assignments = tuple(
        Assignment(peer, *spans[peer], ((i * 64, (i + 1) * 64),) if peer in drivers else (), 10_000, 1)
        if peer in spans
        else Assignment(peer, 0, POLICY.layers - 1, (), 0, 0)
        for i, peer in enumerate(ordered)
    )
    if set(ordered) - set(strangers):
        assignments = tuple(replace(item, on_probation=item.peer_id in strangers) for item in assignments)
    names = tuple(tuple(peer for peer, _, _ in route) for route in routes)
    return Plan("r", version, assignments, names, base or Base(GENESIS.hash, next_seats(ordered, ordered, ())))


def random_routes(members: Sequence[str], rng: random.Random) -> Routes:
    """Everybody in one route, of one to all layers each."""
    waiting, routes = rng.sample(members, len(members)), []
    while waiting:
        stages = rng.randint(1, min(len(waiting), POLICY.layers))
        cuts = [0, *sorted(rng.sample(range(1, POLICY.layers), stages - 1)), POLICY.layers]
        routes.append([(waiting.pop(), first, end - 1) for first, end in pairwise(cuts)])
    return routes


def routes_of(plan: Plan) -> Routes:
    """What everybody does under this plan."""
    return [[(peer, plan.span(peer).start, plan.span(peer).stop - 1) for peer in route] for route in plan.routes]


def policies(policy: RoundPolicy, offsets: Sequence[int] = OFFSETS) -> PolicyOf:
    """This policy, with as many fragments, under plans that have cuts."""
    wanted = len(policy.fragments)
    made = lru_cache(maxsize=8)(lambda cuts: replace(policy, fragments=split_into_fragments(offsets, wanted, cuts)))
    return lambda plan: made(plan.cuts)


def state_of(payload: bytes) -> bytes:
    """The state that a manifest names: that of the layers which its round changed."""
    return max(manifest_pb2.Manifest.FromString(payload).layers, key=lambda layer: layer.round).anchor_digest


def layers_after(policy: RoundPolicy, head: Head, digest: bytes) -> tuple[manifest_pb2.LayerState, ...]:
    """The layers that the round after `head` comes to when its fragment becomes `digest`."""
    number = head.round + 1
    layers = list(head.manifest.layers)
    for layer in policy.fragment_of(number).layers:
        layers[layer] = manifest_pb2.LayerState(layer=layer, round=number, anchor_digest=digest, momentum_digest=digest)
    return tuple(layers)


def longest_attempt(policy: RoundPolicy) -> float:
    """Seconds after which no attempt can still be under way."""
    parts = (policy.ready_timeout, policy.exchange_timeout, policy.decision_timeout)
    return sum(part.total_seconds() for part in parts) * 2 + 30
