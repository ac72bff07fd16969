"""Machines and links to plan for: small random ones, ten cities, and homes with consumer cards. Seeded.

Cities lie where they lie: round trips are great-circle distances at two thirds of the speed of light, twice as long as
the straight way, and 4 ms. Home links are log-uniform between the published ends of a volunteer swarm's downlinks,
213 Mbit/s and 7.7 Gbit/s, with uplinks of 5 to 50 % of them.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np

from atoll.coordinator.planner.links import fill_missing_links
from atoll.coordinator.planner.problem import (
    FloatArray,
    Goal,
    Layer,
    Machine,
    Pin,
    Problem,
    Reach,
    Training,
    Wishes,
    decoder_layers,
)

GB = 1e9
MBIT = 1e6 / 8
CITIES = {
    "london": (51.5, -0.1),
    "frankfurt": (50.1, 8.7),
    "stockholm": (59.3, 18.1),
    "virginia": (38.9, -77.4),
    "chicago": (41.9, -87.6),
    "oregon": (45.8, -119.7),
    "sao-paulo": (-23.5, -46.6),
    "mumbai": (19.1, 72.9),
    "singapore": (1.35, 103.8),
    "tokyo": (35.7, 139.7),
}
# name, memory in GB, TFLOP/s that training reaches, price per hour
CARDS = (("a100", 80.0, 120.0, 1.6), ("a10", 24.0, 35.0, 0.6), ("l4", 24.0, 25.0, 0.5), ("v100", 16.0, 30.0, 0.4))
CONSUMER_CARDS = (
    ("rtx4090", 24.0, 70.0, 0.4), ("rtx3090", 24.0, 35.0, 0.25), ("rtx4070", 12.0, 25.0, 0.18),
    ("rtx3060", 12.0, 11.0, 0.1), ("gtx1080ti", 11.0, 7.0, 0.06),
)  # fmt: skip


def seven_billion() -> tuple[Layer, ...]:
    """A 7 B decoder: 32 blocks, 4096 wide, 32 k words."""
    return decoder_layers(
        blocks=32, dimension=4096, block_parameters=202_383_360, vocabulary=32_000, sequence_length=2048
    )


def three_billion() -> tuple[Layer, ...]:
    """A 3 B decoder: 28 blocks, 3072 wide, tied to a vocabulary of 32 k."""
    return decoder_layers(
        blocks=28, dimension=3072, block_parameters=100_669_440, vocabulary=32_000, sequence_length=2048, tied=True
    )


def small(rng: random.Random, most: int = 8, layers: tuple[int, int] = (5, 12)) -> Problem:
    """Up to `most` unlike machines in up to three regions, with few enough layers to solve exactly."""
    table = decoder_layers(
        blocks=rng.randint(layers[0], layers[1]) - 2,
        dimension=1024,
        block_parameters=12_000_000 * rng.choice((1, 4, 16)),
        vocabulary=rng.choice((256, 32_000)),
        sequence_length=512,
        tied=rng.random() < 0.3,
    )
    training = Training(
        micro_batch_tokens=rng.choice((512, 2048)),
        micro_batches=rng.choice((1, 4, 16)),
        round_tokens=rng.choice((20_000, 200_000, 1_000_000, 10_000_000)),
        ahead=rng.choice((0, 5)),
    )
    need = 16.0 * sum(layer.parameters for layer in table)
    machines = tuple(_small_machine(rng, number, need) for number in range(rng.randint(2, most)))
    points = [(rng.randrange(3), rng.random()) for _ in machines]
    rtt = np.array(
        [[abs(one[0] - other[0]) * 0.06 + abs(one[1] - other[1]) * 0.02 for other in points] for one in points]
    )
    rate = np.full(rtt.shape, np.inf)
    for _ in range(len(machines) // 2):
        one, other = rng.randrange(len(machines)), rng.randrange(len(machines))
        rate[one, other] = rng.choice((0.0, 10 * MBIT, 100 * MBIT))
    goal = Goal.PRICE if rng.random() < 0.15 else Goal.TIME
    return Problem(machines, fill_missing_links(rtt, rate), table, training, _wishes(rng, machines, len(table), goal))


def _wishes(rng: random.Random, machines: tuple[Machine, ...], layers: int, goal: Goal) -> Wishes:
    trusted_ends = rng.random() < 0.3
    if rng.random() < 0.8:
        return Wishes(goal, trusted_ends=trusted_ends)
    first = rng.randrange(layers)
    span = rng.choice((None, (first, rng.randrange(first, layers))))
    return Wishes(goal, (Pin(rng.choice(machines).name, span),), trusted_ends=trusted_ends)


def _small_machine(rng: random.Random, number: int, need: float) -> Machine:
    down = math.exp(rng.uniform(math.log(20), math.log(2000))) * MBIT
    return Machine(
        name=f"m{number}",
        minimum_step_seconds=rng.choice((0.5, 5.0, 50.0)) if rng.random() < 0.1 else 0.0,
        device_memory_bytes=need * rng.choice((0.2, 0.4, 0.8, 1.5)) + 1e8,
        host_memory_bytes=need * rng.choice((0.5, 2.0)),
        uplink_bytes_per_second=down * rng.uniform(0.1, 1),
        downlink_bytes_per_second=down,
        flops_per_second=1e12 * rng.choice((1, 2, 5, 10)),
        reach=rng.choice((Reach.PUBLIC, Reach.PUBLIC, Reach.RELAYED, Reach.OUTBOUND)),
        price_per_hour=rng.uniform(0.1, 2),
        availability=rng.uniform(0.8, 1),
        failures_per_hour=rng.choice((0.0, 0.1, 1.0)),
        trusted=rng.random() < 0.7,
    )


def ten_cities(rng: random.Random, count: int = 60) -> Problem:
    """Rented cards in ten cities, training 7 B."""
    places = [rng.choice(sorted(CITIES)) for _ in range(count)]
    machines = []
    for number, place in enumerate(places):
        kind, memory, tflops, price = rng.choice(CARDS)
        rate = rng.choice((300, 1000, 3000, 10_000)) * MBIT
        machines.append(_card(f"{place}-{number}", place, kind, memory, tflops, price, rate, rate, 0.99))
    return _city_problem(machines, places, rng)


def consumers(rng: random.Random, count: int = 60) -> Problem:
    """Cards at home, unequal by ten to one, training 7 B."""
    places = [rng.choice(sorted(CITIES)) for _ in range(count)]
    machines = []
    for number, place in enumerate(places):
        kind, memory, tflops, price = rng.choice(CONSUMER_CARDS)
        down = math.exp(rng.uniform(math.log(213), math.log(7700))) * MBIT
        up = down * math.exp(rng.uniform(math.log(0.05), math.log(0.5)))
        machines.append(
            _card(f"{place}-{number}", place, kind, memory, tflops, price, up, down, rng.uniform(0.9, 0.99))
        )
    machines = [replace(it, reach=rng.choice((Reach.PUBLIC, Reach.PUBLIC, Reach.RELAYED))) for it in machines]
    return _city_problem(machines, places, rng)


def _card(
    name: str, place: str, kind: str, memory: float, tflops: float, price: float, up: float, down: float, there: float
) -> Machine:
    return Machine(
        name=name,
        device_memory_bytes=0.9 * memory * GB,
        host_memory_bytes=4 * memory * GB,
        uplink_bytes_per_second=up,
        downlink_bytes_per_second=down,
        flops_per_second=0.4 * tflops * 1e12,
        region=place,
        price_per_hour=price,
        availability=there,
        failures_per_hour=1 - there,
        kind=kind,
    )


def _city_problem(machines: list[Machine], places: list[str], rng: random.Random) -> Problem:
    names = sorted(CITIES)
    between = np.array([[_city_rtt(one, other) for other in names] for one in names])
    index = [names.index(place) for place in places]
    rtt: FloatArray = between[np.ix_(index, index)]
    last_mile = np.array([rng.uniform(0, 0.005) for _ in machines])
    rtt = rtt + last_mile[:, None] + last_mile[None, :]
    training = Training(micro_batch_tokens=2048, micro_batches=16, round_tokens=500_000 * len(machines))
    return Problem(tuple(machines), fill_missing_links(rtt, np.full(rtt.shape, np.inf)), seven_billion(), training)


def _city_rtt(one: str, other: str) -> float:
    """Seconds."""
    (lat1, lon1), (lat2, lon2) = (tuple(math.radians(it) for it in CITIES[name]) for name in (one, other))
    cosine = math.sin(lat1) * math.sin(lat2) + math.cos(lat1) * math.cos(lat2) * math.cos(lon1 - lon2)
    kilometres = 6371 * math.acos(max(-1.0, min(1.0, cosine)))
    return 0.004 + 2 * 2 * kilometres / 200_000
