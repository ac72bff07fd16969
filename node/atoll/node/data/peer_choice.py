"""Which members to ask for a part of the corpus. Pure: the caller passes the time and the source of chance.

Each read considers members that gave parts of this shard, members that gave anything lately, seeds, and a few others by
chance; it asks the one with the shortest expected time first. So its cost does not grow with the number of members, and
a member that has much is found sooner or later. A member that lacks a range is not asked for it for a while. One that
fails rests for a time that doubles; one that sent wrong bytes rests longer. If all rest, the one that rests least is
asked.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

ASKED_PER_READ = 4
MAX_MEMBERS = 1024  # of which something is remembered
MAX_SHARDS = 4096
MAX_ABSENCES = 8192
_HOLDERS_PER_SHARD = 4
_FAVOURITES, _SEEDS, _BY_CHANCE = 8, 4, 8
_ABSENT_SECONDS = 20.0
_FIRST_REST_SECONDS, _LONGEST_REST_SECONDS = 2.0, 60.0
_FIRST_REST_OF_LIAR_SECONDS, _LONGEST_REST_OF_LIAR_SECONDS = 120.0, 3600.0
_REST_OF_BUSY_SECONDS = 1.0
_SLOW_SECONDS = 5.0  # limit for the answer that a member lacks a range; a slower member counts as failed
_SMOOTHING = 0.25
_USUAL_SECONDS = 0.3  # assumed for a member that was not asked yet
_USUAL_ABSENCES, _USUAL_ABSENCES_OF_SEED = 0.7, 0.1

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass
class _Facts:
    """Statistics of a member."""

    absences: float  # share of the requests for which it lacked the bytes
    seconds: float = _USUAL_SECONDS  # of an answer
    rests_until: float = float("-inf")
    failures: int = 0  # in a row
    lies: int = 0


class PeerChoice:
    """Remembers, in bounded memory, how members answered and which shards they have."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._facts: OrderedDict[str, _Facts] = OrderedDict()
        self._holders: OrderedDict[str, list[str]] = OrderedDict()  # by shard; the newest first
        self._favourites: list[str] = []  # members that gave verified bytes; the newest first
        self._absent_until: OrderedDict[tuple[str, object], float] = OrderedDict()

    def order(
        self, shard: str, what: object, members: Sequence[str], seeds: Sequence[str], me: str, now: float
    ) -> list[str]:
        """Return the members to ask for the range `what` of a shard, one after the other."""
        chance = self._rng.sample(members, min(_BY_CHANCE, len(members)))
        some_seeds = self._rng.sample(seeds, min(_SEEDS, len(seeds)))
        for seed in some_seeds:
            self._facts_of(seed, _USUAL_ABSENCES_OF_SEED)
        holders = self._holders.get(shard, ())
        pool = dict.fromkeys([*holders, *self._favourites, *some_seeds, *chance])
        asked = [peer for peer in pool if peer != me and self.may_ask(peer, what, now)]

        def expected_seconds(peer: str) -> float:
            facts = self._facts.get(peer) or _Facts(_USUAL_ABSENCES)
            absences = facts.absences / 2 if peer in holders else facts.absences
            return facts.seconds / (1 - min(absences, 0.99))

        ranked = sorted(asked, key=expected_seconds)
        chosen = ranked[:ASKED_PER_READ]
        likely = next((peer for peer in ranked if peer in holders or peer in some_seeds), None)
        # it is slow now, but it is the member most likely to have the range
        if likely is not None and likely not in chosen:
            chosen[-1] = likely
        return chosen or self._rests_least(pool, me, what, now)

    def _rests_least(self, pool: Iterable[str], me: str, what: object, now: float) -> list[str]:
        """Return the member that may be asked soonest, if no other may be asked; never one that sent wrong bytes."""
        resting = [
            (facts.rests_until, peer)
            for peer in pool
            if peer != me and (facts := self._facts.get(peer)) is not None and not facts.lies
            if self._absent_until.get((peer, what), now) <= now
        ]
        return [min(resting)[1]] if resting else []

    def gave(self, peer: str, shard: str, seconds: float) -> None:
        """Record a verified answer."""
        facts = self._facts_of(peer)
        facts.failures = 0
        facts.seconds += _SMOOTHING * (seconds - facts.seconds)
        facts.absences *= 1 - _SMOOTHING
        self._favourites = _first(peer, self._favourites)[:_FAVOURITES]
        self._holders[shard] = _first(peer, self._holders.get(shard, ()))[:_HOLDERS_PER_SHARD]
        _bound(self._holders, shard, MAX_SHARDS)

    def lacked(self, peer: str, what: object, seconds: float, now: float) -> None:
        """Record that a member answered, after `seconds`, that it does not have a range."""
        if seconds > _SLOW_SECONDS:
            self.failed(peer, now - seconds, now)
        facts = self._facts_of(peer)
        if seconds <= _SLOW_SECONDS:
            facts.failures = 0
        facts.seconds += _SMOOTHING * (seconds - facts.seconds)
        facts.absences += _SMOOTHING * (1 - facts.absences)
        self._absent_until[peer, what] = now + _ABSENT_SECONDS
        _bound(self._absent_until, (peer, what), MAX_ABSENCES)

    def busy(self, peer: str, now: float) -> None:
        """Record that a member is busy: it is not asked for about a second, and does not count as failed."""
        facts = self._facts_of(peer)
        facts.rests_until = max(facts.rests_until, now + _REST_OF_BUSY_SECONDS * self._rng.uniform(0.5, 1.5))

    def failed(self, peer: str, began: float, now: float, *, lied: bool = False) -> None:
        """Record that a member gave no answer, or wrong bytes, to a request sent at `began`.

        Requests sent before its pause began do not count: one fault can end several reads.
        """
        facts = self._facts_of(peer)
        if began < facts.rests_until and not lied:
            return
        facts.failures += 1
        facts.lies += lied
        rest = min(_FIRST_REST_SECONDS * 2 ** min(facts.failures - 1, 8), _LONGEST_REST_SECONDS)
        if lied:
            rest = min(_FIRST_REST_OF_LIAR_SECONDS * 2 ** min(facts.lies - 1, 8), _LONGEST_REST_OF_LIAR_SECONDS)
        facts.rests_until = max(facts.rests_until, now + rest)
        self._favourites = [other for other in self._favourites if other != peer]

    def may_ask(self, peer: str, what: object, now: float) -> bool:
        """Whether a member is in no pause, and did not answer recently that it lacks the range."""
        facts = self._facts.get(peer)
        rested = facts is None or facts.rests_until <= now
        return rested and self._absent_until.get((peer, what), now) <= now

    def _facts_of(self, peer: str, absences: float = _USUAL_ABSENCES) -> _Facts:
        facts = self._facts.setdefault(peer, _Facts(absences))
        _bound(self._facts, peer, MAX_MEMBERS)
        return facts


def _first(peer: str, others: Iterable[str]) -> list[str]:
    return [peer, *(other for other in others if other != peer)]


def _bound(remembered: OrderedDict[_Key, _Value], newest: _Key, most: int) -> None:
    remembered.move_to_end(newest)
    while len(remembered) > most:
        remembered.popitem(last=False)
