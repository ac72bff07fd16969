"""Which contribution of a committed round is audited, and by whom. Pure.

Each round one contribution is audited: was it trained on the samples that its sender says it consumed? A model knows
samples better that it has just been trained on. So if the auditor adds the contribution to the anchor, the loss of
its sender's samples must fall by more than that of samples that others trained. A copy of somebody else's update, an
update of earlier rounds, or noise gains as much on the ones as on the others. (The difference of losses on members and
non-members of a training set is the signal of membership inference: Yeom et al. 2018, arXiv:1709.01604. Here each
sample is its own control, because its loss is measured with and without the contribution.)

A seed in the manifest draws the contribution. It is a hash of the round and of random numbers that all members but the
opener told only after the exchange. So nobody knows beforehand who will be audited, and everybody can check it. Where
rounds average one of N fragments in turn, one round in N is audited, as the seed draws too. A contribution is then
trained on the samples of N rounds, so an audit measures as many as in a round of the whole model.
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
    """Who is audited, by whom, and whose samples serve for comparison. Peer ids."""

    contributor: str
    auditor: str
    compared: str  # the auditor itself in a round of two


class Gains(NamedTuple):
    """What an audit measured."""

    score: float  # standard errors by which `own` exceeds `other`
    own: float  # nats per token, the mean over the contributor's samples
    other: float
    samples: int  # of each kind


def audit_seed(round_id: RoundId, nonces: Iterable[bytes]) -> bytes:
    """The seed of a round, from the nonces in `Settle`."""
    return hashlib.sha256(b"training/" + str(round_id).encode() + b"\0" + b"".join(nonces)).digest()


def draw(manifest: manifest_pb2.Manifest) -> Drawn | None:
    """The audit of a committed round; None if there is none, or fewer than two members contributed and are still there.

    The contributor is drawn: every second turn among all, else among those on probation, if there are any. The auditor
    is the one that follows it by as many places as the turn's number says, so that a member is audited by all others
    in turn. Members on probation audit only one another, where nobody else contributed.
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
    """At most `MAX_SAMPLES` of these sample numbers, as the seed draws them."""

    def place(sample: int) -> bytes:
        return hashlib.sha256(seed + sample.to_bytes(8, "big")).digest()

    return sorted(samples, key=place)[:MAX_SAMPLES]


def _cut(gain: float) -> float:
    return max(-_MOST_GAIN, min(gain, _MOST_GAIN)) if gain == gain else -_MOST_GAIN  # NaN is no gain


def gains(own: Sequence[float], other: Sequence[float]) -> Gains:
    """Compare the gains of each sample: Welch's t, which is about normal from some twenty samples on.

    An update that ruins the model may have losses without end: gains are cut off at 1,000 nats per token.
    """
    own, other = ([_cut(gain) for gain in told] for told in (own, other))
    spread = math.sqrt(variance(own) / len(own) + variance(other) / len(other))
    difference = fmean(own) - fmean(other)
    score = difference / spread if spread > 0 else 0.0
    return Gains(max(-MAX_SCORE, min(score, MAX_SCORE)), fmean(own), fmean(other), min(len(own), len(other)))
