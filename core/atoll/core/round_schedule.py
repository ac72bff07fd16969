"""When outer rounds are due, and how many a run has: the schedule of `[sync]`. Pure.

Nodes open rounds by `due_tokens`. `atollctl run plan` counts the rounds before the run exists.
"""

from __future__ import annotations

import math

from atoll.core.run_spec import SyncSection

_SMALLEST_GROWTH = 1e-3  # relative growth of rounds below which rounds are counted as equal


def due_tokens(sync: SyncSection, committed_tokens: int, first_tokens: int, fragments: int = 1) -> int:
    """How many tokens since the head make a round due: few at first, `round_tokens` in the long run.

    Replicas that start from random weights and drift for a whole round land in different basins, and their mean is in
    none of them. `first_tokens`: one inner step of every member. With several `fragments`, whose rounds take turns, a
    fragment's round is due after its share of these tokens, but not before one inner step of every member.
    """
    whole = min(sync.round_tokens, first_tokens + int(sync.round_growth * committed_tokens))
    return max(min(first_tokens, whole), whole // fragments)


def rounds_until(
    sync: SyncSection, stop_tokens: int, first_tokens: int, fragments: int = 1, most_tokens: float = math.inf
) -> int:
    """Count the rounds that a run needs for `stop_tokens`, if each commits what makes it due.

    `first_tokens`: one inner step of every member. `most_tokens`: the most tokens of a round, because
    `round_max_seconds` ends it. Exact if rounds grow by a thousandth or more, otherwise at most a thousandth too many.
    """
    committed = rounds = 0
    longest = due_tokens(sync, stop_tokens, first_tokens, fragments)
    while committed < stop_tokens:
        due = due_tokens(sync, committed, first_tokens, fragments)
        tokens = max(1, int(min(due, most_tokens)))
        left = -(-(stop_tokens - committed) // tokens)
        grown = due >= longest or tokens < due
        equal = left if grown else max(1, int(_SMALLEST_GROWTH * fragments / sync.round_growth))
        rounds += min(equal, left)
        committed += min(equal, left) * tokens
    return rounds
