"""Screening as a pure rule: the honest stay in, attackers that are fewer than half are left out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.node.exchange.screening import MAX_NORM_RATIO, MIN_NORM_RATIO, Screen, factors_from_products, inner_products
from atoll.node.exchange.weighted_sum import weighted_mean

ELEMENTS = 8_192
some = settings(max_examples=50, deadline=None)
seeds = st.integers(0, 2**30).map(lambda n: 2 * n)


def honest(count: int, work: list[int], noise: float, seed: int) -> Tensor:
    """Pseudo-gradients of members that drift together and wander apart: fp32 [n, E]."""
    rng = torch.Generator().manual_seed(seed)
    common_E = torch.randn(ELEMENTS, generator=rng)
    own_nE = torch.randn(count, ELEMENTS, generator=rng)
    work_n1 = torch.tensor(work, dtype=torch.float32).unsqueeze(1)
    return work_n1 * common_E + noise * work_n1.sqrt() * own_nE


def verdicts(values_nE: Tensor, work: list[int], change: float = 1e9) -> tuple[float, ...]:
    return factors_from_products(inner_products(list(values_nE)), work, values_nE.shape[1], Screen(change))


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
    "noise in another direction": lambda own_E, noise_E: noise_E * own_E.norm() / noise_E.norm() - 0.3 * own_E,
    "1e30": lambda own_E, noise_E: torch.full_like(own_E, 1e30),
    "largest": lambda own_E, noise_E: torch.full_like(own_E, torch.finfo(torch.float32).max),
}


@some
@given(swarms())
def test_the_honest_stay_in_at_any_speed(swarm: tuple[Tensor, list[int]]) -> None:
    assert verdicts(*swarm) == (1.0,) * len(swarm[1])


@pytest.mark.parametrize("claim", [1, 8])
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
@some
@given(swarm=swarms(), data=st.data())
def test_fewer_than_half_who_attack_are_left_out_and_nobody_else(
    attack: Callable[[Tensor, Tensor], Tensor], claim: int, swarm: tuple[Tensor, list[int]], data: st.DataObject
) -> None:
    """They collude, all send the same noise, and some say that they did more work than they did."""
    values_nE, work = swarm
    count = len(work)
    bad = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=(count - 1) // 2))
    noise_E = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1 + data.draw(seeds)))
    for i in bad:
        values_nE[i] = attack(values_nE[i], noise_E)
    claimed = [tokens * claim if i in bad else tokens for i, tokens in enumerate(work)]
    assert {i for i, factor in enumerate(verdicts(values_nE, claimed)) if factor == 0} == bad


@some
@given(swarms(), st.data())
def test_colluders_who_are_no_copies_of_each_other_are_left_out_too(
    swarm: tuple[Tensor, list[int]], data: st.DataObject
) -> None:
    """They agree among themselves as much as they like."""
    values_nE, work = swarm
    count = len(work)
    bad = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=(count - 1) // 2))
    mutual = data.draw(st.floats(0.1, 1))
    rng = torch.Generator().manual_seed(1 + data.draw(seeds))
    poison_E = torch.randn(ELEMENTS, generator=rng)
    for i in bad:
        mixed_E = math.sqrt(mutual) * poison_E + math.sqrt(1 - mutual) * torch.randn(ELEMENTS, generator=rng)
        values_nE[i] = mixed_E * values_nE[i].norm() / mixed_E.norm()
    assert {i for i, factor in enumerate(verdicts(values_nE, work)) if factor == 0} == bad


@some
@given(swarms(), st.data())
def test_zeros_hide_nobody(swarm: tuple[Tensor, list[int]], data: st.DataObject) -> None:
    """Rows of tokens that a member did not see: even when most are, a flipped sign among the rest is found."""
    values_nE, work = swarm
    values_nE[-1] *= -5
    zeros = data.draw(st.integers(0, 6))
    padded_nE = torch.cat((torch.zeros(zeros, ELEMENTS), values_nE))
    factors = verdicts(padded_nE, [100] * zeros + work)
    assert factors[zeros:] == (1.0,) * (len(work) - 1) + (0.0,)
    if zeros >= len(work):
        assert all(factors[:zeros])
    else:
        most = (zeros + len(work) - 1) // 2  # who may be left out
        assert factors[:zeros].count(0.0) == min(zeros, most - 1)


@pytest.mark.parametrize("size", [0.0, 1e-6, 0.05])
@pytest.mark.parametrize("claim", [1, 8])
@some
@given(swarm=swarms(), data=st.data())
def test_fewer_than_half_who_bring_next_to_nothing_are_left_out_and_nobody_else(
    size: float, claim: int, swarm: tuple[Tensor, list[int]], data: st.DataObject
) -> None:
    values_nE, work = swarm
    count = len(work)
    lazy = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=(count - 1) // 2))
    for i in lazy:
        values_nE[i] *= size
    claimed = [tokens * claim if i in lazy else tokens for i, tokens in enumerate(work)]
    assert {i for i, factor in enumerate(verdicts(values_nE, claimed)) if factor == 0} == lazy


@some
@given(st.integers(3, 9), seeds)
def test_a_little_more_than_a_quarter_of_the_usual_size_is_in(count: int, seed: int) -> None:
    values_nE = honest(1, [100], 0.0, seed).repeat(count, 1)
    values_nE[0] *= 1.05 * MIN_NORM_RATIO
    assert verdicts(values_nE, [100] * count) == (1.0,) * count
    values_nE[0] *= 0.9
    assert verdicts(values_nE, [100] * count) == (0.0,) + (1.0,) * (count - 1)


@some
@given(st.integers(3, 9), st.floats(1, 64), st.floats(0, 30), seeds)
def test_who_did_much_less_work_than_most_is_in(count: int, times: float, noise: float, seed: int) -> None:
    work = [100, *[int(100 * times)] * (count - 1)]
    values_nE = honest(count, work, noise, seed)
    assert factors_from_products(inner_products(list(values_nE)), work, ELEMENTS, Screen(1e9))[0] == 1.0


def test_who_is_small_and_turned_is_left_out_once() -> None:
    """And so is another one, who is only small."""
    values_nE = honest(5, [100] * 5, 5.0, 0)
    values_nE[1] *= -0.01
    values_nE[3] *= 0.01
    assert verdicts(values_nE, [100] * 5) == (1.0, 0.0, 1.0, 0.0, 1.0)


def test_nobody_is_too_small_where_steps_take_more_tokens_for_some() -> None:
    values_nE = honest(3, [100] * 3, 5.0, 0)
    values_nE[1] *= 0.1
    assert (
        factors_from_products(inner_products(list(values_nE)), [100] * 3, ELEMENTS, Screen(1e9, least=0.0))
        == (1.0,) * 3
    )


@some
@given(st.integers(1, 2), st.integers(0, 6), st.floats(1, 1e30))
def test_nobody_moves_farther_than_the_optimiser_can_also_where_nobody_else_moves(
    count: int, zeros: int, size: float
) -> None:
    values_nE = torch.cat((torch.zeros(zeros, ELEMENTS), torch.full((count, ELEMENTS), size)))
    factors = verdicts(values_nE, [100] * (zeros + count), change=1e-4)
    for value_E, factor in zip(values_nE, factors, strict=True):
        assert factor * value_E.double().square().mean().sqrt() <= MAX_NORM_RATIO * 1e-4 * 100 * 1.000001
    assert all(factors[zeros:])


@some
@given(swarms(), st.floats(3, 1e6))
def test_a_huge_update_in_the_right_direction_has_no_more_than_its_say(
    swarm: tuple[Tensor, list[int]], times: float
) -> None:
    values_nE, work = swarm
    before = values_nE[0].norm()
    values_nE[0] *= times
    factor, *others = verdicts(values_nE, work)
    assert others == [1.0] * len(others)
    assert 0 < factor * values_nE[0].norm() < 2 * MAX_NORM_RATIO * before


@some
@given(st.integers(3, 9), st.floats(1, 100), st.floats(0, 30), seeds)
def test_who_did_much_more_work_than_most_is_not_scaled_down(count: int, times: float, noise: float, seed: int) -> None:
    work = [int(100 * times), *[100] * (count - 1)]
    assert verdicts(honest(count, work, noise, seed), work)[0] == 1.0


@some
@given(swarms(), st.floats(1e-20, 1e20), st.randoms())
def test_neither_units_nor_places_matter(swarm: tuple[Tensor, list[int]], unit: float, random: object) -> None:
    values_nE, work = swarm
    values_nE[1] = -3 * values_nE[1]
    said = verdicts(values_nE, work)
    order = list(range(len(work)))
    random.shuffle(order)  # type: ignore[attr-defined]
    moved = verdicts(values_nE[order] * unit, [work[i] for i in order])
    assert [bool(factor) for factor in moved] == [bool(said[i]) for i in order]


@some
@given(st.integers(0, 12), st.integers(1, 5), st.data())
def test_whatever_comes_less_than_half_is_left_out_and_factors_are_factors(
    count: int, rank: int, data: st.DataObject
) -> None:
    entries = st.sampled_from([0.0, 1.0, -1.0, 1e-30, 1e30, -3e38, 1e-45]) | st.floats(-10, 10, width=32)
    rows = st.lists(st.lists(entries, min_size=rank, max_size=rank), min_size=count, max_size=count)
    work = data.draw(st.lists(st.integers(1, 2**40), min_size=count, max_size=count))
    values_nE = torch.tensor(data.draw(rows), dtype=torch.float32).view(count, rank)
    factors = verdicts(values_nE, work) if count else ()
    assert len(factors) == count
    assert all(0 <= factor <= 1 for factor in factors)  # false for NaN
    assert 2 * sum(factor == 0 for factor in factors) < max(1, count)


@pytest.mark.parametrize("count", [1, 2])
def test_directions_of_one_or_two_cannot_be_judged(count: int) -> None:
    values_nE = honest(2, [100, 100], 5.0, 0)[:count]
    values_nE[-1] *= -100
    assert verdicts(values_nE, [100] * count) == (1.0,) * count


@some
@given(st.integers(3, 9), seeds)
def test_where_nobody_agrees_nobody_is_left_out(count: int, seed: int) -> None:
    values_nE = torch.randn(count, ELEMENTS, generator=torch.Generator().manual_seed(seed))
    assert verdicts(values_nE, [100] * count) == (1.0,) * count


def test_members_may_all_send_the_same() -> None:
    values_nE = honest(1, [100], 1.0, 0).repeat(5, 1)
    assert verdicts(values_nE, [100] * 5) == (1.0,) * 5
    values_nE[3] *= -1
    assert verdicts(values_nE, [100] * 5) == (1.0, 1.0, 1.0, 0.0, 1.0)


@some
@given(st.integers(1, 5), st.integers(1, 100_000), seeds)
def test_inner_products_are_right_and_factors_the_same_on_any_number_of_threads(
    count: int, elements: int, seed: int
) -> None:
    values_nE = torch.randn(count, elements, generator=torch.Generator().manual_seed(seed))
    values_nE[0] *= 100
    wide_nE = values_nE.double()
    products_nn, work = inner_products(list(values_nE)), [100] * count
    exact = [[math.fsum((a * b).tolist()) for b in wide_nE] for a in wide_nE]
    torch.testing.assert_close(products_nn, torch.tensor(exact, dtype=torch.float64), rtol=1e-12, atol=1e-9)
    factors = factors_from_products(products_nn, work, elements, Screen(1e-6))
    assert factors[0] < 1  # it is scaled down
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert verdicts(values_nE, work, 1e-6) == factors
    finally:
        torch.set_num_threads(threads)


@some
@given(swarms(), st.floats(1e-30, 1e30))
def test_what_is_scaled_down_is_at_its_limit(swarm: tuple[Tensor, list[int]], size: float) -> None:
    values_nE, work = swarm
    values_nE[0] *= size
    change = 1e-3 * float(values_nE[0].double().norm()) / (MAX_NORM_RATIO * math.sqrt(ELEMENTS) * work[0])
    factor = verdicts(values_nE[:1], work[:1], change)[0]
    assert math.isclose(factor, 1e-3, rel_tol=1e-6)


def test_the_mean_is_of_those_who_are_in() -> None:
    values = [torch.full((4,), value) for value in (1.0, 100.0, 6.0)]
    assert torch.equal(weighted_mean(values, [1, 5, 3], [1.0, 0.0, 0.5]), torch.full((4,), 2.5))


def judged_beside(values_nE: Tensor, work: list[int], strangers: int) -> tuple[float, ...]:
    """Factors if the last so many contributions are on probation."""
    on_probation = [False] * (len(work) - strangers) + [True] * strangers
    products = inner_products(list(values_nE))
    return factors_from_products(products, work, values_nE.shape[1], Screen(1e9), on_probation)


@pytest.mark.parametrize("strangers", [1, 40])
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
@settings(max_examples=10, deadline=None)
@given(swarm=swarms(), seed=seeds)
def test_attackers_on_probation_are_left_out_however_many_they_are(
    attack: Callable[[Tensor, Tensor], Tensor], strangers: int, swarm: tuple[Tensor, list[int]], seed: int
) -> None:
    values_nE, work = swarm
    noise_E = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1 + seed))
    attackers_nE = torch.stack([attack(values_nE[place % len(work)], noise_E) for place in range(strangers)])
    claimed = [work[place % len(work)] for place in range(strangers)]
    factors = judged_beside(torch.cat((values_nE, attackers_nE)), [*work, *claimed], strangers)
    assert factors[: len(work)] == verdicts(values_nE, work) == (1.0,) * len(work)
    assert set(factors[len(work) :]) == {0.0}


@some
@given(swarm=swarms(), strangers=st.integers(1, 6))
def test_honest_members_on_probation_stay_in(swarm: tuple[Tensor, list[int]], strangers: int) -> None:
    values_nE, work = swarm
    strangers = min(strangers, len(work) - 2)
    factors = judged_beside(values_nE, work, strangers)
    assert factors[:-strangers] == (1.0,) * (len(work) - strangers)
    assert min(factors[-strangers:]) > 0.6  # none has more than the usual norm for its tokens


@pytest.mark.parametrize(("factor", "kept"), [(1.0, True), (-1.0, False), (0.0, False), (50.0, True)])
def test_one_member_alone_screens_those_on_probation(factor: float, kept: bool) -> None:
    values_nE = honest(2, [100, 100], 5.0, 3)
    values_nE[1] *= factor
    alone, other = judged_beside(values_nE, [100, 100], 1)
    assert alone == 1.0
    assert (other > 0) is kept
    assert other * values_nE[1].norm() <= 1.01 * values_nE[0].norm()
