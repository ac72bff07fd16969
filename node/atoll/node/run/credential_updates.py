"""What the coordinator changes of this node's credentials while it runs: certificates, authorities, deny-list, seeds.

The link uses the newest ones, the gate of the swarm's host hears of them, and the next start finds them on disk.
"""

from __future__ import annotations

from pathlib import Path

from atoll.core import log
from atoll.core.errors import AtollError, Rejected
from atoll.core.membership import DenyList
from atoll.node.control.coordinator_link import CoordinatorLink
from atoll.node.control.credentials import Credentials
from atoll.node.swarm.host import SwarmHost
from atoll.v1 import common_pb2 as pb

_log = log.get("daemon")


class CredentialUpdates:
    """`link` is set when it is made, and `host` once the node has joined the swarm."""

    link: CoordinatorLink

    def __init__(self, data_dir: Path) -> None:
        self.host: SwarmHost | None = None
        self._data_dir = data_dir
        self._coordinator_deny_list_older = False

    def renew(self, credentials: Credentials) -> None:
        """The link has a new certificate."""
        self._save()
        if self.host is not None:
            self.host.gate.set_membership(credentials.signed_membership())

    def take_deny_list(self, deny: DenyList, sealed: pb.Signed) -> None:
        """Ban whom a verified deny-list names, and nobody else; keep it if it is newer."""
        known = self.link.credentials.verified_deny_list().number
        self._coordinator_deny_list_older = deny.number < known
        if deny.number > known:
            self.link.credentials = self.link.credentials.with_deny_list(sealed)
            self._save()  # a restart must not forget a ban
        if self.host is not None:
            self.host.gate.set_deny_list(deny)

    def deny_list_for_coordinator(self) -> pb.Signed | None:
        """Return this node's deny-list if the coordinator's is older, as after a restore from a backup."""
        return pb.Signed.FromString(self.link.credentials.deny_list) if self._coordinator_deny_list_older else None

    def take_authorities(self, sealed: pb.Signed) -> None:
        """Trust the coordinator's new CA too, or no longer the old one; the link renews the certificate."""
        known = self.link.credentials
        try:
            self.link.credentials = known.with_authorities(sealed)
        except Rejected as error:
            _log.warning("certificate authorities not adopted", reason=str(error))
        if self.link.credentials != known:
            self._save()

    def take_seeds(self, seeds: tuple[str, ...]) -> None:
        """Use other seeds, now and at the next start."""
        if self.host is not None:
            self.host.set_seeds(seeds)  # raises for addresses that the next start could not use either
        self.link.credentials = self.link.credentials.with_seeds(seeds)
        self._save()

    def _save(self) -> None:
        """Save the credentials for the next start. After a failed write the node goes on; the next change retries."""
        try:
            self.link.credentials.save(self._data_dir)
        except AtollError as error:
            _log.warning("credentials not saved", reason=str(error))
