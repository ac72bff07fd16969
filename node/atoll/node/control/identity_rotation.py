"""Change of this node's identity key, while it keeps its membership.

The next key and the coordinator's answer wait in a folder of the data directory. The answer's file decides: while it is
missing, the old identity is valid; once it exists, the new one is, and `finish_rotation` copies both files to their
places. So a kill or a power cut at any moment leaves one usable identity. The key is written before the coordinator is
asked. If the answer is lost, the next try asks for the same key again and gets the same answer.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import grpc

from atoll.core.certs import new_tls_key_and_csr, not_after
from atoll.core.clock import Clock
from atoll.core.disk import OS_DISK
from atoll.core.errors import CertificateInvalid, Unreachable, UsageError
from atoll.core.files import data_dir_unusable, make_private_dir, read_private, remove_unfinished, write_private
from atoll.core.grpc_errors import from_rpc_error
from atoll.core.identity import Identity
from atoll.core.identity_rotation import sign_rotation
from atoll.node.control.channel import dial, refuse_replaced_authority
from atoll.node.control.credentials import Credentials
from atoll.node.control.local_client import CREDENTIALS_FILE
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import membership_pb2_grpc

KEY_FILE = "identity.key"
FOLDER = "rotation"
TIMEOUT = timedelta(seconds=10)


async def rotate_identity(data_dir: Path, clock: Clock) -> str:
    """Give this node a new identity, or finish an earlier try; returns its peer id. The caller holds the lock.

    Raises the coordinator's error, `UsageError` if the node never joined, `CertificateInvalid`, `Unreachable`,
    `KeyFileCorrupt`, `DataDirUnusable`. After an error this node still has the old identity.
    """
    finished = finish_rotation(data_dir)
    if finished is not None:
        return finished
    credentials = Credentials.load(data_dir)
    if credentials is None or not (data_dir / KEY_FILE).exists():
        raise not_joined(data_dir)
    if not_after(credentials.tls_chain_pem.encode()) <= clock.unix():
        raise CertificateInvalid(
            "this node's certificate has expired, so the coordinator cannot move its membership",
            "join as a new node: ask your operator for a token and run `atoll join` with another --data-dir",
        )
    old = Identity.load(data_dir / KEY_FILE)
    credentials = await _of_present_run(credentials, old, data_dir, clock)
    new = Identity.load_or_create(make_private_dir(data_dir / FOLDER) / KEY_FILE)
    replaced = await _ask(credentials, old, new, clock)
    replaced.save(data_dir / FOLDER)
    finish_rotation(data_dir)
    return new.peer_id


def finish_rotation(data_dir: Path) -> str | None:
    """Move a new identity that the coordinator accepted into place; return its peer id, or None without one.

    Every step can be repeated. Raises `KeyFileCorrupt`, `DataDirUnusable`.
    """
    folder = data_dir / FOLDER
    for place in (data_dir, folder):
        remove_unfinished(place, KEY_FILE)
    accepted = Credentials.load(folder)
    if accepted is None:
        return None
    key, current = folder / KEY_FILE, data_dir / KEY_FILE
    if key.exists():  # otherwise both files are already in place
        write_private(current, read_private(key))
        accepted.save(data_dir)
    try:
        key.unlink(missing_ok=True)  # delete the key first: a key without an answer counts as not accepted yet
        OS_DISK.sync_directory(folder)
        OS_DISK.unlink(folder / CREDENTIALS_FILE)
        OS_DISK.sync_directory(folder)
    except OSError as error:
        raise data_dir_unusable(folder, error) from error
    shutil.rmtree(folder, ignore_errors=True)
    return Identity.load(current).peer_id


def not_joined(data_dir: Path) -> UsageError:
    """Error for a directory without a member."""
    return UsageError(f"the node in {data_dir} has not joined a run yet", "join with a token: atoll join")


async def _of_present_run(credentials: Credentials, identity: Identity, data_dir: Path, clock: Clock) -> Credentials:
    """Credentials for the run to which the operator moved this node while it was offline.

    A new identity must be for that run.
    """
    async with dial(credentials) as channel:
        stub = membership_pb2_grpc.MembershipServiceStub(channel)
        try:
            answer = await stub.MoveToRun(mb.MoveToRunRequest(), timeout=TIMEOUT.total_seconds())
        except grpc.aio.AioRpcError:
            return credentials  # the next call reports the error, or repeats an answer that was lost
    if answer.run_id == credentials.run_id:
        return credentials
    from atoll.node.control.begin_membership import begin_membership  # here, because it imports logs

    moved = credentials.moved(answer, identity.peer_id, clock.unix())
    begin_membership(data_dir, moved)
    return moved


async def _ask(credentials: Credentials, old: Identity, new: Identity, clock: Clock) -> Credentials:
    key_pem, csr_der = new_tls_key_and_csr()
    request = mb.RotateIdentityRequest(
        rotation=sign_rotation(old, new, credentials.operator_key),
        csr_der=csr_der,
        csr_signature=new.sign("csr", csr_der),
    )
    async with dial(credentials) as channel:
        stub = membership_pb2_grpc.MembershipServiceStub(channel)
        try:
            answer = await stub.RotateIdentity(request, timeout=TIMEOUT.total_seconds())
        except grpc.aio.AioRpcError as error:
            problem = from_rpc_error(error, f"the coordinator at {credentials.coordinator}")
            if isinstance(problem, Unreachable):
                await refuse_replaced_authority(credentials)
            raise problem from error
    credentials.authority.verify_membership(answer.membership, clock.unix(), expect_peer_id=new.peer_id)
    renewed = credentials.renewed(
        tls_key_pem=key_pem,
        chain_pem=answer.certificate_chain_pem,
        membership=answer.membership,
        deny_list=answer.deny_list,
    )
    own = f"/p2p/{old.peer_id}"  # a seed's old address contains its old peer id
    return replace(renewed, seeds=tuple(seed for seed in renewed.seeds if not seed.endswith(own)))
