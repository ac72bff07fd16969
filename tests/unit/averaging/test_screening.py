"""Screening as a pure rule: the honest stay in, attackers that are fewer than half are left out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.node.averaging.outer import weighted_mean
from atoll.node.averaging.screening import MOST, inner_products, judge

ELEMENTS = 20_000
seeds = st.integers(0, 2**30).map(lambda n: 2 * n)


def honest(count: int, work: list[int], noise: float, seed: int) -> Tensor:
    """Pseudo-gradients of members that drift together and wander apart: fp32 [n, E]."""
    rng = torch.Generator().manual_seed(seed)
    common_E = torch.randn(ELEMENTS, generator=rng)
    own_nE = torch.randn(count, ELEMENTS, generator=rng)
    work_n1 = torch.tensor(work, dtype=torch.float32).unsqueeze(1)
    return work_n1 * common_E + noise * work_n1.sqrt() * own_nE


def verdicts(values_nE: Tensor, work: list[int]) -> tuple[float, ...]:
    return judge(inner_products(list(values_nE)), work, values_nE.shape[1])


@st.composite
def swarms(draw: st.DrawFn) -> tuple[Tensor, list[int]]:
    """3 to 9 honest members, the fastest up to four times as fast as the slowest, pairwise cosines from 0.1 to 0.9."""
    count = draw(st.integers(3, 9))
    work = draw(st.lists(st.integers(100, 400), min_size=count, max_size=count))
    return honest(count, work, draw(st.floats(5, 30)), draw(seeds)), work


ATTACKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sign": lambda own_E, noise_E: -own_E,
    "sign x10": lambda own_E, noise_E: -10 * own_E,
    "noise": lambda own_E, noise_E: noise_E * own_E.norm() / noise_E.norm(),
    "noise x10": lambda own_E, noise_E: 10 * noise_E * own_E.norm() / noise_E.norm(),
    "zeros": lambda own_E, noise_E: torch.zeros_like(own_E),
    "1e30": lambda own_E, noise_E: torch.full_like(own_E, 1e30),
    "largest": lambda own_E, noise_E: torch.full_like(own_E, torch.finfo(torch.float32).max),
}


@given(swarms())
def test_the_honest_stay_in_at_any_speed(swarm: tuple[Tensor, list[int]]) -> None:
    assert verdicts(*swarm) == (1.0,) * len(swarm[1])


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
@given(swarm=swarms(), data=st.data())
def test_fewer_than_half_who_attack_are_left_out_and_nobody_else(
    attack: Callable[[Tensor, Tensor], Tensor], swarm: tuple[Tensor, list[int]], data: st.DataObject
) -> None:
    """They collude: all send the same noise."""
    values_nE, work = swarm
    count = len(work)
    bad = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=max(1, count // 4)))
    noise_E = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1 + data.draw(seeds)))
    for i in bad:
        values_nE[i] = attack(values_nE[i], noise_E)
    assert {i for i, factor in enumerate(verdicts(values_nE, work)) if factor == 0} == bad


@given(swarms(), st.floats(3, 1e6))
def test_a_huge_update_in_the_right_direction_has_no_more_than_its_say(
    swarm: tuple[Tensor, list[int]], times: float
) -> None:
    values_nE, work = swarm
    before = values_nE[0].norm()
    values_nE[0] *= times
    factor, *others = verdicts(values_nE, work)
    assert others == [1.0] * len(others)
    assert 0 < factor * values_nE[0].norm() < 2 * MOST * before


@given(swarms(), st.floats(1e-20, 1e20), st.randoms())
def test_neither_units_nor_places_matter(swarm: tuple[Tensor, list[int]], unit: float, random: object) -> None:
    values_nE, work = swarm
    values_nE[1] = -3 * values_nE[1]
    said = verdicts(values_nE, work)
    order = list(range(len(work)))
    random.shuffle(order)  # type: ignore[attr-defined]
    moved = verdicts(values_nE[order] * unit, [work[i] for i in order])
    assert [bool(factor) for factor in moved] == [bool(said[i]) for i in order]


@given(st.integers(0, 12), st.integers(1, 5), st.data())
def test_whatever_comes_less_than_half_is_left_out_and_factors_are_factors(
    count: int, rank: int, data: st.DataObject
) -> None:
    entries = st.sampled_from([0.0, 1.0, -1.0, 1e-30, 1e30, -3e38, 1e-45]) | st.floats(-10, 10, width=32)
    rows = st.lists(st.lists(entries, min_size=rank, max_size=rank), min_size=count, max_size=count)
    work = data.draw(st.lists(st.integers(1, 2**40), min_size=count, max_size=count))
    values_nE = torch.tensor(data.draw(rows), dtype=torch.float32).view(count, rank)
    factors = verdicts(values_nE, work) if count else judge(torch.zeros(0, 0, dtype=torch.float64), [], rank)
    assert len(factors) == count
    assert all(0 <= factor <= 1 for factor in factors)  # false for NaN
    assert 2 * sum(factor == 0 for factor in factors) < max(1, count)


@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_cannot_be_judged(count: int) -> None:
    values_nE = honest(2, [100, 100], 5.0, 0)[:count]
    values_nE[-1] *= -100
    assert verdicts(values_nE, [100] * count) == (1.0,) * count


@given(st.integers(3, 9), seeds)
def test_where_nobody_agrees_nobody_is_left_out(count: int, seed: int) -> None:
    values_nE = torch.randn(count, ELEMENTS, generator=torch.Generator().manual_seed(seed))
    assert verdicts(values_nE, [100] * count) == (1.0,) * count


def test_members_that_send_all_the_same_are_not_copies_of_each_other() -> None:
    values_nE = honest(1, [100], 1.0, 0).repeat(5, 1)
    assert verdicts(values_nE, [100] * 5) == (1.0,) * 5
    values_nE[3] *= -1
    assert verdicts(values_nE, [100] * 5) == (1.0, 1.0, 1.0, 0.0, 1.0)


@given(st.integers(1, 5), st.integers(1, 20_000), seeds)
def test_inner_products_are_right_and_the_same_on_any_number_of_threads(count: int, elements: int, seed: int) -> None:
    values_nE = torch.randn(count, elements, generator=torch.Generator().manual_seed(seed))
    products_nn = inner_products(list(values_nE))
    exact = [[math.fsum((a * b).tolist()) for b in values_nE.double()] for a in values_nE.double()]
    assert torch.allclose(products_nn, torch.tensor(exact, dtype=torch.float64), rtol=1e-12, atol=1e-9)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert torch.equal(inner_products(list(values_nE)), products_nn)
    finally:
        torch.set_num_threads(threads)


def test_the_mean_is_of_those_who_are_in() -> None:
    values = [torch.full((4,), value) for value in (1.0, 100.0, 6.0)]
    assert torch.equal(weighted_mean(values, [1, 5, 3], [1.0, 0.0, 0.5]), torch.full((4,), 2.5))
