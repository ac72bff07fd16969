"""Which votes commit a manifest, and what else one may not say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.donors import ANN, BOB, CLEO, DAN, EVE, FAY, GENESIS, OPERATOR, commit, plan_of, state_of

from atoll.core.errors import PeerMisbehaved, SignatureInvalid
from atoll.core.identity import Identity
from atoll.core.manifest import (
    Head,
    parse_and_verify_head,
    require_quorum,
    sign_attestation,
    sign_vote,
    verify_attestation,
    verify_vote,
)
from atoll.core.quorum import COORDINATOR, Ballot, Electorate
from atoll.v1 import manifest_pb2

MEMBERS = (ANN, BOB, CLEO, DAN, EVE, FAY)
STATE = state_of(1.0)
PAYLOAD, BALLOT = b"a manifest", Ballot(3, 4)


def is_decided(electorate: Electorate, *voters: Identity) -> bool:
    head = commit(STATE, 1, list(voters), after=GENESIS, present=[ANN])
    parse_and_verify_head(head.committed, "r")
    try:
        require_quorum(head, electorate, OPERATOR.public_key)
    except SignatureInvalid:
        return False
    return True


@pytest.mark.parametrize("count", range(1, 7))
def test_a_majority_of_the_seats_commits(count: int) -> None:
    seats = MEMBERS[:count]
    electorate = plan_of(*MEMBERS, seats=seats).electorate(GENESIS)
    with_coordinator = count % 2 == 0
    assert len(electorate.members) == count + with_coordinator
    enough = count // 2 + 1
    assert is_decided(electorate, *seats[:enough])
    assert not is_decided(electorate, *seats[: enough - 1])
    assert is_decided(electorate, *seats[: enough - 1], OPERATOR) == with_coordinator
    assert not is_decided(electorate, *seats[: enough - 1], *MEMBERS[count:])


def test_the_operators_key_is_one_vote_and_only_the_operators() -> None:
    electorate = plan_of(*MEMBERS, seats=MEMBERS[:4]).electorate(GENESIS)
    assert COORDINATOR in electorate.members
    assert not is_decided(electorate, ANN, OPERATOR)
    assert is_decided(electorate, ANN, BOB, OPERATOR)
    assert not is_decided(electorate, ANN, BOB, Identity.generate())


def test_no_signature_counts_twice() -> None:
    head = commit(STATE, 1, [ANN, ANN], after=GENESIS)
    with pytest.raises(PeerMisbehaved, match="two signatures"):
        parse_and_verify_head(head.committed, "r")


@given(st.sampled_from(range(3)), st.binary(max_size=3), st.integers(0, 9), st.integers(0, 9))
def test_a_vote_is_for_one_result_in_one_attempt_and_no_word_of_a_holder(
    which: int, payload: bytes, plan: int, attempt: int
) -> None:
    vote, word = sign_vote(ANN, PAYLOAD, BALLOT), sign_attestation(ANN, PAYLOAD)
    verify_vote(PAYLOAD, BALLOT, vote, ANN.peer_id)
    assert verify_attestation(PAYLOAD, word) == ANN.peer_id
    wrong = ((payload, BALLOT, vote), (PAYLOAD, Ballot(plan + 10, attempt), vote), (PAYLOAD, BALLOT, word))[which]
    with pytest.raises(SignatureInvalid):
        verify_vote(*wrong, ANN.peer_id)
    with pytest.raises(SignatureInvalid):
        verify_vote(PAYLOAD, BALLOT, vote, BOB.peer_id)
    for attestation, of in ((vote, PAYLOAD), (word, payload)):
        with pytest.raises(SignatureInvalid):
            verify_attestation(of, attestation)


def test_seats_are_in_the_order_of_opening() -> None:
    head = commit(STATE, 1, [ANN], after=GENESIS, present=[DAN, ANN, EVE, BOB])
    assert head.seats == (DAN.peer_id, ANN.peer_id, EVE.peer_id, BOB.peer_id, COORDINATOR)
    assert head.electorate == Electorate(frozenset(head.seats))
    manifest = manifest_pb2.Manifest.FromString(head.committed.payload)
    manifest.seats[:] = [3, 0, 1]
    manifest.coordinator_seat = False
    again = Head(manifest_pb2.CommittedManifest(payload=manifest.SerializeToString()))
    assert again.seats == (BOB.peer_id, DAN.peer_id, ANN.peer_id)
    assert again.present == head.present


@pytest.mark.parametrize("place", [4, 2**32 - 1])
def test_a_seat_of_somebody_who_did_not_take_part_is_refused(place: int) -> None:
    head = commit(STATE, 1, [ANN], after=GENESIS, present=[DAN, ANN, EVE, BOB])
    manifest = manifest_pb2.Manifest.FromString(head.committed.payload)
    manifest.seats.append(place)
    payload = manifest.SerializeToString()
    committed = manifest_pb2.CommittedManifest(
        payload=payload, signatures=[sign_vote(ANN, payload, Ballot(1, 0))], ballot_plan_version=1
    )
    with pytest.raises(PeerMisbehaved, match="seat"):
        parse_and_verify_head(committed, "r")
