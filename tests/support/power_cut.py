"""A disk that remembers every operation, and a model of what a power cut between any two of them leaves.

The model has no journal: data survive if synced, names if their directory was synced; what was not synced survives or
not as the generator likes, data also in part or as zeros.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from atoll.core.disk import OS_DISK, Bytes, File


@dataclass(frozen=True)
class Op:
    kind: str  # create write sync rename unlink mkdir rmdir sync_directory
    path: Path  # of a write or sync: the name under which the file was created
    data: bytes = b""
    target: Path = Path()
    serial: int = 0  # of the file


class RecordingDisk:
    """Does everything for real in `root` and keeps the list."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ops: list[Op] = []
        self._serial = 0

    def create(self, path: Path, mode: int = 0o644) -> File:
        self._serial += 1
        self.note("create", path, serial=self._serial)
        return _RecordingFile(self, path, self._serial, OS_DISK.create(path, mode))

    def rename(self, old: Path, new: Path) -> None:
        OS_DISK.rename(old, new)
        self.note("rename", old, target=new.relative_to(self.root))

    def unlink(self, path: Path) -> None:
        OS_DISK.unlink(path)
        self.note("unlink", path)

    def mkdir(self, path: Path, mode: int = 0o755) -> None:
        OS_DISK.mkdir(path, mode)
        self.note("mkdir", path)

    def rmdir(self, path: Path) -> None:
        OS_DISK.rmdir(path)
        self.note("rmdir", path)

    def sync_directory(self, path: Path) -> None:
        self.note("sync_directory", path)

    def note(self, kind: str, path: Path, **more: object) -> None:
        self.ops.append(Op(kind, path.relative_to(self.root), **more))  # type: ignore[arg-type]


class _RecordingFile:
    def __init__(self, disk: RecordingDisk, path: Path, serial: int, real: File) -> None:
        self._disk, self._path, self._serial, self._real = disk, path, serial, real

    def write(self, data: Bytes) -> None:
        self._real.write(data)
        self._disk.note("write", self._path, data=bytes(data), serial=self._serial)

    def sync(self) -> None:
        self._disk.note("sync", self._path, serial=self._serial)

    def close(self) -> None:
        self._real.close()


@dataclass
class _Data:
    now: bytes = b""
    durable: bytes = b""


@dataclass
class _Directory:
    now: dict[str, _Node] = field(default_factory=dict)
    durable: dict[str, _Node] = field(default_factory=dict)
    pending: list[dict[str, _Node | None]] = field(default_factory=list)  # each applied as a whole or not

    def change(self, names: dict[str, _Node | None]) -> None:
        self.pending.append(names)
        _apply(self.now, names)

    def sync(self) -> None:
        self.durable, self.pending = dict(self.now), []


_Node = _Data | _Directory


def _apply(entries: dict[str, _Node], change: dict[str, _Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def leave_after(ops: list[Op], destination: Path, chance: random.Random | None, *, cut: bool = True) -> None:
    """What `ops` leave in `destination` (empty): all of it, or after a power `cut` only what is durable.

    With `chance`, what is not durable may survive too.
    """
    root = _Directory()
    files: dict[int, _Data] = {}

    def directory(path: Path) -> _Directory:
        node = root
        for part in path.parts:
            found = node.now[part]
            assert isinstance(found, _Directory)
            node = found
        return node

    for op in ops:
        parent = directory(op.path.parent) if op.kind not in ("write", "sync", "sync_directory") else root
        match op.kind:
            case "create":
                files[op.serial] = _Data()
                parent.change({op.path.name: files[op.serial]})
            case "write":
                files[op.serial].now += op.data
            case "sync":
                files[op.serial].durable = files[op.serial].now
            case "rename":
                assert op.target.parent == op.path.parent, "only within a directory is a rename one change"
                parent.change({op.target.name: parent.now[op.path.name], op.path.name: None})
            case "unlink" | "rmdir":
                parent.change({op.path.name: None})
            case "mkdir":
                parent.change({op.path.name: _Directory()})
            case "sync_directory":
                directory(op.path).sync()
    _materialise(root, destination, chance, cut)


def _materialise(node: _Directory, path: Path, chance: random.Random | None, cut: bool) -> None:
    entries = dict(node.durable) if cut else node.now
    if cut and chance is not None:
        for change in node.pending:
            if chance.random() < 0.5:
                _apply(entries, change)
    for name, child in entries.items():
        if isinstance(child, _Directory):
            (path / name).mkdir()
            _materialise(child, path / name, chance, cut)
        else:
            (path / name).write_bytes(_survivor(child, chance) if cut else child.now)


def _survivor(data: _Data, chance: random.Random | None) -> bytes:
    if chance is None or data.durable == data.now:
        return data.durable
    match chance.randrange(4):
        case 0:
            return data.durable
        case 1:
            return data.now
        case 2:
            return data.now[: chance.randint(len(data.durable), len(data.now))]
        case _:
            return data.durable + bytes(len(data.now) - len(data.durable))


class FailingDisk:
    """The real disk until operation number `fails_at` (from 0), which raises; with `for_good` all after it too."""

    def __init__(self, fails_at: int, error: int, *, for_good: bool = False) -> None:
        self.seen = 0
        self._fails_at, self._error, self._for_good = fails_at, error, for_good

    def create(self, path: Path, mode: int = 0o644) -> File:
        self.step()
        return _FailingFile(self, OS_DISK.create(path, mode))

    def rename(self, old: Path, new: Path) -> None:
        self.step()
        OS_DISK.rename(old, new)

    def unlink(self, path: Path) -> None:
        self.step()
        OS_DISK.unlink(path)

    def mkdir(self, path: Path, mode: int = 0o755) -> None:
        self.step()
        OS_DISK.mkdir(path, mode)

    def rmdir(self, path: Path) -> None:
        self.step()
        OS_DISK.rmdir(path)

    def sync_directory(self, path: Path) -> None:
        self.step()

    def step(self) -> None:
        number, self.seen = self.seen, self.seen + 1
        if number == self._fails_at or (self._for_good and number > self._fails_at):
            raise OSError(self._error, "made to fail")


class _FailingFile:
    def __init__(self, disk: FailingDisk, real: File) -> None:
        self._disk, self._real = disk, real

    def write(self, data: Bytes) -> None:
        self._disk.step()
        self._real.write(data)

    def sync(self) -> None:
        self._disk.step()

    def close(self) -> None:
        self._real.close()
