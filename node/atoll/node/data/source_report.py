"""Counts of the training text that was read or left out, for the log, messages and `atoll data build`.

Each worker process fills a report of its own; the reports are added up in the order of the units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from atoll.core.errors import CorpusError

_EXAMPLES = {
    "unanswered_examples": "without an answer left out (the first is ",
    "long_examples": "left out as too long (the first is ",
    "cut_examples": "cut at the longest length (the first is ",
}


@dataclass
class SourceReport:
    """Counts of files, documents and omissions, with the first case of each kind."""

    files: int = 0
    documents: int = 0
    skipped_files: int = 0  # not readable as the source's format
    first_skipped_file: str = ""
    first_skipped_why: str = ""
    skipped_rows: int = 0  # null, empty or without the field
    bad_lines: int = 0
    first_bad_line: str = ""
    first_bad_why: str = ""
    unanswered_examples: int = 0  # without an answer to learn
    first_unanswered_examples: str = ""
    long_examples: int = 0  # longer than the build allows
    first_long_examples: str = ""
    cut_examples: int = 0  # examples that were cut at that length
    first_cut_examples: str = ""

    def skip_file(self, name: str, why: str) -> None:
        """Count a file that is left out."""
        self.add(SourceReport(skipped_files=1, first_skipped_file=name, first_skipped_why=why))

    def bad_line(self, place: str, why: str) -> None:
        """Count a line or row that is left out although it should have held text."""
        self.add(SourceReport(bad_lines=1, first_bad_line=place, first_bad_why=why))

    def count_example(self, kind: str, place: Callable[[], str]) -> None:
        """Count an example that is left out or cut. `kind` is the name of a field."""
        if not getattr(self, kind):
            setattr(self, f"first_{kind}", place())
        setattr(self, kind, getattr(self, kind) + 1)

    def add(self, other: SourceReport) -> None:
        """Add the counts of a later part of the same source."""
        if not self.skipped_files:
            self.first_skipped_file, self.first_skipped_why = other.first_skipped_file, other.first_skipped_why
        if not self.bad_lines:
            self.first_bad_line, self.first_bad_why = other.first_bad_line, other.first_bad_why
        for kind in _EXAMPLES:
            if not getattr(self, kind):
                setattr(self, f"first_{kind}", getattr(other, f"first_{kind}"))
            setattr(self, kind, getattr(self, kind) + getattr(other, kind))
        self.files += other.files
        self.documents += other.documents
        self.skipped_files += other.skipped_files
        self.skipped_rows += other.skipped_rows
        self.bad_lines += other.bad_lines

    def to_dict(self) -> dict[str, int | str]:
        """Return all fields, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SourceReport:
        """Rebuild a report. Raises `ValueError` for missing, unknown or mistyped fields.

        Those of examples may be missing: earlier releases did not write them.
        """
        values = {name: value for name, value in asdict(cls()).items() if name.endswith("_examples")} | dict(values)
        types = {field.name: int if field.type == "int" else str for field in fields(cls)}
        if values.keys() != types.keys() or any(type(values[name]) is not kind for name, kind in types.items()):
            raise ValueError("this is not a report of training text")
        return cls(**values)

    def left_out(self) -> str:
        """Return one clause about what was left out and why; empty if nothing was."""
        parts = []
        if self.skipped_files:
            files = f"{self.skipped_files} of {self.files} files" if self.files > 1 else "the only file"
            parts.append(f"{files} left out (the first is {self.first_skipped_file}: {self.first_skipped_why})")
        if self.bad_lines:
            lines = f"{self.bad_lines} unusable {'line' if self.bad_lines == 1 else 'lines'} left out"
            parts.append(f"{lines} (the first is {self.first_bad_line}: {self.first_bad_why})")
        if self.skipped_rows:
            parts.append(f"{self.skipped_rows} {'row' if self.skipped_rows == 1 else 'rows'} without text left out")
        for kind, told in _EXAMPLES.items():
            if count := getattr(self, kind):
                parts.append(
                    f"{count} {'example' if count == 1 else 'examples'} {told}{getattr(self, f'first_{kind}')})"
                )
        return "; ".join(parts)

    def nothing_read(self, where: str) -> CorpusError:
        """Build the error for a source that gave no document at all."""
        left_out = self.left_out()
        if not left_out:
            return CorpusError(f"the training text at {where} is empty", "use more text")
        remedy = "check [data] field and path in the run spec"
        if self.unanswered_examples or self.long_examples:
            remedy = "check the roles of the messages, the chat template and longest_example"
        if self.skipped_files:
            remedy = f"convert the files to UTF-8 ({iconv(self.first_skipped_why)}), or set [data] source to theirs"
        return CorpusError(f"there is no usable training text at {where}: {left_out}", remedy)


def iconv(why: str) -> str:
    """Return the command that converts a text to UTF-8, from why it was refused.

    Text that is not UTF-16 is mostly Latin-1.
    """
    return f"iconv -f {'UTF-16' if 'UTF-16' in why else 'LATIN1'} -t UTF-8"
