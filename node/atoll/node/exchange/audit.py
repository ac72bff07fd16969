"""Check a reducer's averages against the contributions, from short sketches of both. Pure.

When all averages of a round are fixed, a seed draws some parts of every reducer. Each member sends the sketches of its
contribution to these parts (sketch.py). Sketches are linear, so the sketch of an average must be the weighted sum of
the sketches of the contributions that its reducer says are in it.

No other member knows the reducer's own contribution, so it can explain any difference. But screening (screening.py)
must have accepted it. So with A, the average, and T, the sum of the known contributions:

- *Size.* ‖A − T‖ is at most what the unknown contributions may have, plus the codec's noise.
- *Direction.* A − T does not point against T, by more than chance and the codec's shrinking explain. Judged over all
  drawn parts of a reducer together.

So a reducer that lies can do in its share about what a lying contributor could do. The bounds below leave room for the
errors of sketches: 1.6 in size and six standard deviations in direction. They assume that a sketch's square norm is
spread like χ²₁₂₈. docs/adr/0012 lists what passes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from atoll.node.exchange.partition import ReducerShare
from atoll.node.exchange.screening import (
    MAX_NORM_RATIO,
    PROBATION_NORM_RATIO,
    Screen,
    UsualNorm,
    judged_with,
    largest_norm,
)
from atoll.node.exchange.sketch import BUCKETS
from atoll.node.exchange.weighted_sum import weights_in_sum
from atoll.v1 import manifest_pb2

MAX_AUDITED_PARTS = 512  # of one round
_AUDITED_SHARE = 16  # one of this many parts of a reducer is drawn
_MIN_AUDITED = 2  # parts of a reducer
SIZE_SLACK = 1.6  # χ²₁₂₈ exceeds 128 · 1.6² with a probability below 10⁻¹²
_ERROR_SLACK = 1.5  # factor for unusually large rounding errors, and for those of contributions
_SIGMAS = 6.0
_CHANCE_SIGMAS = 4.0  # unrelated vectors have a cosine of at most this many times 1/√E
_LEAST_SCALED = 0.3  # a contribution that is scaled down has nearly the largest norm that is accepted
_TINY = 1e-30
_LEAST_COSINE = 0.1  # the smallest cosine to the others, negated, that an honest contribution may have
_MAX_UNKNOWN = 0.5  # share of the weight above which direction is not judged
_NO_VERDICT = manifest_pb2.Verdict()


@dataclass(frozen=True)
class CodecNoise:
    """Bounds on a codec's rounding error, in units of the vector's norm or of the square root of its length."""

    relative: float
    absolute: float = 0.0  # of each element: the spacing of subnormal values
    shrinking: float = 0.05  # of the component along the vector


CODEC_NOISE = {
    "fp32": CodecNoise(1e-4),
    "bf16": CodecNoise(0.01),
    "fp16": CodecNoise(0.01, absolute=6e-8),
    "int8": CodecNoise(0.03),
    "int4": CodecNoise(0.5),
    "int2": CodecNoise(0.95, shrinking=0.9),  # blocks with few large values lose most of their norm
}


@dataclass(frozen=True)
class AuditedPart:
    """One drawn part: the settled average, and the factors that its reducer reports."""

    index: int  # in the order of the vector
    elements: int
    average: Tensor  # the sketch of the decoded average, [128]
    factors: Sequence[float]  # of each contribution, in the order of the sum; 0: not in the sum
    usual_error: float = math.inf  # the usual norm of the average's rounding errors, derived from its scales


def draw_parts(seed: bytes, shares: Iterable[ReducerShare]) -> dict[str, tuple[int, ...]]:
    """The parts to audit: reducer → indices in the order of the vector, ascending. They depend only on the seed."""
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
    """Results of checking the contributions of one round."""

    sketches: Mapping[int, Mapping[int, Tensor]]  # place of a contribution → index of a part → sketch [128]
    tokens: Sequence[int]  # of each contribution, in the order of the sum; its size is judged by them
    weights: Sequence[int]  # likewise: its weight in the sum
    codec: str
    screen: Screen | None
    on_probation: frozenset[int] = frozenset()  # places of contributions that do not decide how others are screened

    @cached_property
    def judging(self) -> list[int]:
        """Places of the contributions that decide how others are screened."""
        return [place for place, count in enumerate(self.tokens) if count > 0 and place not in self.on_probation]

    def judged_among(self, place: int, factors: Sequence[float]) -> list[int]:
        """Places of the contributions with which the one at `place` was compared, in a sum with these factors."""
        if place not in self.on_probation:
            return self.judging
        return judged_with([other for other in self.judging if factors[other] > 0], place)

    def without(self, place: int) -> Evidence:
        """This evidence without the sketches of one contributor."""
        return replace(self, sketches={other: it for other, it in self.sketches.items() if other != place})


@dataclass(frozen=True)
class Finding:
    """A reducer's averages do not match the sketches that contributors sent."""

    reason: str
    # place of the contributor without whose sketches they match best; None: no single one explains the mismatch
    witness: int | None


