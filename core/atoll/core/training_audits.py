"""Which contribution of a committed round is audited, and by whom. Pure.

In each round one contribution is audited: was it trained on the samples that its sender says it consumed? A model has a
lower loss on samples on which it has just been trained. So if the auditor adds the contribution to the anchor, the loss
on the sender's samples must fall by more than the loss on samples that others trained. A copy of another update, an
update of earlier rounds, or noise gains equally on both. (The difference of losses on members and non-members of a
training set is the signal of membership inference: Yeom et al. 2018, arXiv:1709.01604. Here each sample is its own
control, because its loss is measured with and without the contribution.)

A seed in the manifest draws the contribution. The seed is a hash of the round and of random numbers that all members
except the opener reported only after the exchange. So nobody knows beforehand who will be audited, and everybody can
check the draw. If rounds rotate over N fragments, one round in N, also drawn by the seed, is audited. A contribution is
then trained on the samples of N rounds, so an audit has as many samples as in a round of the whole model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from statistics import fmean, variance
from typing import NamedTuple

from atoll.core.round_id import RoundId
from atoll.v1 import manifest_pb2

SEED_BYTES = 32
MAX_SAMPLES = 64  # of each kind, in one audit
MIN_SAMPLES = 8
MAX_SCORE = 100.0
_MOST_GAIN = 1000.0  # nats per token


class Drawn(NamedTuple):
    """The audited member, its auditor, and the member whose samples are compared. Peer ids."""

    contributor: str
    auditor: str
    compared: str  # the auditor itself if there are only two members


class Gains(NamedTuple):
    """The measurements of an audit."""

    score: float  # standard errors by which `own` exceeds `other`
    own: float  # nats per token, the mean over the contributor's samples
    other: float
    samples: int  # of each kind


def audit_seed(round_id: RoundId, nonces: Iterable[bytes]) -> bytes:
    """The seed of a round, from the nonces in `Settle`."""
    return hashlib.sha256(b"training/" + str(round_id).encode() + b"\0" + b"".join(nonces)).digest()


def draw(manifest: manifest_pb2.Manifest) -> Drawn | None:
    """The audit of a committed round; None if this round has none, or fewer than two contributors are present.

    The contributor is drawn from all present contributors. If some are on probation, every second turn draws from these
    alone. The turn's number selects the auditor by its distance from the contributor, so that each member is audited by
    all others in turn. Members on probation audit only each other, and only if there is no other auditor.
    """
    there = [item for item in manifest.contributions if item.weight and item.samples and item.present]
    if len(there) < 2 or len(manifest.audit_seed) != SEED_BYTES:
        return None
    fragments = max(manifest.fragments, 1)
    if int.from_bytes(manifest.audit_seed[8:16], "big") % fragments:
        return None
    turn = manifest.round.number // fragments
    on_probation = [item for item in there if item.on_probation]
    drawn_from = on_probation if on_probation and turn % 2 else there
    contributor = drawn_from[int.from_bytes(manifest.audit_seed[:8], "big") % len(drawn_from)]
    place = there.index(contributor)
    after = [*there[place + 1 :], *there[:place]]
    auditors = [item for item in after if not item.on_probation]
    if not auditors and contributor.on_probation:
        auditors = after
    if not auditors:
        return None
    step = (turn // 2 if on_probation else turn) % len(auditors)
    compared = auditors[(step + 1) % len(auditors)]
    return Drawn(contributor.peer_id, auditors[step].peer_id, compared.peer_id)


def draw_samples(seed: bytes, samples: Sequence[int]) -> list[int]:
    """At most `MAX_SAMPLES` of these sample numbers, drawn by the seed."""

    def place(sample: int) -> bytes:
        return hashlib.sha256(seed + sample.to_bytes(8, "big")).digest()

    return sorted(samples, key=place)[:MAX_SAMPLES]


def _cut(gain: float) -> float:
    return max(-_MOST_GAIN, min(gain, _MOST_GAIN)) if gain == gain else -_MOST_GAIN  # NaN counts as the worst gain


def gains(own: Sequence[float], other: Sequence[float]) -> Gains:
    """Compare the gains on each sample with Welch's t, which is nearly normal from about twenty samples on.

    An update that ruins the model may have unbounded losses, so gains are limited to 1,000 nats per token.
    """
    own, other = ([_cut(gain) for gain in told] for told in (own, other))
    spread = math.sqrt(variance(own) / len(own) + variance(other) / len(other))
    difference = fmean(own) - fmean(other)
    score = difference / spread if spread > 0 else 0.0
    return Gains(max(-MAX_SCORE, min(score, MAX_SCORE)), fmean(own), fmean(other), min(len(own), len(other)))
