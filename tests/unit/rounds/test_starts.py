"""Start and Settle: what an honest opener says, and that every member refuses whatever differs from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.machine_plans import OFFSETS, POLICY, make_plan, policies

from atoll.core.errors import PeerMisbehaved
from atoll.core.fragments import split_into_fragments
from atoll.core.plan import Plan
from atoll.core.round_id import RoundId
from atoll.node.exchange.codecs import CODECS
from atoll.node.rounds.decide import (
    MAX_SAMPLES,
    build_start,
    check_nonces,
    check_settle,
    check_start,
    check_verdicts,
    parts_total,
)
from atoll.node.rounds.settlement import MAX_HOLDERS, NONCE_BYTES
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

WHOLE, FRONT, BACK, SECOND = "p0", "p1", "p2", "p3"
PEERS = [WHOLE, FRONT, BACK, SECOND]
ROUTES = [[(WHOLE, 0, 2)], [(FRONT, 0, 1), (BACK, 2, 2)], [(SECOND, 0, 2)]]
SHARES = {WHOLE: 1, FRONT: 2, BACK: 9, SECOND: 1}
CAP = 10_000
POLICY_CUT = replace(POLICY, fragments=split_into_fragments(OFFSETS, 2, (2,)), part_elements=128)
NUMBER = RoundId("r", 7, 0, 1, 3)  # of layers 0 and 1: BACK is its witness


def plan_of(peers: list[str] = PEERS) -> Plan:
    plan = make_plan(peers, 7, routes=ROUTES)
    shared = (replace(item, max_reduce_bytes_per_second=SHARES[item.peer_id]) for item in plan.assignments)
    return replace(plan, assignments=tuple(shared))


PLAN = plan_of()
READY = {
    WHOLE: dp.Ready(tokens=101, samples=4, mark=b"of whole"),
    FRONT: dp.Ready(tokens=CAP + 1, samples=MAX_SAMPLES + 1, mark=b"of front"),
    BACK: dp.Ready(tokens=70, samples=5, mark=b"of back."),
    SECOND: dp.Ready(tokens=0, samples=0),
}
ORDER = NUMBER.order(READY)


def started(poor_reducers: frozenset[str] = frozenset()) -> dp.Start:
    return build_start(
        POLICY_CUT,
        PLAN,
        NUMBER,
        READY,
        codec=CODECS["int4"],
        unix_ms=1234,
        exchange_seconds=2.5,
        poor_reducers=poor_reducers,
    )


def check(start: dp.Start, me: str = WHOLE) -> None:
    check_start(POLICY_CUT, PLAN, NUMBER, READY[me], me, start)


def test_a_start_holds_what_was_reported_up_to_the_caps_and_cuts_by_the_shares_of_holders() -> None:
    given = {
        WHOLE: manifest_pb2.Contribution(peer_id=WHOLE, weight=101, tokens=50, samples=4, mark=b"of whole"),
        FRONT: manifest_pb2.Contribution(
            peer_id=FRONT, weight=CAP, tokens=CAP // 2, samples=MAX_SAMPLES, mark=b"of front"
        ),
        BACK: manifest_pb2.Contribution(peer_id=BACK, mark=b"of back."),
        SECOND: manifest_pb2.Contribution(peer_id=SECOND),
    }
    reducers = [peer for peer in ORDER if peer != BACK]
    sizes = {WHOLE: 128, FRONT: 256, SECOND: 128}
    ends = [sum(sizes[peer] for peer in reducers[: n + 1]) for n in range(3)]
    pieces = [
        dp.PartRange(reducer=peer, start=end - sizes[peer], end=end) for peer, end in zip(reducers, ends, strict=True)
    ]
    assert started() == dp.Start(
        round=NUMBER.to_proto(),
        contributions=[given[peer] for peer in ORDER],
        partition=pieces,
        codec=CODECS["int4"].number,
        elements=512,
        part_elements=128,
        deadline_ms=2500,
        unix_ms=1234,
    )
    assert parts_total(started()) == 4


def test_every_member_takes_an_honest_start() -> None:
    check(started(), WHOLE)
    check(started(), SECOND)
    check_start(POLICY_CUT, PLAN, NUMBER, dp.Ready(mark=b"of back."), BACK, started())  # what a witness reports
    mine = dp.Ready(tokens=CAP + 1, samples=MAX_SAMPLES, mark=b"of front")
    check_start(POLICY_CUT, PLAN, NUMBER, mine, FRONT, started())


def test_a_claim_beyond_what_can_be_makes_its_own_start_refused() -> None:
    with pytest.raises(PeerMisbehaved, match="what we reported"):
        check(started(), FRONT)  # its samples were cut


def place(peer: str) -> int:
    return ORDER.index(peer)


def swap(start: dp.Start) -> None:
    first, second = manifest_pb2.Contribution(), manifest_pb2.Contribution()
    first.CopyFrom(start.contributions[0])
    second.CopyFrom(start.contributions[1])
    start.contributions[0].CopyFrom(second)
    start.contributions[1].CopyFrom(first)


def on(peer: str, **changes: int | bool | str | bytes) -> Callable[[dp.Start], None]:
    def change(start: dp.Start) -> None:
        for name, value in changes.items():
            setattr(start.contributions[place(peer)], name, value)

    return change


def nobody_brings(start: dp.Start) -> None:
    for item in start.contributions:
        item.weight = item.tokens = 0


WRONG_STARTS: list[tuple[str, Callable[[dp.Start], None]]] = [
    ("names members", swap),
    ("names members", on(SECOND, peer_id="stranger")),
    ("names members", lambda start: start.contributions.add(peer_id="stranger")),
    ("more than the plan", on(FRONT, weight=CAP + 2, tokens=CAP // 2 + 1)),
    ("more than the plan", on(FRONT, tokens=CAP // 2 - 1)),
    ("more than the plan", on(FRONT, samples=MAX_SAMPLES + 1)),
    ("more than the plan", on(BACK, weight=1)),
    ("more than the plan", on(BACK, samples=1)),
    ("more than the plan", on(BACK, tokens=1)),
    ("how the round ended", on(FRONT, present=True)),
    ("what we reported", on(WHOLE, weight=100)),
    ("what we reported", on(WHOLE, samples=3)),
    ("another mark of p0", on(WHOLE, mark=b"another.")),
    ("another mark of p0", on(WHOLE, mark=b"")),
    ("another mark of p1", on(FRONT, mark=b"too long.")),
    ("another mark of p2", on(BACK, mark=b"short")),
    ("keeps too many", lambda start: start.not_reducing.extend([place(WHOLE), place(FRONT)])),
    ("keeps too many", lambda start: start.not_reducing.extend([place(FRONT), place(FRONT)])),
    ("keeps too many", lambda start: start.not_reducing.append(place(BACK))),
    ("keeps too many", lambda start: start.not_reducing.append(len(ORDER))),
    ("cuts the vector", lambda start: start.not_reducing.append(place(FRONT))),
    ("another codec", lambda start: setattr(start, "codec", CODECS["fp32"].number)),
    ("cuts the vector", lambda start: setattr(start, "elements", 511)),
    ("cuts the vector", lambda start: setattr(start.partition[0], "end", 0)),
    ("cuts the vector", lambda start: start.partition.pop() and None),
    ("cuts the ranges", lambda start: setattr(start, "part_elements", 256)),
]


@pytest.mark.parametrize(("why", "change"), WRONG_STARTS, ids=range(len(WRONG_STARTS)))
def test_a_start_that_differs_is_refused(why: str, change: Callable[[dp.Start], None]) -> None:
    start = started()
    change(start)
    with pytest.raises(PeerMisbehaved, match=why):
        check(start)


def test_a_start_that_leaves_us_out_or_to_which_nobody_brings_anything_is_refused() -> None:
    with pytest.raises(PeerMisbehaved, match="leaves us out"):
        check_start(POLICY_CUT, PLAN, NUMBER, READY[WHOLE], "p9", started())
    start = started()
    nobody_brings(start)
    with pytest.raises(PeerMisbehaved, match="nobody contributes"):
        check_start(POLICY_CUT, PLAN, NUMBER, READY[SECOND], SECOND, start)


@pytest.mark.parametrize("peer", [WHOLE, FRONT, SECOND])
def test_a_holder_may_be_kept_from_reducing(peer: str) -> None:
    start = started(poor_reducers=frozenset({peer, BACK, "stranger"}))
    assert list(start.not_reducing) == [place(peer)]
    assert [piece.reducer for piece in start.partition] == [it for it in ORDER if it not in (peer, BACK)]
    assert start.contributions == started().contributions
    check(start)


@pytest.mark.parametrize(("holders", "most"), [(1, 0), (2, 1), (3, 1), (4, 1), (7, 1), (8, 2), (13, 3)])
def test_a_quarter_of_the_holders_may_be_kept_from_reducing_or_one_of_few(holders: int, most: int) -> None:
    peers = [f"p{number}" for number in range(holders)]
    plan, number = make_plan(peers), RoundId("r", 1, 0, 1, 0)
    policy = policies(POLICY)(plan)
    ready = {peer: dp.Ready(tokens=10, samples=1) for peer in peers}
    start = build_start(
        policy,
        plan,
        number,
        ready,
        codec=CODECS["int4"],
        unix_ms=0,
        exchange_seconds=5,
        poor_reducers=frozenset(peers),
    )
    assert list(start.not_reducing) == list(range(most))
    check_start(policy, plan, number, ready["p0"], "p0", start)
    start.not_reducing.append(most)
    with pytest.raises(PeerMisbehaved, match="keeps too many"):
        check_start(policy, plan, number, ready["p0"], "p0", start)


# --- verdicts and sums ---------------------------------------------------------------------------------


def verdict(
    reducer: str, contributor: str, left_out: int = 0, scaled: int = 1, missing: int = 0
) -> manifest_pb2.Verdict:
    return manifest_pb2.Verdict(
        reducer=place(reducer),
        contributor=place(contributor),
        parts_left_out=left_out,
        parts_scaled=scaled,
        parts_missing=missing,
    )


def test_a_reducer_judges_its_own_parts() -> None:
    check_verdicts(started(), [verdict(FRONT, WHOLE, scaled=2)])
    check_verdicts(started(), [verdict(FRONT, WHOLE, scaled=2)], FRONT)
    check_verdicts(started(), [], BACK)
    for reducer in (WHOLE, SECOND):
        check_verdicts(started(), [verdict(reducer, FRONT)], reducer)
    with pytest.raises(PeerMisbehaved, match="sender's"):
        check_verdicts(started(), [verdict(FRONT, WHOLE)], WHOLE)
    with pytest.raises(PeerMisbehaved, match="counts 3 parts"):
        check_verdicts(started(), [verdict(FRONT, WHOLE, scaled=3)])  # it sums two
    with pytest.raises(PeerMisbehaved, match="must count 1 to 0"):
        check_verdicts(started(), [verdict(BACK, WHOLE)])  # it sums nothing
    with pytest.raises(PeerMisbehaved, match="sender's"):
        check_verdicts(started(), [manifest_pb2.Verdict(reducer=4, contributor=0, parts_scaled=1)], FRONT)
    with pytest.raises(PeerMisbehaved, match="weight 0"):
        check_verdicts(started(), [verdict(FRONT, SECOND)])


def misses(reducer: str, contributor: str, parts: int = 1) -> manifest_pb2.Verdict:
    return verdict(reducer, contributor, scaled=0, missing=parts)


def test_only_who_sums_misses_somebody_else_who_brings_something() -> None:
    check_verdicts(started(), [misses(WHOLE, FRONT)], WHOLE)
    check_verdicts(started(), [misses(FRONT, WHOLE, 2)], FRONT)
    with pytest.raises(PeerMisbehaved, match="counts 3 parts; it must count 1 to 2"):
        check_verdicts(started(), [misses(FRONT, WHOLE, 3)], FRONT)
    with pytest.raises(PeerMisbehaved, match="must count 1 to 0"):
        check_verdicts(started(), [misses(BACK, FRONT)], BACK)
    with pytest.raises(PeerMisbehaved, match="weight 0"):
        check_verdicts(started(), [misses(WHOLE, SECOND)], WHOLE)
    with pytest.raises(PeerMisbehaved, match="its own contribution"):
        check_verdicts(started(), [misses(WHOLE, WHOLE)], WHOLE)
    with pytest.raises(PeerMisbehaved, match="outside the 4"):
        check_verdicts(started(), [manifest_pb2.Verdict(reducer=place(WHOLE), contributor=4, parts_missing=1)], WHOLE)
    one = started()
    for piece in one.partition:
        if piece.reducer == SECOND:
            piece.end = piece.start
    with pytest.raises(PeerMisbehaved, match="must count 1 to 0"):
        check_verdicts(one, [misses(SECOND, FRONT)], SECOND)  # its range is empty


# --- Settle ------------------------------------------------------------------------------------------------


def settled() -> dp.Settle:
    return dp.Settle(
        present=[peer for peer in ORDER if peer != SECOND],
        digests=[b"d" * 32] * 3 + [b""],
        parts_zeroed=1,
        whole=[0, 3],
        repairs=[dp.PartHolders(part=3, members=[0, 1, 3])],
        verdicts=[verdict(FRONT, WHOLE)],
    )


def test_an_honest_settle_is_taken() -> None:
    for holds_parts in (True, False):
        check_settle(started(), settled(), holds_parts=holds_parts)
    bare = dp.Settle(present=list(ORDER), verdicts=[misses(FRONT, WHOLE, 2)], parts_zeroed=3)
    check_settle(started(), bare, holds_parts=False)


def test_a_round_of_a_fragment_without_parts_may_settle() -> None:
    start = started()
    del start.partition[:]
    assert parts_total(start) == 0
    check_settle(start, dp.Settle(present=list(ORDER)), holds_parts=True)


def test_a_settle_that_gives_up_the_only_part_is_refused() -> None:
    start = started()
    start.part_elements = 512
    del start.partition[1:]
    assert parts_total(start) == 1
    with pytest.raises(PeerMisbehaved, match="every part"):
        check_settle(start, dp.Settle(present=list(ORDER), digests=[b""], parts_zeroed=1), holds_parts=True)


WRONG_SETTLES: list[tuple[str, Callable[[dp.Settle], object]]] = [
    ("names nobody", lambda settle: settle.ClearField("present")),
    ("names nobody", lambda settle: settle.present.append("stranger")),
    ("names nobody", lambda settle: settle.present.reverse()),
    ("names nobody", lambda settle: settle.present.append(settle.present[-1])),
    ("its own contribution", lambda settle: settle.verdicts.append(misses(WHOLE, WHOLE))),
    ("counts 3 parts", lambda settle: setattr(settle.verdicts[0], "parts_scaled", 3)),
    ("every part", lambda settle: setattr(settle, "parts_zeroed", 4)),
    ("every part", lambda settle: setattr(settle, "parts_zeroed", 5)),
]
WRONG_PARTS: list[tuple[str, Callable[[dp.Settle], object]]] = [
    ("one digest for each", lambda settle: settle.digests.pop()),
    ("one digest for each", lambda settle: settle.digests.append(b"d" * 32)),
    ("one digest for each", lambda settle: settle.digests.__setitem__(0, b"d" * 31)),
    ("one digest for each", lambda settle: settle.digests.__setitem__(0, b"d")),
    ("miscounts", lambda settle: setattr(settle, "parts_zeroed", 0)),
    ("miscounts", lambda settle: setattr(settle, "parts_zeroed", 2)),
    ("holder of parts beyond", lambda settle: settle.whole.append(4)),
    ("holder of parts beyond", lambda settle: settle.repairs[0].members.__setitem__(0, 4)),
    ("repairs a part", lambda settle: setattr(settle.repairs[0], "part", 4)),
    ("repairs a part", lambda settle: settle.repairs[0].members.append(2)),
]


@pytest.mark.parametrize(("why", "change"), WRONG_SETTLES + WRONG_PARTS)
def test_a_settle_that_no_exchange_can_end_with_is_refused(why: str, change: Callable[[dp.Settle], object]) -> None:
    settle = settled()
    change(settle)
    with pytest.raises(PeerMisbehaved, match=why):
        check_settle(started(), settle, holds_parts=True)
    if (why, change) in WRONG_PARTS:  # a witness holds none
        check_settle(started(), settle, holds_parts=False)
    assert MAX_HOLDERS == 3


# --- nonces ------------------------------------------------------------------------------------------------

NONCE = b"n" * NONCE_BYTES


def with_nonces(**changes: bytes) -> dp.Settle:
    """All are present, and WHOLE opened."""
    nonces = {WHOLE: b"", FRONT: NONCE, BACK: b"", SECOND: NONCE} | changes
    return dp.Settle(present=list(ORDER), nonces=[nonces[peer] for peer in ORDER])


def test_a_settle_has_the_nonces_of_those_that_contributed() -> None:
    check_nonces(started(), with_nonces(), WHOLE)
    check_nonces(started(), with_nonces(p3=b""), WHOLE)  # it contributed nothing
    absent = with_nonces(p1=b"")
    absent.present.remove(FRONT)
    check_nonces(started(), absent, WHOLE)


WRONG_NONCES: list[tuple[str, dp.Settle, str]] = [
    ("leaves out the nonce of p1", with_nonces(p1=b""), WHOLE),
    ("leaves out the nonce of p0", with_nonces(), BACK),
    ("a nonce of its opener", with_nonces(p0=NONCE), WHOLE),
    ("a nonce of its opener", with_nonces(p0=NONCE), FRONT),
    ("one nonce, or none", with_nonces(p1=NONCE + b"n"), WHOLE),
    ("one nonce, or none", with_nonces(p1=NONCE[1:]), WHOLE),
    ("one nonce, or none", with_nonces(p2=b"n"), WHOLE),
    ("one nonce, or none", dp.Settle(present=ORDER), WHOLE),
    ("one nonce, or none", dp.Settle(present=ORDER, nonces=[*with_nonces().nonces, b""]), WHOLE),
    ("one nonce, or none", dp.Settle(present=ORDER, nonces=with_nonces().nonces[:-1]), WHOLE),
]


@pytest.mark.parametrize(("why", "settle", "opener"), WRONG_NONCES, ids=range(len(WRONG_NONCES)))
def test_a_settle_without_the_nonces_that_are_due_is_refused(why: str, settle: dp.Settle, opener: str) -> None:
    with pytest.raises(PeerMisbehaved, match=why):
        check_nonces(started(), settle, opener)


# --- members on probation --------------------------------------------------------------------------

STRANGERS = {f"s{number}" for number in range(20)}
KNOWN = {"k0": 300, "k1": 500, "k2": 100}
MIXED_NUMBER = RoundId("r", 7, 0, 1, 0)
MIXED_READY = {
    **{peer: dp.Ready(tokens=tokens, samples=4) for peer, tokens in KNOWN.items()},
    **{peer: dp.Ready(tokens=CAP, samples=40) for peer in STRANGERS},
}


def mixed_plan() -> Plan:
    plan = make_plan([*KNOWN, *STRANGERS], 7)
    flagged = (replace(item, on_probation=item.peer_id in STRANGERS) for item in plan.assignments)
    return replace(plan, assignments=tuple(flagged))


def mixed_start(poor_reducers: frozenset[str] = frozenset()) -> dp.Start:
    return build_start(
        POLICY,
        mixed_plan(),
        MIXED_NUMBER,
        MIXED_READY,
        codec=CODECS["int4"],
        unix_ms=1,
        exchange_seconds=1.0,
        poor_reducers=poor_reducers,
    )


def check_mixed(start: dp.Start, me: str = "k0") -> None:
    check_start(POLICY, mixed_plan(), MIXED_NUMBER, MIXED_READY[me], me, start)


def test_twenty_strangers_weigh_a_quarter_of_a_round_and_count_no_tokens() -> None:
    start = mixed_start()
    for me in ("k0", "k2", "s0", "s19"):
        check_mixed(start, me)
    known = {item.peer_id: (item.weight, item.tokens) for item in start.contributions if not item.on_probation}
    assert known == {peer: (tokens, tokens) for peer, tokens in KNOWN.items()}
    strangers = [item for item in start.contributions if item.on_probation]
    assert {item.peer_id for item in strangers} == STRANGERS
    assert {(item.weight, item.tokens, item.judged_tokens) for item in strangers} == {(15, 0, 500)}


def heavier(start: dp.Start) -> None:
    for item in start.contributions:
        item.weight = 16 if item.on_probation else item.weight


def counting(start: dp.Start) -> None:
    item = next(item for item in start.contributions if item.on_probation)
    item.tokens = item.weight


def judged_by_more(start: dp.Start) -> None:
    next(item for item in start.contributions if item.on_probation).judged_tokens = 501


def on_probation_itself(start: dp.Start) -> None:
    item = next(item for item in start.contributions if item.peer_id == "k0")
    item.on_probation, item.tokens, item.judged_tokens, item.weight = True, 0, 300, 1


def not_on_probation(start: dp.Start) -> None:
    item = next(item for item in start.contributions if item.on_probation)
    item.on_probation, item.judged_tokens, item.tokens = False, 0, item.weight


@pytest.mark.parametrize("change", [heavier, counting, judged_by_more, on_probation_itself, not_on_probation])
def test_a_start_that_gives_strangers_more_than_they_may_have_is_refused(change: Callable[[dp.Start], None]) -> None:
    start = mixed_start()
    change(start)
    with pytest.raises(PeerMisbehaved):
        check_mixed(start)


def test_strangers_reduce_nothing_and_an_opener_may_keep_one_of_few_others_from_it() -> None:
    assert {piece.reducer for piece in mixed_start().partition} == set(KNOWN)
    start = mixed_start(frozenset({*STRANGERS, *KNOWN}))
    check_mixed(start)
    reducing = {piece.reducer for piece in start.partition}
    assert len(reducing) == 2
    assert reducing < set(KNOWN)
    start.not_reducing.append(next(i for i, it in enumerate(start.contributions) if it.peer_id in reducing))
    with pytest.raises(PeerMisbehaved):
        check_mixed(start)
