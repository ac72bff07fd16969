"""Credentials that enrolment gave this node, kept in one file that every change replaces as a whole."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from atoll.core.authority_list import AuthorityList, verify_authority_list
from atoll.core.certs import Credential
from atoll.core.errors import KeyFileCorrupt, ProtocolMismatch
from atoll.core.files import read_private, write_private
from atoll.core.membership import DenyList, Member, MembershipVerifier
from atoll.node.control.local_client import CREDENTIALS_FILE
from atoll.v1 import common_pb2 as pb
from atoll.v1 import membership_pb2 as mb


@dataclass(frozen=True)
class Credentials:
    """Keys, certificates and addresses for connections to the coordinator and to other members."""

    run_id: str
    coordinator: str  # host:port of the membership service
    tls_key_pem: str
    tls_chain_pem: str
    ca_pem: str
    operator_key: bytes
    membership: bytes  # serialised Signed
    deny_list: bytes  # serialised Signed
    seeds: tuple[str, ...]
    run_spec_toml: str
    authorities: bytes = b""  # serialised Signed; empty: the coordinator's CA never changed
    run_created_unix_ms: int = 0  # identifies the run among runs of the same name; 0: not known

    @property
    def tls(self) -> Credential:
        """Key and certificates for mutual TLS."""
        return Credential(self.tls_key_pem.encode(), self.tls_chain_pem.encode(), self.ca_pem.encode())

    @property
    def authority(self) -> MembershipVerifier:
        """Verifier of other members' certificates."""
        return MembershipVerifier(self.operator_key, self.run_id, self.run_created_unix_ms)

    def member(self, unix: float) -> Member:
        """This node as described by its certificate. Raises `CertificateInvalid`."""
        return self.authority.verify_membership(self.signed_membership(), unix)

    def signed_membership(self) -> pb.Signed:
        """Return this node's membership certificate, as peers see it."""
        return pb.Signed.FromString(self.membership)

    def verified_deny_list(self) -> DenyList:
        """Return the newest deny-list that the coordinator sent. Raises `SignatureInvalid`."""
        return self.authority.verify_deny_list(pb.Signed.FromString(self.deny_list))

    def renewed(
        self, *, tls_key_pem: bytes, chain_pem: bytes, membership: pb.Signed, deny_list: pb.Signed
    ) -> Credentials:
        """Return a copy with a renewed certificate and a deny-list that is at least as new.

        A membership of another run is ignored: the operator moved this node to that run, and the coordinator's order
        will follow (`moved`).
        """
        is_ours = pb.Membership.FromString(membership.payload).run_id == self.run_id
        return replace(
            self,
            tls_key_pem=tls_key_pem.decode(),
            tls_chain_pem=chain_pem.decode(),
            membership=membership.SerializeToString() if is_ours else self.membership,
        ).with_deny_list(deny_list)

    def moved(self, answer: mb.MoveToRunResponse, peer_id: str, now: float) -> Credentials:
        """Return a copy for the run that the coordinator moved this node to. Key and certificate stay.

        Raises `RunSpecError`, `ProtocolMismatch` for a spec of another run, `SignatureInvalid`, `CertificateInvalid`.
        """
        from atoll.core.run_spec import parse_run_spec  # imports pydantic

        if parse_run_spec(answer.run_spec_toml).run.name != answer.run_id:
            raise ProtocolMismatch(f"the coordinator sent the spec of another run than {answer.run_id!r}")
        moved = replace(
            self,
            run_id=answer.run_id,
            membership=answer.membership.SerializeToString(),
            run_spec_toml=answer.run_spec_toml,
            seeds=tuple(answer.seeds),
            run_created_unix_ms=answer.run_created_unix_ms,
        )
        moved.authority.verify_membership(answer.membership, now, expect_peer_id=peer_id)
        return moved.with_deny_list(answer.deny_list)

    def with_deny_list(self, signed: pb.Signed) -> Credentials:
        """Return a copy with this deny-list, unless it is older. Raises `SignatureInvalid`."""
        if self.authority.verify_deny_list(signed).number < self.verified_deny_list().number:
            return self
        return replace(self, deny_list=signed.SerializeToString())

    def with_authorities(self, signed: pb.Signed) -> Credentials:
        """Return a copy that trusts these CAs, unless the list is older.

        Raises `SignatureInvalid` and its subclasses.
        """
        told, known = verify_authority_list(signed, self.operator_key), self._authority_list()
        if known is not None and told.number <= known.number:
            return self
        ca_pem = b"".join(told.certificates_pem).decode()
        return replace(self, ca_pem=ca_pem, authorities=signed.SerializeToString())

    @property
    def is_of_older_authority(self) -> bool:
        """True if the certificate is not from the newest CA in the coordinator's list."""
        known = self._authority_list()
        return known is not None and not self.tls_chain_pem.encode().endswith(known.certificates_pem[0])

    def _authority_list(self) -> AuthorityList | None:
        if not self.authorities:
            return None
        return verify_authority_list(pb.Signed.FromString(self.authorities), self.operator_key)

    def with_seeds(self, seeds: tuple[str, ...]) -> Credentials:
        """Return a copy with other seeds."""
        return replace(self, seeds=seeds)

    def save(self, directory: Path) -> None:
        """Replace the file, mode 0600. Raises `DataDirUnusable`."""
        plain = {
            key: b64encode(value).decode() if isinstance(value, bytes) else value for key, value in asdict(self).items()
        }
        write_private(directory / CREDENTIALS_FILE, json.dumps({"version": 1, **plain}, indent=1).encode())

    @classmethod
    def load(cls, directory: Path) -> Credentials | None:
        """Read the file; None if this node never joined. Raises `KeyFileCorrupt`."""
        path = directory / CREDENTIALS_FILE
        if not path.exists():
            return None
        try:
            plain = json.loads(read_private(path))
            if plain.pop("version") != 1:
                raise ValueError("its version is not 1")
            for key in ("operator_key", "membership", "deny_list", "authorities"):
                plain[key] = b64decode(plain.get(key, ""), validate=True)
            loaded = cls(**{**plain, "seeds": tuple(plain["seeds"])})
            loaded.verified_deny_list()
            loaded._authority_list()
        except (ValueError, TypeError, KeyError) as error:
            raise KeyFileCorrupt(
                f"{path} is damaged: {error}", "move it away and join again with a new token"
            ) from error
        return loaded
