"""Typed reasons why a node ended, is paused, waits or is slow (`NodeReason`), and their words for people."""

from __future__ import annotations

from typing import cast

from atoll.v1 import membership_pb2 as mb

_FAILURES = range(10, 30)
_SAID_BY_STATE = (  # the node's state says the same
    mb.NODE_REASON_UNSPECIFIED,
    mb.NODE_REASON_LOADING,
    mb.NODE_REASON_WAITS_FOR_PLAN,
    mb.NODE_REASON_FETCHING_STATE,
)
_PREFIX = "NODE_REASON_"


def is_failure(reason: int) -> bool:
    """Whether a node with this reason failed. Otherwise it ended on purpose, or has not ended."""
    return reason in _FAILURES


def reason_words(reason: int) -> str:
    """Words such as "text differs". An unknown number stays a number; unspecified is empty."""
    if reason == mb.NODE_REASON_UNSPECIFIED:
        return ""
    value = mb.NodeReason.DESCRIPTOR.values_by_number.get(reason)
    return str(reason) if value is None else str(value.name).removeprefix(_PREFIX).lower().replace("_", " ")


def telling_words(reason: int) -> str:
    """Words for a reason that adds to the node's state; empty if the state says the same."""
    return "" if reason in _SAID_BY_STATE else reason_words(reason)


def reason_name(reason: int) -> str:
    """Name for a database: the enum's, without its prefix. Empty for unspecified and unknown numbers.

    A failure that this release does not know is `INTERNAL`.
    """
    if is_failure(reason) and reason not in mb.NodeReason.values():
        reason = mb.NODE_REASON_INTERNAL
    value = mb.NodeReason.DESCRIPTOR.values_by_number.get(reason)
    return "" if value is None or not reason else str(value.name).removeprefix(_PREFIX)


def named_reason(name: str) -> mb.NodeReason:
    """The reason of a name from a database; unspecified if this release does not know it."""
    value = mb.NodeReason.DESCRIPTOR.values_by_name.get(_PREFIX + name)
    return cast("mb.NodeReason", value.number) if value is not None else mb.NODE_REASON_UNSPECIFIED
