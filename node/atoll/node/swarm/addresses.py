"""AddressBook: the multiaddrs at which each peer can be dialled.

p2pd cannot find a peer by its id alone, because its own DHT (kad) is off. Addresses come from the configuration
(seeds), from the coordinator's plan, and from address records in the DHT. The book keeps only addresses that this node
may dial (`direct/dial_policy.py`). When a peer does not answer at its known addresses, the book asks its resolver for
the page of the DHT that has the peer: once for all concurrent callers, and at most every two seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from datetime import timedelta
from itertools import islice

from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.multiaddr.exceptions import Error as MultiaddrError

from atoll.core import log
from atoll.core.clock import Clock
from atoll.core.errors import ConfigError
from atoll.node.direct.dial_policy import DialPolicy
from atoll.node.wire.refusals import printable

RESOLVE_INTERVAL = timedelta(seconds=2)
_resolving: ContextVar[bool] = ContextVar("resolving", default=False)
_P2P = b"\xa5\x03"  # the multiaddr code of /p2p/, as a varint
MAX_PEERS = 4096
MAX_ANNOUNCED_MULTIADDRS = 64  # of this node; the coordinator accepts no more

_MAX_LOGGED = 3  # refused addresses in one line

_log = log.get("addresses")


class AddressBook:
    """Multiaddrs by peer id. They are not trusted: the handshake proves the identity of the peer that answers."""

    def __init__(self, clock: Clock, policy: DialPolicy) -> None:
        self._clock = clock
        self._policy = policy
        self._logged_refusals: set[str] = set()  # peers
        self._addresses: dict[str, tuple[Multiaddr, ...]] = {}
        self._resolver: Callable[[str], Awaitable[None]] | None = None
        self._page_of: Callable[[str], str] = str
        self._resolving: dict[str, asyncio.Task[None]] = {}  # by page
        self._resolve_from: dict[str, float] = {}  # page → monotonic seconds

    def learn(self, peer_id: str, multiaddrs: Iterable[str]) -> None:
        """Replace the addresses of `peer_id`. Those that do not parse, or may not be dialled, are left out."""
        named = tuple(islice(multiaddrs, MAX_ANNOUNCED_MULTIADDRS))
        allowed = tuple(text for text in named if self._policy.allows(text))
        if len(allowed) < len(named):
            self._log_refusal(peer_id, [text for text in named if text not in allowed], len(allowed))
        parsed = tuple(filter(None, (parse(text, peer_id) for text in allowed)))
        if parsed and (peer_id in self._addresses or len(self._addresses) < MAX_PEERS):
            self._addresses[peer_id] = parsed

    def known(self, peer_id: str) -> tuple[Multiaddr, ...]:
        """Return the stored addresses of `peer_id`."""
        return self._addresses.get(peer_id, ())

    def set_resolver(self, resolver: Callable[[str], Awaitable[None]], page_of: Callable[[str], str]) -> None:
        """Use `resolver`, which fills the book through `learn`. While it dials, `find` uses the book only.

        The resolver gets a page of the DHT; `page_of` maps a peer id to its page.
        """
        self._resolver, self._page_of = resolver, page_of

    async def find(self, peer_id: str) -> tuple[Multiaddr, ...]:
        """Ask the resolver, since stored addresses may be outdated; then return the addresses of `peer_id`."""
        if self._resolver is not None and not _resolving.get():
            now, page = self._clock.monotonic(), self._page_of(peer_id)
            if page not in self._resolving and now >= self._resolve_from.get(page, 0.0):
                self._resolve_from[page] = now + RESOLVE_INTERVAL.total_seconds()
                self._resolving[page] = asyncio.create_task(self._resolve(self._resolver, page))
                self._resolving[page].add_done_callback(lambda _task: self._resolving.pop(page))
            if page in self._resolving:
                await asyncio.shield(self._resolving[page])
        return self.known(peer_id)

    def _log_refusal(self, peer_id: str, refused: list[str], left: int) -> None:
        """Log refused addresses, once for each peer.

        A single one is normal, since nodes also announce private addresses.
        """
        if peer_id not in self._logged_refusals and len(self._logged_refusals) < MAX_PEERS:
            self._logged_refusals.add(peer_id)
            named = [printable(text) for text in refused[:_MAX_LOGGED]]
            _log.info("addresses not dialled", peer=peer_id, refused=len(refused), left=left, for_example=named)

    async def _resolve(self, resolver: Callable[[str], Awaitable[None]], page: str) -> None:
        _resolving.set(True)  # for this task and for the tasks that it starts
        await resolver(page)


def parse(text: str, peer_id: str) -> Multiaddr | None:
    """Parse a multiaddr into the form that p2pd dials, without `/p2p/<peer>` at its end; None if it does not parse.

    A relayed address contains the relay's peer id. hivemind's codec writes it as a CID, which p2pd cannot read, so
    this function encodes it itself.
    """
    first, *others = text.removesuffix(f"/p2p/{peer_id}").split("/p2p/")
    try:
        raw = Multiaddr(first).to_bytes()
        for other in others:
            name, slash, rest = other.partition("/")
            identity = PeerID.from_base58(name).to_bytes()
            raw += _P2P + bytes([len(identity)]) + identity + (Multiaddr(slash + rest).to_bytes() if rest else b"")
        return Multiaddr(raw)
    except (MultiaddrError, ValueError):
        return None


def announceable_multiaddrs(multiaddrs: Iterable[str]) -> tuple[str, ...]:
    """Return at most 64 addresses to announce. Loopback addresses are left out unless there are no others."""
    everything = tuple(multiaddrs)
    return (tuple(a for a in everything if not a.startswith(("/ip4/127.", "/ip6/::1/"))) or everything)[
        :MAX_ANNOUNCED_MULTIADDRS
    ]


def peer_id_of(multiaddr: str) -> str:
    """Return the peer id at the end of a seed's address. Raises `ConfigError`."""
    peer_id = multiaddr.rpartition("/p2p/")[2]
    if "/p2p/" not in multiaddr or not _is_peer_id(peer_id) or parse(multiaddr, peer_id) is None:
        raise ConfigError(f"{multiaddr!r} does not name a seed", "write it like /ip4/192.0.2.1/tcp/4001/p2p/12D3KooW…")
    return peer_id


def readable_seeds(multiaddrs: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Group the addresses of seeds by peer id. An address that does not parse is logged and left out.

    Raises `ConfigError` only if none parses: other members report these addresses, and one bad report must not disable
    the others.
    """
    found: dict[str, tuple[str, ...]] = {}
    errors: list[ConfigError] = []
    for address in multiaddrs:
        try:
            peer_id = peer_id_of(address)
        except ConfigError as error:
            errors.append(error)
            _log.warning("seed address ignored", reason=str(error))
            continue
        found[peer_id] = (*found.get(peer_id, ()), address)
    if errors and not found:
        raise errors[0]
    return found


def _is_peer_id(text: str) -> bool:
    try:
        PeerID.from_base58(text)
    except ValueError:
        return False
    return bool(text)
