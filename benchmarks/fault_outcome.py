"""What became of a swarm under fire, read from what its nodes left on their disks. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.attempt_audit import AttemptAudit, Fault
from benchmarks.process_swarm import Chain, first_commits


@dataclass(frozen=True)
class FaultOutcome:
    """What became of a swarm."""

    kind: str
    nodes: int
    chains: dict[str, Chain]  # by node
    held: dict[str, str]  # node → what is wrong with the state that it left on its disk; empty: nothing
    window: tuple[float, float]  # unix seconds: from the first strike until all were back
    rounds: tuple[int, int]  # the newest at its begin and its end
    limit_seconds: float  # that a round can take
    strikes: tuple[Fault, ...]
    audit: AttemptAudit
    behind: int
    recovered_members: int
    losses: dict[int, float]  # by committed tokens

    @property
    def known(self) -> Chain:
        """Every round, as the node that had it first holds it."""
        return first_commits(self.chains.values())

    @property
    def committed(self) -> Chain:
        """The rounds of the window."""
        first, last = self.rounds
        return {number: item for number, item in self.known.items() if first < number <= last}

    @property
    def gaps(self) -> list[float]:
        """Seconds between commits of the swarm, the ends of the window included."""
        began, ended = self.window
        return _gaps([(time, time) for time in (began, *(item.when for item in self.committed.values()), ended)])

    def node_gaps(self, name: str) -> list[float]:
        """Seconds that a node was without a commit, counted anew from each strike at it."""
        began, ended = self.window
        commits = [(item.when, item.when) for item in self.chains[name].values() if began < item.when < ended]
        strikes = [(item.began, min(item.ended, ended)) for item in self.strikes if item.name == name]
        return _gaps([(began, began), *commits, *strikes, (ended, ended)])

    @property
    def hangs(self) -> int:
        """How often the swarm, or a node, committed nothing for longer than a round can take."""
        gaps = [*self.gaps, *(gap for name in self.chains for gap in self.node_gaps(name))]
        return sum(gap > self.limit_seconds for gap in gaps)

    @property
    def faulty_rounds(self) -> list[str]:
        """Rounds that two nodes know differently, that nobody has, or that do not follow the one before."""
        known = self.known
        faults = []
        for number in range(1, max(known, default=0) + 1):
            hashes = {chain[number].head.hash for chain in self.chains.values() if number in chain}
            before = known.get(number - 1)
            if len(hashes) > 1:
                faults.append(f"{len(hashes)} manifests of round {number}")
            elif not hashes:
                faults.append(f"nobody has round {number}")
            elif before is not None and known[number].head.manifest.previous_hash != before.head.hash:
                faults.append(f"round {number} does not follow round {number - 1}")
        return faults


def compare(losses: dict[int, float], peace: dict[int, float]) -> tuple[int, float]:
    """Tokens, and by how much the mean loss of the last fifth of the common tokens is above that in peace."""
    last = min(max(losses), max(peace))
    points = [item for item in losses if 0.8 * last <= item <= last] or [last]
    ours = statistics.fmean(at_tokens(losses, item) for item in points)
    theirs = statistics.fmean(at_tokens(peace, item) for item in points)
    return last, ours / theirs - 1


def at_tokens(losses: dict[int, float], tokens: int) -> float:
    """The loss at `tokens`, interpolated."""
    below = max((item for item in losses if item <= tokens), default=min(losses))
    above = min((item for item in losses if item >= tokens), default=max(losses))
    if above == below:
        return losses[below]
    share = (tokens - below) / (above - below)
    return losses[below] * (1 - share) + losses[above] * share


def _gaps(spans: list[tuple[float, float]]) -> list[float]:
    """Seconds between spans (from, to) that are next to each other; 0 where they overlap."""
    gaps, covered = [], min(start for start, _ in spans)
    for start, end in sorted(spans):
        gaps.append(max(0.0, start - covered))
        covered = max(covered, end)
    return gaps[1:]
