"""The round policy that follows from a run spec and a layer table, with timeouts from the bytes sent. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache

from atoll.core.fragments import split_into_fragments
from atoll.core.round_schedule import due_tokens
from atoll.core.run_spec import RunSpec
from atoll.node.exchange.codecs import CODECS
from atoll.node.exchange.partition import MAX_PART_BYTES
from atoll.node.exchange.screening import Screen
from atoll.node.rounds.codec_choice import allowed
from atoll.node.rounds.types import PolicyOf, RoundPolicy

_SLOWEST_LINK = 1.25e6  # bytes per second that first timeouts allow for, until rounds were measured
_EXCHANGE = timedelta(seconds=60)  # in addition to the time for the bytes
_DECISION = timedelta(seconds=20)
_STALL = timedelta(seconds=0.5)
_STALL_PARTS = 4  # a silent peer may be sending this many parts


def round_samples(spec: RunSpec) -> int:
    """Samples that the whole swarm consumes in a round. Leases are computed from it (`core/data_position.py`)."""
    return -(-spec.sync.round_tokens // spec.data.sequence_length)


def screen_of(spec: RunSpec, cuts: tuple[int, ...] = ()) -> Screen:
    """How contributions are screened. A route's step may take another number of tokens than a replica's step."""
    if not cuts or spec.tokens_per_flush == spec.tokens_per_step:
        return Screen(spec.optimizer.learning_rate / spec.tokens_per_step)
    return Screen(spec.optimizer.learning_rate / min(spec.tokens_per_flush, spec.tokens_per_step), least=0.0)


def policies(spec: RunSpec, layer_offsets: Sequence[int]) -> PolicyOf:
    """The round policy for each plan of a run: no fragment crosses a cut of the plan."""
    made = lru_cache(maxsize=4)(lambda cuts: policy_of(spec, layer_offsets, cuts))
    return lambda plan: made(plan.cuts)


def policy_of(spec: RunSpec, layer_offsets: Sequence[int], cuts: tuple[int, ...] = ()) -> RoundPolicy:
    """The round policy of a run. `layer_offsets` has one entry more than there are layers."""
    fragments = split_into_fragments(tuple(layer_offsets), spec.sync.fragments, cuts)
    elements = max(fragment.elements for fragment in fragments)
    codecs = allowed(spec.sync.codec)
    coded = CODECS[codecs[0]].encoded_bytes
    part_bytes = min(MAX_PART_BYTES, coded(spec.sync.part_elements))
    vector, part = (timedelta(seconds=size / _SLOWEST_LINK) for size in (coded(elements), part_bytes))
    return RoundPolicy(
        run_id=spec.run.name,
        fragments=fragments,
        part_elements=spec.sync.part_elements,
        codecs=codecs,
        screen=screen_of(spec, cuts) if spec.sync.screening else None,
        due_tokens=lambda committed, members: due_tokens(
            spec.sync, committed, members * spec.tokens_per_step, len(fragments)
        ),
        round_max=spec.sync.round_max_seconds / len(fragments),
        exchange_share=spec.sync.exchange_share,
        stop_tokens=spec.run.stop_tokens,
        round_samples=round_samples(spec),
        exchange_timeout=_EXCHANGE + 2 * vector,  # sent once and received once
        decision_timeout=_DECISION + vector,  # all parts may need repair
        stall=_STALL + _STALL_PARTS * part,
    )
