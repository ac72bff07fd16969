"""Which codec an exchange uses where the spec says `auto`: as precise as the link and the round's time allow."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.machine_plans import POLICY
from support.machine_world import World

from atoll.node.exchange.codecs import CODECS
from atoll.node.rounds.codec_choice import AUTO, CodecChoice, allowed

ELEMENTS = 1_000_000
SHARE, SPARE = 0.25, 0.8


def seconds_of(name: str, bytes_per_second: float) -> float:
    return CODECS[name].encoded_bytes(ELEMENTS) / bytes_per_second


class Link:
    """A choice that saw exchanges over a link of so many bytes per second."""

    def __init__(self, bytes_per_second: float, name: str = "int4", times: int = 5) -> None:
        self.choice, self.now, self.began = CodecChoice(AUTO, ELEMENTS), 0.0, 0.0
        self.exchange(bytes_per_second, name, times)

    def exchange(self, bytes_per_second: float, name: str, times: int = 1, *, complete: bool = True) -> None:
        for _ in range(times):
            self.choice.begin(CODECS[name].number, self.now)
            self.began = self.now
            self.now += seconds_of(name, bytes_per_second)
            self.choice.end(self.now, complete=complete)

    def choose(self, round_seconds: float) -> str:
        """At the end of a round that began with an exchange of the codec used last."""
        return self.choice.choose(self.began + round_seconds).name


@given(st.floats(1e3, 1e9), st.floats(0.01, 1e4), st.sampled_from(AUTO))
def test_the_most_precise_that_fits_into_a_quarter_of_a_round_is_chosen(bytes_per_second, round_seconds, used):
    chosen = Link(bytes_per_second, used).choose(round_seconds)
    needs = {name: seconds_of(name, bytes_per_second) / (SHARE * round_seconds) for name in AUTO}
    finest = next((name for name in AUTO if needs[name] <= 1), AUTO[-1])
    if chosen != finest:  # there is no time to spare, or it is a matter of rounding
        assert needs[finest] >= SPARE * (1 - 1e-6)
        assert AUTO.index(chosen) > AUTO.index(finest)
        assert AUTO.index(finest) < AUTO.index(used) or needs[finest] == pytest.approx(1)


def test_a_round_at_the_edge_does_not_swing_between_two_codecs():
    link = Link(1e6)
    edge = seconds_of("int8", 1e6) / SHARE
    assert link.choose(0.99 * edge) == link.choose(1.01 * edge) == "int4"
    link.exchange(1e6, "int8")
    assert link.choose(1.01 * edge) == "int8"


def test_one_slow_exchange_changes_nothing_and_a_slow_link_is_found_after_three():
    link = Link(1e6, "int8")
    round_seconds = 1.01 * seconds_of("int8", 1e6) / SHARE
    assert link.choose(round_seconds) == "int8"
    for seen in range(1, 4):
        link.exchange(1e5, "int8")
        assert link.choose(round_seconds) == ("int8" if seen < 3 else "int2")


def test_where_bytes_are_not_what_takes_the_time_coarse_codes_are_not_kept():
    """Every codec takes ten seconds here, and nothing fits: the finest that was seen to be as quick is used."""
    link = Link(1e6, times=0)
    used = []
    for _ in range(60):
        used.append(link.choose(20.0))
        link.choice.begin(CODECS[used[-1]].number, link.now)
        link.choice.end(link.now + 10.0, complete=True)
        link.began, link.now = link.now, link.now + 20.0
    assert used.count("int2") < 10


def test_what_a_codec_took_long_ago_does_not_count_when_it_is_tried_again():
    link = Link(1e4, "int8")
    link.exchange(1e6, "int2", 20)
    round_seconds = 1.3 * seconds_of("int8", 1e6) / SHARE
    assert link.choose(round_seconds) == "int8"
    link.exchange(1e6, "int8")
    assert link.choose(round_seconds) == "int8"


def test_an_exchange_that_was_cut_off_counts_only_as_a_lower_bound():
    link = Link(1e6, "int8")
    round_seconds = 1.01 * seconds_of("int8", 1e6) / SHARE
    link.exchange(1e9, "int8", 5, complete=False)
    link.exchange(1e6, "int8")
    assert link.choose(round_seconds) == "int8"
    link.exchange(1e5, "int8", 5, complete=False)
    assert link.choose(round_seconds) == "int2"


def test_where_the_first_exchange_is_cut_off_the_coarsest_is_next():
    link = Link(1e5, times=0)
    assert link.choose(1e9) == "int4"
    link.exchange(1e5, "int4", complete=False)
    assert link.choose(1e9) == "int2"


def test_who_was_away_does_not_take_its_absence_for_a_round():
    link = Link(1e6, "int2")
    link.choice.forget_round()
    assert link.choose(1e9) == "int2"


def test_a_spec_that_names_a_codec_has_that_one():
    assert allowed("int8") == ("int8",)
    choice = CodecChoice(allowed("int8"), ELEMENTS)
    choice.begin(CODECS["int8"].number, 0.0)
    choice.end(1e9, complete=True)
    assert choice.choose(1e9 + 0.001).name == "int8"


def test_rounds_name_the_codec_that_their_links_are_good_for():
    def codecs_of(round_tokens: int) -> list[int]:
        policy = replace(POLICY, codecs=AUTO, due_tokens=lambda committed, members: round_tokens)
        world = World(3, policy=policy)
        assert world.run(300, until=lambda: world.rounds() >= 8)
        return [head.manifest.codec for _, head in sorted(world.committed.items())]

    long, short = codecs_of(4000), codecs_of(50)
    assert long[0] == short[0] == CODECS["int4"].number  # nothing was seen yet
    assert long[-1] == CODECS["bf16"].number
    assert CODECS["int2"].number in short
    assert CODECS["bf16"].number not in short


def test_a_codec_that_the_spec_does_not_allow_is_refused():
    world = World(3, policy=replace(POLICY, codecs=AUTO))

    def forge(sender, to, message):
        if message.WhichOneof("body") == "start":
            message.start.codec = CODECS["fp32"].number
        return False

    world.network.drop = forge
    world.run(30)
    assert world.rounds() == 0


def test_who_is_alone_rounds_nothing_more_than_it_must():
    world = World(1, policy=replace(POLICY, codecs=AUTO))
    assert world.run(100, until=lambda: world.rounds() >= 2)
    assert {head.manifest.codec for number, head in world.committed.items() if number} == {CODECS[AUTO[0]].number}


@pytest.mark.parametrize("size", [1e-3, 1e-6, 1e-8])
def test_a_more_precise_codec_is_that_at_any_scale(size):
    values = size * torch.randn(4096, generator=torch.Generator().manual_seed(1))
    errors = []
    for codec in map(CODECS.__getitem__, AUTO):
        decoded = codec.decode(codec.encode(values), len(values))
        errors.append(float((decoded - values).norm() / values.norm()))
    assert errors == sorted(errors)
    assert errors[0] < 0.01
