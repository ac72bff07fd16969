"""The order of a build's tasks, for one source: units are tokenised, and groups of units become shards. Pure.

A group is the shortest run of units that reaches one of the limits, so it depends on the units' contents and not on
which worker finishes first. Its shards are written as soon as its units are tokenised. Units run ahead of the group
that is being completed by no more than there are workers, and by one group while shards are written: that bounds the
space of spill files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from atoll.node.data.card import Shard
from atoll.node.data.source_report import SourceReport
from atoll.node.data.spill import Spill


@dataclass(frozen=True)
class Limits:
    """Sizes that determine which documents are shuffled together. Other limits give another corpus."""

    unit_bytes: int = 16 << 20  # of input
    group_bytes: int = 1 << 30  # of tokens
    group_documents: int = 1 << 20
    group_units: int = 512


@dataclass(frozen=True)
class DoneGroup:
    """A group whose shards are complete: its units are [first_unit, end_unit) in the order of the build."""

    first_unit: int
    end_unit: int
    tokens: int
    documents: int
    report: SourceReport
    shards: tuple[Shard, ...]


@dataclass
class OpenGroup:
    """A group whose shards are being written."""

    number: int
    first_unit: int
    spills: tuple[Spill, ...]
    first_shard: int
    shards: int
    done: dict[int, Shard] = field(default_factory=dict)  # by number in the group

    @property
    def missing(self) -> list[int]:
        """The numbers of shards that are not complete."""
        return [number for number in range(self.shards) if number not in self.done]

    def finish(self) -> DoneGroup:
        """Describe the group when no shard is missing."""
        report = SourceReport()
        for spill in self.spills:
            report.add(spill.report)
        return DoneGroup(
            self.first_unit,
            self.first_unit + len(self.spills),
            sum(spill.tokens for spill in self.spills),
            sum(spill.documents for spill in self.spills),
            report,
            tuple(self.done[number] for number in range(self.shards)),
        )


class SourceSchedule:
    """The completed work of one source, and its next tasks."""

    def __init__(
        self,
        units: int,
        limits: Limits,
        token_bytes: int,
        shard_tokens: int,
        groups: Iterable[DoneGroup] = (),
        spills: Mapping[int, Spill] | None = None,
    ) -> None:
        """`groups` and `spills` (by unit): what an earlier build of the same corpus has completed."""
        self.groups = list(groups)
        self._units = units
        self._limits = limits
        self._token_bytes = token_bytes
        self._shard_tokens = shard_tokens
        self._first = self.groups[-1].end_unit if self.groups else 0  # first unit that is in no group yet
        self._first_shard = sum(len(group.shards) for group in self.groups)
        self._number = len(self.groups)  # of the next group
        self._spills = {unit: spill for unit, spill in (spills or {}).items() if unit >= self._first}
        self._missing = iter([unit for unit in range(self._first, units) if unit not in self._spills])

    def next_unit(self) -> int | None:
        """Return the next unit to tokenise; None if all were returned before."""
        return next(self._missing, None)

    def unit_done(self, unit: int, spill: Spill) -> None:
        """Record that a unit is tokenised."""
        self._spills[unit] = spill

    def next_group(self) -> OpenGroup | None:
        """Return the next group if all its units are tokenised. Each group is returned once."""
        end = self._end_of_group()
        if end is None:
            return None
        spills = tuple(self._spills.pop(unit) for unit in range(self._first, end))
        shards = -(-sum(spill.tokens for spill in spills) // self._shard_tokens)
        group = OpenGroup(self._number, self._first, spills, self._first_shard, shards)
        self._first, self._first_shard, self._number = end, self._first_shard + shards, self._number + 1
        return group

    def group_done(self, group: DoneGroup) -> None:
        """Record that a group's shards are complete. Must be called in the order of the groups."""
        self.groups.append(group)

    @property
    def complete(self) -> bool:
        """Whether all units are in complete groups."""
        return (self.groups[-1].end_unit if self.groups else 0) == self._units

    def _end_of_group(self) -> int | None:
        if self._first == self._units:
            return None
        tokens = documents = 0
        for unit in range(self._first, self._units):
            spill = self._spills.get(unit)
            if spill is None:
                return None
            tokens, documents = tokens + spill.tokens, documents + spill.documents
            if (
                tokens * self._token_bytes >= self._limits.group_bytes
                or documents >= self._limits.group_documents
                or unit + 1 - self._first == self._limits.group_units
            ):
                return unit + 1
        return self._units
