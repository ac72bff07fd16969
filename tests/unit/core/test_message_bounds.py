"""Bounds on entries: what a message may have before it is parsed."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import PeerMisbehaved
from atoll.core.message_bounds import parse_bounded
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb


def heartbeat(addresses: int, signatures: int, lost: int) -> mb.HeartbeatRequest:
    """A message with `addresses` + 2 `signatures` + 4 fields, and packed numbers of `lost` bytes."""
    report = mb.RoundReport(
        manifest=manifest_pb2.CommittedManifest(signatures=[pb.Signed(signature=b"s" * 64)] * signatures)
    )
    status = mb.NodeStatus(lost_layers=[1] * lost)
    return mb.HeartbeatRequest(status=status, multiaddrs=["/ip4/192.0.2.1/tcp/1"] * addresses, rounds=[report])


def entries(addresses: int, signatures: int, lost: int) -> int:
    return addresses + 2 * signatures + (1 + lost if lost else 0) + 3  # status, rounds, manifest


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_every_field_counts_at_every_depth(addresses: int, signatures: int, lost: int) -> None:
    request = heartbeat(addresses, signatures, lost)
    data, count = request.SerializeToString(), entries(addresses, signatures, lost)
    assert parse_bounded(mb.HeartbeatRequest, data, count) == request
    if len(data) > 2 * (count - 1):
        with pytest.raises(PeerMisbehaved, match=f"more than {count - 1} entries"):
            parse_bounded(mb.HeartbeatRequest, data, count - 1)


FLOODS = {
    "rows": mb.HeartbeatRequest(evaluations=[mb.EvaluationReport()] * 3000),
    "strings": mb.HeartbeatRequest(multiaddrs=[""] * 3000),
    "packed numbers": mb.HeartbeatRequest(status=mb.NodeStatus(lost_layers=[0] * 3000)),
    "rows inside a row": heartbeat(0, 0, 0),
    "the same field again": mb.HeartbeatRequest(),
    "an unknown field": mb.HeartbeatRequest(),
}
FLOODS["rows inside a row"].rounds[0].manifest.signatures.extend([pb.Signed()] * 3000)
FLOODS["the same field again"].MergeFromString(b"\x08\x01")


@pytest.mark.parametrize("what", FLOODS)
def test_a_flood_is_refused_unparsed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = FLOODS[what].SerializeToString()
    data += {"the same field again": b"\x08\x01", "an unknown field": b"\xa0\x06\x01"}.get(what, b"") * 3000
    with pytest.raises(PeerMisbehaved, match="a HeartbeatRequest has more than 1000 entries"):
        parse_bounded(mb.HeartbeatRequest, data, 1000)


@given(st.binary(min_size=9, max_size=200))
def test_rubbish_is_refused_by_name_or_parsed(data: bytes) -> None:
    try:
        found: Message = parse_bounded(mb.HeartbeatRequest, data, 4)
    except PeerMisbehaved:
        return
    assert found == mb.HeartbeatRequest.FromString(data)
