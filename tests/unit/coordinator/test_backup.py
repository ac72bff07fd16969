"""Backups: whole and true, or refused; and what a restored coordinator knows of its own forgetting."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.postgres import missing, postgres
from typer.testing import CliRunner
from unit.coordinator.world import RUN, World

from atoll.coordinator import backup, backup_archive
from atoll.coordinator.ca import CoordinatorKeys, write_admin_credential
from atoll.coordinator.cli import serve
from atoll.coordinator.store.records import DenyRow, Event
from atoll.coordinator.store.sql import SqlStore
from atoll.core.clock import SystemClock
from atoll.core.errors import AlreadyExists, AtollError, BackupCorrupt, ConfigError, DataDirUnusable, SignatureInvalid
from atoll.core.identity import Identity
from atoll.core.membership import DenyList, issue_deny_list

MADE_MS = 1_800_000_000_000


def url(data_dir: Path) -> str:
    return f"sqlite:///{data_dir / 'coordinator.db'}"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A data directory with a run, nodes, a token with uses left, and a ban."""
    data_dir = tmp_path / "home"
    data_dir.mkdir()
    clock = SystemClock()
    keys = CoordinatorKeys(data_dir, clock)
    write_admin_credential(keys, data_dir / "admin", "127.0.0.1:1", clock.unix())
    world = World()
    world.train("ann", "bob")
    store = SqlStore(url(data_dir))
    sealed = issue_deny_list(keys.operator, 3, frozenset({"peer"}), clock.unix())
    store.apply([*world.records, DenyRow(3, sealed.SerializeToString())])
    store.close()
    return data_dir


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_keys_come_back_as_they_were_and_nothing_is_open_to_others(home: Path, tmp_path: Path) -> None:
    made = backup.write(home, url(home), tmp_path / "b.tar", MADE_MS)
    assert made.path.stat().st_mode & 0o777 == 0o600
    restored = backup.restore(made.path, tmp_path / "new", "", MADE_MS)
    assert restored.ca_sha256 == made.ca_sha256 == CoordinatorKeys(tmp_path / "new", SystemClock()).ca.sha256
    before, after = files(home), files(tmp_path / "new")
    assert {name: data for name, data in after.items() if "coordinator.db" not in name} == {
        name: data for name, data in before.items() if "coordinator.db" not in name
    }
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "new").rglob("*")} == {0}
    assert {path.name for path in tmp_path.iterdir()} == {"home", "b.tar", "new"}


def test_numbers_go_on_above_all_that_may_have_been_issued(home: Path, tmp_path: Path) -> None:
    backup.write(home, url(home), tmp_path / "b.tar", MADE_MS)
    backup.restore(tmp_path / "b.tar", tmp_path / "new", "", MADE_MS + 60_000)
    store = SqlStore(url(tmp_path / "new"))
    contents = store.load()
    store.close()
    (run,) = contents.runs
    assert (run.plan_version, run.plan_floor) == (1, 1 + 1000 + 600)
    assert contents.deny is not None
    assert contents.deny.number == 3 + 1600
    assert all(token.revoked for token in contents.tokens)
    last = contents.last_event_id
    assert last > 1


def test_a_run_of_a_deleted_name_goes_on_above_the_plans_that_were_before_it(home: Path, tmp_path: Path) -> None:
    store = SqlStore(url(home))
    (run,) = store.load().runs
    store.apply([replace(run, plans_before=70)])
    store.close()
    backup.write(home, url(home), tmp_path / "b.tar", MADE_MS)
    backup.restore(tmp_path / "b.tar", tmp_path / "new", "", MADE_MS)
    store = SqlStore(url(tmp_path / "new"))
    (run,) = store.load().runs
    store.close()
    assert run.plan_floor == 70 + backup.SKIPPED_NUMBERS


def test_the_deny_list_that_is_shown_stays_and_the_next_one_is_above_the_spare_numbers() -> None:
    world = World()
    world.train("ann", "bob")
    world.state = replace(world.state, deny=DenyList(3, frozenset({"peer"})), deny_reserved=1003)
    shown = issue_deny_list(world.operator, 7, frozenset({"peer", world.identities["bob"].peer_id}), 1.0)
    world.say("ann", deny_list=shown)
    assert world.state.deny == DenyList(1004, frozenset({"peer", world.identities["bob"].peer_id}))
    assert world.state.nodes[world.identities["bob"].peer_id].banned
    assert world.kinds()[-1] == "node.banned"
    world.say("ann", deny_list=shown)  # older than ours by now
    assert world.state.deny.number == 1004


def test_a_deny_list_signed_by_another_key_is_refused() -> None:
    world = World()
    world.train("ann", "bob")
    foreign = issue_deny_list(Identity.generate(), 9, frozenset({"peer"}), 1.0)
    with pytest.raises(SignatureInvalid):
        world.say("ann", deny_list=foreign)
    assert world.state.deny.number == 0


