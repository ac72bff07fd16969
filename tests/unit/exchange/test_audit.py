"""Audits of averages: lies that move the model are found, honest members are never accused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lying_members import LIES, Lie, noise_like
from torch import Tensor

from atoll.core.probation import limit_weights
from atoll.node.exchange.audit import (
    AuditedPart,
    Evidence,
    Finding,
    contradicted_verdicts,
    draw_parts,
    judge,
)
from atoll.node.exchange.codecs import CODECS
from atoll.node.exchange.partition import ReduceRange, reducer_shares
from atoll.node.exchange.screening import Screen
from atoll.node.exchange.sketch import Sketcher
from atoll.node.exchange.weighted_sum import screening_factors, tensor_source, weighted_mean
from atoll.v1.manifest_pb2 import Verdict

ELEMENTS = 16_384
SCREEN = Screen(max_change_per_token=1e-3)


@dataclass(frozen=True)
class Sums:
    """What contributors sent to one reducer, which is at place 0, for some parts."""

    tokens: tuple[int, ...]
    codec: str = "int4"
    common: float = 0.5  # of the square of each norm
    heavy: float = 0.0  # how much rows differ in size
    sparse: float = 0.0  # share of rows that a member did not see
    parts: int = 2
    seed: int = 0
    strangers: int = 0  # the last so many are on probation

    def contributions(self, part: int) -> list[Tensor]:
        rng = torch.Generator().manual_seed(1000 * self.seed + part)
        rows = -(-ELEMENTS // 128)
        common_E, scale = torch.randn(ELEMENTS, generator=rng), torch.exp(self.heavy * torch.randn(rows, generator=rng))
        scale_E = scale.repeat_interleave(128)[:ELEMENTS]
        made = []
        for tokens in self.tokens:
            own_E = torch.randn(ELEMENTS, generator=rng)
            seen_E = (torch.rand(rows, generator=rng) >= self.sparse).float().repeat_interleave(128)[:ELEMENTS]
            size = 1e-4 * tokens**0.75
            mixed_E = math.sqrt(self.common) * common_E + math.sqrt(1 - self.common) * own_E
            made.append(size * scale_E * seen_E * mixed_E)
        return made

    def evidence(self, lie: Lie | None = None) -> tuple[list[AuditedPart], Evidence]:
        """The parts as an honest reducer, or a liar, averages them; and what the others' sketches say."""
        codec, sketcher = CODECS[self.codec], Sketcher(self.seed.to_bytes(32, "big"), ELEMENTS)
        sketches: dict[int, dict[int, Tensor]] = {place: {} for place in range(1, len(self.tokens))}
        parts = []
        for index in range(self.parts):
            sent = self.contributions(index)
            received = [sent[0]] + [codec.decode(codec.encode(one_E), ELEMENTS) for one_E in sent[1:]]
            sources = [tensor_source(it) for it in received]
            on_probation = [place in self.on_probation for place in range(len(self.tokens))]
            factors = screening_factors(sources, self.judged_tokens, ELEMENTS, SCREEN, on_probation)
            mean_E = weighted_mean(received, self.weights, factors)
            body = codec.encode(mean_E)
            if lie is not None:
                body = codec.encode(lie(codec.decode(body, ELEMENTS)))
            average_E, error = codec.decode(body, ELEMENTS), codec.open(body, ELEMENTS).usual_error()
            parts.append(AuditedPart(index, ELEMENTS, sketcher.of(average_E), factors, error))
            for place in sketches:
                sketches[place][index] = sketcher.of(sent[place])
        return parts, Evidence(sketches, self.judged_tokens, self.weights, self.codec, SCREEN, self.on_probation)

    @property
    def weights(self) -> list[int]:
        return limit_weights(self.tokens, [place in self.on_probation for place in range(len(self.tokens))])

    @property
    def judged_tokens(self) -> list[int]:
        most = max(self.tokens[: len(self.tokens) - self.strangers])
        return [min(count, most) if place in self.on_probation else count for place, count in enumerate(self.tokens)]

    @property
    def on_probation(self) -> frozenset[int]:
        return frozenset(range(len(self.tokens) - self.strangers, len(self.tokens)))

    def judged(self, lie: Lie | None = None) -> Finding | None:
        return judge(*self.evidence(lie))


