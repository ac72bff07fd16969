"""The certificate authority's files: a kill at any moment leaves authorities that all members can follow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from atoll.coordinator.authorities import Authorities
from atoll.coordinator.ca import CoordinatorKeys, write_admin_credential
from atoll.core.certs import CertificateAuthority, is_handed_over, split_pem
from atoll.core.clock import ManualClock
from atoll.core.disk import OsDisk
from atoll.core.errors import InvalidTransition, KeyFileCorrupt

NOW = 1_700_000_000.0
LATER_MS = int(1000 * NOW) + 1000


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture
def kill_after(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many operations on disk are left."""
    budget = {"left": 10**9}

    def limit(name: str) -> None:
        real = getattr(OsDisk, name)

        def step(self: OsDisk, *arguments: object) -> object:
            budget["left"] -= 1
            if budget["left"] < 0:
                raise Killed
            return real(self, *arguments)

        monkeypatch.setattr(OsDisk, name, step)

    for name in ("create", "rename", "unlink", "sync_directory"):
        limit(name)
    return budget


def names(found: Authorities) -> list[str]:
    return [authority.sha256 for authority in found.now.all]


def chain_of(found: Authorities) -> list[bytes]:
    """What its server shows, DER."""
    pems = split_pem(found.now.serving.pem + found.now.shown_pem)
    return [x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER) for pem in pems]


def test_a_rotation_adds_one_and_a_retirement_takes_the_old_one(tmp_path: Path) -> None:
    found = Authorities(tmp_path, NOW)
    (old,) = names(found)
    found.rotate(NOW, LATER_MS)
    new, also = names(found)
    assert (also, found.now.serving.sha256, found.now.issuing.sha256) == (old, old, new)
    assert names(Authorities(tmp_path, NOW)) == [new, old]
    found.retire(NOW)
    assert names(found) == names(Authorities(tmp_path, NOW)) == [new]
    assert found.now.number == 2
    assert {path.name for path in tmp_path.iterdir()} == {"ca.key", "ca.crt", "ca-previous.json"}


def test_all_files_are_private_and_no_old_key_stays(tmp_path: Path) -> None:
    found = Authorities(tmp_path, NOW)
    old = (tmp_path / "ca.key").read_text()
    found.rotate(NOW, LATER_MS)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    found.retire(NOW)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    texts = "".join(path.read_text() for path in tmp_path.iterdir())
    assert old.splitlines()[1] not in texts
    assert texts.count("PRIVATE KEY") == 2  # one, with its begin and its end


@pytest.mark.parametrize("what", ["rotate", "retire"])
def test_a_kill_between_any_two_operations_on_disk(tmp_path: Path, kill_after: dict[str, int], what: str) -> None:
    for steps in range(100):
        directory = tmp_path / str(steps)
        directory.mkdir()
        kill_after["left"] = 10**9
        found = Authorities(directory, NOW)
        (old,), old_pem = names(found), found.now.serving.pem
        if what == "retire":
            found.rotate(NOW, LATER_MS)
        before = names(found)
        kill_after["left"] = steps
        try:
            found.rotate(NOW, LATER_MS) if what == "rotate" else found.retire(NOW)
        except Killed:
            ended = False
        else:
            ended = True
        kill_after["left"] = 10**9
        again = Authorities(directory, NOW)
        if names(again) == before:
            again.rotate(NOW, LATER_MS) if what == "rotate" else again.retire(NOW)
        after = names(again)
        assert after == names(Authorities(directory, NOW))
        assert (after[-1] == old) if what == "rotate" else (after == before[:1])
        if what == "retire":
            assert is_handed_over(chain_of(again), old_pem)
        if ended:
            assert steps >= 3
            return
    raise AssertionError("it never ends")