Verdicts = Mapping[int, manifest_pb2.Verdict]
"""One reducer's verdicts as the manifest will have them, by place of the contribution."""


def contradicted_verdicts(parts: Sequence[AuditedPart], evidence: Evidence, verdicts: Verdicts) -> str:
    """Why a reducer's factors do not fit its verdicts; empty if they do."""
    for part in parts:
        held = sum(part.factors[place] > 0 for place in evidence.judging)
        if 2 * held < len(evidence.judging):
            return f"the sum of part {part.index} holds {held} of {len(evidence.judging)} contributions"
    for place in (place for place, weight in enumerate(evidence.weights) if weight > 0):
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
    """The finding against one reducer, if its averages cannot be the sums that it reports; else None.

    A contributor may also lie about what it sent. If the averages match once one contributor's sketches are ignored,
    either that contributor or the reducer lies.
    """
    if not _examine(parts, evidence).reason:
        return None
    # members on probation may be many and one attacker, so their sketches accuse nobody
    for place in evidence.on_probation:
        evidence = evidence.without(place)
    found = _examine(parts, evidence)
    if not found.reason:
        return None
    without = {place: _examine(parts, evidence.without(place)) for place in evidence.sketches}
    explained = [place for place, other in without.items() if not other.reason]
    return Finding(found.reason, min(explained, key=lambda place: without[place].excess, default=None))


@dataclass(frozen=True)
class _Examination:
    reason: str  # why the averages cannot be the sums; empty if they can
    excess: float  # the largest ratio of a difference to its bound


def _examine(parts: Sequence[AuditedPart], evidence: Evidence) -> _Examination:
    direction, excess = _Direction(), 0.0
    for part in parts:
        sums = _Sums(part, evidence)
        if not sums.shares:
            return _Examination(f"part {part.index} has an average to which nobody contributed", math.inf)
        if sums.strange_factor is not None:
            return _Examination(
                f"part {part.index} scales contribution {sums.strange_factor} to almost nothing", math.inf
            )
        rounding = _Rounding(part, sums, CODEC_NOISE[evidence.codec])
        allowed = SIZE_SLACK * (sums.hidden + rounding.norm)
        if not sums.rest <= allowed:  # also if it is not finite
            told = f"{sums.rest:.2g} from what was sent; {allowed:.2g} can be explained"
            return _Examination(f"the average of part {part.index} differs by {told}", math.inf)
        excess = max(excess, sums.rest / allowed if allowed > 0 else 0.0)
        if sums.unknown_share <= _MAX_UNKNOWN and sums.several_known:
            cosine = _LEAST_COSINE + _CHANCE_SIGMAS / math.sqrt(part.elements)
            direction.add(sums, cosine * (sums.usual + sums.spread) + rounding.against)
    reason = direction.contradiction()
    return _Examination(reason, math.inf if reason else excess)


class _Rounding:
    """Bounds on the rounding errors of an average and of the contributions in it."""

    def __init__(self, part: AuditedPart, sums: _Sums, noise: CodecNoise) -> None:
        relative = min(noise.relative, _ERROR_SLACK * part.usual_error / max(sums.average, _TINY))
        absolute = 2 * noise.absolute * math.sqrt(part.elements)
        self.norm = relative * (sums.norm + sums.hidden + sums.spread) + absolute
        self.against = max(noise.shrinking, relative**2) * sums.norm + absolute


