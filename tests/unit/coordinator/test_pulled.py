"""A pulled checkpoint is there whole and true, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.coordinator.model_files import Files, checkpoint, safetensors, tensors
from unit.coordinator.world import LAYERS, RUN

from atoll.coordinator.cli import checkpoint_download
from atoll.core.errors import AlreadyExists, AtollError, CheckpointCorrupt
from atoll.core.identity import Identity
from atoll.v1 import membership_pb2 as mb

SIGNER = Identity.generate()


def receive(messages: list[mb.CheckpointUpload], target: Path) -> list[tuple[int, int]]:
    told: list[tuple[int, int]] = []
    checkpoint_download.receive(iter(messages), target, RUN, LAYERS, lambda done, total: told.append((done, total)))
    return told


def test_all_files_are_there_and_progress_ends_at_the_end(tmp_path: Path) -> None:
    files = checkpoint(SIGNER)
    told = receive(files.messages(size=777), tmp_path / "c")  # messages do not end where files do
    assert {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir()} == files.files
    total = sum(map(len, files.files.values()))
    assert told[-1] == (total, total)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_the_manifest_is_written_when_it_only_stood_in_the_opening(tmp_path: Path) -> None:
    files = checkpoint(SIGNER)
    sent = files.files.pop("manifest")
    receive(files.messages(), tmp_path / "c")
    assert (tmp_path / "c" / "manifest").read_bytes() == sent


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "mine").write_text("precious")
    with pytest.raises(AlreadyExists):
        receive(checkpoint(SIGNER).messages(), tmp_path / "c")
    assert (tmp_path / "c" / "mine").read_text() == "precious"


def wrong_layer(files: Files) -> None:
    files.files["anchor.safetensors"] = safetensors(tensors(6))


def wrong_momentum(files: Files) -> None:
    files.files["momentum.safetensors"] = files.files["anchor.safetensors"]


def half_floats(files: Files) -> None:
    files.files["anchor.safetensors"] = safetensors(tensors(5), dtype="F16")


def no_anchor(files: Files) -> None:
    del files.files["anchor.safetensors"]


def other_layers(files: Files) -> None:
    files.files["anchor.safetensors"] = safetensors({"more": b"\0" * 4, **tensors(5)})


def no_safetensors(files: Files) -> None:
    files.files["anchor.safetensors"] = b"\xff" * 100


def other_manifest(files: Files) -> None:
    files.files["manifest"] = checkpoint(SIGNER, 6).files["manifest"]


def other_round(files: Files) -> None:
    files.round = 6


def forged(files: Files) -> None:
    files.manifest.signatures[0].signature = b"\0" * 64


def unsigned(files: Files) -> None:
    del files.manifest.signatures[:]


def signed_twice(files: Files) -> None:
    files.manifest.signatures.append(files.manifest.signatures[0])


def outside(files: Files) -> None:
    files.files["../outside"] = b"x"


def nothing(files: Files) -> None:
    files.files.clear()


@pytest.mark.parametrize(
    "spoil",
    [
        wrong_layer,
        wrong_momentum,
        half_floats,
        no_anchor,
        other_layers,
        no_safetensors,
        other_manifest,
        other_round,
        forged,
        unsigned,
        signed_twice,
        outside,
        nothing,
    ],
)
def test_a_checkpoint_that_fails_verification_leaves_nothing(tmp_path: Path, spoil: Callable[[Files], None]) -> None:
    files = checkpoint(SIGNER)
    spoil(files)
    with pytest.raises(AtollError):
        receive(files.messages(), tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_are_missing_or_changed_are_noticed(tmp_path: Path) -> None:
    files = checkpoint(SIGNER)
    messages = files.messages()
    for wrong in (messages[:-1], messages[:1], [], [*messages[:2], mb.CheckpointUpload(data=b"x"), *messages[3:]]):
        with pytest.raises(CheckpointCorrupt):
            receive(wrong, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 200), value=st.integers(0, 255))
def test_no_header_does_worse_than_be_refused(tmp_path: Path, position: int, value: int) -> None:
    data = bytearray(safetensors(tensors(5)))
    data[position] = value
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    digests = dict.fromkeys(LAYERS, bytes(32))
    with pytest.raises(CheckpointCorrupt):
        checkpoint_download.check_layers(path, digests)


# --- checkpoints of nodes that hold some layers each --------------------------------------------------------


def set_of(*parts: Files, announced: int | None = None) -> list[mb.CheckpointUpload]:
    """As the coordinator passes them on: by turns."""
    found = []
    for number, files in enumerate(parts):
        messages = files.messages(size=700)
        messages[0].opening.parts = len(parts) if announced is None else announced
        for message in messages:
            message.part = number
        found.append(messages)
    return [message for turn in zip_longest(*found) for message in turn if message is not None]


def halves() -> list[Files]:
    whole = checkpoint(SIGNER)
    return [whole.part(0, 0), whole.part(1, 2)]


def test_parts_that_come_by_turns_lie_beside_one_another_by_their_layers(tmp_path: Path) -> None:
    first, second = halves()
    told: list[tuple[int, int]] = []
    messages = iter(set_of(second, first))
    pulled_ = checkpoint_download.receive(messages, tmp_path / "c", RUN, LAYERS, lambda *it: told.append(it))
    assert pulled_.parts == ("layers-0-0", "layers-1-2")
    for name, files in zip(pulled_.parts, (first, second), strict=True):
        assert {path.name: path.read_bytes() for path in (tmp_path / "c" / name).iterdir()} == files.files
    total = sum(len(data) for files in (first, second) for data in files.files.values())
    assert told[-1] == (total, total)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def of_two_rounds() -> list[mb.CheckpointUpload]:
    return set_of(checkpoint(SIGNER, 5).part(0, 0), checkpoint(SIGNER, 6).part(1, 2))


def lacking() -> list[mb.CheckpointUpload]:
    whole = checkpoint(SIGNER)
    return set_of(whole.part(0, 0), whole.part(2, 2))


def one_alone() -> list[mb.CheckpointUpload]:
    return set_of(checkpoint(SIGNER).part(0, 1))


def one_of_two() -> list[mb.CheckpointUpload]:
    return set_of(halves()[0], announced=2)


def too_many() -> list[mb.CheckpointUpload]:
    return set_of(*halves(), announced=9)


def one_more() -> list[mb.CheckpointUpload]:
    return set_of(*halves(), halves()[0], announced=2)


def cut_short() -> list[mb.CheckpointUpload]:
    return set_of(*halves())[:-1]


def too_long() -> list[mb.CheckpointUpload]:
    messages = set_of(*halves())
    return [*messages[:-1], mb.CheckpointUpload(data=b"x" * 701, part=1)]


def past_its_end() -> list[mb.CheckpointUpload]:
    messages = set_of(*halves())
    return [*messages[:-1], mb.CheckpointUpload(data=b"x", part=0), messages[-1]]


def a_gap_in_one() -> list[mb.CheckpointUpload]:
    whole = checkpoint(SIGNER)
    gap = whole.part(0, 2)
    for name in ("anchor", "momentum"):
        file = f"{name}.safetensors"
        gap.files[file] = safetensors({LAYERS[0]: tensors(5)[LAYERS[0]], LAYERS[2]: tensors(5)[LAYERS[2]]})
    return set_of(gap, whole.part(1, 2))


def other_momentum() -> list[mb.CheckpointUpload]:
    first, second = halves()
    second.files["momentum.safetensors"] = first.files["momentum.safetensors"]
    return set_of(first, second)


@pytest.mark.parametrize(
    "messages",
    [
        of_two_rounds,
        lacking,
        one_alone,
        one_of_two,
        too_many,
        one_more,
        cut_short,
        too_long,
        past_its_end,
        a_gap_in_one,
        other_momentum,
    ],
)
def test_a_set_that_is_not_whole_and_of_one_round_leaves_nothing(
    tmp_path: Path, messages: Callable[[], list[mb.CheckpointUpload]]
) -> None:
    with pytest.raises(CheckpointCorrupt):
        receive(messages(), tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_missing_layers_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"lack layer 1$"):
        receive(lacking(), tmp_path / "c")
