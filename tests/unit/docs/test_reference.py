"""The pages that list every command and option are those of the programs."""

from __future__ import annotations

import pytest
from support.command_reference import PAGES, REFERENCE, page


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_the_program_says(name: str) -> None:
    assert (REFERENCE / name).read_text() == page(name), "write it again: make reference"
