"""Inputs are divided into units; together they give every document once, in order; faults are named or counted."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import CorpusError
from atoll.node.data import byte_streams, readers
from atoll.node.data.inputs import Document, InputSpec, LongText, SourceReport, plan_units, read_unit

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402


def whole(document: Document) -> bytes:
    return b"".join(document.chunks()) if isinstance(document, LongText) else document


def read(spec: InputSpec, unit_bytes: int = 1 << 20, strict: bool = True) -> tuple[list[bytes], SourceReport]:
    """Read all units as worker processes would."""
    plan = plan_units(spec, unit_bytes)
    assert plan == plan_units(spec, unit_bytes)
    assert [unit.number for unit in plan.units] == [*range(len(plan.units))]
    report, documents = plan.report, []
    for unit in plan.units:
        own = SourceReport()
        documents += [whole(document) for document in read_unit(pickle.loads(pickle.dumps(unit)), own, strict)]
        report.add(SourceReport.from_dict(json.loads(json.dumps(own.to_dict()))))
    assert report.documents == len(documents)
    return documents, report


def refused(spec: InputSpec) -> str:
    with pytest.raises(CorpusError) as caught:
        read(spec)
    return f"{caught.value} | {caught.value.remedy}"


def jsonl(path: Path, rows: list[Any]) -> InputSpec:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return InputSpec("jsonl", str(path))


def zst(data: bytes) -> bytes:
    packed = pyarrow.compress(data, codec="zstd", asbytes=True)
    assert isinstance(packed, bytes)
    return packed


# --- units ----------------------------------------------------------------------------------------------

lines = st.lists(
    st.one_of(
        st.text(max_size=30).map(lambda text: json.dumps({"text": text})),
        st.text(max_size=30).map(lambda text: json.dumps({"text": text}, ensure_ascii=False)),
        st.sampled_from(["", "  ", '{"text": null}', '{"text": ""}']),
    ),
    max_size=30,
)


@given(lines=lines, unit_bytes=st.integers(1, 200), end=st.sampled_from(["\n", "\r\n"]), last=st.booleans())
@settings(max_examples=100, deadline=None)
def test_every_line_belongs_to_exactly_one_unit(
    lines: list[str], unit_bytes: int, end: str, last: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("lines") / "a.jsonl"
    text = end.join(lines) + (end if last else "")
    file.write_bytes(text.encode(errors="replace"))
    rows = [json.loads(line.encode(errors="replace"))["text"] for line in lines if line.strip()]
    documents, report = read(InputSpec("jsonl", str(file)), unit_bytes)
    wanted = [row.replace("\0", "").encode(errors="replace") for row in rows if row and row != "\0"]
    assert documents == [row for row in wanted if row]
    assert (report.files, report.skipped_rows) == (min(1, len(text) or 1), len(rows) - len(documents))


def test_small_files_share_a_unit_and_a_large_one_has_its_own(tmp_path: Path) -> None:
    for name, size in (("a", 40), ("b", 40), ("c", 300), ("d", 10), ("e", 90)):
        (tmp_path / f"{name}.txt").write_text(name * size)
    plan = plan_units(InputSpec("text", str(tmp_path)), 100)
    assert [unit.size_bytes for unit in plan.units] == [80, 300, 100]
    assert plan.size_bytes == 480
    assert plan.units[0].name == f"{tmp_path}/a.txt and 1 more"
    assert [file[-5:] for file in plan.files] == ["a.txt", "b.txt", "c.txt", "d.txt", "e.txt"]


def test_row_groups_of_parquet_are_units(tmp_path: Path) -> None:
    texts = [f"text {number} " * 20 for number in range(1000)]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=100)
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], "string")}), tmp_path / "b.parquet")
    spec = InputSpec("parquet", str(tmp_path))
    size = (tmp_path / "a.parquet").stat().st_size
    assert len(plan_units(spec, size // 4).units) == 4
    documents, report = read(spec, size // 4)
    assert documents == [text.encode() for text in texts]
    assert report.files == 2


def test_rows_of_a_hugging_face_data_set_are_units(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    jsonl(tmp_path / "a.jsonl", [{"text": f"text {number}" if number % 10 else None} for number in range(1000)])
    spec = InputSpec("huggingface", str(tmp_path))
    assert len(plan_units(spec, 1 << 10).units) > 5
    documents, report = read(spec, 1 << 10)
    assert documents == [f"text {number}".encode() for number in range(1000) if number % 10]
    assert report.skipped_rows == 100
    readers._loaded.clear()  # as in a worker process
    assert next(iter(read_unit(plan_units(spec, 1 << 10).units[0], SourceReport()))) == b"text 1"


# --- compressed files -----------------------------------------------------------------------------------


def test_compressed_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    rows = b'{"text": "one"}\n\n{"text": "two"}'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(rows))
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "three"}\n')
    (tmp_path / "c.NDJSON.zst").write_bytes(zst(rows[:16]) + zst(rows[16:]))
    assert read(InputSpec("jsonl", str(tmp_path)), 10)[0] == [b"one", b"two", b"three", b"one", b"two"]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one"))
    (tmp_path / "b.md.zst").write_bytes(zst(b"two"))
    assert read(InputSpec("text", str(tmp_path)))[0] == [b"one", b"two"]


def test_a_compressed_copy_beside_its_file_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one"))
    documents, report = read(InputSpec("text", str(tmp_path)))
    assert documents == [b"one"]
    assert report.left_out() == f"1 of 2 files left out (the first is {tmp_path}/a.txt.gz: a.txt is beside it)"


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("kept", [0, 0.3, 0.99])
@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_a_cut_compressed_file_is_an_error_that_names_it(tmp_path: Path, suffix: str, kept: float, source: str) -> None:
    data = "".join(json.dumps({"text": f"{number * 7919 % 10007}"}) + "\n" for number in range(20_000)).encode()
    packed = gzip.compress(data) if suffix == "gz" else zst(data)
    file = tmp_path / f"a.{'txt' if source == 'text' else 'jsonl'}.{suffix}"
    file.write_bytes(packed[: int(len(packed) * kept)])
    message = refused(InputSpec(source, str(tmp_path)))
    assert str(file) in message
    assert "cut short or damaged" in message
    file.write_bytes(b"no such format" * 9)
    assert "cut short or damaged" in refused(InputSpec(source, str(tmp_path)))


def test_a_line_or_text_beyond_the_bounds_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = gzip.compress(b"x" * (40 << 20))
    (tmp_path / "a.txt.gz").write_bytes(bomb)
    [unit] = plan_units(InputSpec("text", str(tmp_path))).units
    [document] = read_unit(unit, SourceReport())
    assert isinstance(document, LongText)
    assert max(len(chunk) for chunk in document.chunks()) <= 1 << 18
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 20 << 20)
    (tmp_path / "a.jsonl.gz").write_bytes(bomb)
    assert "line 1 of" in (message := refused(InputSpec("jsonl", str(tmp_path))))
    assert "longer than 20 MiB" in message


def test_zst_without_its_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.txt.zst").write_bytes(b"x")
    assert "pyarrow" in (message := refused_config(tmp_path))
    assert "hf" in message


def refused_config(path: Path) -> str:
    from atoll.core.errors import ConfigError

    with pytest.raises(ConfigError) as caught:
        read(InputSpec("text", str(path)))
    return f"{caught.value} | {caught.value.remedy}"


# --- faults of lines and rows ---------------------------------------------------------------------------

GOOD = '{"text": "good"}\n'
FAULTS = {
    "[" + GOOD.strip() + "]": ("is a JSON array", "jq -c"),
    "[\n " + GOOD.strip() + "\n]": ("is a JSON array", "jq -c"),
    GOOD + GOOD[:12]: ("line 2 of .*the line is cut or damaged", "repair or remove"),
    GOOD + "\n" + "7\n": ("line 3 of .* is a number, not a JSON object", "one JSON object a line"),
    GOOD + '"word"\n': ("line 2 of .* is text, not a JSON object", "one JSON object a line"),
    GOOD + "null\n": ("line 2 of .* is null, not a JSON object", "one JSON object a line"),
    GOOD + "[" * 100_000 + "\n": ("line 2 of .*", "remove that line"),
    GOOD + '{"text": 7}\n': ("line 2 of .* holds a number under 'text', not text", "leave that row out"),
    GOOD + '{"text": true}\n': ("holds true or false under", "leave that row out"),
    GOOD + '{"text": ["a"]}\n': ("holds a list under", "leave that row out"),
    GOOD + '{"text": {"a": 1}}\n': ("holds an object under", "leave that row out"),
}


@pytest.mark.parametrize("content", FAULTS)
@pytest.mark.parametrize("unit_bytes", [1 << 20, 7])
def test_each_fault_of_a_line_has_its_own_sentence_and_remedy(tmp_path: Path, content: str, unit_bytes: int) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    spec = InputSpec("jsonl", str(tmp_path))
    with pytest.raises(CorpusError, match=FAULTS[content][0]) as caught:
        read(spec, unit_bytes)
    assert FAULTS[content][1] in caught.value.remedy
    assert "field" not in caught.value.remedy
    documents, report = read(spec, unit_bytes, strict=False)
    assert documents == [b"good"] * (0 if content.startswith("[{") else 1)
    assert report.bad_lines >= 1
    assert str(tmp_path / "a.jsonl") in report.first_bad_line
    assert report.first_bad_why


def test_the_field_remedy_is_for_a_missing_key_alone(tmp_path: Path) -> None:
    spec = jsonl(tmp_path / "a.jsonl", [{"text": "one"}, {"body": "two", "id": 3}])
    assert "line 2 of" in (message := refused(spec))
    assert "has no text under 'text'; its keys are: 'body', 'id' | check [data] field" in message
    documents, report = read(spec, strict=False)
    assert (documents, report.skipped_rows, report.bad_lines) == ([b"one"], 1, 0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(GOOD.encode(), mtime=0), "is gzip data.*rename it to end in .gz"),
        (zst(GOOD.encode()), "is Zstandard data.*rename it to end in .zst"),
        (b"PK\x03\x04rest", "is zip data.*decompress it"),
        (GOOD.encode("utf-16"), "is UTF-16"),
        (GOOD.encode() + b'{"text": "\xe9"}\n', "line 2 of .* is not UTF-8"),
    ],
)
def test_a_jsonl_file_in_another_format_is_named_as_such(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(CorpusError) as caught:
        read(InputSpec("jsonl", str(tmp_path)))
    import re

    assert re.search(words, f"{caught.value} | {caught.value.remedy}")


@pytest.mark.parametrize("source", ["jsonl", "parquet", "huggingface"])
def test_null_and_empty_text_is_left_out_and_counted_alike(tmp_path: Path, source: str) -> None:
    rows = [{"text": "one"}, {"text": None}, {"text": ""}, {"text": "two"}]
    spec = jsonl(tmp_path / "a.jsonl", rows)
    if source != "jsonl":
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
        (tmp_path / "a.jsonl").unlink()
        spec = InputSpec(source, str(tmp_path))
    documents, report = read(spec)
    assert documents == [b"one", b"two"]
    assert (report.files, report.documents, report.skipped_rows) == (1, 2, 2)
    assert report.left_out() == "2 rows without text left out"


def test_a_column_of_numbers_is_refused_or_counted(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"text": [1, 2]}), tmp_path / "a.parquet")
    spec = InputSpec("parquet", str(tmp_path))
    assert "holds a number under 'text', not text" in refused(spec)
    assert read(spec, strict=False)[1].bad_lines == 2


@pytest.mark.parametrize(
    ("files", "cause"),
    [
        ({"a.jsonl": GOOD + GOOD[:12]}, "JSON parse error"),
        ({"a.jsonl": GOOD, "b.jsonl": '{"text": "x", "more": [1]}\n'}, "cast"),
        ({"a.bin": GOOD}, "No .*data files found"),
    ],
)
def test_a_folder_that_datasets_cannot_load_is_an_error_with_the_innermost_cause(
    tmp_path: Path, files: dict[str, str], cause: str
) -> None:
    pytest.importorskip("datasets")
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(CorpusError, match=f"cannot be loaded: .*{cause}"):
        plan_units(InputSpec("huggingface", str(tmp_path)))


# --- files that are left out ----------------------------------------------------------------------------


def test_files_that_are_not_text_are_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.txt").write_bytes("café ".encode("latin-1") * 300_000)
    (tmp_path / "c.txt").write_text("word", encoding="utf-16")
    (tmp_path / "d.txt.bz2").write_bytes(b"BZh")
    (tmp_path / "e.png").write_bytes(b"no text by its name")
    documents, report = read(InputSpec("text", str(tmp_path)))
    assert documents == [b"good"]
    assert (report.files, report.skipped_files) == (4, 3)
    assert report.left_out() == (
        f"3 of 4 files left out (the first is {tmp_path}/d.txt.bz2: Atoll does not read bzip2 files)"
    )
    (tmp_path / "d.txt.bz2").unlink()
    assert (
        "b.txt: it contains bytes that are not UTF-8 (at byte 3)"
        in read(InputSpec("text", str(tmp_path)))[1].left_out()
    )


@pytest.mark.parametrize(("at", "where"), [(5, "byte 5"), ((1 << 20) + 7, "byte 1,048,583")])
@pytest.mark.parametrize(("bad", "why"), [(b"\xff", "not UTF-8"), (b"\0", "byte 0"), (b"\xc3", "not UTF-8")])
def test_the_first_bad_byte_of_a_text_is_named(tmp_path: Path, at: int, where: str, bad: bytes, why: str) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * at + bad)
    message = refused(InputSpec("text", str(tmp_path / "a.txt")))
    assert why in message
    assert where in message


@pytest.mark.parametrize(("content", "command"), [("é".encode("latin-1"), "LATIN1"), ("é".encode("utf-16"), "UTF-16")])
def test_the_remedy_names_the_encoding(tmp_path: Path, content: bytes, command: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert f"iconv -f {command} -t UTF-8" in refused(InputSpec("text", str(tmp_path / "a.txt")))
    report = read(InputSpec("text", str(tmp_path)))[1]
    assert f"iconv -f {command} -t UTF-8" in report.nothing_read(str(tmp_path)).remedy


def test_a_folder_with_unreadable_formats_alone_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.xz").write_bytes(b"x")
    (tmp_path / "b.json").write_bytes(b"[]")
    message = refused(InputSpec("jsonl", str(tmp_path)))
    assert "2 of 2 files left out" in message
    assert "a.jsonl.xz: Atoll does not read xz files" in message


def test_reports_add_up_and_survive_json() -> None:
    total = SourceReport(files=1)
    for name in ("b", "a"):
        total.skip_file(name, f"{name} is bad")
        total.bad_line(f"line 1 of {name}", "is cut")
    assert (total.skipped_files, total.first_skipped_file, total.first_skipped_why) == (2, "b", "b is bad")
    assert (total.bad_lines, total.first_bad_line) == (2, "line 1 of b")
    assert SourceReport.from_dict(total.to_dict()) == total
    for broken in ({}, total.to_dict() | {"files": "1"}, total.to_dict() | {"more": 1}):
        with pytest.raises(ValueError, match="not a report"):
            SourceReport.from_dict(broken)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    [unit] = plan_units(InputSpec("text", str(tmp_path))).units
    (tmp_path / "a.txt").unlink()
    with pytest.raises(CorpusError, match=r"cannot read .*a\.txt: No such file"):
        [*read_unit(unit, SourceReport())]
    assert not byte_streams.is_compressed("a.txt")
