"""What became of every attempt at a round that anybody knows of. Pure.

Three witnesses are set against each other: the coordinator's round log (what openers reported), the manifests on the
nodes' disks (whose ballots name the attempts that committed), and the nodes' logs (what they gave up as followers).
An opener that is killed reports nothing, so its attempt stands in the logs of others only. An attempt whose opener
died before its `Open` reached anybody is known to nobody and has no effect.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from atoll.core.round_id import RoundId

REPORT_SECONDS = 2.0  # a report travels at once: an opener that dies later than that has told it
_NAME = re.compile(r"(\d+)\.(\d+)@plan(\d+)")


@dataclass(frozen=True)
class Fault:
    """A node that was killed or frozen; unix seconds."""

    name: str
    kind: str
    began: float
    ended: float  # when it was started again, or woken


@dataclass(frozen=True)
class Row:
    """A line of the coordinator's round log."""

    attempt: RoundId
    committed: bool
    reason: str


@dataclass(frozen=True)
class AttemptAudit:
    """Every attempt; `opened` is whatever a witness names, the others are what became of it."""

    opened: frozenset[RoundId]
    committed: frozenset[RoundId]  # more than one at a round: the same result, committed again by who adopted it
    abandoned: Mapping[RoundId, str]  # as its opener reported it, with the reason
    opener_faulted: frozenset[RoundId]  # given up by others and not reported: its opener was killed or frozen then
    unexplained: frozenset[RoundId]  # given up by others and not reported by an opener that was well
    unreported_rounds: frozenset[int]  # committed, but the coordinator was never told

    @property
    def all_explained(self) -> bool:
        """Whether every attempt committed, or did not for a reason that is known."""
        explained = len(self.committed) + len(self.abandoned) + len(self.opener_faulted)
        return explained == len(self.opened) and all(self.abandoned.values())

    @property
    def reasons(self) -> Counter[str]:
        """The reported ones, without who and how many."""
        return Counter(_short(reason) or "no reason" for reason in self.abandoned.values())


def audit_attempts(
    rows: Sequence[Row],
    ballots: Set[RoundId],
    given_up: Mapping[RoundId, float],
    *,
    commits: Mapping[int, float],
    strikes: Sequence[Fault],
    opener: Callable[[RoundId], str],
) -> AttemptAudit:
    """Set the witnesses against each other.

    `ballots` of committed manifests; `given_up`: when the first follower gave it up, unix seconds; `commits`: when the
    first node had each round; `opener` names the node that may open an attempt.
    """
    told = {row.attempt for row in rows if row.committed}
    committed = told | ballots
    abandoned = {row.attempt: row.reason for row in rows if row.attempt not in committed}
    silent = given_up.keys() - committed - abandoned.keys()

    def struck(attempt: RoundId) -> bool:
        name, after = opener(attempt), commits.get(attempt.number - 1, 0.0)
        until = given_up[attempt] + REPORT_SECONDS
        return any(item.name == name and item.began <= until and item.ended >= after for item in strikes)

    dead = frozenset(attempt for attempt in silent if struck(attempt))
    untold = {attempt.number for attempt in ballots} - {attempt.number for attempt in told}
    opened = frozenset({row.attempt for row in rows} | ballots | given_up.keys())
    return AttemptAudit(opened, frozenset(committed), abandoned, dead, frozenset(silent - dead), frozenset(untold))


def parse_attempt(run_id: str, text: str) -> RoundId:
    """As nodes write it into their logs. Raises `ValueError`."""
    match = _NAME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} does not name an attempt")
    number, attempt, plan_version = map(int, match.groups())
    return RoundId(run_id, plan_version, 0, number, attempt)


def _short(reason: str) -> str:
    return re.sub(r"\d+", "n", re.split(r"[(:;]", reason)[0]).strip()
