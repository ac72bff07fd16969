"""Results to vote for: the manifest that every member computes, and that whatever no round can end with is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.machine_plans import GENESIS, POLICY, layers_after, make_plan, policies
from support.machine_votes import FakeVoteSigner
from support.second_round import (
    BACK,
    CAP,
    EPOCH,
    FRONT,
    HEAD,
    PEERS,
    PLAN,
    POLICIES,
    POLICY_CUT,
    RESULT,
    SECOND,
    START,
    WHOLE,
    committed,
    made,
    plan_of,
)

from atoll.core import protocol
from atoll.core.errors import PeerMisbehaved
from atoll.core.quorum import COORDINATOR
from atoll.core.round_id import RoundId
from atoll.core.training_audits import audit_seed
from atoll.node.exchange.codecs import CODECS
from atoll.node.rounds import decide
from atoll.node.rounds.decide import (
    MAX_SAMPLES,
    build_start,
    check_attested,
    check_payload,
    is_attested,
    is_witness,
    manifest_payload,
    parts_total,
    seats_after,
)
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

Change = Callable[[manifest_pb2.Manifest], object]


def test_round_two_is_of_the_second_fragment() -> None:
    assert (HEAD.round, HEAD.committed_tokens) == (1, 50 + 30 + 20)
    assert HEAD.seats == (WHOLE, FRONT, SECOND)
    check_payload(POLICIES(PLAN), PLAN, GENESIS, HEAD.committed.payload)
    check_payload(POLICY_CUT, PLAN, HEAD, RESULT)


def test_a_result_holds_all_that_the_round_decided() -> None:
    order = RoundId("r", 5, 1, 2, 4).order(PEERS)
    missing = [
        manifest_pb2.Verdict(reducer=reducer, contributor=order.index(SECOND), parts_missing=1)
        for reducer in sorted(order.index(peer) for peer in (WHOLE, BACK))
    ]  # two of three parts
    start, payload = made(HEAD, attempt=4, present=[WHOLE, SECOND, BACK], verdicts=missing, parts_zeroed=0)
    assert [item.peer_id for item in start.contributions] == list(order)
    given = {
        WHOLE: manifest_pb2.Contribution(
            peer_id=WHOLE, weight=101, tokens=50, samples=4, present=True, mark=b"of whole"
        ),
        FRONT: manifest_pb2.Contribution(peer_id=FRONT, mark=b"of front"),
        BACK: manifest_pb2.Contribution(peer_id=BACK, present=True, mark=b"of back."),
        SECOND: manifest_pb2.Contribution(peer_id=SECOND, weight=41, samples=2, present=True),
    }
    layers = layers_after(POLICY_CUT, HEAD, b"%032d" % 2)
    manifest = manifest_pb2.Manifest.FromString(payload)
    assert manifest == manifest_pb2.Manifest(
        protocol=protocol.ours(),
        round=RoundId("r", 5, 1, 2, 4).to_proto(),
        previous_hash=HEAD.hash,
        contributions=[given[peer] for peer in order],
        layers=layers,
        codec=CODECS["int4"].number,
        data=manifest.data,
        parts_total=parts_total(start),
        parts_zeroed=0,
        committed_unix_ms=77,
        committed_tokens=150,
        verdicts=missing,
        fragments=2,
        seats=[order.index(peer) for peer in (WHOLE, SECOND, BACK)],
        coordinator_seat=False,
        epoch=EPOCH,
        audit_seed=audit_seed(RoundId("r", 5, 1, 2, 4), []),
    )
    assert payload == manifest.SerializeToString(deterministic=True)


def test_samples_are_spent_from_each_drivers_own() -> None:
    before, after = HEAD.data, committed(RESULT).data
    used = {WHOLE: 4, SECOND: 2}
    assert {peer: ranges[0][0] for peer, ranges in after.holdings.items()} == {
        peer: before.holdings[peer][0][0] + used.get(peer, 0) for peer in (WHOLE, FRONT, SECOND)
    }


def test_verdicts_zeroed_parts_and_who_left_are_recorded() -> None:
    order = [item.peer_id for item in START.contributions]
    verdict = manifest_pb2.Verdict(reducer=order.index(WHOLE), contributor=order.index(SECOND), parts_scaled=1)
    _, payload = made(HEAD, verdicts=[verdict], parts_zeroed=1, present=[WHOLE, SECOND])
    manifest = manifest_pb2.Manifest.FromString(payload)
    assert list(manifest.verdicts) == [verdict]
    assert manifest.parts_zeroed == 1
    assert (manifest.coordinator_seat, len(manifest.seats)) == (True, 2)
    check_payload(POLICY_CUT, PLAN, HEAD, payload)


def test_the_opener_then_those_with_seats_then_the_best_uplinks_get_seats() -> None:
    round_id = RoundId("r", 5, 1, 2, 1)  # opened by the second seat
    assert seats_after(PLAN, HEAD, round_id, set(PEERS)) == (FRONT, WHOLE, SECOND, BACK, COORDINATOR)
    assert seats_after(PLAN, HEAD, round_id, {WHOLE, FRONT, SECOND}) == (FRONT, WHOLE, SECOND)
    assert seats_after(PLAN, HEAD, round_id, {BACK, SECOND, WHOLE}) == (WHOLE, SECOND, BACK)
    assert seats_after(PLAN, HEAD, round_id, {BACK}) == (BACK,)
    fresh = replace(HEAD, committed=HEAD.committed)
    assert seats_after(PLAN, fresh, replace(round_id, attempt=2), {FRONT, SECOND}) == (SECOND, FRONT, COORDINATOR)


# --- what is refused ---------------------------------------------------------------------------------------


def tampered(change: Change, payload: bytes = RESULT) -> bytes:
    manifest = manifest_pb2.Manifest.FromString(payload)
    change(manifest)
    return manifest.SerializeToString(deterministic=True)


def field(name: str, value: Any) -> Change:
    """Set `a.b` of the manifest."""

    def change(manifest: manifest_pb2.Manifest) -> None:
        target: Any = manifest
        *outer, last = name.split(".")
        for part in outer:
            target = getattr(target, part)
        setattr(target, last, value)

    return change


def of(peer: str, **values: Any) -> Change:
    """Set fields of a contribution; tokens of the run follow."""

    def change(manifest: manifest_pb2.Manifest) -> None:
        item = next(item for item in manifest.contributions if item.peer_id == peer)
        before = item.tokens
        for name, value in values.items():
            setattr(item, name, value)
        manifest.committed_tokens += item.tokens - before

    return change


def layer(place: int, **values: Any) -> Change:
    def change(manifest: manifest_pb2.Manifest) -> None:
        for name, value in values.items():
            setattr(manifest.layers[place], name, value)

    return change


def nobody_stays(manifest: manifest_pb2.Manifest) -> None:
    for item in manifest.contributions:
        item.present = False


def seats(*peers: str, coordinator: bool = False) -> Change:
    def change(manifest: manifest_pb2.Manifest) -> None:
        order = [item.peer_id for item in manifest.contributions]
        del manifest.seats[:]
        manifest.seats.extend(order.index(peer) for peer in peers)
        manifest.coordinator_seat = coordinator

    return change


def only(*peers: str) -> Change:
    """As if nobody else had taken part."""

    def change(manifest: manifest_pb2.Manifest) -> None:
        kept = [item for item in manifest.contributions if item.peer_id in peers]
        del manifest.contributions[:]
        manifest.contributions.extend(kept)

    return change


def double(manifest: manifest_pb2.Manifest) -> None:
    manifest.contributions.add().CopyFrom(manifest.contributions[0])
    manifest.committed_tokens += manifest.contributions[0].tokens


def moved(manifest: manifest_pb2.Manifest) -> None:
    manifest.data.cursor += 1


WRONG: list[tuple[str, Change]] = [
    ("does not parse", field("protocol.major", 99)),
    ("another round", field("round.run_id", "other")),
    ("another round", field("round.number", 1)),
    ("another round", field("round.number", 3)),
    ("another history", field("previous_hash", GENESIS.hash)),
    ("another history", field("round.plan_version", 6)),
    ("void by a recovery", field("epoch", 1)),
    ("void by a recovery", field("epoch", 3)),
    ("void by a recovery", field("round.plan_version", 1)),
    ("majority of the seats", only(WHOLE, BACK)),
    ("another fragment", field("round.fragment", 0)),
    ("another fragment", field("round.fragment", 2)),
    ("another fragment", field("fragments", 0)),
    ("another fragment", field("fragments", 4)),
    ("other fragments than the plan's", field("fragments", 3)),
    ("more than a plan allows", of(WHOLE, weight=CAP + 2, tokens=CAP // 2 + 1)),
    ("more than a plan allows", of(WHOLE, tokens=51)),
    ("more than a plan allows", of(WHOLE, tokens=49)),
    ("more than a plan allows", of(WHOLE, samples=MAX_SAMPLES + 1)),
    ("more than a plan allows", of(FRONT, weight=1)),
    ("a mark of a wrong length", of(WHOLE, mark=b"short")),
    ("a mark of a wrong length", of(FRONT, mark=b"too long.")),
    ("doubled members", double),
    ("nobody to decide", nobody_stays),
    ("tokens wrongly", field("committed_tokens", 169)),
    ("tokens wrongly", field("committed_tokens", 171)),
    ("other layers than the model", lambda manifest: manifest.layers.pop()),
    ("other layers than the model", layer(1, layer=2)),
    ("other layers than the model", layer(2, anchor_digest=b"short")),
    ("other layers than the model", layer(2, momentum_digest=b"")),
    ("change its fragment's layers", layer(1, round=2)),
    ("not consecutive", layer(2, round=0)),
    ("not of its fragment", layer(1, anchor_digest=b"x" * 32)),
    ("not of its fragment", layer(0, momentum_digest=b"x" * 32)),
    ("another codec", field("codec", CODECS["fp32"].number)),
    ("more parts than there are", field("parts_total", 7)),
    ("more parts than there are", field("parts_zeroed", 6)),
    ("moves the data", moved),
    ("seats to absent", seats(WHOLE, FRONT)),
    ("seats to absent", seats(WHOLE, FRONT, WHOLE)),
    ("takes a seat", seats(WHOLE, SECOND, BACK)),
    ("takes a seat", seats(WHOLE, coordinator=False)),
    ("others than are due", seats(WHOLE, FRONT, SECOND)),
]


@pytest.mark.parametrize(("why", "change"), WRONG, ids=range(len(WRONG)))
def test_whatever_differs_from_an_honest_result_is_refused(why: str, change: Change) -> None:
    with pytest.raises(PeerMisbehaved, match=why):
        check_payload(POLICY_CUT, PLAN, HEAD, tampered(change))


def test_a_seat_of_an_absent_member_is_refused() -> None:
    _, payload = made(HEAD, present=[WHOLE, FRONT, SECOND])
    assert committed(payload).seats == (FRONT, WHOLE, SECOND)
    with pytest.raises(PeerMisbehaved, match="absent"):
        check_payload(POLICY_CUT, PLAN, HEAD, tampered(seats(FRONT, WHOLE, BACK), payload))
    with pytest.raises(PeerMisbehaved, match="others than are due"):
        check_payload(POLICY_CUT, PLAN, HEAD, tampered(seats(WHOLE, FRONT, SECOND), payload))


@pytest.mark.parametrize("payload", [b"\xff\xff", b""])
def test_what_is_no_manifest_is_refused(payload: bytes) -> None:
    with pytest.raises(PeerMisbehaved):
        check_payload(POLICY_CUT, PLAN, HEAD, payload)


def test_more_than_seven_seats_are_refused() -> None:
    many = [f"p{number}" for number in range(9)]
    plan = make_plan(many)
    policy = policies(POLICY)(plan)
    number = RoundId("r", 1, 0, 1, 0)
    ready = {peer: dp.Ready(tokens=10, samples=1) for peer in many}
    start = build_start(policy, plan, number, ready, codec=CODECS["int4"], unix_ms=0, exchange_seconds=5)
    order = [item.peer_id for item in start.contributions]
    layers = layers_after(policy, GENESIS, b"a" * 32)
    payload = manifest_payload(policy, plan, GENESIS, start, dp.Settle(present=order), layers)
    assert len(committed(payload).seats) == 7
    check_payload(policy, plan, GENESIS, payload)
    with pytest.raises(PeerMisbehaved, match="wrong number"):
        check_payload(policy, plan, GENESIS, tampered(seats(*many), payload))


def test_a_member_counts_up_to_its_own_cap() -> None:
    """Though others have a higher one."""
    caps = (replace(it, max_round_tokens=200 if it.peer_id == WHOLE else CAP) for it in PLAN.assignments)
    plan = replace(PLAN, assignments=tuple(caps))
    check_payload(POLICY_CUT, plan, HEAD, tampered(of(WHOLE, weight=200, tokens=100)))
    with pytest.raises(PeerMisbehaved, match="more than a plan allows"):
        check_payload(POLICY_CUT, plan, HEAD, tampered(of(WHOLE, weight=201, tokens=100)))


def test_a_last_part_may_be_shorter_than_the_others() -> None:
    policy = replace(POLICY_CUT, part_elements=384)
    check_payload(policy, PLAN, HEAD, tampered(field("parts_total", 2 + len(PEERS))))
    with pytest.raises(PeerMisbehaved, match="more parts than there are"):
        check_payload(policy, PLAN, HEAD, tampered(field("parts_total", 3 + len(PEERS))))


LIMITS: list[Change] = [
    of(WHOLE, weight=CAP, tokens=CAP // 2),
    of(BACK, samples=0),
    of(WHOLE, mark=b"another."),  # whoever knows another one abstains
    of(WHOLE, mark=b""),
    field("parts_total", 2 + len(PEERS)),  # each member's range may end within a part
    field("parts_total", 0),
    field("committed_unix_ms", 5),
]


@pytest.mark.parametrize("change", LIMITS, ids=range(len(LIMITS)))
def test_the_most_that_a_plan_allows_is_allowed(change: Change) -> None:
    check_payload(POLICY_CUT, PLAN, HEAD, tampered(change))


# --- of an older plan --------------------------------------------------------------------------------------

LATER = plan_of(6)


def test_a_result_of_an_older_plan_of_the_epoch_is_taken() -> None:
    check_payload(POLICIES(LATER), LATER, HEAD, RESULT)
    for version in (EPOCH, 4):
        check_payload(POLICIES(LATER), LATER, HEAD, tampered(field("round.plan_version", version)))


OLDER: list[tuple[str, Change]] = [
    ("", of(WHOLE, weight=4 * CAP, tokens=2 * CAP)),
    ("", of("p9", weight=4 * CAP, tokens=2 * CAP)),
    ("", of(FRONT, weight=10, tokens=5)),
    ("", of(WHOLE, samples=MAX_SAMPLES)),
    ("", moved),
    ("", seats(WHOLE, FRONT, SECOND)),
    ("", field("parts_total", 4 + len(PEERS) + 1)),
    ("more than a plan allows", of(WHOLE, weight=4 * CAP + 2, tokens=2 * CAP + 1)),
    ("more than a plan allows", of("p9", weight=4 * CAP + 2, tokens=2 * CAP + 1)),
    ("takes a seat", seats(WHOLE, SECOND, BACK)),
    ("another fragment", field("round.fragment", 0)),
    ("not of its fragment", layer(1, anchor_digest=b"x" * 32)),
    ("more parts than there are", field("parts_total", 4 + len(PEERS) + 2)),
]


@pytest.mark.parametrize(("why", "change"), OLDER, ids=range(len(OLDER)))
def test_of_an_older_plan_everything_is_checked_that_is_known(why: str, change: Change) -> None:
    def older(manifest: manifest_pb2.Manifest) -> None:
        gone = manifest.contributions.add(peer_id="p9", weight=10, tokens=5)  # no member any more
        manifest.committed_tokens += gone.tokens
        change(manifest)

    payload = tampered(older)
    if not why:
        check_payload(POLICIES(LATER), LATER, HEAD, payload)
        return
    with pytest.raises(PeerMisbehaved, match=why):
        check_payload(POLICIES(LATER), LATER, HEAD, payload)


# --- who says so --------------------------------------------------------------------------------------------


def test_who_holds_nothing_that_changed_is_a_witness() -> None:
    first = HEAD.committed.payload  # of layers 0 and 1
    assert [is_witness(PLAN, peer, first) for peer in (*PEERS, "p9")] == [False, False, True, False, False]
    assert [is_witness(PLAN, peer, RESULT) for peer in (*PEERS, "p9")] == [False, True, False, False, False]
    with pytest.raises(PeerMisbehaved, match="does not parse"):
        is_witness(PLAN, WHOLE, b"\xff\xff")


def test_half_of_the_holders_that_took_part_suffice() -> None:
    assert is_attested(PLAN, RESULT, {WHOLE, BACK})
    assert not is_attested(PLAN, RESULT, {WHOLE})
    assert not is_attested(PLAN, RESULT, {WHOLE, FRONT})
    _, two = made(HEAD, members=[WHOLE, FRONT, SECOND])
    assert is_attested(PLAN, two, {WHOLE})
    assert not is_attested(PLAN, two, {BACK})  # it took no part
    assert not is_attested(PLAN, two, set())
    assert not is_attested(PLAN, tampered(only(FRONT)), {FRONT})  # nobody who took part holds them


@pytest.mark.parametrize(
    ("said", "enough"),
    [
        ({WHOLE}, True),
        ({BACK}, True),
        ({FRONT}, True),
        (set(PEERS), True),
        ({"p9"}, False),
        ({WHOLE, "p9"}, False),
        (set(), False),
    ],
)
def test_of_an_older_plan_half_of_those_suffice_that_trained_something(said: set[str], enough: bool) -> None:
    assert is_attested(LATER, RESULT, said) is enough  # WHOLE and SECOND did


def test_of_an_older_plan_fewer_than_half_do_not_suffice() -> None:
    three = tampered(of(BACK, weight=1))
    assert not is_attested(LATER, three, {WHOLE})
    assert is_attested(LATER, three, {WHOLE, SECOND})
    nothing = tampered(lambda manifest: [setattr(item, "weight", 0) for item in manifest.contributions])
    assert not is_attested(LATER, nothing, set())
    assert is_attested(LATER, nothing, {WHOLE})


def proposal(*peers: str, payload: bytes = RESULT) -> dp.Proposal:
    return dp.Proposal(payload=payload, attestations=[FakeVoteSigner(peer).attest(payload) for peer in peers])


def test_a_proposal_shows_the_words_of_enough_holders_each_once() -> None:
    signer = FakeVoteSigner("p9")
    check_attested(PLAN, signer, proposal(WHOLE, BACK))
    check_attested(PLAN, signer, proposal(WHOLE, BACK, SECOND, FRONT))
    with pytest.raises(PeerMisbehaved, match="shows 5 attestations"):
        check_attested(PLAN, signer, proposal(*PEERS, WHOLE))
    with pytest.raises(PeerMisbehaved, match="twice"):
        check_attested(PLAN, signer, proposal(WHOLE, BACK, BACK))
    with pytest.raises(PeerMisbehaved, match="too few"):
        check_attested(PLAN, signer, proposal(WHOLE))
    forged = proposal(WHOLE, BACK)
    forged.attestations[1].signature = b"no"
    with pytest.raises(PeerMisbehaved, match="nobody gave"):
        check_attested(PLAN, signer, forged)


def test_a_proposal_shows_no_more_words_than_a_round_has_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "MAX_MEMBERS", 2)
    check_attested(PLAN, FakeVoteSigner("p9"), proposal(WHOLE, BACK))
    with pytest.raises(PeerMisbehaved, match="shows 3 attestations"):
        check_attested(PLAN, FakeVoteSigner("p9"), proposal(WHOLE, BACK, SECOND))
