"""A swarm on paper whose nodes cannot all hold the model, with the planner in its place: twelve layers, any cards."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from unit.coordinator.world import ELIGIBLE_STATES, RUN, World, layer_table, spec_toml

from atoll.coordinator.planner.answer_question import answer_question
from atoll.coordinator.planner.plan_builder import RoutePart, routes_of
from atoll.coordinator.planner.question import Answer, Question
from atoll.coordinator.planner.span_memory import SpanMemory, span_memory
from atoll.coordinator.runs import machine
from atoll.coordinator.state import prefetch
from atoll.coordinator.state.snapshot import Policy
from atoll.coordinator.store.records import Event
from atoll.core.clock import ManualClock
from atoll.core.plan import Plan
from atoll.core.run_spec import parse_run_spec
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import plan_pb2

LAYERS = 12
QUICK = Policy(solve_steps=30, plan_interval_seconds=0.0)
HOST_BYTES = 64 << 30
LONG_ROUNDS = {"round_tokens": 10**8, "stop_tokens": 10**12}  # so that exchanges hold nobody up


def rows() -> list[plan_pb2.LayerInfo]:
    """Embedding, ten blocks, head."""
    kinds = ["embedding", *["block"] * (LAYERS - 2), "head"]
    return [
        plan_pb2.LayerInfo(
            name=f"{kind}.{number}",
            kind=kind,
            parameters=1_000_000,
            flops_per_token_forward=2e6,
            activation_bytes_per_token=256,
        )
        for number, kind in enumerate(kinds)
    ]


@cache
def model() -> SpanMemory:
    """Memory of the model's spans."""
    found = span_memory(layer_table(rows()).SerializeToString(), parse_run_spec(spec_toml()))
    assert found is not None
    return found


def card(layers: int, *, slower: float = 1.0) -> mb.NodeProfile:
    """A device with room for any span of so many layers and for none longer."""
    fits = max(model().device_bytes(first, first + layers - 1) for first in range(LAYERS - layers + 1))
    seconds = 1e-6 * slower
    return mb.NodeProfile(
        device="cuda:0",
        device_name=f"card-{layers}",
        device_memory_bytes=int(fits) + 1,
        host_memory_bytes=HOST_BYTES,
        layer_times=[
            mb.LayerTime(kind=kind, forward_seconds_per_token=seconds, backward_seconds_per_token=2 * seconds)
            for kind in ("embedding", "block", "head")
        ],
    )


@dataclass
class RoutedWorld(World):
    """Answers the machine's questions as soon as they are asked, unless told not to."""

    policy: Policy = field(default_factory=lambda: QUICK)
    table: plan_pb2.LayerTable = field(default_factory=lambda: layer_table(rows()))
    answers: bool = True
    fetches: bool = True  # nodes have the layers of a plan to come as soon as they are told
    asked: list[Question] = field(default_factory=list)

    def tick_done(self) -> None:
        """The planner's turn."""
        memory = self.state.memory.get(RUN)
        if self.answers and memory is not None and memory.question is not None:
            self.bring(memory.question, self.find(memory.question))
        if self.fetches:
            self.fetch_told()

    def fetch_told(self) -> None:
        """All nodes that are there come to have the layers that they were told to fetch, and say so."""
        for name, identity in self.identities.items():
            span, peer = prefetch.layers_to_fetch(self.state, identity.peer_id), identity.peer_id
            if span and self.prepared.get(name, span) != span:
                del self.prepared[name]  # a node says of what it is told now whether it has that
            if span and peer in self.sessions and self.prepared.get(name) != span:
                self.prepared[name] = span
                self.say(name, self.state.live[peer].status.state)

    def find(self, question: Question) -> Answer:
        """Let the planner answer a question."""
        self.asked.append(question)
        return answer_question(question, ManualClock())

    def bring(self, question: Question, found: Answer) -> None:
        """The answer arrives."""
        self.take(machine.apply_planner_answer(self.state, self.now, RUN, question, found))

    def cards(self, **layers: int) -> None:
        """Nodes come, each with a card for so many layers."""
        for name, count in layers.items():
            self.profiles[name] = card(count)
        self.join(*layers)

    def begin(self, **layers: int) -> None:
        """A run that trains with these cards."""
        self.create_run(min_nodes=len(layers), **LONG_ROUNDS)
        self.cards(**layers)
        self.wait(0.4)
        self.say(self.name_of(self.state.memory[RUN].genesis_writer), ELIGIBLE_STATES, genesis=self.genesis())
        self.wait(1)

    def spans(self) -> dict[str, tuple[int, int]]:
        """First and last layer of each member of the newest plan, by name."""
        return {self.name_of(item.peer_id): (item.first_layer, item.last_layer) for item in self.plan.assignments}

    def routes(self) -> list[list[str]]:
        """The routes of the newest plan, by name."""
        return [[self.name_of(part.peer_id) for part in route] for route in routes_of(self.plan)]

    @property
    def plan(self) -> Plan:
        """The newest."""
        return self.plans[-1]

    def told(self, kind: str) -> list[str]:
        """Texts of the events of a kind."""
        return [record.message for record in self.records if isinstance(record, Event) and record.kind == kind]


def covers(route: tuple[RoutePart, ...]) -> bool:
    """True where its spans hold all layers once, in order."""
    ends = [-1, *(part.last for part in route)]
    return ends[-1] == LAYERS - 1 and all(
        part.first == end + 1 <= part.last for part, end in zip(route, ends, strict=False)
    )
