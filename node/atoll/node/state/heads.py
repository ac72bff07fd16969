"""Choose the head to follow, among the heads that the members of a plan offer.

A manifest names its own members. So its votes prove nothing to a node that has not followed the run: a liar can sign a
manifest that names only itself. A head is accepted when its electorate's votes commit it *and* more than half of the
members that hold any head agree that its round decided this manifest.

Two kinds of heads need no such majority: the base that the operator set, whose hash is in the plan; and a head that
descends from this node's own head, if the electorate of each round committed the next one. So many returning nodes
accept a history that a few nodes continued without them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from atoll.core import log
from atoll.core.errors import AtollError, NotFound, SignatureInvalid, Unreachable
from atoll.core.manifest import Head, require_quorum
from atoll.core.plan import Plan
from atoll.core.quorum import Electorate
from atoll.node.state.state_client import StateClient
from atoll.node.wire.transport import Network

ANSWER_TIMEOUT = timedelta(seconds=10)
_STRAGGLERS_TIMEOUT = timedelta(seconds=2)  # for the remaining members, once more than half answered
MAX_HISTORY_ROUNDS = 2048  # rounds to follow one by one from this node's head
_HISTORY_TIMEOUT = timedelta(seconds=60)  # for the whole history
_BATCH = 32  # rounds per request

_log = log.get("catchup")


@dataclass(frozen=True)
class ChosenHead:
    """An accepted head, and the members that hold its state."""

    head: Head
    holders: tuple[str, ...]
    descends_from_held: bool = False  # its history was verified round by round from this node's head
    clients: dict[str, StateClient] = field(default_factory=dict)  # open clients to holders, without requests in flight
    held: dict[str, tuple[range, ...]] = field(default_factory=dict)  # holder → its layers; not in it: all layers

    async def end(self) -> None:
        """Close the clients that were not taken out of `clients`."""
        await asyncio.gather(*(client.close() for client in self.clients.values()))


async def choose_head(network: Network, plan: Plan, operator_key: bytes, held: Head | None) -> ChosenHead | None:
    """Choose the newest acceptable head; None when there is none yet. `held` is this node's head.

    Takes a newer head that a majority agrees on; follows histories from `held` only if there is none. Ends within the
    timeouts of a few answers, plus a minute for histories. The caller must call `end` on the result.
    """
    survey = _HeadSurvey(network, plan)
    try:
        best = await _choose(survey, plan, operator_key, held)
        kept = survey.reusable_clients(best.holders) if best is not None else {}
        await survey.close(kept)
    except BaseException:
        await survey.close()
        raise
    return best and replace(best, clients=kept, held=survey.held)


async def _choose(survey: _HeadSurvey, plan: Plan, operator_key: bytes, held: Head | None) -> ChosenHead | None:
    offers = await _committed(survey, plan, await survey.heads(), operator_key)
    rejected: list[tuple[Head, str]] = []
    chosen = None
    for head in sorted(_distinct(offers), key=_newest_first):
        reason = await _reason_to_reject(survey, plan, head, offers, held)
        if not reason:
            chosen = head
            break
        rejected.append((head, reason))
    descends_from_held = False
    if held is not None and plan.accepts(held) and (chosen is None or chosen.round <= held.round):
        ahead = [head for head, _ in rejected if head.round > held.round or head.hash == held.hash]
        history = await _history(survey, plan, operator_key, held, ahead, offers)
        found = next((head for head in ahead if head.hash in history), None)
        chosen, descends_from_held = found or chosen, found is not None
    for head, reason in rejected:
        # an honest member may be one round ahead of the others
        if chosen is None or head.round > chosen.round + 1:
            _log_rejected(_offering(offers, head), head, reason)
    if chosen is None:
        return None
    return ChosenHead(chosen, (*_offering(offers, chosen), *_offering(survey.former, chosen)), descends_from_held)


async def _committed(survey: _HeadSurvey, plan: Plan, offers: dict[str, Head], operator_key: bytes) -> dict[str, Head]:
    """The offers that have enough votes of the electorate that the previous round names.

    A member is responsible for the votes that it sends: too few votes count only against the member that sent them.
    When no member has the previous round, a majority of the manifest's own seats must have voted.
    """
    committed: dict[str, Head] = {}
    for head in _distinct(offers):
        offering = _offering(offers, head)
        if head.hash == plan.base.manifest_hash:
            committed |= dict.fromkeys(offering, head)
            continue
        try:
            electorate = await _electorate(survey, plan, head, offering)
        except AtollError as error:
            _log_rejected(offering, head, str(error))
            continue
        for peer in offering:
            try:
                require_quorum(offers[peer], electorate, operator_key)
                committed[peer] = offers[peer]
            except AtollError as error:
                _log_rejected((peer,), head, str(error))
    return {peer: committed[peer] for peer in offers if peer in committed}


async def _electorate(survey: _HeadSurvey, plan: Plan, head: Head, offering: Iterable[str]) -> Electorate:
    if head.manifest.previous_hash == plan.base.manifest_hash:
        if head.round != plan.base.round + 1:
            raise SignatureInvalid(
                f"round {head.round} names the plan's base, round {plan.base.round}, as the round before it"
            )
        return Electorate(frozenset(plan.base.seats))
    before = await survey.previous(head, offering)
    return head.electorate if before is None else before.electorate


async def _reason_to_reject(
    survey: _HeadSurvey, plan: Plan, head: Head, offers: dict[str, Head], held: Head | None
) -> str:
    """The reason to reject `head`; empty: accept it.

    A node without a head accepts the offers of members on probation if no other member offers a head.
    """
    if head.hash == plan.base.manifest_hash:
        return ""
    agreeing = set(_offering(offers, head))
    further = [peer for peer, other in offers.items() if peer not in agreeing and other.round > head.round]
    agreeing |= {peer for peer, hash_ in (await survey.hashes(further, head.round)).items() if hash_ == head.hash}
    counted = plan.without_probation(offers.keys()) or (frozenset(offers) if held is None else frozenset())
    agreeing &= counted
    if 2 * len(agreeing) <= len(counted):
        return f"only {len(agreeing)} of {len(counted)} members that hold a head agree; more than half must"
    return ""


async def _history(
    survey: _HeadSurvey, plan: Plan, operator_key: bytes, held: Head, ahead: Sequence[Head], offers: dict[str, Head]
) -> set[bytes]:
    """The hashes of `held` and of its descendants up to the newest of `ahead` that arrive in time.

    Each round must have the votes of a majority of the seats that the manifest before it names. Skips members that lack
    a manifest or have a different one. Does not ask slow members again.
    """
    before, batch_start, hashes = held, -1, {held.hash}
    last = min(max((head.round for head in ahead), default=0), held.round + MAX_HISTORY_ROUNDS)
    offering = [peer for head in ahead for peer in _offering(offers, head)]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_HISTORY_TIMEOUT.total_seconds()):
            while batch_start < before.round < last and ahead[0].hash not in hashes:
                batch_start = before.round
                for peer in survey.to_ask(offering):
                    numbers = range(before.round + 1, min(batch_start + _BATCH, last) + 1)
                    for found in await survey.stored(peer, numbers):
                        if is_valid_successor(plan, operator_key, before, found):
                            before = found
                            hashes.add(found.hash)
    return hashes


def is_valid_successor(plan: Plan, operator_key: bytes, before: Head, found: Head) -> bool:
    """Whether `found` directly follows `before` and is committed by the electorate of `before`."""
    if found.manifest.previous_hash != before.hash or not plan.accepts(found):
        return False
    try:
        require_quorum(found, plan.electorate(before), operator_key)
    except SignatureInvalid:
        return False
    return True


def _distinct(offers: dict[str, Head]) -> Iterable[Head]:
    """One head per offered manifest."""
    return {head.hash: head for head in offers.values()}.values()


def _offering(offers: dict[str, Head], head: Head) -> tuple[str, ...]:
    """The members that offer `head`."""
    return tuple(peer for peer, other in offers.items() if other.hash == head.hash)


def _newest_first(head: Head) -> tuple[int, bytes]:
    return -head.round, head.hash


def _log_rejected(peers: Iterable[str], head: Head, reason: str) -> None:
    for peer in peers:
        _log.warning("head rejected", peer=peer, round=head.round, reason=reason)


class _HeadSurvey:
    """Open clients to every reachable member, to compare their heads and manifests."""

    def __init__(self, network: Network, plan: Plan) -> None:
        self._network = network
        self._plan = plan
        self._peers = [peer for peer in (*plan.members, *plan.former) if peer != network.peer_id]
        self.former: dict[str, Head] = {}  # heads of previous members: they do not count, but may be the only donors
        self.held: dict[str, tuple[range, ...]] = {}  # peer → its layers; not in it: all layers
        self._open: dict[str, StateClient] = {}
        self._answered: list[str] = []  # peers that answered with a head
        self._slow: set[str] = set()  # not asked again

    async def close(self, kept: Collection[str] = ()) -> None:
        await asyncio.gather(*(self._open[peer].close() for peer in self._open if peer not in kept))

    def reusable_clients(self, peers: Iterable[str]) -> dict[str, StateClient]:
        """Open clients to `peers` that a fetch should reuse: those with their own connection.

        For other peers the fetch opens a new stream, because a direct connection may exist by now.
        """
        return {peer: self._open[peer] for peer in peers if peer in self._open and self._open[peer].has_own_connection}

    async def heads(self) -> dict[str, Head]:
        """The head of every member that answers and holds one that the plan accepts, in the order of the plan."""
        asking = {peer: asyncio.create_task(self._head_of(peer)) for peer in self._peers}
        try:
            await self._wait_for_most(asking)
            answers = {peer: task.result() for peer, task in asking.items() if task.done()}
        finally:
            for task in asking.values():
                task.cancel()
            await asyncio.gather(*asking.values(), return_exceptions=True)
        found = {peer: head for peer, head in answers.items() if head is not None and self._plan.accepts(head)}
        self.former = {peer: found.pop(peer) for peer in self._plan.former if peer in found}
        return found

    async def hashes(self, peers: Iterable[str], number: int) -> dict[str, bytes]:
        """The manifest hash of round `number` according to each of `peers`."""
        heads = await asyncio.gather(*(self._stored_at(peer, number) for peer in peers))
        return {peer: head.hash for peer, head in heads if head is not None}

    def to_ask(self, first: Iterable[str]) -> list[str]:
        """Peers that answered and were not slow, those in `first` first."""
        return [peer for peer in dict.fromkeys([*first, *self._answered]) if peer not in self._slow]

    async def stored(self, peer: str, numbers: Sequence[int]) -> list[Head]:
        """The manifests of rounds `numbers` that `peer` sends in time, in their order."""
        found: list[Head] = []
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT.total_seconds()):
                for fresh in (peer not in self._open, True):  # retry once: the peer closes streams that idle for long
                    if await self._collect(peer, numbers, found) or found or fresh:
                        break
        except TimeoutError:
            self._slow.add(peer)
            _log.warning("peer answered too slowly for its manifests", peer=peer, rounds=len(found))
        return found

    async def _collect(self, peer: str, numbers: Sequence[int], found: list[Head]) -> bool:
        """Append manifests to `found`; returns whether the peer answered every request."""
        try:
            client = self._open.get(peer) or await self._dial(peer)
            async for head in client.manifests(numbers):
                found.append(head)
        except BaseException as error:  # close: later answers would not match their requests
            await self._hang_up(peer)
            if not isinstance(error, AtollError):
                raise
            _log.debug("no manifests", peer=peer, reason=str(error))
            return False
        return True

    async def _dial(self, peer: str) -> StateClient:
        self._open[peer] = await StateClient.connect(self._network, peer, self._plan.run_id, ANSWER_TIMEOUT)
        return self._open[peer]

    async def _hang_up(self, peer: str) -> None:
        client = self._open.pop(peer, None)
        if client is not None:
            await client.close()

    async def previous(self, head: Head, first: Iterable[str]) -> Head | None:
        """Fetch the manifest before `head` from any member that has it, asking those in `first` first."""
        for peer in dict.fromkeys([*first, *self._open]):
            _, found = await self._stored_at(peer, head.round - 1)
            if found is not None and found.hash == head.manifest.previous_hash and self._plan.accepts(found):
                return found
        return None

    async def _head_of(self, peer: str) -> Head | None:
        try:
            client = await self._dial(peer)
            head = await client.manifest(None)
            self._answered.append(peer)
            if client.held:
                self.held[peer] = client.held
            return head
        except NotFound as error:
            _log.debug("no head", peer=peer, reason=str(error))
            return None
        except Unreachable as error:
            _log.debug("no head", peer=peer, reason=str(error))
        except AtollError as error:
            _log.warning("head rejected", peer=peer, reason=str(error))
        except BaseException:
            await self._hang_up(peer)
            raise
        await self._hang_up(peer)  # an answer may still be in flight
        return None

    async def _stored_at(self, peer: str, number: int) -> tuple[str, Head | None]:
        client = self._open.get(peer)
        if client is None or number < 0:
            return peer, None
        try:
            return peer, await client.manifest(number)
        except NotFound:
            return peer, None
        except AtollError as error:
            _log.debug("no manifest", peer=peer, round=number, reason=str(error))
            await self._hang_up(peer)  # later answers would not match their requests
            return peer, None

    async def _wait_for_most(self, asking: Mapping[str, asyncio.Task[Head | None]]) -> None:
        """Wait until all peers answered, or `_STRAGGLERS_TIMEOUT` after more than half of the members answered."""
        pending = set(asking.values())
        uncounted = {*self._plan.former, *self._plan.on_probation}
        members = {task for peer, task in asking.items() if peer not in uncounted}
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 2 * ANSWER_TIMEOUT.total_seconds()
        while pending and (left := deadline - loop.time()) > 0:
            done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if done and 2 * len(pending & members) < max(1, len(members)):
                deadline = min(deadline, loop.time() + _STRAGGLERS_TIMEOUT.total_seconds())
