"""What stays of a long run: all of the newest rounds, and of older ones fewer and fewer. Pure.

The newest `FULL_ROUNDS` rounds and their losses are complete. Of those up to twice as old every second one stays, of
those up to four times as old every fourth, and so on. So a run of 100,000 rounds keeps about 23,000 rows, and one of a
million about 37,000. Rounds of checkpoints on nodes stay: an operator may pull these, or fork the run there.

Metrics of nodes are rows for each round and node. So only `FULL_METRICS_ROUNDS` are complete, and older ones are
thinned alike: a node has about 4,400 rows after 100,000 rounds. A run keeps at most `MAX_METRICS_ROWS`, the newest.
"""

from __future__ import annotations

from collections.abc import Iterator

FULL_ROUNDS = 8192
FULL_METRICS_ROUNDS = 1024
MAX_METRICS_ROWS = 1 << 19  # of a run, and what comes between two thinnings; a row takes about 230 bytes
KEPT_MANIFESTS = 1024  # rows of older rounds have figures only; nodes have the manifests of 4,096
KEPT_COMMITS = 1024  # newest rounds that the machine has in memory
THIN_EVERY = 256  # rounds


def thinning(head_round: int, full_rounds: int) -> Iterator[tuple[int, int]]:
    """Pairs (round, bucket): up to that round, the newest of every `bucket` consecutive numbers stays."""
    age, bucket = full_rounds, 2
    while age < head_round:
        yield head_round - age, bucket
        age, bucket = 2 * age, 2 * bucket