class _Sums:
    """The sums over the sketches of one part."""

    def __init__(self, part: AuditedPart, evidence: Evidence) -> None:
        self._part, self._evidence = part, evidence
        on_probation = [place in evidence.on_probation for place in range(len(evidence.weights))]
        weights = weights_in_sum(evidence.weights, part.factors, on_probation)
        counted = [place for place, factor in enumerate(part.factors) if factor > 0 and weights[place] > 0]
        total = sum(weights[place] for place in counted)
        told = {place: it[part.index].double() for place, it in evidence.sketches.items() if part.index in it}
        # also of contributions that are not in the sum
        norms = {place: float(sketch.norm()) for place, sketch in told.items()}
        limits = _NormBounds(norms, part, evidence)
        bounds = {place: limits.of(place) for place in counted}
        known = [  # a sketch larger than screening accepts is ignored
            place
            for place in counted
            if place in told and part.factors[place] * norms[place] <= SIZE_SLACK * bounds[place]
        ]
        given = {place: told[place] for place in known}
        self.shares = {place: weights[place] / total for place in counted}
        self.sum_B = torch.zeros(BUCKETS, dtype=torch.float64)  # T
        for place, sketch in given.items():
            self.sum_B += self.shares[place] * part.factors[place] * sketch
        self.rest_B = part.average.double() - self.sum_B  # A − T
        self.norm, self.rest = float(self.sum_B.norm()), float(self.rest_B.norm())
        self.average = float(part.average.double().norm())
        self.several_known = sum(bool(sketch.any()) for sketch in given.values()) >= 2
        unknown = [place for place in counted if place not in given]
        self.unknown_share = sum(self.shares[place] for place in unknown)
        self.usual = self.unknown_share * max(norms.values(), default=0.0)
        # norm that unknown contributions may add to the sum
        self.hidden = sum(self.shares[place] * bounds[place] for place in unknown)
        scaled = {place: part.factors[place] * norms[place] for place in known}
        self.spread = math.hypot(*(self.shares[place] * scaled[place] for place in known))
        self.strange_factor = next((place for place in known if self._is_strange(place, scaled, norms)), None)

    def _is_strange(self, place: int, scaled: Mapping[int, float], norms: Mapping[int, float]) -> bool:
        """Whether a contribution was scaled down far below what screening lets in."""
        part, evidence = self._part, self._evidence
        if part.factors[place] == 1 or evidence.screen is None:
            return False
        least = _NormBounds(norms, part, evidence, least=True).of(place)
        scaled_ones = sum(0 < part.factors[other] < 1 for other in evidence.judging)
        minority = 2 * scaled_ones < len(evidence.judging)
        # a minority was scaled by the usual norm, all others only by the optimiser's bound
        if not minority and place not in evidence.on_probation:
            least = largest_norm(evidence.tokens[place], part.elements, evidence.screen)
        if place in evidence.on_probation:  # the bounds used here are those of members not on probation
            least *= PROBATION_NORM_RATIO / MAX_NORM_RATIO
        return scaled[place] < _LEAST_SCALED * least


class _Direction:
    """Whether the averages of several parts point against the contributions to them."""

    def __init__(self) -> None:
        self._along = self._allowed = self._variance = 0.0

    def add(self, sums: _Sums, opposed: float) -> None:
        """Add a part. `opposed`: how far A − T may honestly point against T."""
        self._along += float(sums.rest_B @ sums.sum_B)
        self._allowed += opposed * sums.norm
        self._variance += (sums.rest * sums.norm) ** 2 / BUCKETS

    def contradiction(self) -> str:
        """Why the averages contradict the contributions; empty if they do not."""
        if self._along >= -self._allowed - _SIGMAS * math.sqrt(self._variance):
            return ""
        return "its averages point against what was sent"


class _NormBounds:
    """The norm limits of screening for one part: the largest that they can be, or with `least` the smallest."""

    def __init__(
        self, norms: Mapping[int, float], part: AuditedPart, evidence: Evidence, *, least: bool = False
    ) -> None:
        """`norms`: the known norms, by place. The reducer's own is unknown."""
        self._norms, self._part, self._evidence, self._least = norms, part, evidence, least
        self._usual = self._usual_among(evidence.judging)

    def _usual_among(self, places: Sequence[int]) -> UsualNorm:
        tokens, norms = self._evidence.tokens, self._norms
        known = [place for place in places if place in norms]
        unknown = [tokens[place] for place in places if place not in norms]
        return UsualNorm(
            [norms[place] for place in known], [tokens[place] for place in known], unknown, least=self._least
        )

    def of(self, place: int) -> float:
        """The norm limit of one contribution."""
        evidence, usual = self._evidence, self._usual
        if evidence.screen is None:
            return 0.0 if self._least else math.inf
        if place in evidence.on_probation:
            usual = self._usual_among(evidence.judged_among(place, self._part.factors))
        tokens = evidence.tokens[place]
        return min(largest_norm(tokens, self._part.elements, evidence.screen), usual.limit(tokens))
