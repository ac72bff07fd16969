"""The fuzzing itself: every field of what peers send is changed, and valid bytes occur too."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message
from support.mutation import Mutator, never_changed, on_wire

from atoll.core.frames import PREFIX, Frame, FrameKind, check_frame, unpack_prefix
from atoll.v1 import common_pb2 as pb
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2, plan_pb2, records_pb2

BODIES = dp.RoundMessage.DESCRIPTOR.oneofs_by_name["body"].fields


@pytest.mark.parametrize(
    "message",
    [
        dp.Hello(),
        dp.StateRequest(),
        dp.StateReply(),
        dp.CorpusRequest(),
        dp.CorpusReply(),
        dp.ExchangeHeader(),
        dp.PartHeader(),
        dp.Refusal(),
        manifest_pb2.Manifest(),
        manifest_pb2.CommittedManifest(),
        plan_pb2.Plan(),
        pb.Membership(),
        pb.DenyList(),
        records_pb2.DhtRecord(),
        *(getattr(dp.RoundMessage(), field.name) for field in BODIES),
    ],
    ids=lambda message: message.DESCRIPTOR.name,
)
def test_every_field_is_changed_by_some_case(message: Message) -> None:
    assert never_changed(message) == set()


def test_frames_are_whole_and_broken() -> None:
    valid = Frame(FrameKind.MESSAGE, dp.TokenReport(tokens=5).SerializeToString(), b"body")
    outcomes = set()
    for seed in range(300):
        mutator = Mutator(seed)
        data = mutator.wire(mutator.frame(valid, dp.TokenReport))
        try:
            prefix = unpack_prefix(data[: PREFIX.size])
            header = data[PREFIX.size : PREFIX.size + prefix.header_bytes]
            outcomes.add(check_frame(prefix, header, data[PREFIX.size + prefix.header_bytes :]).kind)
        except Exception as error:
            outcomes.add(type(error).__name__)
    assert outcomes >= {*FrameKind, "FrameInvalid", "error"}
    assert unpack_prefix(on_wire(valid)[: PREFIX.size]).kind is FrameKind.MESSAGE
