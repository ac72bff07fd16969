"""A small swarm on paper: specs, identities, and the reports that honest (and other) nodes would send."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from support.memory_store import MemoryStore

from atoll.coordinator.rounds import learner, node_metrics
from atoll.coordinator.rounds.zero_digests import sizes_to_hash, zero_digests
from atoll.coordinator.runs import admission, lifecycle, machine, restart
from atoll.coordinator.state.draft import Draft, Step
from atoll.coordinator.state.run_memory import seats_after
from atoll.coordinator.state.snapshot import Policy, State, StepTime
from atoll.coordinator.store.records import Change, Event, Node, Run, Token
from atoll.core import protocol
from atoll.core.fragments import fragment_of_round
from atoll.core.identity import Identity
from atoll.core.manifest import manifest_hash, sign_vote
from atoll.core.plan import Plan
from atoll.core.quorum import COORDINATOR, Ballot, next_seats
from atoll.core.round_id import RoundId
from atoll.core.run_spec import parse_run_spec
from atoll.core.tokens import hash_secret
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2, plan_pb2
from atoll.v1 import membership_pb2 as mb

RUN = "reef"
CORPUS = "ab" * 32
LAYERS = ("embedding", "block.0", "head")
SECRET = "5" * 48
ELIGIBLE_STATES = mb.NODE_STATE_READY
PROMPT = Policy(plan_interval_seconds=0.0)  # for tests that are not about the time between two plans


def spec_toml(
    *,
    min_nodes: int = 2,
    stop_tokens: int = 10_000,
    round_tokens: int = 1000,
    name: str = RUN,
    fragments: int = 1,
    micro_batches: int = 1,
    data: str = 'path = "corpus"',
) -> str:
    """A run spec as an operator would write it."""
    pipeline = f"[pipeline]\nmicro_batches = {micro_batches}\n" if micro_batches > 1 else ""
    return (
        f'version = 1\n[run]\nname = "{name}"\nmin_nodes = {min_nodes}\nstop_tokens = {stop_tokens}\n'
        f"[data]\n{data}\nsequence_length = 64\n"
        f"{pipeline}[sync]\nround_tokens = {round_tokens}\nfragments = {fragments}\n"
    )


@lru_cache
def digest_of_zeros(parameters: int) -> bytes:
    """The digest of a layer whose outer momentum is zero."""
    return zero_digests([parameters])[parameters]


def layer_states(count: int = len(LAYERS), fill: int = 1) -> list[manifest_pb2.LayerState]:
    """Digests of the right length."""
    digest = bytes([fill]) * 32
    return [manifest_pb2.LayerState(layer=i, anchor_digest=digest, momentum_digest=digest) for i in range(count)]


def commit(payload: bytes, signers: list[Identity], ballot: Ballot | None = None) -> manifest_pb2.CommittedManifest:
    """A manifest with these votes, cast in the attempt that made it or in `ballot`."""
    made = manifest_pb2.Manifest.FromString(payload).round
    ballot = ballot or Ballot(made.plan_version, made.attempt)
    return manifest_pb2.CommittedManifest(
        payload=payload,
        signatures=[sign_vote(signer, payload, ballot) for signer in signers],
        ballot_plan_version=ballot.plan_version,
        ballot_attempt=ballot.attempt,
    )


def layer_table(layers: list[plan_pb2.LayerInfo] | None = None) -> plan_pb2.LayerTable:
    """Of the run's model: three small layers, or these."""
    rows = layers or [plan_pb2.LayerInfo(name=name, parameters=10) for name in LAYERS]
    return plan_pb2.LayerTable(layers=rows, model_hash=parse_run_spec(spec_toml()).model_hash())


def genesis_report(
    writer: Identity, run_id: str = RUN, corpus: str = CORPUS, table: plan_pb2.LayerTable | None = None
) -> mb.GenesisReport:
    """What the chosen node sends."""
    table = table or layer_table()
    manifest = manifest_pb2.Manifest(
        protocol=protocol.ours(),
        round=pb.RoundId(run_id=run_id),
        layers=layer_states(len(table.layers)),
        corpus_digest=bytes.fromhex(corpus),
    )
    for layer, row in zip(manifest.layers, table.layers, strict=True):
        layer.momentum_digest = digest_of_zeros(row.parameters)
    return mb.GenesisReport(layers=table, manifest=commit(manifest.SerializeToString(), [writer]))