def test_who_knows_one_of_the_last_four_learns_that_it_was_replaced(tmp_path: Path) -> None:
    found, known = Authorities(tmp_path, NOW), []
    for _ in range(6):
        known.append(found.now.serving.pem)
        found.rotate(NOW, LATER_MS)
        assert not is_handed_over(chain_of(found), known[-1])  # it is still trusted
        found.retire(NOW)
    assert [is_handed_over(chain_of(found), pem) for pem in known] == [False, False, True, True, True, True]
    assert not is_handed_over(chain_of(found), found.now.serving.pem)
    assert not is_handed_over(chain_of(found), CertificateAuthority.generate(NOW).pem)


def test_only_the_old_authority_can_hand_over(tmp_path: Path) -> None:
    old, new, forger = (CertificateAuthority.generate(NOW) for _ in range(3))

    def shown(hand_over: bytes, *authorities: CertificateAuthority) -> list[bytes]:
        pems = [hand_over, *(it.pem for it in authorities)]
        return [x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER) for pem in pems]

    assert is_handed_over(shown(old.hand_over(new, NOW), new), old.pem)
    assert not is_handed_over(shown(forger.hand_over(new, NOW), new, old), old.pem)
    assert not is_handed_over(shown(old.hand_over(new, NOW), forger), old.pem)  # to one that the server does not show
    assert not is_handed_over([], old.pem)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (bytes.fromhex("a003020102"), bytes.fromhex("a003020109")),  # an X.509 version that does not exist
        (bytes.fromhex("0603551d13"), bytes.fromhex("0603551d11")),  # two extensions of one kind
        (bytes([0x86, 11 + 64]), bytes([0xA3, 11 + 64])),  # a kind of name that the library does not know
        (bytes([0x86, 11 + 64]), bytes([0x86, 12 + 64])),  # no DER
    ],
)
def test_a_server_that_shows_nonsense_hands_nothing_over(tmp_path: Path, before: bytes, after: bytes) -> None:
    old, new = (CertificateAuthority.generate(NOW) for _ in range(2))
    good, shown = (
        x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER) for pem in (old.hand_over(new, NOW), new.pem)
    )
    assert good.count(before) == 1
    bad = good.replace(before, after)
    assert not is_handed_over([bad, shown], old.pem)
    assert is_handed_over([bad, good, shown], old.pem)


def test_one_at_a_time(tmp_path: Path) -> None:
    found = Authorities(tmp_path, NOW)
    with pytest.raises(InvalidTransition, match="only one"):
        found.retire(NOW)
    found.rotate(NOW, LATER_MS)
    with pytest.raises(InvalidTransition, match="already"):
        found.rotate(NOW, LATER_MS)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": 2}', '{"version": 1, "number": 1}'])
@pytest.mark.parametrize("name", ["ca-next.json", "ca-previous.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    Authorities(tmp_path, NOW)
    (tmp_path / name).write_text(text)
    with pytest.raises(KeyFileCorrupt, match=name):
        Authorities(tmp_path, NOW)


def test_the_admin_credential_follows(tmp_path: Path) -> None:
    clock = ManualClock()
    keys, place = CoordinatorKeys(tmp_path, clock), tmp_path / "admin"

    def written() -> tuple[int, bool]:
        write_admin_credential(keys, place, "127.0.0.1:1", clock.unix())
        chain, trusted = (place / "admin.crt").read_bytes(), keys.authorities.now
        return len(split_pem((place / "ca.crt").read_bytes())), chain.endswith(trusted.issuing.pem)

    assert written() == (1, True)
    keys.authorities.rotate(clock.unix(), LATER_MS)
    assert written() == (2, True)
    keys.authorities.retire(clock.unix())
    assert written() == (1, True)
    assert json.loads((tmp_path / "ca-previous.json").read_text())["number"] == 2


def test_what_a_kill_left_half_written_is_removed(tmp_path: Path) -> None:
    Authorities(tmp_path, NOW)
    left = tmp_path / ".ca-next.json.123.tmp"
    left.write_text("a secret")
    Authorities(tmp_path, NOW)
    assert not left.exists()