@st.composite
def honest_sums(draw: st.DrawFn) -> Sums:
    """2 to 9 members, some on probation, the fastest up to sixteen times as fast as the slowest, in any codec."""
    tokens = tuple(draw(st.lists(st.integers(100, 1600), min_size=2, max_size=9)))
    return Sums(
        tokens=tokens,
        codec=draw(st.sampled_from(sorted(CODECS))),
        common=draw(st.sampled_from([0.0, 0.02, 0.3, 0.6, 0.95])),
        heavy=draw(st.sampled_from([0.0, 1.0, 3.0])),
        sparse=draw(st.sampled_from([0.0, 0.5, 0.95])),
        parts=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 2**31)),
        strangers=draw(st.integers(0, len(tokens) - 1)),
    )


@settings(max_examples=150, deadline=None)
@given(honest_sums())
def test_an_honest_reducer_is_never_accused(sums: Sums) -> None:
    assert sums.judged() is None


@settings(max_examples=60, deadline=None)
@given(honest_sums(), st.data())
def test_silent_contributors_make_nobody_a_liar(sums: Sums, data: st.DataObject) -> None:
    parts, evidence = sums.evidence()
    for place in data.draw(st.sets(st.sampled_from(range(1, len(sums.tokens))))):
        evidence = evidence.without(place)
    assert judge(parts, evidence) is None


@pytest.mark.parametrize("members", [3, 4, 8, 16])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_that_moves_the_model_is_found(lie: str, codec: str, members: int) -> None:
    for seed in range(5):
        sums = Sums((1000,) * members, codec, common=0.1 if seed % 2 else 0.6, seed=seed)
        assert sums.judged(LIES[lie]) is not None


@pytest.mark.parametrize("members", [4, 8, 16])
@pytest.mark.parametrize("lie", [name for name in LIES if name != "zeros"])
def test_int2_hides_smaller_lies_only(lie: str, members: int) -> None:
    for seed in range(5):
        assert Sums((1000,) * members, "int2", common=0.3, seed=seed).judged(LIES[lie]) is not None


@pytest.mark.parametrize("members", [4, 8, 16])
def test_noise_of_the_same_size_is_found_where_the_codec_has_less(members: int) -> None:
    for seed in range(5):
        assert Sums((1000,) * members, "int8", seed=seed).judged(noise_like) is not None


def test_a_reducer_that_lies_in_one_part_of_those_drawn_is_found() -> None:
    parts, evidence = Sums((1000,) * 8, parts=4).evidence()
    lies, _ = Sums((1000,) * 8, parts=4).evidence(LIES["ten times"])
    assert judge([*parts[:3], lies[3]], evidence) is not None


@pytest.mark.parametrize("size", [-3.0, -2.0, -1.0, 0.0, 3.0])
@pytest.mark.parametrize("members", [3, 4, 6, 12])
def test_a_contributor_that_tells_other_sketches_than_it_sent_is_named_beside_the_reducer(
    members: int, size: float
) -> None:
    """Its word contradicts an honest reducer. Without it everything fits best, so the finding names both."""
    parts, evidence = Sums((1000,) * members, "fp32").evidence()
    liar = members - 1
    false = {index: size * sketch for index, sketch in evidence.sketches[liar].items()}
    told = Evidence({**evidence.sketches, liar: false}, evidence.tokens, evidence.weights, "fp32", SCREEN)
    finding = judge(parts, told)
    assert finding is None or finding.witness == liar
    assert finding is not None or size > -3  # smaller lies are within what the reducer's own part may hide


@pytest.mark.parametrize("change", [lambda it: -9 * it, lambda it: 1e30 * it])
def test_sketches_of_more_than_screening_lets_in_are_not_believed(change: Callable[[Tensor], Tensor]) -> None:
    parts, evidence = Sums((1000,) * 6, "fp32").evidence()
    false = {index: change(sketch) for index, sketch in evidence.sketches[3].items()}
    told = Evidence({**evidence.sketches, 3: false}, evidence.tokens, evidence.weights, "fp32", SCREEN)
    assert judge(parts, told) is None


def test_a_contributor_cannot_explain_a_lie_with_sketches_that_fit_it() -> None:
    """The reducer sends −10 times the average; a colluding contributor tells the sketch that makes the sum right."""
    parts, evidence = Sums((1000,) * 8).evidence(LIES["ten times, turned"])
    honest, _ = Sums((1000,) * 8).evidence()
    fitting = {it.index: 8 * (it.average - true.average) for it, true in zip(parts, honest, strict=True)}
    told = Evidence({**evidence.sketches, 7: fitting}, evidence.tokens, evidence.weights, "int4", SCREEN)
    assert judge(parts, told) is not None


