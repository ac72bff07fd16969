"""Retention of a long run's rows: all of the newest rounds, and a decreasing share of older ones. Pure.

The newest `FULL_ROUNDS` rounds and their losses are complete. Of rounds up to twice as old every second one is kept, of
rounds up to four times as old every fourth, and so on. So a run of 100,000 rounds keeps about 23,000 rows, and one of a
million about 37,000. Rounds of checkpoints on nodes are kept: an operator may download these, or fork the run from
them.

Metrics of nodes are rows for each round and node. So only `FULL_METRICS_ROUNDS` are complete, and older ones are
thinned in the same way: a node has about 4,400 rows after 100,000 rounds. A run keeps at most `MAX_METRICS_ROWS`, the
newest.
"""

from __future__ import annotations

from collections.abc import Iterator

FULL_ROUNDS = 8192
FULL_METRICS_ROUNDS = 1024
MAX_METRICS_ROWS = 1 << 19  # of a run, plus the rows between two thinnings; a row takes about 230 bytes
KEPT_MANIFESTS = 1024  # rows of older rounds have no manifest; nodes have the manifests of 4,096 rounds
KEPT_COMMITS = 1024  # newest rounds that the state machine keeps in memory
THIN_EVERY = 256  # rounds


def thinning(head_round: int, full_rounds: int) -> Iterator[tuple[int, int]]:
    """Pairs (round, bucket): up to that round, the newest of every `bucket` consecutive numbers is kept."""
    age, bucket = full_rounds, 2
    while age < head_round:
        yield head_round - age, bucket
        age, bucket = 2 * age, 2 * bucket
