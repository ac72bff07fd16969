"""MemberDirectory: the address records of all members, in hivemind's DHT on the gated P2P and this event loop.

A record is stored at the nodes nearest to its key and at every seed, so that one request to a seed finds the address of
any member. Its key is one of a few *pages* (`core/records.py`), because one message could not hold all records. Lookups
verify every record again, because any peer may store records. Nothing is cached: records are few and short-lived, and
readers need fresh ones.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils import MSGPackSerializer

from atoll.core import log
from atoll.core.clock import Clock
from atoll.core.errors import AtollError, DeadlineExceeded, Rejected, Unreachable
from atoll.core.membership import MembershipVerifier
from atoll.core.records import Record, page_key
from atoll.node.swarm.addresses import readable_seeds
from atoll.node.swarm.dht_messages import node_id_bytes
from atoll.node.swarm.p2p import GatedP2P
from atoll.node.swarm.record_validator import MemberRecords

REPLICAS = 5
RPC_TIMEOUT = timedelta(seconds=6)  # including the hello
STORE_TIMEOUT = timedelta(seconds=20)
LOOKUP_TIMEOUT = timedelta(seconds=20)
SLOW_SEED_GRACE = timedelta(
    seconds=2
)  # for other seeds after the first answer: a hello over a bad link takes this long

_log = log.get("dht")

T = TypeVar("T")


class MemberDirectory:
    """Stores this node's record and looks up the records of all members."""

    def __init__(self, p2p: GatedP2P, authority: MembershipVerifier, clock: Clock, seeds: tuple[str, ...]) -> None:
        self._p2p = p2p
        self._clock = clock
        self._authority = authority
        self._records = MemberRecords(authority, clock)
        self._seeds: dict[str, tuple[str, ...]] = {}  # addresses by peer id
        self._node: DHTNode | None = None
        self.set_seeds(seeds)

    def set_seeds(self, seeds: Sequence[str]) -> None:
        """Replace the run's seeds and their addresses; the next store or lookup contacts them.

        Raises `ConfigError` if no address parses; the previous seeds are kept in that case.
        """
        me = self._p2p.peer_id.to_base58()
        self._seeds = {peer_id: known for peer_id, known in readable_seeds(seeds).items() if peer_id != me}
        for peer_id, addresses in self._seeds.items():
            self._p2p.book.learn(peer_id, addresses)

    async def join(self, *, seeds_optional: bool, timeout: timedelta) -> None:
        """Say hello to the seeds and fill the routing table.

        Raises `Rejected`, and `Unreachable` with the seeds' names.
        """
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                answering = await self._greet_seeds(seeds_optional)
                self._node = await _in_own_task(self._create(answering))
        except TimeoutError as error:
            raise Unreachable(*self._no_seed_answers()) from error
        self._p2p.book.set_resolver(self._fetch_addresses, lambda peer: page_key(self._authority.run_id, peer))

    async def store(self, value: bytes, expires: float) -> None:
        """Publish this node's record until `expires` (Unix seconds). Raises `Unreachable`."""
        node, own = self._joined_node(), self._p2p.peer_id.to_base58()
        name = page_key(self._authority.run_id, own)
        try:
            async with asyncio.timeout(STORE_TIMEOUT.total_seconds()):
                await self._rejoin(node)
                stored = await _in_own_task(node.store(name, value, expires, subkey=own))
                at_seeds = await asyncio.gather(
                    *(self._store_at(node, seed, name, value, expires) for seed in self._seeds)
                )
        except TimeoutError as error:
            raise DeadlineExceeded(f"the DHT did not store {name} within {STORE_TIMEOUT}") from error
        if not stored and not any(at_seeds):
            raise Unreachable(f"no member of the DHT stored this node's record {name}")

    async def lookup(self, names: Iterable[str]) -> dict[str, Record]:
        """Return the verified records under these keys by owner, without banned owners. Raises `DeadlineExceeded`."""
        wanted = list(names)
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT.total_seconds()):
                node = self._joined_node()
                await self._rejoin(node)
                found = await _in_own_task(node.get_many(wanted, sufficient_expiration_time=math.inf))
        except TimeoutError as error:
            raise DeadlineExceeded(f"the DHT did not answer for {wanted} within {LOOKUP_TIMEOUT}") from error
        records: dict[str, Record] = {}
        for name, page in found.items():
            if page is not None and isinstance(page.value, Mapping):
                records |= self._verified(name, {subkey: tuple(entry) for subkey, entry in page.value.items()})
        return records

    async def close(self, timeout: timedelta) -> None:
        """Leave the DHT, without a message to peers; their requests simply fail."""
        if self._node is not None:
            with suppress(TimeoutError, P2PDaemonError):
                async with asyncio.timeout(timeout.total_seconds()):
                    await _in_own_task(self._node.shutdown())

    async def _greet_seeds(self, seeds_optional: bool) -> list[str]:
        """Say hello to all seeds and return the addresses of those that answered.

        If none answered, raises a seed's rejection, if there was one, rather than `Unreachable`.
        """
        greetings = [self._p2p.introductions.say_hello(seed) for seed in self._seeds]
        outcomes = await asyncio.gather(*greetings, return_exceptions=True)
        told = zip(self._seeds.values(), outcomes, strict=True)
        answering = [address for addresses, outcome in told if outcome is None for address in addresses]
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, Unreachable | Rejected):
                raise outcome
        if self._seeds and not answering and not seeds_optional:
            rejections = [outcome for outcome in outcomes if isinstance(outcome, Rejected)]
            raise rejections[0] if rejections else Unreachable(*self._no_seed_answers())
        return answering

    async def _create(self, initial_peers: list[str]) -> DHTNode:
        node = await DHTNode.create(
            p2p=self._p2p,
            node_id=DHTID.from_bytes(node_id_bytes(self._p2p.peer_id.to_bytes())),
            initial_peers=initial_peers,
            num_replicas=REPLICAS,
            wait_timeout=RPC_TIMEOUT.total_seconds(),
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            record_validator=self._records,
            ensure_bootstrap_success=False,  # `_greet_seeds` has checked that
            strict=False,
        )
        # hivemind drops a whole dictionary for one bad entry, so one bad peer could hide all records.
        node.protocol._validate_dictionary = self._records.prune
        return node

    async def _rejoin(self, node: DHTNode) -> None:
        """Ping the seeds that are missing from the routing table, so that the DHT recovers after an outage."""
        table = node.protocol.routing_table
        lost = [peer for peer in map(PeerID.from_base58, self._seeds) if table.get(peer_id=peer) is None]
        await asyncio.gather(*(node.protocol.call_ping(peer) for peer in lost))

    async def _store_at(self, node: DHTNode, seed: str, name: str, value: bytes, expires: float) -> bool:
        own = self._p2p.peer_id.to_base58()
        values = [MSGPackSerializer.dumps(value)]
        key = DHTID.generate(source=name)
        stored = await node.protocol.call_store(PeerID.from_base58(seed), [key], values, expires, subkeys=[own])
        return bool(stored and stored[0])

    async def _fetch_addresses(self, name: str) -> None:
        """Ask each seed once for the addresses on one page. Dials only seeds.

        After the first answer with records, the other seeds get 2 s: one dead seed must not delay every first contact.
        """
        node = self._joined_node()
        key = DHTID.generate(source=name)
        seeds = [PeerID.from_base58(seed) for seed in self._seeds]
        pending = {asyncio.ensure_future(node.protocol.call_find(seed, [key])) for seed in seeds}
        timeout: float | None = None
        try:
            while pending:
                done, pending = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                found = [answer[key][0] for request in done if (answer := request.result())]
                if sum(self._learn(name, value) for value in found):
                    timeout = SLOW_SEED_GRACE.total_seconds()
        finally:
            for request in pending:
                request.cancel()

    def _learn(self, name: str, found: Any) -> bool:
        """Put the addresses that a seed returned into the book; return whether there were any."""
        if found is None or not isinstance(found.value, DictionaryDHTValue):
            return False
        entries = {owner: (MSGPackSerializer.loads(raw), until) for owner, (raw, until) in found.value.items()}
        records = self._verified(name, entries)
        for owner, record in records.items():
            self._p2p.book.learn(owner, record.multiaddrs)
        return bool(records)

    def _verified(self, name: str, entries: dict[str, tuple[bytes, float]]) -> dict[str, Record]:
        records: dict[str, Record] = {}
        for subkey, (value, expires) in entries.items():
            try:
                record = self._records.read(name, subkey, value, expires)
            except AtollError as error:
                _log.info("DHT record dropped", owner=subkey, reason=error.reason, error=str(error))
                continue
            if subkey not in self._p2p.gate.deny.peer_ids and expires > self._clock.unix():
                records[subkey] = record
        return records

    def _joined_node(self) -> DHTNode:
        if self._node is None:
            raise Unreachable("this node has not joined the DHT yet")
        return self._node

    def _no_seed_answers(self) -> tuple[str, str]:
        return (
            f"none of the seeds answers: {', '.join(itertools.chain(*self._seeds.values()))}",
            "check that a seed runs, that its address is right, and that no firewall is between",
        )


async def _in_own_task(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in its own task and return its result: hivemind's waits may swallow the caller's cancellation."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task])
    finally:
        task.cancel()
    return task.result()
