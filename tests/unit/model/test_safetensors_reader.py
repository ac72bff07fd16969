"""Single tensors are read from files of other programs, or refused if a file is damaged."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from atoll.core.errors import CheckpointCorrupt
from atoll.node.model.safetensors_reader import read_tensor, tensor_names

TENSORS = {
    "matrix": torch.arange(12.0).view(3, 4),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "small": torch.tensor(2.5, dtype=torch.float16),
    "none": torch.zeros(0, 3),
    "numbers": torch.tensor([[1, -2]]),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "it.safetensors", {"format": "pt"})
    return tmp_path / "it.safetensors"


def header_of(data: bytes) -> dict[str, dict[str, object]]:
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def with_header(data: bytes, header: object) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :]


def test_files_of_the_format_s_library_are_read(path: Path) -> None:
    assert sorted(tensor_names(path)) == sorted(TENSORS)
    for name, values in TENSORS.items():
        found = read_tensor(path, name)
        assert found.dtype is values.dtype
        assert torch.equal(found, values)


@pytest.mark.parametrize(
    "changed",
    [
        {"data_offsets": [0, 44]},
        {"data_offsets": [48, 0]},
        {"data_offsets": [-48, 0]},
        {"data_offsets": [1 << 40, (1 << 40) + 48]},
        {"data_offsets": [0, 48, 0]},
        {"data_offsets": None},
        {"shape": [3, 5]},
        {"shape": [-3, -4]},
        {"shape": "34"},
        {"shape": [1 << 62, 4]},
        {"dtype": "F128"},
        {"dtype": ["F32"]},
    ],
    ids=str,
)
def test_an_invalid_header_entry_is_refused(changed: dict[str, object], path: Path) -> None:
    data = path.read_bytes()
    header = header_of(data)
    header["matrix"].update(changed)
    path.write_bytes(with_header(data, header))
    with pytest.raises(CheckpointCorrupt, match="matrix"):
        read_tensor(path, "matrix")
    assert torch.equal(read_tensor(path, "numbers"), TENSORS["numbers"])


def test_a_missing_file_or_tensor_is_named(path: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match="no tensor other"):
        read_tensor(path, "other")
    for missing in (tensor_names, lambda path: read_tensor(path, "matrix")):
        with pytest.raises(CheckpointCorrupt, match="cannot be read"):
            missing(path.with_name("nothing"))
    for header in ([], "text", 3):
        path.write_bytes(with_header(b"\0" * 8, header))
        with pytest.raises(CheckpointCorrupt, match="safetensors file"):
            tensor_names(path)


@settings(max_examples=200)
@given(st.data())
def test_arbitrary_bytes_are_refused_with_a_typed_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    good = save({"matrix": TENSORS["matrix"]})
    place = data.draw(st.integers(0, len(good) - 1))
    spoiled = data.draw(
        st.sampled_from((good[:place], good[:place] + bytes([data.draw(st.integers(0, 255))]) + good[place + 1 :]))
    )
    path = tmp_path_factory.getbasetemp() / "spoiled"
    path.write_bytes(spoiled)
    with contextlib.suppress(CheckpointCorrupt):
        assert read_tensor(path, "matrix").shape.numel() <= len(good)