def test_a_backup_moves_a_coordinator_to_another_database_and_back(home: Path, tmp_path: Path) -> None:
    if missing():
        pytest.skip(missing())
    backup.write(home, url(home), tmp_path / "b.tar", MADE_MS)
    with postgres() as server:
        elsewhere = server.fresh()
        backup.restore(tmp_path / "b.tar", tmp_path / "new", elsewhere, MADE_MS)
        assert not (tmp_path / "new" / "coordinator.db").exists()
        with pytest.raises(AlreadyExists):
            backup.restore(tmp_path / "b.tar", tmp_path / "other", elsewhere, MADE_MS)
        backup.write(tmp_path / "new", elsewhere, tmp_path / "c.tar", MADE_MS)
    backup.restore(tmp_path / "c.tar", tmp_path / "back", "", MADE_MS)
    store = SqlStore(url(tmp_path / "back"))
    (run,) = store.load().runs
    store.close()
    assert (run.run_id, run.plan_floor) == (RUN, 1 + 2 * backup.SKIPPED_NUMBERS)


def test_a_backup_is_never_written_over_anything(home: Path, tmp_path: Path) -> None:
    target = tmp_path / "b.tar"
    target.write_text("precious")
    with pytest.raises(AlreadyExists):
        backup.write(home, url(home), target, MADE_MS)
    assert target.read_text() == "precious"


def test_a_restore_needs_an_empty_place(home: Path, tmp_path: Path) -> None:
    backup.write(home, url(home), tmp_path / "b.tar", MADE_MS)
    before = files(home)
    with pytest.raises(AlreadyExists):
        backup.restore(tmp_path / "b.tar", home, "", MADE_MS)
    assert files(home) == before
    (tmp_path / "empty").mkdir()
    backup.restore(tmp_path / "b.tar", tmp_path / "empty", "", MADE_MS)


def test_what_is_no_coordinator_is_not_backed_up(tmp_path: Path) -> None:
    with pytest.raises(DataDirUnusable, match="no coordinator"):
        backup.write(tmp_path, url(tmp_path), tmp_path / "b.tar", MADE_MS)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    position = data.index(b"SQLite format 3") + 5000
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def rewrite(data: bytes, change: Callable[[str], str | None], more: str = "") -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data)) as old, tarfile.open(fileobj=target, mode="w") as new:
        for entry in old:
            source, name = old.extractfile(entry), change(entry.name)
            if name is not None:
                entry.name = name
                new.addfile(entry, source)
        if more:
            new.addfile(tarfile.TarInfo(more))
    return target.getvalue()


def lacking(data: bytes) -> bytes:
    return rewrite(data, lambda name: None if name == "operator.key" else name)


def renamed(data: bytes) -> bytes:
    return rewrite(data, lambda name: "../ca.key" if name == "ca.key" else name)


def with_more(data: bytes) -> bytes:
    return rewrite(data, lambda name: name, more="extra")


def without_index(data: bytes) -> bytes:
    return rewrite(data, lambda name: None if name == backup_archive.INDEX else name)


def poem(_data: bytes) -> bytes:
    return b"roses are red " * 100


@pytest.mark.parametrize("spoil", [cut, flip, lacking, renamed, with_more, without_index, poem])
def test_an_incomplete_backup_leaves_no_directory(home: Path, tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    made = backup.write(home, url(home), tmp_path / "b.tar", MADE_MS)
    made.path.write_bytes(spoil(made.path.read_bytes()))
    with pytest.raises(BackupCorrupt):
        backup.restore(made.path, tmp_path / "new", "", MADE_MS)
    assert {path.name for path in tmp_path.iterdir()} == {"home", "b.tar"}


def test_a_backup_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AtollError, match=r"nothing\.tar"):
        backup.restore(tmp_path / "nothing.tar", tmp_path / "new", "", MADE_MS)


@pytest.mark.parametrize("how", ["file", "environment"])
def test_a_restore_takes_the_database_from_where_a_password_is_safe(home: Path, tmp_path: Path, how: str) -> None:
    backup.write(home, url(home), tmp_path / "b.tar", MADE_MS)
    target = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    (tmp_path / "url").write_text(target)
    command = ["restore", str(tmp_path / "b.tar"), "--data-dir", str(tmp_path / "new")]
    named = ["--database", f"file:{tmp_path / 'url'}"] if how == "file" else []
    done = CliRunner().invoke(serve.app, [*command, *named], env={"ATOLL_COORDINATOR_DATABASE": target})
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "new" / "coordinator.db").exists()
    store = SqlStore(target)
    assert store.load().runs
    store.close()
    secret = CliRunner().invoke(serve.app, [*command, "--database", "postgresql://ann:hunter2@reef/atoll"])
    assert isinstance(secret.exception, ConfigError)


def test_the_restore_is_in_the_event_log(home: Path, tmp_path: Path) -> None:
    backup.write(home, url(home), tmp_path / "b.tar", MADE_MS)
    backup.restore(tmp_path / "b.tar", tmp_path / "new", "", MADE_MS)
    store = SqlStore(url(tmp_path / "new"))
    last: Event = store.events(0, 1000)[-1]
    store.close()
    assert last.kind == "coordinator.restored"
