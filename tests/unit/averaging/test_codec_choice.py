"""Which codec an exchange uses where the spec says `auto`: as precise as the link and the round's time allow."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machine_plans import POLICY
from support.machine_world import World

from atoll.node.averaging.codec_choice import AUTO, CodecChoice, allowed
from atoll.node.averaging.codecs import CODECS

ELEMENTS = 1_000_000
SHARE = 0.25


def seconds_of(name: str, bytes_per_second: float) -> float:
    return CODECS[name].encoded_bytes(ELEMENTS) / bytes_per_second


def choice_that_saw(bytes_per_second: float, name: str = "int4", times: int = 5) -> CodecChoice:
    choice = CodecChoice(AUTO, ELEMENTS)
    for _ in range(times):
        choice.observe(CODECS[name].number, seconds_of(name, bytes_per_second))
    return choice


@given(st.floats(1e3, 1e9), st.floats(0.01, 1e4), st.sampled_from(AUTO))
def test_the_most_precise_that_fits_into_a_quarter_of_the_time_is_chosen(bytes_per_second, interval, seen):
    chosen = choice_that_saw(bytes_per_second, seen).choose(interval).name
    fitting = [name for name in AUTO if seconds_of(name, bytes_per_second) <= SHARE * interval * (1 + 1e-9)]
    borderline = [name for name in AUTO if seconds_of(name, bytes_per_second) == pytest.approx(SHARE * interval)]
    assert chosen in [*fitting[:1], *borderline, *([AUTO[-1]] if not fitting else [])]


def test_one_slow_exchange_changes_nothing_and_a_slow_link_is_found_after_three():
    choice = choice_that_saw(1e6)
    interval = 4 * seconds_of("int8", 1e6) * 1.01
    assert choice.choose(interval).name == "int8"
    for seen in range(1, 4):
        choice.observe(CODECS["int8"].number, seconds_of("int8", 1e5))
        assert choice.choose(interval).name == ("int8" if seen < 3 else "int2")


def test_an_exchange_that_was_cut_off_counts_only_as_a_lower_bound():
    choice = choice_that_saw(1e6)
    interval = 4 * seconds_of("int8", 1e6) * 1.01
    for _ in range(5):
        choice.observe(CODECS["int8"].number, 0.0, complete=False)
    assert choice.choose(interval).name == "int8"
    for _ in range(5):
        choice.observe(CODECS["int8"].number, seconds_of("int8", 1e5), complete=False)
    assert choice.choose(interval).name == "int2"


def test_a_spec_that_names_a_codec_has_that_one():
    assert allowed("int8") == ("int8",)
    choice = CodecChoice(allowed("int8"), ELEMENTS)
    choice.observe(CODECS["int8"].number, 1e9)
    assert choice.choose(0.001).name == "int8"


def test_rounds_name_the_codec_that_their_links_are_good_for():
    def codecs_of(round_tokens: int) -> list[int]:
        policy = replace(POLICY, codecs=AUTO, due_tokens=lambda committed, members: round_tokens)
        world = World(3, policy=policy)
        assert world.run(300, until=lambda: world.rounds() >= 8)
        return [head.manifest.codec for _, head in sorted(world.committed.items())]

    long, short = codecs_of(4000), codecs_of(50)
    assert long[0] == short[0] == CODECS["int4"].number  # nothing was seen yet
    assert long[-1] == CODECS["fp16"].number
    assert short[-1] == CODECS["int2"].number


def test_a_codec_that_the_spec_does_not_allow_is_refused():
    world = World(3, policy=replace(POLICY, codecs=AUTO))

    def forge(sender, to, message):
        if message.WhichOneof("body") == "start":
            message.start.codec = CODECS["fp32"].number
        return False

    world.network.drop = forge
    world.run(30)
    assert world.rounds() == 0
