"""Verdicts: how a reducer's sums treated a contribution, as manifests record it. Pure.

A verdict names reducer and contributor by their indices among the contributions, so that the verdicts of a large round
fit into a frame.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from atoll.core.errors import PeerMisbehaved
from atoll.v1 import manifest_pb2


def require_valid_verdicts(
    verdicts: Sequence[manifest_pb2.Verdict],
    contributions: Sequence[manifest_pb2.Contribution],
    parts_total: int,
    parts_of: Callable[[int], int] | None = None,
) -> None:
    """Raise `PeerMisbehaved` for verdicts that no valid exchange can have.

    A sum leaves out fewer than half of the contributions that are not on probation. `parts_of`: a reducer's index → its
    number of parts; None if unknown.
    """
    weights = [item.weight for item in contributions]
    places = [(verdict.reducer, verdict.contributor) for verdict in verdicts]
    if len(places) > len(weights) ** 2 or any(before >= after for before, after in pairwise(places)):
        raise PeerMisbehaved("verdicts must be ordered by reducer and contributor, each pair once")
    if any(max(pair) >= len(weights) or not weights[pair[1]] for pair in places):
        raise PeerMisbehaved(
            f"a verdict has an index outside the {len(weights)} contributions, or a contributor of weight 0"
        )
    on_probation = [item.on_probation for item in contributions]
    counted_ones = sum(item.weight > 0 and not item.on_probation for item in contributions)
    fewer_than_half = max(0, counted_ones - 1) // 2
    left_out: Counter[int] = Counter()  # by reducer
    judged: Counter[int] = Counter()  # by contributor
    for verdict in verdicts:
        parts = parts_total if parts_of is None else parts_of(verdict.reducer)
        left_out[verdict.reducer] += 0 if on_probation[verdict.contributor] else verdict.parts_left_out
        counted = verdict.parts_left_out + verdict.parts_scaled + verdict.parts_missing
        judged[verdict.contributor] += counted
        if not 0 < counted <= parts:
            raise PeerMisbehaved(f"a verdict counts {counted} parts; it must count 1 to {parts}")
        if left_out[verdict.reducer] > parts * fewer_than_half:
            raise PeerMisbehaved(
                f"verdicts of reducer {verdict.reducer} leave out half of the contributions or more; fewer are allowed"
            )
    if left_out.total() > parts_total * fewer_than_half or max(judged.values(), default=0) > parts_total:
        raise PeerMisbehaved(
            f"verdicts count more than {parts_total} parts of a contribution, or leave out half of the contributions"
        )


def strip_unknown_verdict_fields(verdicts: Iterable[manifest_pb2.Verdict]) -> list[manifest_pb2.Verdict]:
    """Return the verdicts without unknown fields."""
    return [
        manifest_pb2.Verdict(
            reducer=it.reducer,
            contributor=it.contributor,
            parts_left_out=it.parts_left_out,
            parts_scaled=it.parts_scaled,
            parts_missing=it.parts_missing,
        )
        for it in verdicts
    ]


def screened_out(manifest: manifest_pb2.Manifest) -> frozenset[int]:
    """Return the indices of contributions that screening left out of more than half of all parts."""
    left_out: Counter[int] = Counter()
    for verdict in manifest.verdicts:
        left_out[verdict.contributor] += verdict.parts_left_out
    return frozenset(place for place, parts in left_out.items() if 2 * parts > manifest.parts_total)


def partial_contributions(manifest: manifest_pb2.Manifest) -> frozenset[int]:
    """Return the indices of contributions that are missing from some sums, because they did not arrive."""
    return frozenset(verdict.contributor for verdict in manifest.verdicts if verdict.parts_missing)


def counted_tokens(manifest: manifest_pb2.Manifest) -> list[int]:
    """Return the tokens that count for each contribution: its weight divided by the number of fragments.

    A contribution counts 0 if more than half of all parts lack it, because it did not arrive or was left out. So a
    single reducer cannot remove a member's tokens, unless it sums half of the vector. Every fragment sums a token once,
    so each round counts its share of the token. Tokens of members on probation do not count.
    """
    lacking: Counter[int] = Counter()
    for verdict in manifest.verdicts:
        lacking[verdict.contributor] += verdict.parts_left_out + verdict.parts_missing
    fragments = max(1, manifest.fragments)
    return [
        0 if item.on_probation or 2 * lacking[place] > manifest.parts_total else item.weight // fragments
        for place, item in enumerate(manifest.contributions)
    ]
