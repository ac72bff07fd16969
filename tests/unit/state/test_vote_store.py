"""What a node promised and voted for is the same after a restart."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from atoll.core.quorum import Ballot, LastVote, VoteRecord
from atoll.node.state.vote_store import VoteStore
from atoll.v1 import common_pb2 as pb
from atoll.v1 import dataplane_pb2 as dp

PROPOSAL = dp.Proposal(payload=b"a manifest", attestations=[pb.Signed(signature=b"s" * 64, public_key=b"k" * 32)])
VOTED = LastVote(Ballot(3, 2), PROPOSAL.SerializeToString(deterministic=True))


@pytest.mark.parametrize("voted", [None, VOTED], ids=["a promise", "a vote"])
def test_a_record_is_read_as_it_was_written(tmp_path: Path, voted: LastVote | None) -> None:
    record = VoteRecord(8, b"h" * 32, Ballot(3, 5), voted)
    VoteStore(tmp_path).save(record)
    read = VoteStore(tmp_path).load()
    assert read == record
    if voted is not None:  # whoever opens next is shown the result and who attests to it
        assert read is not None
        assert read.voted is not None
        assert read.voted.payload == b"a manifest"
        assert dp.Proposal.FromString(read.voted.proposal) == PROPOSAL


def test_marks_and_an_abstention_are_read_as_they_were_written(tmp_path: Path) -> None:
    record = VoteRecord(8, b"h" * 32, Ballot(3, 5), None, (b"mark one", b"mark two"), complete=False)
    VoteStore(tmp_path).save(record)
    assert VoteStore(tmp_path).load() == record


def test_a_file_of_an_earlier_build_has_no_marks(tmp_path: Path) -> None:
    body = json.dumps({"version": 2, "number": 8, "head_hash": "68" * 32, "promised": [3, 5], "voted": None}).encode()
    (tmp_path / "votes").write_bytes(body + b"\n" + hashlib.sha256(body).hexdigest().encode())
    assert VoteStore(tmp_path).load() == VoteRecord(8, b"h" * 32, Ballot(3, 5))


def test_a_node_with_a_new_identity_has_voted_for_nothing(tmp_path: Path) -> None:
    VoteStore(tmp_path).begin()
    assert VoteStore(tmp_path).load() == VoteRecord(0, b"", Ballot(0, 0))
