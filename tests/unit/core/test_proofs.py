"""Proofs: two votes in one ballot convict exactly whoever cast both, and nothing else convicts anybody."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core import protocol
from atoll.core.errors import AtollError, PeerMisbehaved, ProtocolMismatch, SignatureInvalid
from atoll.core.identity import Identity
from atoll.core.manifest import Head, sign_attestation, sign_vote
from atoll.core.proofs import DOUBLE_VOTE, MAX_PROOF_BYTES, double_votes, proof_id, verify_proof
from atoll.core.quorum import Ballot
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2, proofs_pb2

ANN, BOB, CID, DAN = (Identity.generate() for _ in range(4))
BALLOT = Ballot(3, 1)


def payload(fill: int, number: int = 7, run_id: str = "reef", before: bytes = b"b" * 32, epoch: int = 1) -> bytes:
    name = pb.RoundId(run_id=run_id, plan_version=3, number=number)
    return manifest_pb2.Manifest(
        protocol=protocol.ours(), round=name, previous_hash=before, epoch=epoch, parts_total=fill
    ).SerializeToString()


def head(content: bytes, *signers: Identity, ballot: Ballot = BALLOT) -> Head:
    return Head(
        manifest_pb2.CommittedManifest(
            payload=content,
            signatures=[sign_vote(signer, content, ballot) for signer in signers],
            ballot_plan_version=ballot.plan_version,
            ballot_attempt=ballot.attempt,
        )
    )


ONE, OTHER = head(payload(1), ANN, BOB), head(payload(2), CID, BOB, DAN)
(PROOF,) = double_votes(ONE, OTHER)


def test_two_results_of_one_ballot_prove_who_voted_for_both() -> None:
    breach = verify_proof(PROOF)
    assert (breach.culprit, breach.kind, breach.run_id, breach.round) == (BOB.peer_id, DOUBLE_VOTE, "reef", 7)
    assert "round 7 in attempt 1 under plan 3" in breach.sentence
    assert len(proof_id(PROOF)) == 16 != proof_id(PROOF + b" ")
    culprits = {verify_proof(it).culprit for it in double_votes(head(payload(1), ANN, BOB), head(payload(2), BOB, ANN))}
    assert culprits == {ANN.peer_id, BOB.peer_id}


@pytest.mark.parametrize(
    "other",
    [
        ONE,
        head(payload(1), CID, BOB),
        head(payload(2), CID, BOB, ballot=Ballot(3, 2)),
        head(payload(2), CID, BOB, ballot=Ballot(4, 1)),
        head(payload(2, number=8), CID, BOB),
        head(payload(2), CID, DAN),
        head(payload(2, before=b"c" * 32), CID, BOB),
        head(payload(2, epoch=2), CID, BOB),
    ],
    ids=[
        "itself",
        "one result",
        "a later attempt",
        "a later plan",
        "the next round",
        "nobody in common",
        "another run of the name",
        "after a recovery",
    ],
)
def test_what_an_honest_seat_may_sign_proves_nothing(other: Head) -> None:
    assert double_votes(ONE, other) == ()


def double(first: bytes, second: bytes, signer: Identity = BOB, **changes: object) -> bytes:
    """A proof put together by somebody who has the key, or has not."""
    votes = proofs_pb2.DoubleVote(
        public_key=BOB.public_key,
        ballot_plan_version=BALLOT.plan_version,
        ballot_attempt=BALLOT.attempt,
        first_payload=first,
        first_signature=sign_vote(signer, first, BALLOT).signature,
        second_payload=second,
        second_signature=sign_vote(signer, second, BALLOT).signature,
    )
    for name, value in changes.items():
        setattr(votes, name, value)
    return proofs_pb2.Proof(protocol=protocol.ours(), double_vote=votes).SerializeToString()


def test_a_proof_put_together_by_hand_is_one() -> None:
    assert verify_proof(double(payload(1), payload(2))).culprit == BOB.peer_id


@pytest.mark.parametrize(
    ("false", "error", "words"),
    [
        (double(payload(1), payload(1)), SignatureInvalid, "one result"),
        (double(payload(1), payload(2, number=8)), SignatureInvalid, "different rounds"),
        (double(payload(1), payload(2, run_id="lagoon")), SignatureInvalid, "different rounds"),
        (double(payload(1), payload(2, before=b"c" * 32)), SignatureInvalid, "different rounds or histories"),
        (double(payload(1), payload(2, epoch=2)), SignatureInvalid, "different rounds or histories"),
        (double(payload(1, 0, before=b""), payload(2, 0, before=b"")), SignatureInvalid, "genesis"),
        (double(payload(1), payload(2), signer=ANN), SignatureInvalid, "does not verify"),
        (double(payload(1), payload(2), ballot_attempt=2), SignatureInvalid, "does not verify"),
        (
            double(payload(1), payload(2), second_signature=sign_attestation(BOB, payload(2)).signature),
            SignatureInvalid,
            "does not verify",
        ),
        (
            double(payload(1), payload(2), second_signature=sign_vote(BOB, payload(2), Ballot(3, 2)).signature),
            SignatureInvalid,
            "does not verify",
        ),
        (double(payload(1), payload(2), public_key=b"short"), SignatureInvalid, "must have 32"),
        (double(payload(1), b"\xff\xff"), PeerMisbehaved, "manifest that does not parse"),
        (b"", ProtocolMismatch, "protocol 0.0"),
        (b"\xff\xff", PeerMisbehaved, "does not parse"),
        (proofs_pb2.Proof(protocol=protocol.ours()).SerializeToString(), PeerMisbehaved, "no kind"),
        (bytes(MAX_PROOF_BYTES + 1), PeerMisbehaved, "at most"),
    ],
)
def test_nothing_else_convicts_anybody(false: bytes, error: type[AtollError], words: str) -> None:
    with pytest.raises(error, match=words):
        verify_proof(false)


def test_the_largest_manifests_fit_into_a_proof() -> None:
    large = [payload(fill, before=bytes((2 << 20) - 100)) for fill in (1, 2)]
    assert verify_proof(double(*large)).culprit == BOB.peer_id


@given(st.integers(0, len(PROOF) - 1), st.integers(1, 255), st.booleans())
def test_a_changed_proof_convicts_nobody_else(place: int, change: int, cut: bool) -> None:
    changed = PROOF[:place] if cut else bytes([*PROOF[:place], PROOF[place] ^ change, *PROOF[place + 1 :]])
    try:
        breach = verify_proof(changed)
    except AtollError:
        return
    assert breach.culprit == BOB.peer_id  # bytes that say nothing, as of the minor version
