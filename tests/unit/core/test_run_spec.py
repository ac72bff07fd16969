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


CORPUS = """version = 1
[run]
name = "a"
stop_tokens = 1_000_000
[model]
[optimizer]
[sync]
round_tokens = 10_000
[data]
source = "corpus"
"""
DIGEST = f'corpus = "{"a" * 64}"\n'


def test_a_mixture_is_written_and_read_back_and_can_be_a_key() -> None:
    stages = '[{ weights = { web = 0.7, "2-x" = 0.3 } }, { from_tokens = 5000, epochs = { web = 1 } }]'
    spec = parse_run_spec(f"{CORPUS}{DIGEST}mirrors = ['https://example.org/a']\nmixture = {stages}")
    again = parse_run_spec(spec.resolved_toml())
    assert again == spec
    assert hash(again) == hash(spec)
    assert [stage.from_tokens for stage in spec.data.mixture] == [0, 5000]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("", "corpus is missing"),
        ('corpus = "abc"', "data.corpus"),
        (f"{DIGEST}mixture = [{{}}]", "either weights or epochs"),
        (f"{DIGEST}mixture = [{{ weights = {{ a = 1 }}, epochs = {{ a = 1 }} }}]", "either weights or epochs"),
        (f"{DIGEST}mixture = [{{ weights = {{ a = 0 }} }}]", "a weight above 0"),
        (f"{DIGEST}mixture = [{{ weights = {{ a = -1 }} }}]", "weights"),
        (f"{DIGEST}mixture = [{{ weights = {{ a = inf }} }}]", "weights"),
        (f"{DIGEST}mixture = [{{ from_tokens = 500, weights = {{ a = 1 }} }}]", "begins at from_tokens = 0"),
        (f"{DIGEST}mirrors = {['x'] * 33}", "mirrors"),
    ],
)
def test_what_is_wrong_with_a_corpus_is_named(data: str, problem: str) -> None:
    with pytest.raises(RunSpecError, match=problem):
        parse_run_spec(CORPUS + data)


def test_other_sources_need_a_path_and_no_corpus() -> None:
    text = CORPUS.replace('"corpus"', '"text"')
    with pytest.raises(RunSpecError, match="path is missing"):
        parse_run_spec(text)
    with pytest.raises(RunSpecError, match='need source = "corpus"'):
        parse_run_spec(f'{text}path = "a"\n{DIGEST}')
