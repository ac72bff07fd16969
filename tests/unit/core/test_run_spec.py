"""A wrong run spec tells a person all that is wrong with it, and what was probably meant."""

from __future__ import annotations

import pytest

from atoll.core.errors import RunSpecError
from atoll.core.run_spec import parse_run_spec, spec_warnings

SPEC = """version = 1
[run]
name = "t"
stop_tokens = 1000
[data]
path = "corpus.txt"
[sync]
round_tokens = 100
"""


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        (
            "round_tokens = 100",
            'round_tokens = 100\ncodek = "int8"',
            "unknown key sync.codek (did you mean sync.codec?)",
        ),
        (
            "stop_tokens = 1000",
            "stop_tokens = 1000\nlearning_rate = 0.1",
            "unknown key run.learning_rate (did you mean optimizer.learning_rate?)",
        ),
        ('path = "corpus.txt"', 'path = "corpus.txt"\ncolour = "red"', "unknown key data.colour"),
    ],
)
def test_an_unknown_key_is_named_with_a_suggestion(right: str, wrong: str, told: str) -> None:
    with pytest.raises(RunSpecError) as caught:
        parse_run_spec(SPEC.replace(right, wrong), "run.toml")
    assert str(caught.value) == f"run.toml: {told}"


def test_every_problem_has_its_own_line() -> None:
    with pytest.raises(RunSpecError) as caught:
        parse_run_spec(SPEC.replace("name =", "nam =").replace("= 100\n", "= 0\n"), "run.toml")
    first, *problems = str(caught.value).splitlines()
    assert first == "run.toml:"
    assert {it.strip().split(":")[0] for it in problems} == {
        "run.name is missing",
        "unknown key run.nam (did you mean run.name?)",
        "sync.round_tokens",
    }


def test_valid_but_unlikely_values_give_warnings() -> None:
    plain = SPEC.replace("= 100\n", "= 20\n")
    assert spec_warnings(parse_run_spec(plain)) == ()
    (warm_up,) = spec_warnings(parse_run_spec(plain + "[optimizer]\nwarmup_tokens = 1000\n"))
    assert "does not end" in warm_up
    (rounds,) = spec_warnings(parse_run_spec(SPEC.replace("= 100\n", "= 101\n")))
    assert "fewer than 10 rounds" in rounds
