"""A swarm whose machines come and go, followed by the planner as a coordinator asks it, against an oracle.

Machines are there for a share of the time (`availability`); absences are exponential, and have a mean. *Live*: who is
silent is missed after 20 s; changes of 1 s make one question; an answer takes 2 s; a plan that gives layers to machines
is issued when these were fetched, while the old one is followed, and at once when a member of the old one is gone;
whoever gets other layers loads them for 15 s; who comes back fetches its span. Who has no place stands by with the
layers of a stage, as `live/standbys.py` has it, and takes its place 3 s after it is gone. *Oracle*: the same solver
at every change, with full knowledge, moves for nothing. *Fixed*: the first plan for ever, whose members fetch what they
missed, too. All three are worth what `cost.evaluate` says that their whole routes train, in tokens. Time is simulated;
searches are counted in steps, so that results repeat.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from atoll.coordinator.planner.cost import evaluate
from atoll.coordinator.planner.cost_tables import CostTables
from atoll.coordinator.planner.links import fill_missing_links
from atoll.coordinator.planner.problem import Problem
from atoll.coordinator.planner.question import STATE_BYTES_PER_PARAMETER, NamedRoute
from atoll.coordinator.planner.repair import intact_routes
from atoll.coordinator.planner.replan import ReplanResult, fetched_bytes, named_routes, replan
from atoll.coordinator.planner.solve import solve
from atoll.core.clock import SystemClock
from atoll.core.errors import NoFeasiblePlan

STEPS = 800  # of a search: less than a coordinator has time for in its two seconds, with so few machines
LOST_SECONDS = 20.0
DEBOUNCE_SECONDS = 1.0
ANSWER_SECONDS = 2.0
LOAD_SECONDS = 15.0
TAKE_OVER_SECONDS = 3.0  # `pipeline_faults --standbys`: 2.2 to 2.9
_PATIENCE_SECONDS = 600.0  # of a search: steps end it before

Routes = tuple[NamedRoute, ...]
Span = tuple[int, int]  # first and last layer


@dataclass(frozen=True)
class ChurnEvent:
    """A machine comes or goes."""

    at: float
    machine: str
    comes: bool


def churn_events(
    names: Sequence[str], availability: float, absence: float, seconds: float, rng: random.Random
) -> tuple[ChurnEvent, ...]:
    """All of them in that time, in order. Everybody is there at first."""
    found = []
    for name in names:
        at, here = 0.0, True
        presence = absence * availability / (1 - availability)
        while (at := at + rng.expovariate(1 / (presence if here else absence))) < seconds:
            here = not here
            found.append(ChurnEvent(at, name, here))
    return tuple(sorted(found, key=lambda turn: turn.at))


class ChurnModel:
    """A problem of which any machines may be there, and what layouts of them are worth."""

    def __init__(self, problem: Problem, steps: int) -> None:
        self.problem = replace(
            problem, machines=tuple(replace(it, availability=1.0, failures_per_hour=0.0) for it in problem.machines)
        )
        self.tables = CostTables(self.problem)
        self.steps = steps
        self.names = [machine.name for machine in self.problem.machines]

    def of(self, present: set[str]) -> Problem:
        """With these machines only."""
        rows = np.array([number for number, name in enumerate(self.names) if name in present])
        links, square = self.problem.links, np.ix_(rows, rows)
        return replace(
            self.problem,
            machines=tuple(self.problem.machines[row] for row in rows),
            links=fill_missing_links(links.rtt_seconds[square].copy(), links.bytes_per_second[square].copy()),
        )

    def rate(self, routes: Sequence[NamedRoute]) -> float:
        """Tokens per second of these routes."""
        return evaluate(self.tables, intact_routes(self.tables, routes)).tokens_per_second

    def best(self, present: set[str], near: Sequence[Routes]) -> Routes:
        """What the solver finds from nothing, or from one of the routes that are `near`, whichever is best."""
        found = [*near]
        problem = self.of(present)
        try:
            clock, rng = SystemClock(), random.Random(0)
            solution = solve(problem, clock=clock, rng=rng, seconds=_PATIENCE_SECONDS, steps=self.steps)
            found.append(named_routes(problem, solution.evaluation.layout))
        except NoFeasiblePlan:
            pass
        whole = (tuple(route for route in routes if present.issuperset(_members([route]))) for routes in found)
        return max(whole, key=self.rate, default=())

    def answer(self, present: set[str], current: Routes, standing: NamedRoute, number: int) -> ReplanResult | None:
        """As a coordinator has it from the planner; None: no plan is possible."""
        try:
            return replan(
                self.of(present),
                current,
                clock=SystemClock(),
                rng=random.Random(number),
                seconds=_PATIENCE_SECONDS,
                steps=self.steps,
                standbys=standing,
            )
        except NoFeasiblePlan:
            return None

    def fetching(self, change: ReplanResult, current: Routes, stale: set[str]) -> dict[str, float]:
        """Seconds that machines of the new layout take to fetch what they lack, by name."""
        layout, tables = change.evaluation.layout, change.tables
        held = tuple(
            tuple(place for place in route if place[0] not in stale) for route in current
        )  # who was away has old layers
        bytes_of = fetched_bytes(tables, held, layout)
        return {name: size / self._downlink(name) for name, size in bytes_of.items()}

    def span_seconds(self, name: str, span: Span | None) -> float:
        """To fetch all of these layers."""
        layers = self.problem.layers[span[0] : span[1] + 1] if span else ()
        state = STATE_BYTES_PER_PARAMETER * sum(layer.parameters for layer in layers)
        return state / self._downlink(name)

    def fits(self, name: str, span: Span) -> bool:
        """Whether it has room for them."""
        return bool(self.tables.fits(self.names.index(name))[span[0], span[1] + 1])

    def _downlink(self, name: str) -> float:
        machine = self.problem.machines[self.names.index(name)]
        return machine.downlink_bytes_per_second * self.problem.training.link_efficiency


@dataclass
class SimulatedCoordinator:
    """A coordinator and its swarm, in simulated time."""

    world: ChurnModel
    plan: Routes
    present: set[str]
    follows: bool = True  # False: the first plan stays
    known: set[str] = field(default_factory=set)  # that the coordinator counts on
    busy_until: dict[str, float] = field(default_factory=dict)  # machines that fetch or load layers
    stale: set[str] = field(default_factory=set)  # came back, and did not fetch yet what it missed
    tokens: float = 0.0
    waiting: float = 0.0  # tokens that routes would have trained whose members are there but fetch or load
    broken: float = 0.0  # and those of which somebody is gone
    plans: int = 1
    abandoned: int = 0
    taken_over: int = 0
    standing: dict[str, Span] = field(default_factory=dict)  # who stands by with which layers, or fetches them
    _now: float = 0.0
    _asked: bool = False
    _preparing: tuple[ReplanResult, dict[str, float]] | None = None
    _events: list[tuple[float, int, str, object]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.known = set(self.present)

    def run(self, changes: Sequence[ChurnEvent], seconds: float) -> None:
        """Until then."""
        for turn in changes:
            self._at(turn.at, "turn", turn)
        while self._events and self._events[0][0] < seconds:
            at, _, what, it = heapq.heappop(self._events)
            self._pass(at)
            getattr(self, f"_on_{what}")(it)
        self._pass(seconds)

    def _pass(self, now: float) -> None:
        """Training goes on; a machine that becomes ready on the way divides the time."""
        for at in sorted({until for until in self.busy_until.values() if self._now < until < now} | {now}):
            here = tuple(route for route in self.plan if self.present.issuperset(_members([route])))
            rates = [self.world.rate(routes) for routes in (self._whole(), here, self.plan)]
            self.tokens += rates[0] * (at - self._now)
            self.waiting += (rates[1] - rates[0]) * (at - self._now)
            self.broken += (rates[2] - rates[1]) * (at - self._now)
            self._now = at

    def _whole(self) -> Routes:
        able = {name for name in self.present if self.busy_until.get(name, 0.0) <= self._now}
        return tuple(route for route in self.plan if able.issuperset(_members([route])))

    def _at(self, when: float, what: str, it: object = None) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what, it))

    def _on_churn(self, turn: object) -> None:
        assert isinstance(turn, ChurnEvent)
        if not turn.comes:
            self.present.discard(turn.machine)
            self.standing.pop(turn.machine, None)
            self._at(self._now + TAKE_OVER_SECONDS, "gone", turn.machine)
            self._at(self._now + LOST_SECONDS, "missed", turn.machine)
            return
        self.present.add(turn.machine)
        self.stale.add(turn.machine)
        seconds = LOAD_SECONDS + self.world.span_seconds(turn.machine, _spans(self.plan).get(turn.machine))
        self.busy_until[turn.machine] = self._now + seconds
        if turn.machine not in self.known:
            self.known.add(turn.machine)
            self._stand_by()
            self._ask()

    def _on_gone(self, name: object) -> None:
        """Who stands by with its layers, and has them, takes the place."""
        span = _spans(self.plan).get(str(name))
        able = [it for it, held in self.standing.items() if held == span and self.busy_until.get(it, 0.0) <= self._now]
        if name in self.present or not self.follows or not able:
            return
        (other, *_), self.taken_over = able, self.taken_over + 1
        del self.standing[other]
        self.plan = tuple(
            tuple((other if place[0] == name else place[0], *place[1:]) for place in route) for route in self.plan
        )
        self._stand_by()

    def _stand_by(self) -> None:
        """All without a place, one for each stage at most, as long as stages are without."""
        if not self.follows:
            return
        spans = _spans(self.plan)
        stages = {spans[name] for route in self.plan if len(route) > 1 for name, _, _ in route}
        free = sorted(self.known & self.present - spans.keys())
        held = {name: span for name, span in self.standing.items() if name in free and span in stages}
        self.standing = {}
        for name, span in held.items():
            if span not in self.standing.values():
                self.standing[name] = span
        for span in sorted(stages - set(self.standing.values()), key=lambda it: (it[0] - it[1], it)):
            able = [name for name in free if name not in self.standing and self.world.fits(name, span)]
            if able:
                self.standing[able[0]] = span
                self.stale.discard(able[0])
                fetched = self._now + self.world.span_seconds(able[0], span) + LOAD_SECONDS
                self.busy_until[able[0]] = max(self.busy_until.get(able[0], 0.0), fetched)

    def _on_missed(self, name: object) -> None:
        assert isinstance(name, str)
        if name not in self.present and name in self.known:
            self.known.discard(name)
            if self._preparing is not None:
                self._end_preparation(name)
            self._ask()

    def _end_preparation(self, lost: str) -> None:
        """Somebody of the next plan is gone: it is given up. Somebody of the old one alone: nobody waits longer."""
        assert self._preparing is not None
        change, _ = self._preparing
        if lost in _members(named_routes(change.tables.problem, change.evaluation.layout)):
            self._preparing, self.abandoned = None, self.abandoned + 1
        elif lost in _members(self.plan):
            self._issue()

    def _ask(self) -> None:
        if self.follows and not self._asked and self._preparing is None:
            self._asked = True
            self._at(self._now + DEBOUNCE_SECONDS, "question")

    def _on_question(self, _: object) -> None:
        known = set(self.known)
        standing = tuple((name, *span) for name, span in sorted(self.standing.items()))
        change = self.world.answer(known, self.plan, standing, next(self._numbers)) if known else None
        self._at(self._now + ANSWER_SECONDS, "answer", (known, change))

    def _on_answer(self, it: object) -> None:
        known, change = it  # type: ignore[misc]
        self._asked = False
        if known != self.known:
            self._ask()
        if change is None:
            return
        routes = named_routes(change.tables.problem, change.evaluation.layout)
        if not self.known.issuperset(_members(routes)) or set(routes) == set(self.plan):
            return
        standing = tuple((name, *span) for name, span in self.standing.items() if self._has_fetched(name))
        waits = self.world.fetching(change, (*self.plan, standing), self.stale)
        self._preparing = change, {name: self._now + seconds for name, seconds in waits.items()}
        if not waits or not self.known.issuperset(_members(self.plan)):
            self._issue()
        else:
            self._at(max(self._preparing[1].values()), "prepared", self._preparing)

    def _has_fetched(self, name: str) -> bool:
        return self.busy_until.get(name, 0.0) <= self._now

    def _on_prepared(self, it: object) -> None:
        if self._preparing is it:
            self._issue()
            self._ask()  # for whoever came meanwhile

    def _issue(self) -> None:
        assert self._preparing is not None
        (change, ready), self._preparing = self._preparing, None
        routes = named_routes(change.tables.problem, change.evaluation.layout)
        spans = _spans(self.plan) | {name: span for name, span in self.standing.items() if self._has_fetched(name)}
        for name, first, last in (place for route in routes for place in route):
            if spans.get(name) != (first, last):
                self.busy_until[name] = max(self._now, ready.get(name, 0.0)) + LOAD_SECONDS
            self.stale.discard(name)
        self.plan, self.plans = routes, self.plans + 1
        self._stand_by()


@dataclass(frozen=True)
class Outcome:
    """Tokens of one replay."""

    live: float
    oracle: float
    fixed: float
    churn_events: int
    plans: int
    abandoned: int
    taken_over: int
    waiting: float
    broken: float


def replay(problem: Problem, availability: float, absence: float, seconds: float, seed: int) -> Outcome:
    """One swarm for so long."""
    world = ChurnModel(problem, STEPS)
    changes = churn_events(world.names, availability, absence, seconds, random.Random(seed))
    everybody = set(world.names)
    first = world.best(everybody, [])
    live, fixed = (SimulatedCoordinator(world, first, set(everybody), follows=follows) for follows in (True, False))
    for one in (live, fixed):
        one.run(changes, seconds)
    oracle = _oracle(world, first, changes, seconds)
    return Outcome(
        live.tokens,
        oracle,
        fixed.tokens,
        len(changes),
        live.plans,
        live.abandoned,
        live.taken_over,
        live.waiting,
        live.broken,
    )


def _oracle(world: ChurnModel, first: Routes, changes: Sequence[ChurnEvent], seconds: float) -> float:
    """Tokens with full knowledge and moves for nothing."""
    present, routes, tokens, now = set(world.names), first, 0.0, 0.0
    for turn in (*changes, ChurnEvent(seconds, "", comes=True)):
        tokens += world.rate(routes) * (turn.at - now)
        now = turn.at
        if turn.machine:
            (present.add if turn.comes else present.discard)(turn.machine)
            routes = world.best(present, [routes, first])
    return tokens


def _spans(routes: Sequence[NamedRoute]) -> dict[str, Span]:
    return {name: (first, last) for route in routes for name, first, last in route}


def _members(routes: Sequence[NamedRoute]) -> set[str]:
    return {name for route in routes for name, _, _ in route}
