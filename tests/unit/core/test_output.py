"""What people read on a terminal."""

from __future__ import annotations

import io

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import UsageError
from atoll.core.output import ask_interactively, wrap_for_terminal

WORDS = st.lists(st.text("ab-/`", min_size=1, max_size=30), min_size=1, max_size=30)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True, scope="module")
def narrow() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "40")
        yield


@given(WORDS)
def test_lines_fit_a_terminal_and_no_word_is_broken(words: list[str]) -> None:
    shown = wrap_for_terminal(" ".join(words), Terminal())
    assert shown.split() == words
    assert all(len(line) <= 40 for line in shown.split("\n"))


@given(WORDS)
def test_output_for_programs_is_unchanged(words: list[str]) -> None:
    text = " ".join(words)
    assert wrap_for_terminal(text, io.StringIO()) == text


def test_lines_that_fit_and_their_indents_stay_as_they_are() -> None:
    text = "error: no\n  do this\n\n  or   that"
    assert wrap_for_terminal(text, Terminal()) == text


@pytest.mark.parametrize(("stdin", "error"), [(Terminal(), KeyboardInterrupt), (io.StringIO(), UsageError)])
def test_an_unanswered_question_is_an_interrupt_on_a_terminal_and_a_usage_error_elsewhere(
    monkeypatch: pytest.MonkeyPatch, stdin: io.StringIO, error: type[BaseException]
) -> None:
    def question() -> bool:
        raise typer.Abort

    monkeypatch.setattr("sys.stdin", stdin)
    with pytest.raises(error):
        ask_interactively(question)
    assert ask_interactively(lambda: True)
