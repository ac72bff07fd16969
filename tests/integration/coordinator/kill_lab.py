"""A real coordinator process under load, killed where it hurts, and a ledger of everything that it acknowledged.

Clients are as honest as nodes are: what was answered counts, what was not may or may not have happened. After every
restart the ledger is held against what the coordinator says.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grpc
from integration.coordinator.lab import SECONDS, Coordinator, Node, admin_channel
from unit.coordinator.world import RUN, genesis_report, hash_of, round_report, spec_toml

from atoll.core.identity import Identity
from atoll.core.manifest import sign_attestation
from atoll.core.membership import DenyList, MembershipVerifier
from atoll.core.quorum import Ballot
from atoll.core.round_id import RoundId
from atoll.core.tokens import JoinToken, parse_join_token
from atoll.v1 import admin_pb2 as admin
from atoll.v1 import admin_pb2_grpc, manifest_pb2
from atoll.v1 import common_pb2 as pb
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import membership_pb2 as mb

SERVE = [sys.executable, "-c", "from atoll.coordinator.cli.serve import main; main()"]
FREE_PORTS = ["--listen", "127.0.0.1", "--enrol-port", "0", "--member-port", "0", "--http-port", "0"]
KINDS = ("token", "revoke", "enrol", "ban", "round", "promise", "vote")
FIRST_VOTE = 5000  # rounds that are voted on and never reported: their votes must outlive everything
TOKENS_A_ROUND = 1000


@dataclass
class Ledger:
    """What was acknowledged."""

    tokens: dict[str, bool] = field(default_factory=dict)  # id → revoked
    enrolled: dict[str, Identity] = field(default_factory=dict)  # by name
    banned: set[str] = field(default_factory=set)  # peer ids
    deny_number: int = 0  # the highest that was seen
    plan_version: int = 0
    event_id: int = 0
    head: bytes = b""
    rounds: int = 0
    reported: bool = True  # whether the newest round was acknowledged; else it may be there or not
    promised: dict[int, Ballot] = field(default_factory=dict)  # by round number
    voted: dict[tuple[int, Ballot], bytes] = field(default_factory=dict)
    maybe: dict[tuple[int, Ballot], bytes] = field(default_factory=dict)  # asked for, not answered
    counts: Counter[str] = field(default_factory=Counter)


@dataclass
class Kill:
    """When this process is to die: at a moment of a call, or after a time."""

    kind: str = ""  # empty: after `seconds` of load
    acked: bool = False  # right after an answer of that kind; else while one is under way
    skip: int = 0  # so many calls of the kind go by first
    seconds: float = 0.0
    now: asyncio.Event = field(default_factory=asyncio.Event)

    def saw(self, kind: str, acked: bool) -> None:
        """A call of that kind was sent, or answered."""
        if (kind, acked) == (self.kind, self.acked):
            self.skip -= 1
            if self.skip < 0:
                self.now.set()


class Victim:
    """The coordinator's processes, one after the other, on one data directory."""

    def __init__(self, data_dir: Path, seed: int) -> None:
        self.data_dir = data_dir
        self.ledger = Ledger()
        self.rng = random.Random(seed)
        self.nodes: list[Node] = []
        self.attempt = 0
        self.kill = Kill()
        self._processes = 0

    @asynccontextmanager
    async def process(self) -> AsyncIterator[subprocess.Popen[bytes]]:
        """One that may not be ready yet; killed at the end."""
        self._processes += 1
        self.notify = self.data_dir.parent / f"n{self._processes}"
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard,
            (self.data_dir.parent / "log").open("ab") as log,
        ):
            heard.bind(str(self.notify))
            heard.setblocking(False)
            process = subprocess.Popen(  # noqa: ASYNC220 - starting one takes a millisecond
                [*SERVE, "serve", "--data-dir", str(self.data_dir), *FREE_PORTS],
                stderr=log,
                env={**os.environ, "NOTIFY_SOCKET": str(self.notify)},
            )
            self.heard = heard
            try:
                yield process
            finally:
                process.kill()
                process.wait(SECONDS)
                self.notify.unlink()

    async def ready(self) -> Coordinator:
        """The process serves; a client of it."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(SECONDS):
            while await loop.sock_recv(self.heard, 64) != b"READY=1":
                pass
        told = json.loads((self.data_dir / "endpoints.json").read_text())
        ca = SimpleNamespace(pem=(self.data_dir / "ca.crt").read_bytes())
        endpoints = SimpleNamespace(enrolment=told["enrolment"], local=told["membership"])
        self._channel = admin_channel(self.data_dir / "admin", told["membership"])
        stub = admin_pb2_grpc.AdminStub(self._channel)
        home = Coordinator(
            cast("object", None),  # type: ignore[arg-type]  # it runs elsewhere
            SimpleNamespace(ca=ca),  # type: ignore[arg-type]
            endpoints,  # type: ignore[arg-type]
            stub,  # type: ignore[arg-type]
            self.data_dir,
        )
        for node in self.nodes:
            node.home = home
        return home

    async def begin(self, home: Coordinator) -> None:
        """A run that trains with two nodes."""
        text = spec_toml(min_nodes=2, stop_tokens=10**12)
        await home.admin.CreateRun(admin.CreateRunRequest(spec_toml=text, start=True), timeout=SECONDS)
        self.nodes = [await (await home.node(name)).connect() for name in ("ann", "bob")]
        self.nodes.sort(key=lambda node: node.identity.peer_id)
        report = genesis_report(self.nodes[0].identity)
        await self.nodes[0].hear(lambda response: response.order == mb.ORDER_WRITE_GENESIS)
        await self.nodes[0].say(mb.NODE_STATE_READY, genesis=report)
        for node in self.nodes:
            await node.plan(1)
        self.ledger.head = hash_of(report)

    async def load(self, home: Coordinator) -> None:
        """Everything at once, until the process dies."""
        many = parse_join_token(
            (await home.admin.CreateToken(admin.CreateTokenRequest(uses=100_000, ttl_seconds=9000))).token
        )
        await asyncio.gather(
            self._tokens(home), self._enrolments(home, many), self._bans(home), self._rounds(), self._votes()
        )

    async def close(self) -> None:
        """Let go of the dead process's connections."""
        for node in self.nodes:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await node.close()
        await self._channel.close()

    # --- load --------------------------------------------------------------------------------------

    async def _call(self, kind: str, call: Callable[[], Awaitable[object]]) -> object:
        self.kill.saw(kind, acked=False)
        answer = await call()
        self.kill.saw(kind, acked=True)
        self.ledger.counts[kind] += 1
        return answer

    async def _tokens(self, home: Coordinator) -> None:
        while True:
            token = cast("JoinToken", await self._call("token", home.token))
            self.ledger.tokens[token.token_id] = False
            if self.rng.random() < 0.3:
                request = admin.RevokeTokenRequest(id=token.token_id)
                await self._call("revoke", lambda request=request: home.admin.RevokeToken(request, timeout=SECONDS))  # type: ignore[misc]
                self.ledger.tokens[token.token_id] = True

    async def _enrolments(self, home: Coordinator, token: JoinToken) -> None:
        while True:
            name = f"node-{self._processes}-{len(self.ledger.enrolled)}-{self.rng.randrange(10**6)}"
            node = Node(home, Identity.generate(), name)
            await self._call("enrol", lambda node=node: node.enrol(token))  # type: ignore[misc]
            self.ledger.enrolled[name] = node.identity
            self.ledger.deny_number = max(self.ledger.deny_number, self._deny(node.enrolled.deny_list).number)

    async def _bans(self, home: Coordinator) -> None:
        while True:
            left = [name for name, item in self.ledger.enrolled.items() if item.peer_id not in self.ledger.banned]
            if not left:
                await home.admin.ListRuns(admin.ListRunsRequest(), timeout=SECONDS)  # let others go on
                continue
            peer = self.ledger.enrolled[self.rng.choice(left)].peer_id
            request = admin.BanNodeRequest(node=peer)
            await self._call("ban", lambda request=request: home.admin.BanNode(request, timeout=SECONDS))  # type: ignore[misc]
            self.ledger.banned.add(peer)

    async def _rounds(self) -> None:
        ann = self.nodes[0]
        for node in self.nodes:
            await node.connect(mb.NODE_STATE_TRAINING)
        while True:
            ledger, identities = self.ledger, [node.identity for node in self.nodes]
            report = round_report(
                ledger.rounds + 1, ledger.head, identities, committed_before=TOKENS_A_ROUND * ledger.rounds
            )
            ledger.reported = False

            async def told(report: mb.RoundReport = report) -> None:
                await ann.acknowledged(await ann.say(rounds=[report]))

            await self._call("round", told)
            ledger.rounds, ledger.head, ledger.reported = ledger.rounds + 1, hash_of(report), True

    async def _votes(self) -> None:
        while True:
            number = FIRST_VOTE + self.rng.randrange(3)
            self.attempt += 1
            name = RoundId(RUN, 1, 0, number, self.attempt)
            await self._promise(name)
            await self._vote(name, self._proposal(name))

    async def _promise(self, name: RoundId) -> mb.VoteResponse:
        answer = cast("mb.VoteResponse", await self._call("promise", lambda: self._ask(name, b"")))
        assert answer.granted
        self.ledger.promised[name.number] = name.ballot
        self._check_accepted(name.number, answer)
        return answer

    async def _vote(self, name: RoundId, proposal: bytes) -> None:
        self.ledger.maybe[name.number, name.ballot] = proposal
        answer = cast("mb.VoteResponse", await self._call("vote", lambda: self._ask(name, proposal)))
        assert answer.granted
        assert answer.vote.signature
        self.ledger.voted[name.number, name.ballot] = proposal

    async def _ask(self, name: RoundId, proposal: bytes) -> mb.VoteResponse:
        peers = [node.identity.peer_id for node in self.nodes]
        opener = next(node for node in self.nodes if node.identity.peer_id == name.opener(peers))
        async with opener.channel() as channel:
            stub = opener.stub_on(channel)
            return await stub.Vote(mb.VoteRequest(round=name.to_proto(), proposal=proposal), timeout=SECONDS)

    def _proposal(self, name: RoundId) -> bytes:
        made = [manifest_pb2.Contribution(peer_id=node.identity.peer_id) for node in self.nodes]
        manifest = manifest_pb2.Manifest(
            round=name.to_proto(), committed_tokens=self.rng.randrange(10**9), epoch=1, contributions=made
        )
        payload = manifest.SerializeToString()
        word = sign_attestation(self.nodes[0].identity, payload)
        return dp.Proposal(payload=payload, attestations=[word]).SerializeToString()

    # --- the ledger against the coordinator ----------------------------------------------------------

    async def check(self, home: Coordinator) -> None:
        """Nothing acknowledged is lost, nothing goes back, no word is broken."""
        ledger = self.ledger
        tokens = (await home.admin.ListTokens(admin.ListTokensRequest(), timeout=SECONDS)).tokens
        revoked = {token.id: token.revoked for token in tokens}
        assert ledger.tokens.keys() <= revoked.keys(), "an acknowledged token is gone"
        assert all(revoked[name] for name, gone in ledger.tokens.items() if gone), "a revoked token is good again"
        nodes = (await home.admin.ListNodes(admin.ListNodesRequest(), timeout=SECONDS)).nodes
        banned = {node.peer_id: node.banned for node in nodes}
        assert {item.peer_id for item in ledger.enrolled.values()} <= banned.keys(), "an enrolment is gone"
        assert all(banned[peer] for peer in ledger.banned), "a ban is gone"
        await self._check_run(home)
        await self._check_deny()
        for number in sorted(ledger.promised):
            await self._check_votes(number)

    async def _check_run(self, home: Coordinator) -> None:
        ledger = self.ledger
        run = await home.admin.GetRun(admin.RunRequest(), timeout=SECONDS)
        possible = {ledger.rounds} if ledger.reported else {ledger.rounds, ledger.rounds + 1}
        assert run.head_round in possible, f"round {run.head_round} instead of {possible}"
        assert run.committed_tokens == TOKENS_A_ROUND * run.head_round
        assert run.rounds_committed == run.head_round
        assert run.plan_version >= ledger.plan_version, "the plan went back"
        ledger.plan_version = run.plan_version
        request = admin.ListRoundsRequest(limit=10_000)
        rounds = (await home.admin.ListRounds(request, timeout=SECONDS)).rounds
        assert [item.round.number for item in rounds] == list(range(1, run.head_round + 1))
        last = 0
        async for item in home.admin.Events(admin.EventsRequest(after_id=ledger.event_id), timeout=SECONDS):
            assert item.id == (last or ledger.event_id) + 1, "an event is missing or numbered twice"
            last = item.id
        ledger.event_id = last or ledger.event_id

    async def _check_deny(self) -> None:
        ann = self.nodes[0]
        await ann.connect(mb.NODE_STATE_TRAINING)
        response = await ann.hear(lambda response: response.HasField("deny_list"))
        deny = self._deny(response.deny_list)
        assert deny.number >= self.ledger.deny_number, "the deny-list went back"
        assert deny.peer_ids >= self.ledger.banned, "a banned peer is not on the list"
        self.ledger.deny_number = deny.number

    def _deny(self, sealed: pb.Signed) -> DenyList:
        return MembershipVerifier(self.nodes[0].enrolled.operator_public_key, RUN).verify_deny_list(sealed)

    async def _check_votes(self, number: int) -> None:
        """A promise above all earlier ones tells the last vote; what is below a promise is refused."""
        promised = self.ledger.promised[number]
        below = RoundId(RUN, 1, 0, number, promised.attempt - 1)
        assert not (await self._ask(below, b"")).granted, "a promise was broken"
        assert not (await self._ask(below, self._proposal(below))).granted
        last = max((ballot for item, ballot in self.ledger.voted if item == number), default=None)
        if last is not None and last >= promised:
            other = RoundId(RUN, 1, 0, number, last.attempt)
            assert not (await self._ask(other, self._proposal(other))).granted, "two votes in one attempt"
        self.attempt += 1
        await self._promise(RoundId(RUN, 1, 0, number, self.attempt))

    def _check_accepted(self, number: int, answer: mb.VoteResponse) -> None:
        """The vote that is told is the newest acknowledged one, or a newer one that was under way."""
        known = {ballot: text for (item, ballot), text in self.ledger.voted.items() if item == number}
        last = max(known, default=None)
        if not answer.HasField("accepted_ballot"):
            assert last is None, "a vote was forgotten"
            return
        told = Ballot(answer.accepted_ballot.plan_version, answer.accepted_ballot.attempt)
        assert last is None or told >= last, "an older vote is told"
        assert answer.accepted_proposal == self.ledger.maybe[number, told], "a vote for something nobody asked for"
