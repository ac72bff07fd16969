"""Updates of this node's credentials from the coordinator: certificates, authorities, deny-list, seeds.

The link uses the newest credentials, the swarm host's gate receives them, and they are saved for the next start.
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
    """`link` is set right after construction, and `host` once the node has joined the swarm."""

    link: CoordinatorLink

    def __init__(self, data_dir: Path) -> None:
        self.host: SwarmHost | None = None
        self._data_dir = data_dir
        self._coordinator_deny_list_older = False

    def renew(self, credentials: Credentials) -> None:
        """Save the link's new certificate and pass it to the gate."""
        self._save()
        if self.host is not None:
            self.host.gate.set_membership(credentials.signed_membership())

    def take_deny_list(self, deny: DenyList, sealed: pb.Signed) -> None:
        """Ban exactly the peers of a verified deny-list. Save the list if it is newer."""
        known = self.link.credentials.verified_deny_list().number
        self._coordinator_deny_list_older = deny.number < known
        if deny.number > known:
            self.link.credentials = self.link.credentials.with_deny_list(sealed)
            self._save()  # a restart must not forget a ban
        if self.host is not None:
            self.host.gate.set_deny_list(deny)

    def deny_list_for_coordinator(self) -> pb.Signed | None:
        """Return this node's deny-list if the coordinator's list is older, for example restored from a backup."""
        return pb.Signed.FromString(self.link.credentials.deny_list) if self._coordinator_deny_list_older else None

    def take_authorities(self, sealed: pb.Signed) -> None:
        """Adopt the coordinator's list of authorities: a new CA is trusted, or an old one is not any more."""
        known = self.link.credentials
        try:
            self.link.credentials = known.with_authorities(sealed)
        except Rejected as error:
            _log.warning("certificate authorities not adopted", reason=str(error))
        if self.link.credentials != known:
            self._save()

    def take_seeds(self, seeds: tuple[str, ...]) -> None:
        """Replace the seeds, now and for the next start."""
        if self.host is not None:
            self.host.set_seeds(seeds)  # raises for addresses that the next start could not use
        self.link.credentials = self.link.credentials.with_seeds(seeds)
        self._save()

    def _save(self) -> None:
        """Save the credentials for the next start.

        If the write fails, the node continues and the next change retries.
        """
        try:
            self.link.credentials.save(self._data_dir)
        except AtollError as error:
            _log.warning("credentials not saved", reason=str(error))
