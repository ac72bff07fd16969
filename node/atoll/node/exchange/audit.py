"""Check a reducer's averages against the contributions, from short sketches of both. Pure.

When all averages of a round are fixed, a seed draws some parts of every reducer. Each member sends the sketches of its
contribution to these parts (sketch.py). Sketches are linear, so the sketch of an average must be the weighted sum of
the sketches of the contributions that its reducer says are in it.

The reducer's own contribution reaches nobody else, so a lie can always be explained by it. But then it has to be one
that screening (screening.py) would have let in. So of A, the average, and T, the sum of the contributions that
are known:

- *Size.* ‖A − T‖ is at most what the unknown contributions may have, plus the codec's noise.
- *Direction.* A − T does not point against T, by more than chance and the codec's shrinking explain. Judged over all
  drawn parts of a reducer together.

A reducer that lies can so do what a lying contributor could do in its share, and no more. The bounds below leave room
for the errors of sketches: 1.6 in size and six standard deviations in direction. An honest reducer is
accused with a probability below 10⁻⁹ for each part (a sketch's square norm is dominated by χ²₁₂₈ if the vector is not
concentrated in few elements, and exact if it is).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atoll.node.exchange.partition import ReducerShare
from atoll.node.exchange.screening import Screen, largest_norm, usual_norm_bound
from atoll.node.exchange.sketch import BUCKETS
from atoll.v1 import manifest_pb2

MAX_AUDITED_PARTS = 1024  # of one round
_AUDITED_SHARE = 8  # one of so many parts of a reducer is drawn
_MIN_AUDITED = 2  # parts of a reducer
_SIZE_SLACK = 1.6  # χ²₁₂₈ exceeds 128 · 1.6² with a probability below 10⁻¹²
_ERROR_SLACK = 1.5  # rounding errors may be larger than is usual, and those of contributions than the average's
_SIGMAS = 6.0
_LEAST_COSINE = 0.1  # an honest contribution may point against the others by so much
_MAX_UNKNOWN = 0.5  # of the weight; direction is not judged above it


_NO_VERDICT = manifest_pb2.Verdict()


@dataclass(frozen=True)
class CodecNoise:
    """What encoding may do to a vector: bounds in units of its norm, or of the square root of its length."""

    relative: float
    absolute: float = 0.0  # of each element: the spacing of subnormal values
    shrinking: float = 0.05  # of the component along the vector


CODEC_NOISE = {
    "fp32": CodecNoise(1e-4),
    "bf16": CodecNoise(0.01),
    "fp16": CodecNoise(0.01, absolute=6e-8),
    "int8": CodecNoise(0.03),
    "int4": CodecNoise(0.3),
    "int2": CodecNoise(0.6, shrinking=0.25),
}


@dataclass(frozen=True)
class AuditedPart:
    """One drawn part: the average as settled, and what its reducer says is in it."""

    index: int  # in the order of the vector
    elements: int
    average: Tensor  # the sketch of the decoded average, [128]
    factors: Sequence[float]  # of each contribution, in the order of the sum; 0: not in the sum
    usual_error: float = math.inf  # the norm of the average's rounding errors, as its scales tell it


def draw_parts(seed: bytes, shares: Iterable[ReducerShare]) -> dict[str, tuple[int, ...]]:
    """The parts to audit: reducer → indices in the order of the vector, ascending. The seed alone decides."""
    shares = list(shares)
    most = max(1, MAX_AUDITED_PARTS // max(1, len(shares)))

    def place(index: int) -> bytes:
        return hashlib.sha256(seed + index.to_bytes(8, "big")).digest()

    drawn = {}
    for share in shares:
        count = min(len(share.parts), most, max(_MIN_AUDITED, -(-len(share.parts) // _AUDITED_SHARE)))
        indices = sorted((share.first + part.index for part in share.parts), key=place)
        drawn[share.reducer] = tuple(sorted(indices[:count]))
    return drawn


@dataclass(frozen=True)
class Evidence:
    """What is known about the contributions of one round."""

    sketches: Mapping[int, Mapping[int, Tensor]]  # place of a contribution → index of a part → sketch [128]
    tokens: Sequence[int]  # of each contribution, in the order of the sum
    weights: Sequence[int]  # likewise
    codec: str
    screen: Screen | None

    def without(self, place: int) -> Evidence:
        """The same, as if a contributor had said nothing."""
        return replace(self, sketches={other: it for other, it in self.sketches.items() if other != place})


@dataclass(frozen=True)
class Finding:
    """Averages of a reducer do not match what contributors say that they sent."""

    reason: str
    witness: int | None  # place of the one contributor whose word alone contradicts the reducer; None: several do


Verdicts = Mapping[int, manifest_pb2.Verdict]
"""What the round's manifest will say of one reducer's sums, by place of the contribution."""


def contradicted_verdicts(parts: Sequence[AuditedPart], weights: Sequence[int], verdicts: Verdicts) -> str:
    """Why a reducer's factors do not fit its verdicts; empty if they do."""
    contributors = [place for place, weight in enumerate(weights) if weight > 0]
    for part in parts:
        held = sum(part.factors[place] > 0 for place in contributors)
        if 2 * held < len(contributors):
            return f"the sum of part {part.index} holds {held} of {len(contributors)} contributions"
    for place in contributors:
        factors = [part.factors[place] for part in parts]
        lacking, scaled = factors.count(0), sum(0 < factor < 1 for factor in factors)
        verdict = verdicts.get(place, _NO_VERDICT)
        if lacking > verdict.parts_left_out + verdict.parts_missing or scaled > verdict.parts_scaled:
            return (
                f"{lacking} of its sums lack contribution {place}, and {scaled} scale it down; its verdicts say "
                f"{verdict.parts_left_out + verdict.parts_missing} and {verdict.parts_scaled}"
            )
    return ""


