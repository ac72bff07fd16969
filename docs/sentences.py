"""Mean words a sentence in README with the guides, and in docs/explain. Exits with 1 where a mean is above its limit.

    python docs/sentences.py

Full stops and the ends of paragraphs and list items end a sentence. Semicolons do not: a long sentence cannot hide
behind one. Code blocks, tables and headings are left out. Inline code counts as one word.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = {
    "README and guides": (15.0, [ROOT / "README.md", *sorted((ROOT / "docs/guide").glob("*.md"))]),
    "docs/explain": (17.0, sorted((ROOT / "docs/explain").glob("*.md"))),
}
_CODE_BLOCK = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_BLOCK_END = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )")
_SENTENCE_END = re.compile(r"(?<=[.])[)\"*]*\s+")


def sentences(text: str) -> list[str]:
    """The sentences of a Markdown text's prose."""
    text = _CODE_BLOCK.sub("\n\n", text)
    text = re.sub(r"^(\||#).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"`[^`]+`", "code", text)
    blocks = [re.sub(r"^\s*(?:[-*]|\d+\.) ", "", block) for block in _BLOCK_END.split(text)]
    found = [sentence for block in blocks for sentence in _SENTENCE_END.split(" ".join(block.split()))]
    return [sentence for sentence in found if re.search(r"\w", sentence)]


def words(sentence: str) -> int:
    """Words that hold a letter or a digit."""
    return sum(1 for word in sentence.split() if re.search(r"\w", word))


def mean_words(pages: list[Path]) -> float:
    """Words a sentence over all of these pages."""
    lengths = [words(sentence) for page in pages for sentence in sentences(page.read_text())]
    return sum(lengths) / len(lengths)


def main() -> int:
    """Print a row for each set of pages. The exit code is 1 when one is above its limit."""
    rows = [(name, mean_words(pages), limit) for name, (limit, pages) in PAGES.items()]
    for name, mean, limit in rows:
        print(f"{name:<18}  {mean:5.1f} words a sentence, limit {limit:g}  {'ok' if mean <= limit else 'over'}")
    return int(any(mean > limit for _, mean, limit in rows))


if __name__ == "__main__":
    sys.exit(main())
