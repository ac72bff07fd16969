"""What screening did to contributions: verdicts as reducers say them and manifests keep them. Pure.

A verdict names reducer and contributor by their places among the contributions, so that those of a large round still
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
    weights: Sequence[int],
    parts_total: int,
    parts_of: Callable[[int], int] | None = None,
) -> None:
    """Raise `PeerMisbehaved` unless screening can have come to them.

    `weights` are those of the contributions, in order; `parts_of` says how many parts the reducer in a place has, where
    that is known.
    """
    places = [(verdict.reducer, verdict.contributor) for verdict in verdicts]
    if len(places) > len(weights) ** 2 or any(before >= after for before, after in pairwise(places)):
        raise PeerMisbehaved("verdicts are doubled, or in another order")
    if any(max(pair) >= len(weights) or not weights[pair[1]] for pair in places):
        raise PeerMisbehaved("a verdict is of nobody, or about somebody who did not contribute")
    fewer_than_half = (sum(weight > 0 for weight in weights) - 1) // 2
    left_out: Counter[int] = Counter()  # by reducer
    judged: Counter[int] = Counter()  # by contributor
    for verdict in verdicts:
        parts = parts_total if parts_of is None else parts_of(verdict.reducer)
        left_out[verdict.reducer] += verdict.parts_left_out
        judged[verdict.contributor] += verdict.parts_left_out + verdict.parts_scaled
        if not 0 < verdict.parts_left_out + verdict.parts_scaled <= parts:
            raise PeerMisbehaved("a verdict is about more parts than its reducer has, or about none")
        if left_out[verdict.reducer] > parts * fewer_than_half:
            raise PeerMisbehaved("a reducer's verdicts leave out half of the contributors, or more")
    if left_out.total() > parts_total * fewer_than_half or max(judged.values(), default=0) > parts_total:
        raise PeerMisbehaved("verdicts are about more parts than there are, or leave out half of the contributors")


def strip_unknown_verdict_fields(verdicts: Iterable[manifest_pb2.Verdict]) -> list[manifest_pb2.Verdict]:
    """Without anything that somebody hung on to them."""
    return [
        manifest_pb2.Verdict(
            reducer=it.reducer,
            contributor=it.contributor,
            parts_left_out=it.parts_left_out,
            parts_scaled=it.parts_scaled,
        )
        for it in verdicts
    ]


def screened_out(manifest: manifest_pb2.Manifest) -> frozenset[int]:
    """Places of contributions that screening left out of more than half of all parts."""
    left_out: Counter[int] = Counter()
    for verdict in manifest.verdicts:
        left_out[verdict.contributor] += verdict.parts_left_out
    return frozenset(place for place, parts in left_out.items() if 2 * parts > manifest.parts_total)


def counted_tokens(manifest: manifest_pb2.Manifest) -> list[int]:
    """What counts of each contribution: its weight; nothing where sums lack it because it went, or was left out.

    A token is in the sums of every fragment once, so each counts its share of it.
    """
    out, fragments = screened_out(manifest), max(1, manifest.fragments)
    return [
        0 if item.partial or place in out else item.weight // fragments
        for place, item in enumerate(manifest.contributions)
    ]
