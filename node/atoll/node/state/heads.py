"""Which head to believe, among those that the members of a plan offer.

A manifest names its own members, so votes alone prove nothing to who has not followed the run: a liar can sign a
manifest whose only member it is. A head counts when its votes commit it, given who decides its round, *and* more
than half of the members that hold anything agree that this is what that round decided. Two need nobody's agreement:
the base that an operator set, whose hash stands in the plan, and, to who holds a head itself, one that grew out of it
round by round, each decided by those of the round before. So a history that went on with few is found again by many
who were away.
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

_ANSWER = timedelta(seconds=10)
_STRAGGLERS = timedelta(seconds=2)  # for the others, once more than half of the members answered
MAX_HISTORY_ROUNDS = 2048  # rounds that are followed one by one from our own head
_HISTORY = timedelta(seconds=60)  # to follow them
_BATCH = 32  # rounds asked for at once

_log = log.get("catchup")


@dataclass(frozen=True)
class ChosenHead:
    """A head that counts, and the members that hold its state."""

    head: Head
    holders: tuple[str, ...]
    descends_from_held: bool = False  # out of our own, round by round
    conversations: dict[str, StateClient] = field(default_factory=dict)  # with holders; nothing is under way
    held: dict[str, tuple[range, ...]] = field(default_factory=dict)  # holder → its layers; all of who is not in it

    async def end(self) -> None:
        """Close the conversations that nobody took out."""
        await asyncio.gather(*(conversation.close() for conversation in self.conversations.values()))


async def choose_head(network: Network, plan: Plan, operator_key: bytes, held: Head | None) -> ChosenHead | None:
    """The newest head that counts; None when no head does yet. `held` is our own.

    Where enough agree on a newer head than that, it is taken; only otherwise histories are followed. Ends within a few
    answers' deadlines, and a minute more for histories. Who asked ends what it returns.
    """
    inquiry = _HeadSurvey(network, plan)
    try:
        best = await _choose(inquiry, plan, operator_key, held)
        kept = inquiry.reusable_clients(best.holders) if best is not None else {}
        await inquiry.close(kept)
    except BaseException:
        await inquiry.close()
        raise
    return best and replace(best, conversations=kept, held=inquiry.held)


async def _choose(inquiry: _HeadSurvey, plan: Plan, operator_key: bytes, held: Head | None) -> ChosenHead | None:
    offers = await _committed(inquiry, plan, await inquiry.heads(), operator_key)
    doubtful: list[tuple[Head, str]] = []
    believed = None
    for head in sorted(_distinct(offers), key=_newest_first):
        doubt = await _reason_to_reject(inquiry, plan, head, offers)
        if not doubt:
            believed = head
            break
        doubtful.append((head, doubt))
    descends_from_held = False
    if held is not None and plan.accepts(held) and (believed is None or believed.round <= held.round):
        ahead = [head for head, _ in doubtful if head.round > held.round or head.hash == held.hash]
        history = await _history(inquiry, plan, operator_key, held, ahead, offers)
        found = next((head for head in ahead if head.hash in history), None)
        believed, descends_from_held = found or believed, found is not None
    for head, reason in doubtful:
        # one ahead is what an honest member in front is
        if believed is None or head.round > believed.round + 1:
            _log_rejected(_offering(offers, head), head, reason)
    if believed is None:
        return None
    return ChosenHead(
        believed, (*_offering(offers, believed), *_offering(inquiry.former, believed)), descends_from_held
    )


async def _committed(inquiry: _HeadSurvey, plan: Plan, offers: dict[str, Head], operator_key: bytes) -> dict[str, Head]:
    """The offers whose votes commit them, given what went before.

    A member answers for the votes that it sends itself: the true manifest with too few of them is its own lie, and says
    nothing about that manifest. Where nobody has the one before any more, a majority of its own present members must
    have voted for it.
    """
    committed: dict[str, Head] = {}
    for head in _distinct(offers):
        offering = _offering(offers, head)
        if head.hash == plan.base.manifest_hash:
            committed |= dict.fromkeys(offering, head)
            continue
        try:
            electorate = await _electorate(inquiry, plan, head, offering)
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


async def _electorate(inquiry: _HeadSurvey, plan: Plan, head: Head, offering: Iterable[str]) -> Electorate:
    if head.manifest.previous_hash == plan.base.manifest_hash:
        if head.round != plan.base.round + 1:
            raise SignatureInvalid(f"round {head.round} cannot follow round {plan.base.round}")
        return Electorate(frozenset(plan.base.voters))
    before = await inquiry.previous(head, offering)
    return head.electorate if before is None else before.electorate


async def _reason_to_reject(inquiry: _HeadSurvey, plan: Plan, head: Head, offers: dict[str, Head]) -> str:
    """Why `head` does not count; empty when it does."""
    if head.hash == plan.base.manifest_hash:
        return ""
    agreeing = set(_offering(offers, head))
    further = [peer for peer, other in offers.items() if peer not in agreeing and other.round > head.round]
    agreeing |= {peer for peer, hash_ in (await inquiry.hashes(further, head.round)).items() if hash_ == head.hash}
    if 2 * len(agreeing) <= len(offers):
        return f"{len(agreeing)} of {len(offers)} members that hold anything agree"
    if len(offers) == 1 and not agreeing <= head.signers:
        return "the one member that holds anything did not vote for it"
    return ""


async def _history(
    inquiry: _HeadSurvey, plan: Plan, operator_key: bytes, held: Head, ahead: Sequence[Head], offers: dict[str, Head]
) -> set[bytes]:
    """The hashes of `held` and of what grew out of it, up to the newest of `ahead`, as far as can be learnt in time.

    Every round was decided by those who had to: what we would have followed live. Whoever does not have a manifest, or
    another one, is passed over; who is slow to answer is not asked again.
    """
    before, there, hashes = held, -1, {held.hash}
    last = min(max((head.round for head in ahead), default=0), held.round + MAX_HISTORY_ROUNDS)
    offering = [peer for head in ahead for peer in _offering(offers, head)]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_HISTORY.total_seconds()):
            while there < before.round < last and ahead[0].hash not in hashes:
                there = before.round
                for peer in inquiry.to_ask(offering):
                    for found in await inquiry.stored(peer, range(before.round + 1, min(there + _BATCH, last) + 1)):
                        if is_valid_successor(plan, operator_key, before, found):
                            before = found
                            hashes.add(found.hash)
    return hashes


def is_valid_successor(plan: Plan, operator_key: bytes, before: Head, found: Head) -> bool:
    """Whether `found` is the round after `before`, decided by those who had to."""
    if found.manifest.previous_hash != before.hash or not plan.accepts(found):
        return False
    try:
        require_quorum(found, plan.electorate(before), operator_key)
    except SignatureInvalid:
        return False
    return True


def _distinct(offers: dict[str, Head]) -> Iterable[Head]:
    """One head for every manifest that is offered."""
    return {head.hash: head for head in offers.values()}.values()


def _offering(offers: dict[str, Head], head: Head) -> tuple[str, ...]:
    return tuple(peer for peer, other in offers.items() if other.hash == head.hash)


def _newest_first(head: Head) -> tuple[int, bytes]:
    return -head.round, head.hash


def _log_rejected(peers: Iterable[str], head: Head, reason: str) -> None:
    for peer in peers:
        _log.warning("head not believed", peer=peer, round=head.round, reason=reason)


class _HeadSurvey:
    """One conversation with every member that can be reached, for as long as heads are compared."""

    def __init__(self, network: Network, plan: Plan) -> None:
        self._network = network
        self._plan = plan
        self._peers = [peer for peer in (*plan.members, *plan.former) if peer != network.peer_id]
        self.former: dict[str, Head] = {}  # of who is no member any more: nobody's word, but maybe the only bytes
        self.held: dict[str, tuple[range, ...]] = {}  # layers of those who do not hold all
        self._open: dict[str, StateClient] = {}
        self._answered: list[str] = []  # with a head
        self._slow: set[str] = set()

    async def close(self, kept: Collection[str] = ()) -> None:
        await asyncio.gather(*(self._open[peer].close() for peer in self._open if peer not in kept))

    def reusable_clients(self, peers: Iterable[str]) -> dict[str, StateClient]:
        """Conversations with these peers that a fetch should go on with. On other paths it had better dial: meanwhile
        there may be a direct one."""
        return {peer: self._open[peer] for peer in peers if peer in self._open and self._open[peer].has_own_connection}

    async def heads(self) -> dict[str, Head]:
        """The head of every member that answers and holds one that the plan accepts, in the order of the plan."""
        asking = {peer: asyncio.create_task(self._head_of(peer)) for peer in self._peers}
        try:
            await self._most(asking)
            answers = {peer: task.result() for peer, task in asking.items() if task.done()}
        finally:
            for task in asking.values():
                task.cancel()
            await asyncio.gather(*asking.values(), return_exceptions=True)
        found = {peer: head for peer, head in answers.items() if head is not None and self._plan.accepts(head)}
        self.former = {peer: found.pop(peer) for peer in self._plan.former if peer in found}
        return found

    async def hashes(self, peers: Iterable[str], number: int) -> dict[str, bytes]:
        """What each of `peers` says that round `number` decided, by hash."""
        heads = await asyncio.gather(*(self._stored_at(peer, number) for peer in peers))
        return {peer: head.hash for peer, head in heads if head is not None}

    def to_ask(self, first: Iterable[str]) -> list[str]:
        """Everybody who answered and was not slow, `first` first."""
        return [peer for peer in dict.fromkeys([*first, *self._answered]) if peer not in self._slow]

    async def stored(self, peer: str, numbers: Sequence[int]) -> list[Head]:
        """The manifests of `numbers` that `peer` has, in their order, as far as it answers in time."""
        found: list[Head] = []
        try:
            async with asyncio.timeout(_ANSWER.total_seconds()):
                for fresh in (peer not in self._open, True):  # one that was not used for long may have ended
                    if await self._collect(peer, numbers, found) or found or fresh:
                        break
        except TimeoutError:
            self._slow.add(peer)
            _log.warning("slow to tell what it has", peer=peer, rounds=len(found))
        return found

    async def _collect(self, peer: str, numbers: Sequence[int], found: list[Head]) -> bool:
        """Whether it answered everything."""
        try:
            conversation = self._open.get(peer) or await self._dial(peer)
            async for head in conversation.manifests(numbers):
                found.append(head)
        except BaseException as error:  # answers would be out of step from here on
            await self._hang_up(peer)
            if not isinstance(error, AtollError):
                raise
            _log.debug("no manifests", peer=peer, reason=str(error))
            return False
        return True

    async def _dial(self, peer: str) -> StateClient:
        self._open[peer] = await StateClient.connect(self._network, peer, self._plan.run_id, _ANSWER)
        return self._open[peer]

    async def _hang_up(self, peer: str) -> None:
        conversation = self._open.pop(peer, None)
        if conversation is not None:
            await conversation.close()

    async def previous(self, head: Head, first: Iterable[str]) -> Head | None:
        """The manifest that `head` builds on, from whoever has it; `first` are asked first."""
        for peer in dict.fromkeys([*first, *self._open]):
            _, found = await self._stored_at(peer, head.round - 1)
            if found is not None and found.hash == head.manifest.previous_hash and self._plan.accepts(found):
                return found
        return None

    async def _head_of(self, peer: str) -> Head | None:
        try:
            conversation = await self._dial(peer)
            head = await conversation.manifest(None)
            self._answered.append(peer)
            if conversation.held:
                self.held[peer] = conversation.held
            return head
        except NotFound as error:
            _log.debug("no head", peer=peer, reason=str(error))
            return None
        except Unreachable as error:
            _log.debug("no head", peer=peer, reason=str(error))
        except AtollError as error:
            _log.warning("head not believed", peer=peer, reason=str(error))
        except BaseException:
            await self._hang_up(peer)
            raise
        await self._hang_up(peer)  # an answer may be under way
        return None

    async def _stored_at(self, peer: str, number: int) -> tuple[str, Head | None]:
        conversation = self._open.get(peer)
        if conversation is None or number < 0:
            return peer, None
        try:
            return peer, await conversation.manifest(number)
        except NotFound:
            return peer, None
        except AtollError as error:
            _log.debug("no manifest", peer=peer, round=number, reason=str(error))
            await self._hang_up(peer)  # answers would be out of step from here on
            return peer, None

    async def _most(self, asking: Mapping[str, asyncio.Task[Head | None]]) -> None:
        """Wait until all answered, with less patience once more than half of the members did."""
        pending = set(asking.values())
        members = {task for peer, task in asking.items() if peer not in self._plan.former}
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 2 * _ANSWER.total_seconds()
        while pending and (left := deadline - loop.time()) > 0:
            done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if done and 2 * len(pending & members) < max(1, len(members)):
                deadline = min(deadline, loop.time() + _STRAGGLERS.total_seconds())