@pytest.mark.parametrize("members", [4, 8])
def test_a_lie_cannot_hide_behind_factors_of_almost_nothing(members: int) -> None:
    parts, evidence = Sums((1000,) * members).evidence(LIES["sign turned"])
    tiny = [replace(part, factors=(1.0,) + (1e-9,) * (members - 1)) for part in parts]
    assert judge(tiny, evidence) is not None


def test_a_reducer_cannot_say_that_nobody_is_in_a_sum() -> None:
    parts, evidence = Sums((1000,) * 4).evidence()
    empty = [AuditedPart(it.index, it.elements, it.average, (0.0,) * 4) for it in parts]
    assert judge(empty, evidence) is not None


def factors_of(*rows: tuple[float, ...]) -> list[AuditedPart]:
    return [AuditedPart(index, 1, torch.zeros(1), row) for index, row in enumerate(rows)]


def test_factors_have_to_fit_the_verdicts_that_the_manifest_will_hold() -> None:
    evidence = Evidence({}, (5, 5, 5, 0, 5), (5, 5, 5, 0, 5), "fp32", SCREEN)
    told = {
        1: Verdict(contributor=1, parts_left_out=1),
        2: Verdict(contributor=2, parts_scaled=2),
        4: Verdict(contributor=4, parts_missing=1),
    }
    honest = factors_of((1, 0, 1, 0, 1), (1, 1, 0.5, 0, 0), (1, 1, 0.5, 0, 1))
    assert contradicted_verdicts(honest, evidence, told) == ""
    assert "contribution 1" in contradicted_verdicts(factors_of((1, 0, 1, 0, 1), (1, 0, 1, 0, 1)), evidence, told)
    assert "contribution 0" in contradicted_verdicts(factors_of((0, 1, 1, 0, 1)), evidence, told)
    assert "scale it down" in contradicted_verdicts(factors_of((1, 0.9, 1, 0, 1)), evidence, told)
    everyone = {place: Verdict(contributor=place, parts_missing=9) for place in range(5)}
    assert contradicted_verdicts(factors_of((1, 0, 0, 0, 1)), evidence, everyone) == ""
    assert "holds 1 of 4" in contradicted_verdicts(factors_of((1, 0, 0, 0, 0)), evidence, everyone)


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.lists(st.integers(0, 300), min_size=1, max_size=12))
def test_every_reducer_has_parts_drawn_and_nobody_many(seed: bytes, lengths: list[int]) -> None:
    start, ranges = 0, []
    for place, length in enumerate(lengths):
        ranges.append(ReduceRange(str(place), start, start + 128 * length))
        start += 128 * length
    shares = reducer_shares(ranges, 128)
    drawn = draw_parts(seed, shares)
    assert drawn.keys() == {share.reducer for share in shares}
    for share in shares:
        indices = drawn[share.reducer]
        assert set(indices) <= {share.first + part.index for part in share.parts}
        assert min(2, len(share.parts)) <= len(indices) <= max(2, math.ceil(len(share.parts) / 16))


def test_another_seed_draws_other_parts() -> None:
    shares = reducer_shares([ReduceRange("a", 0, 128 * 200)], 128)
    drawn = [draw_parts(bytes([number]) * 32, shares)["a"] for number in range(50)]
    assert len(set(drawn)) == 50
    assert len({index for indices in drawn for index in indices}) > 150


@pytest.mark.parametrize("codec", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("scale", [-2.0, -1.5, 1.3, 1.6, 2.0, 2.5])
def test_forty_false_sketches_of_members_on_probation_accuse_nobody(scale: float, codec: str) -> None:
    """They send a multiple of what a known member sent: so its word alone would not fit with theirs."""
    for seed in range(3):
        parts, evidence = Sums((1000,) * 48, codec, common=0.6, seed=seed, strangers=40).evidence()
        copied = {index: scale * sketch for index, sketch in evidence.sketches[5].items()}
        sketches = {
            place: copied if place in evidence.on_probation else told for place, told in evidence.sketches.items()
        }
        assert judge(parts, replace(evidence, sketches=sketches)) is None


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_found_also_beside_members_on_probation(lie: str) -> None:
    for seed in range(3):
        assert Sums((1000,) * 28, "int8", common=0.6, seed=seed, strangers=20).judged(LIES[lie]) is not None