def round_report(
    number: int,
    previous: bytes,
    members: list[Identity],
    *,
    plan_version: int = 1,
    tokens_each: int = 500,
    committed_before: int = 0,
    run_id: str = RUN,
    attempt: int = 0,
    signers: list[Identity] | None = None,
    layers: int = len(LAYERS),
    gone: tuple[Identity, ...] = (),
    ballot: Ballot | None = None,
    fragments: int = 1,
    epoch: int = 1,
    seats: list[Identity] | None = None,
    committed_unix_ms: int = 0,
) -> mb.RoundReport:
    """A committed round of `members`, as its opener reports it.

    `gone` were not there any more when it was settled; all others have `seats` unless given. `ballot` is the attempt
    that committed it, if a later one.
    """
    peers = [member.peer_id for member in members]
    ranked = [member.peer_id for member in (seats or members) if member not in gone]
    deciding = next_seats((), ranked, ranked) if ranked else ()
    fragment, counted = fragment_of_round(number, fragments), tokens_each // fragments
    name = pb.RoundId(run_id=run_id, plan_version=plan_version, number=number, attempt=attempt, fragment=fragment)
    manifest = manifest_pb2.Manifest(
        protocol=protocol.ours(),
        round=name,
        previous_hash=previous,
        contributions=[
            manifest_pb2.Contribution(
                peer_id=member.peer_id, tokens=counted, weight=tokens_each, present=member not in gone
            )
            for member in members
        ],
        layers=layer_states(layers, number % 200),
        committed_tokens=committed_before + counted * len(members),
        fragments=fragments,
        seats=[peers.index(peer) for peer in deciding if peer != COORDINATOR],
        coordinator_seat=COORDINATOR in deciding,
        epoch=epoch,
        committed_unix_ms=committed_unix_ms,
    )
    voters = [member for member in members if member not in gone] if signers is None else signers
    committed = commit(manifest.SerializeToString(), voters, ballot)
    told = pb.RoundId(
        run_id=run_id,
        plan_version=committed.ballot_plan_version,
        number=number,
        attempt=committed.ballot_attempt,
        fragment=fragment,
    )
    return mb.RoundReport(round=told, committed=True, manifest=committed, seconds=1.5)


def abandoned_report(number: int, *, plan_version: int = 1, attempt: int = 0, run_id: str = RUN) -> mb.RoundReport:
    """A round that did not commit."""
    name = pb.RoundId(run_id=run_id, plan_version=plan_version, number=number, attempt=attempt)
    return mb.RoundReport(round=name, reason="a member was silent", seconds=3.0)


def hash_of(report: mb.RoundReport | mb.GenesisReport) -> bytes:
    """How the next manifest names this one."""
    return manifest_hash(report.manifest.payload)


