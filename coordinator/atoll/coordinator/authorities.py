"""The coordinator's certificate authority and its replacement, as files that a kill at any moment leaves usable.

Between `rotate` and `retire` both authorities are trusted. The new one issues the members' certificates, so members
move to it as they renew. The old one still signs the server's certificate, since every member and every token knows it.
After `retire` there is only the new one.

`ca-next.json` is the next authority; `ca.key` and `ca.crt` are the present one. To retire the present one is to mark
`ca-next.json` so: one atomic write. What follows is repeated at the next start until it is done: the next authority's
files take the place of the present one's. `ca-previous.json` keeps old certificates and their hand-overs, which are
public.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.core.certs import CertificateAuthority, issuer_name
from atoll.core.disk import OS_DISK
from atoll.core.errors import InvalidTransition, KeyFileCorrupt
from atoll.core.files import data_dir_unusable, read_private, remove_unfinished, write_private

KEY, CERTIFICATE, NEXT, PREVIOUS = "ca.key", "ca.crt", "ca-next.json", "ca-previous.json"
SHOWN = 4  # number of last hand-overs: a node may be offline during several
_KEYS = {
    NEXT: {"number", "until_unix_ms", "retired", "key", "certificate", "hand_over"},
    PREVIOUS: {"number", "shown"},
}


@dataclass(frozen=True)
class Trusted:
    """The trusted authorities at one moment."""

    serving: CertificateAuthority  # signs the server's certificates; tokens contain its hash
    issuing: CertificateAuthority  # signs the certificates of members and of the operator
    until_ms: int = 0  # time at which `serving` is retired; 0: there is only one authority
    number: int = 0  # grows with each change
    # certificates that the server sends in addition to its chain: hand-overs and the authorities that signed them
    shown_pem: bytes = b""

    @property
    def all(self) -> tuple[CertificateAuthority, ...]:
        """Authorities whose certificates are accepted, the newest first."""
        return (self.issuing,) if self.issuing is self.serving else (self.issuing, self.serving)

    @property
    def pem(self) -> bytes:
        """Their certificates, the newest first."""
        return b"".join(authority.pem for authority in self.all)

    def issuer_of(self, leaf_pem: bytes) -> str:
        """Hex SHA-256 of the authority that issued a certificate (verified by TLS); empty if it is none of these."""
        issuer = issuer_name(leaf_pem)
        return next((it.sha256 for it in self.all if it.name == issuer), "")


class Authorities:
    """The authorities in a data directory, loaded or created. Raises `KeyFileCorrupt`, `DataDirUnusable`."""

    def __init__(self, data_dir: Path, now: float) -> None:
        self._dir = data_dir
        self._lock = threading.Lock()
        remove_unfinished(data_dir, "ca")
        self._finish_retirement()
        self.now = self._load(now)

    def rotate(self, now: float, until_ms: int) -> None:
        """Create the next authority; the current one will be retired at `until_ms`. Raises `InvalidTransition`."""
        with self._lock:
            if self.now.until_ms:
                raise InvalidTransition(
                    "a new certificate authority is being introduced already",
                    "see `atollctl ca show`; end that with `atollctl ca retire`",
                )
            fresh = CertificateAuthority.generate(now)
            plain = {
                "version": 1,
                "number": self.now.number + 1,
                "until_unix_ms": until_ms,
                "retired": False,
                "key": fresh.key_pem.decode(),
                "certificate": fresh.pem.decode(),
                "hand_over": self.now.serving.hand_over(fresh, now).decode(),
            }
            self._write(NEXT, plain)
            self.now = self._load(now)

    def retire(self, now: float) -> None:
        """Retire the old authority. Raises `InvalidTransition` if there is only one."""
        with self._lock:
            if not self.now.until_ms:
                raise InvalidTransition(
                    "there is only one certificate authority, so none can be retired",
                    "introduce one: `atollctl ca rotate`",
                )
            self._write(NEXT, {**self._read(NEXT), "retired": True})
            self._finish_retirement()
            self.now = self._load(now)

    def _load(self, now: float) -> Trusted:
        present = CertificateAuthority.load_or_create(self._dir / KEY, self._dir / CERTIFICATE, now)
        before = self._read(PREVIOUS)
        shown, number = "".join(before.get("shown", ())).encode(), before.get("number", 0)
        coming = self._read(NEXT)
        if not coming:
            return Trusted(present, present, number=number, shown_pem=shown)
        fresh = CertificateAuthority.from_pem(
            coming["key"].encode(), coming["certificate"].encode(), str(self._dir / NEXT)
        )
        return Trusted(present, fresh, coming["until_unix_ms"], coming["number"], shown)

    def _finish_retirement(self) -> None:
        """Replace the current authority by the next one, if its retirement is decided. Can be repeated."""
        coming = self._read(NEXT)
        if not coming or not coming["retired"]:
            return
        present = read_private(self._dir / CERTIFICATE).decode()
        if present != coming["certificate"]:
            shown = [*self._read(PREVIOUS).get("shown", ()), coming["hand_over"] + present][-SHOWN:]
            self._write(PREVIOUS, {"version": 1, "number": coming["number"] + 1, "shown": shown})
        write_private(self._dir / KEY, coming["key"].encode())
        write_private(self._dir / CERTIFICATE, coming["certificate"].encode())
        try:
            OS_DISK.unlink(self._dir / NEXT)
            OS_DISK.sync_directory(self._dir)
        except OSError as error:
            raise data_dir_unusable(self._dir / NEXT, error) from error

    def _write(self, name: str, plain: dict[str, object]) -> None:
        write_private(self._dir / name, json.dumps(plain, indent=1).encode())

    def _read(self, name: str) -> dict[str, Any]:
        """Read a file written by `_write`; empty if it does not exist. Raises `KeyFileCorrupt`."""
        path = self._dir / name
        if not path.exists():
            return {}
        try:
            plain = json.loads(read_private(path))
            if plain["version"] != 1 or not _KEYS[name] <= plain.keys():
                raise ValueError("its version is not 1, or a key is missing")
        except (ValueError, TypeError, KeyError) as error:
            raise KeyFileCorrupt(f"{path} is damaged: {error}", "restore the keys from a backup") from error
        return dict(plain)
