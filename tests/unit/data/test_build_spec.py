"""A build spec says what it means, or one sentence says what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.core.errors import BuildSpecError
from atoll.node.data.build_spec import parse_build_spec, read_build_spec

GOOD = (
    'seed = 3\nshard_bytes = 2097152\norder = "input"\n'
    '[[sources]]\nname = "web"\nsource = "jsonl"\npath = "a/*.jsonl"\n'
)


def test_a_spec_is_read_with_paths_beside_it(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(GOOD + '[[sources]]\nname = "hub"\nsource = "huggingface"\npath = "org/set"\n')
    spec = read_build_spec(tmp_path / "s.toml")
    assert (spec.seed, spec.shard_bytes, spec.order, spec.tokenizer) == (3, 2 << 20, "input", "bytes")
    assert [source.path for source in spec.sources] == [str(tmp_path / "a/*.jsonl"), "org/set"]


def test_a_tokenizer_beside_the_spec_is_named_with_a_dot(tmp_path: Path) -> None:
    for written, meant in (("./mine", str(tmp_path / "mine")), ("org/name", "org/name"), ("/abs", "/abs")):
        assert parse_build_spec(f'tokenizer = "{written}"\n{GOOD}', "s", tmp_path).tokenizer == meant


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (GOOD + "feild = 1\n", "s.toml: unknown key sources.1.feild (did you mean field?)"),
        ("sed = 1\n" + GOOD, "s.toml: unknown key sed (did you mean seed?)"),
        ("seed = 1\n", "s.toml: sources is missing"),
        ("sources = []\n", "s.toml: a corpus has 1 to 1024 sources, and [[sources]] names 0"),
        (GOOD.replace("2097152", "2097153"), "s.toml: shard_bytes: must be a multiple of 1,048,576 (1 MiB)"),
        (GOOD.replace("2097152", "1024"), "s.toml: shard_bytes: Input should be greater than or equal to 1048576"),
        (GOOD.replace('"web"', '"../web"'), "s.toml: sources.1.name: '../web' cannot be the name of a source"),
        (GOOD.replace('"web"', '"tokenizer"'), "s.toml: sources.1.name: 'tokenizer' cannot be the name of a source"),
        (GOOD.replace('"web"', '".build"'), "s.toml: sources.1.name: '.build' cannot be the name of a source"),
        (GOOD + GOOD[GOOD.index("[[") :], "s.toml: two sources have the name 'web'"),
        (GOOD.replace('"input"', '"sorted"'), "s.toml: order: Input should be 'shuffled' or 'input'"),
        ("seed = \n", "s.toml is not TOML"),
        ("a = " + "[" * 100_000, "s.toml is not TOML"),
    ],
)
def test_a_wrong_spec_is_refused_with_one_sentence(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(BuildSpecError) as refused:
        read_build_spec(tmp_path / "s.toml")
    assert str(refused.value).startswith(told)
    assert "\n" not in str(refused.value)


def test_a_spec_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildSpecError, match="No such file"):
        read_build_spec(tmp_path / "none.toml")
    (tmp_path / "s.toml").write_bytes(b"\xff")
    with pytest.raises(BuildSpecError, match="not UTF-8"):
        read_build_spec(tmp_path / "s.toml")