def judge(parts: Sequence[AuditedPart], evidence: Evidence) -> Finding | None:
    """Whether these averages of one reducer cannot be what it says they are.

    A contributor may lie, too: about what it sent. If the averages fit as soon as one contributor's word is not
    believed, either of the two lies.
    """
    reason = _contradiction(parts, evidence)
    if not reason:
        return None
    alone = [place for place in evidence.sketches if not _contradiction(parts, evidence.without(place))]
    return Finding(reason, alone[0] if len(alone) == 1 else None)


def _contradiction(parts: Sequence[AuditedPart], evidence: Evidence) -> str:
    """Why the averages cannot be the sums; empty if they can."""
    noise, direction = CODEC_NOISE[evidence.codec], _Direction()
    for part in parts:
        sums = _Sums(part, evidence)
        if not sums.shares:
            return f"part {part.index} has an average to which nobody contributed"
        rounding = 2 * noise.absolute * math.sqrt(part.elements)
        relative = min(noise.relative, _ERROR_SLACK * part.usual_error / max(sums.average, 1e-30))
        coding = relative * (sums.norm + sums.hidden + sums.spread) + rounding
        allowed = _SIZE_SLACK * (sums.hidden + coding)
        if not sums.rest <= allowed:  # also if it is not finite
            return (
                f"the average of part {part.index} differs by {sums.rest:.2g} from what was sent; "
                f"{allowed:.2g} can be explained"
            )
        if sums.unknown_share <= _MAX_UNKNOWN and sums.several_known:
            opposed = noise.shrinking * sums.norm + _LEAST_COSINE * (sums.usual + sums.spread) + rounding
            direction.add(sums, opposed)
    return direction.contradiction()


class _Sums:
    """The sketches of one part, added up."""

    def __init__(self, part: AuditedPart, evidence: Evidence) -> None:
        weights = evidence.weights
        counted = [place for place, factor in enumerate(part.factors) if factor > 0 and weights[place] > 0]
        total = sum(weights[place] for place in counted)
        known = [place for place in counted if part.index in evidence.sketches.get(place, ())]
        told = {place: it[part.index].double() for place, it in evidence.sketches.items() if part.index in it}
        given = {place: told[place] for place in known}
        norms = [float(sketch.norm()) for sketch in told.values()]  # of those that are not in the sum, too
        self.shares = {place: weights[place] / total for place in counted}
        self.sum_B = torch.zeros(BUCKETS, dtype=torch.float64)  # T
        for place, sketch in given.items():
            self.sum_B += self.shares[place] * part.factors[place] * sketch
        self.rest_B = part.average.double() - self.sum_B  # A − T
        self.norm, self.rest = float(self.sum_B.norm()), float(self.rest_B.norm())
        self.average = float(part.average.double().norm())
        self.several_known = sum(bool(sketch.any()) for sketch in given.values()) >= 2
        unknown = [place for place in counted if place not in given]
        known_tokens = [evidence.tokens[place] for place in told]
        bounds = {
            place: _norm_bound(norms, known_tokens, evidence.tokens[place], part.elements, evidence.screen)
            for place in unknown
        }
        self.unknown_share = sum(self.shares[place] for place in unknown)
        self.usual = self.unknown_share * max(norms, default=0.0)
        self.hidden = sum(self.shares[place] * bound for place, bound in bounds.items())  # may be in the sum, unseen
        scaled = {place: self.shares[place] * part.factors[place] for place in known}
        self.spread = math.hypot(*(scaled[place] * float(given[place].norm()) for place in known))


class _Direction:
    """Whether the averages of several parts point against what was sent to them."""

    def __init__(self) -> None:
        self._along = self._allowed = self._variance = 0.0

    def add(self, sums: _Sums, opposed: float) -> None:
        """`opposed`: how far A − T may honestly point against T."""
        self._along += float(sums.rest_B @ sums.sum_B)
        self._allowed += opposed * sums.norm
        self._variance += (sums.rest * sums.norm) ** 2 / BUCKETS

    def contradiction(self) -> str:
        """Why they do; empty if they do not."""
        if self._along >= -self._allowed - _SIGMAS * math.sqrt(self._variance):
            return ""
        return "its averages point against what was sent"


def _norm_bound(
    norms: Sequence[float], tokens: Sequence[int], own_tokens: int, elements: int, screen: Screen | None
) -> float:
    """The largest norm that screening lets in, of a contribution with `own_tokens` beside those that are known."""
    if screen is None:
        return math.inf
    return min(largest_norm(own_tokens, elements, screen), usual_norm_bound(norms, tokens, own_tokens))
