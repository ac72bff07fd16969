"""Held-out losses by source: checked when a node reports them, and stored as text beside the loss of all. Pure.

Without a mixture the coordinator does not know a run's sources, since it does not have the corpus card. So a run takes
the first names that are reported, and all others count as one source. Members on probation cannot add names. A name
that no member has reported for a while is replaced by a new one. So a member with invented names cannot hide a real
source for ever.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence

from atoll.coordinator.store.records import MAX_INTEGER
from atoll.core.errors import PeerMisbehaved
from atoll.core.run_spec import RunSpec
from atoll.v1 import membership_pb2 as mb

MAX_SOURCES = 64  # per evaluation, and names per run at a time
KEPT_EVALUATIONS = 32  # evaluations without a report after which a name may be replaced
OTHER = "other"  # name for all sources beyond the limit
MAX_LOSS = 1e6
MAX_WINDOWS = 2**32 - 1  # limit of the message field
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")  # of a source in a corpus card


def check_sources(spec: RunSpec, sources: Sequence[mb.SourceLoss]) -> None:
    """Raise `PeerMisbehaved` for sources that the run's corpus cannot have."""
    if not sources:
        return
    names = [source.name for source in sources]
    if spec.data.source != "corpus":
        raise PeerMisbehaved("an evaluation by source of a run whose text has no sources")
    if len(sources) > MAX_SOURCES or len(set(names)) != len(names):
        raise PeerMisbehaved(f"an evaluation may have at most {MAX_SOURCES} sources, each once")
    if not all(_NAME.fullmatch(name) for name in names):
        raise PeerMisbehaved("an evaluation has a source whose name no corpus can have")
    known = {name for stage in spec.data.mixture for name in (stage.weights or stage.epochs or {})}
    if known and not known.issuperset(names):
        raise PeerMisbehaved("an evaluation has a source that the run's mixture does not name")
    for source in sources:
        _check_figures(source)


def _check_figures(source: mb.SourceLoss) -> None:
    if not 0 <= source.loss <= MAX_LOSS or not source.windows:  # also refuses NaN
        raise PeerMisbehaved(f"the loss of the source {source.name} is {source.loss} over {source.windows} samples")
    if source.tokens > MAX_INTEGER:
        raise PeerMisbehaved(f"the source {source.name} has {source.tokens} tokens trained")


def fold(
    known: Sequence[str], sources: Sequence[mb.SourceLoss], replaceable: Collection[str] = ()
) -> tuple[tuple[str, ...], list[mb.SourceLoss]]:
    """The run's names after these checked sources, and the sources under those names; all others become `OTHER`.

    New names replace as many of `replaceable` as they need.
    """
    reported = {source.name for source in sources}
    new = [source.name for source in sources if source.name not in known and source.name != OTHER]
    lacking = max(0, len(known) + len(new) - MAX_SOURCES)
    replaced = [name for name in known if name in replaceable and name not in reported][:lacking]
    names = (*(name for name in known if name not in replaced), *new)[:MAX_SOURCES]
    return names, by_names(names, sources)


def by_names(names: Collection[str], sources: Sequence[mb.SourceLoss]) -> list[mb.SourceLoss]:
    """Return the sources that have these names, and the sum of the rest as `OTHER`."""
    rest = [source for source in sources if source.name not in names]
    named = [source for source in sources if source.name in names]
    return [*named, *([_sum_of(rest)] if rest else [])]


def _sum_of(sources: Sequence[mb.SourceLoss]) -> mb.SourceLoss:
    windows = sum(source.windows for source in sources)
    return mb.SourceLoss(
        name=OTHER,
        loss=sum(source.loss * source.windows for source in sources) / windows,
        windows=min(windows, MAX_WINDOWS),
        tokens=min(sum(source.tokens for source in sources), MAX_INTEGER),
    )


def to_text(sources: Sequence[mb.SourceLoss]) -> str:
    """Encode checked sources for the database; empty if there are none."""
    rows = [[source.name, source.loss, source.windows, source.tokens] for source in sources]
    return json.dumps(rows) if rows else ""


def from_text(stored: str) -> list[mb.SourceLoss]:
    """Decode the text of `to_text`."""
    rows = json.loads(stored) if stored else []
    return [mb.SourceLoss(name=name, loss=loss, windows=windows, tokens=tokens) for name, loss, windows, tokens in rows]
