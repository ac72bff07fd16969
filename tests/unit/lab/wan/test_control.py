"""Requests to a hub survive the wire; nothing else gets in."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.lab.wan.control import (
    Cut,
    Heal,
    Partition,
    ReadCounters,
    Restore,
    SetHost,
    SetRoute,
    decode,
    encode,
)
from atoll.lab.wan.errors import TopologyError


@pytest.mark.parametrize(
    "request_",
    [
        SetHost("ann", {"uplink_mbit": 5.0, "loss": 0.1}),
        SetRoute("ann", "ben", {"rtt_ms": 5.0}),
        Cut("ann"),
        Restore("ann"),
        Partition([["ann", "ben"], ["cleo"]]),
        Heal(),
        ReadCounters(),
    ],
)
def test_requests_survive_the_wire(request_):
    assert decode(encode(request_)) == request_


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (b'{"kind": "SetHost", "host": "ann", "values": {"nat": 1}}', "'nat' cannot be changed"),
        (b'{"kind": "SetHost", "host": "ann", "values": {"loss": 2}}', "loss must be a number from 0 to 0.5"),
        (b'{"kind": "SetRoute", "one": "a", "other": "b", "values": {"rtt_ms": null}}', "rtt_ms must be a number"),
        (b'{"kind": "Partition", "groups": 5}', "not a request"),
        (b'{"kind": "Partition", "groups": [[["x"]]]}', "not a request"),
        (b'{"kind": "Cut", "host": ["ann"]}', "not a request"),
        (b'{"kind": "Cut"}', "not a request"),
        (b'{"kind": "system", "host": "ann"}', "not a request"),
        (b"[]", "not a request"),
    ],
)
def test_invalid_requests_are_refused(line, word):
    with pytest.raises(TopologyError, match=word):
        decode(line)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(
    st.sampled_from(["SetHost", "SetRoute", "Cut", "Restore", "Partition", "Heal"]),
    st.dictionaries(st.sampled_from(["host", "one", "other", "values", "groups"]), json_values),
)
def test_every_accepted_document_is_fully_checked(kind, document):
    line = json.dumps({"kind": kind, **document}).encode()
    try:
        request = decode(line)
    except TopologyError:
        return
    assert decode(encode(request)) == request


@given(st.binary())
def test_arbitrary_bytes_are_only_refused(line):
    try:
        decode(line)
    except TopologyError:
        return