@dataclass
class World:
    """Drives the machine as the server does, and keeps everything it said."""

    policy: Policy = field(default_factory=lambda: PROMPT)
    operator: Identity = field(default_factory=Identity.generate)
    state: State = field(default_factory=State)
    now: StepTime = field(default_factory=lambda: StepTime(1_700_000_000_000, 100.0))
    records: list[Change] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    identities: dict[str, Identity] = field(default_factory=dict)
    sessions: dict[str, int] = field(default_factory=dict)
    heads: dict[str, tuple[int, bytes]] = field(default_factory=dict)  # by name: what a node says it holds
    uplinks: dict[str, float] = field(default_factory=dict)  # by name: bytes per second that a node says it measured
    paces: dict[str, float] = field(default_factory=dict)  # by name: tokens per second under the newest plan
    computed: dict[str, float] = field(default_factory=dict)  # by name: seconds a token of the layers it has there
    profiles: dict[str, mb.NodeProfile] = field(default_factory=dict)  # by name; nodes without one tell none
    lost: dict[str, list[int]] = field(default_factory=dict)  # by name: layers that nobody has any more
    prepared: dict[str, range] = field(default_factory=dict)  # by name: layers fetched for a plan to come
    refusing: dict[str, range] = field(default_factory=dict)  # by name: layers that find no room there
    missing: dict[str, str] = field(default_factory=dict)  # by name: the stage that it cannot reach
    table: plan_pb2.LayerTable = field(default_factory=layer_table)

    def __post_init__(self) -> None:
        self.state = replace(self.state, operator_key=self.operator.public_key)

    def take(self, step: Step[object]) -> object:
        """Make a step the present."""
        self.state = step.state
        self.records += step.records
        self.plans += step.plans
        return step.result

    def put(self, row: Run) -> None:
        """Change a row as another program would: a restore."""
        draft = Draft(self.state, self.now)
        draft.put(row)
        self.take(draft.done(None))

    def restart(self) -> None:
        """The process ends and another takes over from what was made durable."""
        store = MemoryStore()
        store.apply(self.records)
        self.state = restart.restore(store.load(), tuple(self.plans), None, self.now, self.operator.public_key)
        self.sessions.clear()

    def wait(self, seconds: float) -> None:
        """Let time pass, ticking as the server does."""
        end = self.now.monotonic + seconds
        while self.now.monotonic < end:
            pause = min(0.2, end - self.now.monotonic)
            self.now = StepTime(self.now.unix_ms + int(pause * 1000), self.now.monotonic + pause)
            for peer, session in self.sessions.items():
                live = self.state.live.get(peer)
                if live is not None and live.session == session:  # nodes that are there keep sending
                    self.state = replace(
                        self.state, live={**self.state.live, peer: replace(live, last_message_at=self.now.monotonic)}
                    )
            self.tick()
            self.tick_done()

    def tick(self) -> None:
        """Take the steps of one tick."""
        self.take(machine.tick_streams(self.state, self.now, self.policy))
        self.take(node_metrics.store(self.state, self.now))
        for run_id in self.state.runs:
            self.take(machine.tick_run(self.state, self.now, self.policy, run_id))

    def tick_done(self) -> None:
        """Whoever else has a turn."""

    def create_run(self, *, start: bool = True, **spec: Any) -> Run:
        """A run."""
        run = self.take(lifecycle.create_run(self.state, self.now, spec_toml(**spec), start=start))
        assert isinstance(run, Run)
        return run

    def token(self, *, uses: int = 100, ttl_seconds: int = 1800, roles: tuple[str, ...] = ("node",)) -> Token:
        """A token whose secret is SECRET."""
        number = f"{len(self.state.tokens):012x}"
        wanted = admission.TokenRequest(number, hash_secret(SECRET), "", uses, ttl_seconds, roles)
        made = self.take(admission.create_token(self.state, self.now, wanted))
        assert isinstance(made, Token)
        return made

    def enrol(self, name: str, token: Token | None = None, secret: str = SECRET) -> Identity:
        """Admit a node; the same name comes back with the same identity."""
        identity = self.identities.setdefault(name, self.new_identity(name))
        chosen = token or self.token()
        applicant = admission.Applicant(chosen.token_id, secret, identity.peer_id, identity.public_key, name)
        node = self.take(admission.enrol(self.state, self.now, applicant))
        assert isinstance(node, Node)
        return identity

    def new_identity(self, _name: str) -> Identity:
        """Another one every time."""
        return Identity.generate()

    def connect(self, name: str, state: mb.NodeState = ELIGIBLE_STATES, corpus: str = CORPUS) -> Identity:
        """Open a stream and report a state."""
        identity = self.identities[name]
        session = self.take(machine.connect(self.state, self.now, identity.peer_id))
        assert isinstance(session, int)
        self.sessions[identity.peer_id] = session
        self.say(name, state, corpus_digest=corpus)
        return identity

    def say(self, name: str, state: mb.NodeState = mb.NODE_STATE_TRAINING, **request: object) -> None:
        """One heartbeat."""
        peer = self.identities[name].peer_id
        number, digest = self.heads.get(name, (0, b""))
        uplink = self.uplinks.get(name, 0.0)
        status = mb.NodeStatus(state=state, head_round=number, head_hash=digest, uplink_bytes_per_second=uplink)
        if name in self.paces:
            status.tokens_per_second, status.plan_version = self.paces[name], self.plans[-1].version
        if name in self.computed:
            span = self.plans[-1].span(peer)
            status.computed.layers.first, status.computed.layers.last = span.start, span.stop - 1
            status.computed.seconds_per_token = self.computed[name]
        if name in self.missing:
            status.missing_stage = self.identities[self.missing[name]].peer_id
        status.lost_layers.extend(self.lost.get(name, ()))
        if name in self.prepared:
            status.prepared_round = self.state.runs[RUN].head_round
            status.prepared.first, status.prepared.last = self.prepared[name].start, self.prepared[name].stop - 1
        if name in self.refusing:
            status.refused.first, status.refused.last = self.refusing[name].start, self.refusing[name].stop - 1
        self.tell(name, status, **request)

    def tell(self, name: str, status: mb.NodeStatus, **request: object) -> None:
        """One heartbeat with exactly that status."""
        peer = self.identities[name].peer_id
        told = {"profile": self.profiles.get(name), **request}
        message = mb.HeartbeatRequest(status=status, **told)  # type: ignore[arg-type]
        self.take(machine.heartbeat(self.state, self.now, peer, self.sessions[peer], message))
        if message.HasField("genesis"):
            zeros = zero_digests(sizes_to_hash(message.genesis.layers))
            self.take(machine.take_genesis(self.state, self.now, peer, self.sessions[peer], message.genesis, zeros))

    @property
    def asked_node(self) -> str:
        """The name of the node that is asked for rounds; empty: nobody."""
        inquiry = self.state.memory[RUN].inquiry
        return self.name_of(inquiry.peer_id) if inquiry is not None and inquiry.peer_id else ""

    def send_asked(self, told: Mapping[int, mb.RoundReport]) -> list[int]:
        """The node that is asked sends those of `told` that follow each other, as it does from disk; their numbers."""
        inquiry = self.state.memory[RUN].inquiry
        assert inquiry is not None
        most = learner.MAX_BATCH if inquiry.agreed is None else 1
        numbers = list(itertools.takewhile(told.__contains__, range(inquiry.first, inquiry.first + most)))
        manifests = [told[number].manifest for number in numbers]
        self.say(self.asked_node, manifests=mb.ManifestAnswer(first=inquiry.first, manifests=manifests))
        return numbers

    def opener_of(self, report: mb.RoundReport) -> str:
        """Whose attempt it was."""
        return self.name_of(self.opener(RoundId.from_proto(report.round)))

    def opener(self, round_id: RoundId) -> str:
        """The peer that may open this attempt; where the round before is unknown, so any member may, one of them."""
        memory = self.state.memory[RUN]
        members = memory.token_caps[round_id.plan_version]
        seats = seats_after(memory, round_id.number - 1)
        return round_id.opener([peer for peer in (members if seats is None else seats) if peer in members])

    def hang_up(self, name: str) -> None:
        """The stream ends."""
        peer = self.identities[name].peer_id
        self.take(machine.disconnect(self.state, self.now, peer, self.sessions.pop(peer)))

    def join(self, *names: str) -> list[Identity]:
        """Enrol and connect."""
        for name in names:
            self.enrol(name)
            self.connect(name)
        return [self.identities[name] for name in names]

    def train(self, *names: str, **spec: Any) -> list[Identity]:
        """A run that trains with these nodes; the identities in the order of the plan."""
        self.create_run(min_nodes=len(names), **spec)
        self.join(*names)
        self.wait(0.4)
        writer = self.state.memory[RUN].genesis_writer
        self.say(self.name_of(writer), ELIGIBLE_STATES, genesis=self.genesis())
        for name in names:
            self.say(name)
        assert self.run.state == "TRAINING"
        return [self.identities[self.name_of(peer)] for peer in self.plans[-1].members]

    def genesis(self) -> mb.GenesisReport:
        """From whoever was asked for it."""
        writer = self.name_of(self.state.memory[RUN].genesis_writer)
        return genesis_report(self.identities[writer], table=self.table)

    def name_of(self, peer_id: str) -> str:
        """The name a peer was given here."""
        return next(name for name, identity in self.identities.items() if identity.peer_id == peer_id)

    @property
    def run(self) -> Run:
        """The run."""
        return self.state.runs[RUN]

    def members(self) -> set[str]:
        """Names in the newest plan."""
        return {self.name_of(peer) for peer in self.plans[-1].members}

    def kinds(self) -> list[str]:
        """Kinds of all events so far."""
        return [record.kind for record in self.records if isinstance(record, Event)]
