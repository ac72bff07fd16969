"""The coordinator's keys and certificates: made once, renewed in time, never written over."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.coordinator.ca import (
    ADMIN_LIFETIME,
    SERVER_LIFETIME,
    CoordinatorKeys,
    ServerCertificate,
    write_admin_credential,
)
from atoll.core.clock import ManualClock
from atoll.core.errors import KeyFileCorrupt


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_keys_are_made_once_and_private(tmp_path: Path, clock: ManualClock) -> None:
    first, second = CoordinatorKeys(tmp_path, clock), CoordinatorKeys(tmp_path, clock)
    assert first.ca.pem == second.ca.pem
    assert first.operator.public_key == second.operator.public_key
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())


def test_an_interrupted_first_start_starts_over(tmp_path: Path, clock: ManualClock) -> None:
    CoordinatorKeys(tmp_path, clock)
    (tmp_path / "ca.crt").unlink()
    with pytest.raises(KeyFileCorrupt, match="but not"):
        CoordinatorKeys(tmp_path, clock)  # something was signed: a backup must exist
    (tmp_path / "operator.key").unlink()
    old = (tmp_path / "ca.key").read_bytes()
    CoordinatorKeys(tmp_path, clock)
    assert (tmp_path / "ca.key").read_bytes() != old


def test_the_server_says_no_change_until_its_leaf_is_due(tmp_path: Path, clock: ManualClock) -> None:
    certificate = ServerCertificate(CoordinatorKeys(tmp_path, clock).authorities, clock)
    certificate.credentials(mutual=True)
    assert certificate.fetch() is None
    clock.advance(SERVER_LIFETIME.total_seconds() * 2 / 3 + 1)
    assert certificate.fetch() is not None
    assert certificate.fetch() is None


def test_the_admin_credential_is_kept_while_good_and_renewed_in_time(tmp_path: Path, clock: ManualClock) -> None:
    keys, place = CoordinatorKeys(tmp_path, clock), tmp_path / "admin"

    def written(endpoint: str) -> bytes:
        write_admin_credential(keys, place, endpoint, clock.unix())
        assert f'endpoint = "{endpoint}"' in (place / "admin.toml").read_text()
        return (place / "admin.crt").read_bytes()

    first = written("127.0.0.1:1")
    assert written("127.0.0.1:2") == first
    assert place.stat().st_mode & 0o777 == 0o700
    clock.advance(ADMIN_LIFETIME.total_seconds() * 0.7)
    assert written("127.0.0.1:2") != first


def test_a_credential_of_another_authority_is_replaced(tmp_path: Path, clock: ManualClock) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_admin_credential(CoordinatorKeys(tmp_path / name, clock), tmp_path / "admin", "127.0.0.1:1", clock.unix())
    assert (tmp_path / "admin" / "ca.crt").read_bytes() == CoordinatorKeys(tmp_path / "b", clock).ca.pem


def test_keys_that_do_not_belong_together_are_refused(tmp_path: Path, clock: ManualClock) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        CoordinatorKeys(tmp_path / name, clock)
    (tmp_path / "a" / "ca.crt").write_bytes((tmp_path / "b" / "ca.crt").read_bytes())
    with pytest.raises(KeyFileCorrupt, match="is not the key of"):
        CoordinatorKeys(tmp_path / "a", clock)
