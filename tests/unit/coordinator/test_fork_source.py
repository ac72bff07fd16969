"""Runs that begin with the weights of another run: what may be named, who writes genesis, and what is kept for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from unit.coordinator.world import (
    LAYERS,
    RUN,
    World,
    commit,
    digest_of_zeros,
    genesis_report,
    hash_of,
    layer_states,
    layer_table,
    round_report,
    spec_toml,
)

from atoll.coordinator.rounds import reports
from atoll.coordinator.rounds.genesis import MAX_PAYLOAD_BYTES
from atoll.coordinator.runs import admission, assignment, fork_source, lifecycle, recovery
from atoll.coordinator.services.views import order_for
from atoll.coordinator.state import lookup
from atoll.coordinator.state.draft import Draft
from atoll.coordinator.state.kept_rounds import MAX_KEPT_ROUNDS, rounds_held_elsewhere, update_kept_rounds
from atoll.coordinator.store.records import Event, Thin
from atoll.core.errors import AlreadyExists, InvalidRequest, InvalidTransition, NotFound, RunSpecError
from atoll.core.identity import Identity
from atoll.core.manifest import Head
from atoll.v1 import manifest_pb2, plan_pb2
from atoll.v1 import membership_pb2 as mb

ALL = plan_pb2.Span(first=0, last=len(LAYERS) - 1)
READY = mb.NODE_STATE_READY


class Reef(World):
    """A run that committed three rounds, and its nodes with checkpoints of them."""

    reports: dict[int, mb.RoundReport]
    members_of_reef: list[Identity]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reports = {}
        self.members_of_reef = self.train("ann", "bob", stop_tokens=10**6)
        self.commit_more(3)

    def commit_more(self, rounds: int) -> None:
        """So many rounds of the source commit."""
        for number in range(self.run.head_round + 1, self.run.head_round + 1 + rounds):
            previous = hash_of(self.reports[number - 1] if number > 1 else self.genesis_of_reef)
            report = round_report(number, previous, self.members_of_reef, committed_before=1000 * (number - 1))
            self.say(self.opener_of(report), rounds=[report])
            self.reports[number] = report
            assert self.run.head_round == number

    @property
    def genesis_of_reef(self) -> mb.GenesisReport:
        return mb.GenesisReport(manifest=manifest_pb2.CommittedManifest.FromString(self.run.genesis))

    def info(self, number: int, layers: plan_pb2.Span = ALL, manifest: bytes = b"") -> mb.CheckpointInfo:
        digest = manifest or hash_of(self.reports[number])
        return mb.CheckpointInfo(round=number, manifest_hash=digest, bytes=9, layers=layers)

    def hold(self, name: str, *infos: mb.CheckpointInfo) -> None:
        """A node of the source reports these checkpoints."""
        self.say(name, checkpoints_changed=True, checkpoints=infos)

    def fork(self, number: int = 2, name: str = "kelp", *, manifest: str = "", text: str = "", start: bool = True):
        """Create a fork as `atollctl run fork` does."""
        digest = manifest or hash_of(self.reports[number]).hex()
        section = f'[fork]\nrun = "{RUN}"\nround = {number}\nmanifest = "{digest}"\n'
        spec = (text or spec_toml(name=name)) + section
        return self.take(lifecycle.create_run(self.state, self.now, spec, start=start))

    def move(self, name: str, *former: mb.CheckpointInfo, run_id: str = "kelp") -> None:
        """Assign a node, move it, and have it report what its disk has of the source."""
        self.take(assignment.assign(self.state, self.now, name, run_id))
        self.take(assignment.move(self.state, self.now, self.identities[name].peer_id))
        self.connect(name)
        self.say(name, READY, former_checkpoints=[mb.FormerCheckpoint(run_id=RUN, checkpoint=it) for it in former])

    def forked_genesis(self, name: str, number: int = 2, fill: int | None = None, momentum: bytes = b""):
        """A genesis by this node with the weights of that round, or with others."""
        made = genesis_report(self.identities[name], run_id="kelp")
        manifest = manifest_pb2.Manifest.FromString(made.manifest.payload)
        del manifest.layers[:]
        manifest.layers.extend(layer_states(fill=number if fill is None else fill))
        for layer, row in zip(manifest.layers, made.layers.layers, strict=True):
            layer.momentum_digest = momentum or digest_of_zeros(row.parameters)
        made.manifest.CopyFrom(commit(manifest.SerializeToString(), [self.identities[name]]))
        made.source_manifest = self.reports[number].manifest.payload
        return made

    @property
    def writer(self) -> str:
        peer = self.state.memory["kelp"].genesis_writer
        return self.name_of(peer) if peer else ""

    @property
    def reason(self) -> str:
        return self.state.memory["kelp"].no_plan_reason

    def told(self, kind: str) -> list[str]:
        return [it.message for it in self.records if isinstance(it, Event) and it.kind == kind]


@pytest.fixture
def world() -> Reef:
    return Reef()


# --- what may be named -------------------------------------------------------------------------------


def test_a_source_is_found_with_the_nodes_that_hold_it_also_those_that_moved_away(world: Reef) -> None:
    world.hold("ann", world.info(2), world.info(3))
    world.hold("bob", world.info(2))
    world.fork()
    world.move("bob", world.info(2))
    found = fork_source.find(world.state, RUN, 2)
    assert [world.name_of(item.peer_id) for item in found.held] == ["ann", "bob"]
    assert (found.manifest_hash, found.committed) == (hash_of(world.reports[2]), True)
    world.fork(name="dune")  # from the same source again, though a holder trains elsewhere


def test_a_round_that_nobody_holds_is_refused_with_the_rounds_that_are_held(world: Reef) -> None:
    world.hold("ann", world.info(3))
    with pytest.raises(NotFound, match="no node holds a checkpoint of round 2 of run 'reef'; nodes hold round 3: ann"):
        world.fork(2)
    with pytest.raises(NotFound, match="no node holds"):
        fork_source.find(world.state, RUN, 77)
    assert "kelp" not in world.state.runs


def test_a_round_that_is_not_known_to_have_committed_needs_its_hash_by_name(world: Reef) -> None:
    world.hold("ann", world.info(9, manifest=b"\x07" * 32))
    with pytest.raises(NotFound, match="not known to have committed.*" + "07" * 32) as refused:
        fork_source.find(world.state, RUN, 9)
    assert "--manifest" in refused.value.remedy
    assert not fork_source.find(world.state, RUN, 9, b"\x07" * 32).committed
    assert fork_source.find(world.state, RUN, 9, logged=b"\x07" * 32).committed  # an old round, by the log
    world.fork(9, manifest="07" * 32)


def test_another_manifest_than_the_committed_one_is_refused(world: Reef) -> None:
    world.hold("ann", world.info(2, manifest=b"\x07" * 32))
    with pytest.raises(InvalidRequest, match="committed with manifest"):
        world.fork(2, manifest="07" * 32)
    with pytest.raises(NotFound, match="no node holds"):
        world.fork(2)


def test_a_round_of_which_nodes_hold_some_layers_each_is_refused_with_the_way_out(world: Reef) -> None:
    world.hold("ann", world.info(2, plan_pb2.Span(first=0, last=1)))
    world.hold("bob", world.info(2, plan_pb2.Span(first=2, last=2)))
    with pytest.raises(InvalidTransition, match="ann 0-1, bob 2-2") as refused:
        world.fork()
    assert "checkpoint pull" in refused.value.remedy


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (spec_toml(name="kelp") + "[model]\nlayers = 2\n", r"\[model\]"),
        (spec_toml(name="kelp", data='path = "corpus"\ntokenizer = "gpt2"'), "data.tokenizer"),
    ],
)
def test_a_fork_with_another_model_or_vocabulary_is_refused(world: Reef, text: str, names: str) -> None:
    world.hold("ann", world.info(2))
    with pytest.raises(RunSpecError, match=names):
        world.fork(text=text)


def test_a_fork_onto_an_existing_name_and_one_of_an_unknown_run_are_refused(world: Reef) -> None:
    world.hold("ann", world.info(2))
    with pytest.raises(AlreadyExists):
        world.fork(name=RUN)
    gone = f'[fork]\nrun = "moon"\nround = 2\nmanifest = "{"07" * 32}"\n'
    with pytest.raises(NotFound, match="'moon'"):
        lifecycle.create_run(world.state, world.now, spec_toml(name="kelp") + gone, start=False)


@pytest.mark.parametrize("line", ["round = -1", "manifest = 'AB'", "run = '../reef'", "colour = 1"])
def test_a_wrong_fork_section_is_refused_by_name(world: Reef, line: str) -> None:
    keys = {"run": "'reef'", "round": "2", "manifest": f"'{'07' * 32}'"}
    keys.pop(line.split()[0], None)
    section = "[fork]\n" + "\n".join([line, *(f"{key} = {value}" for key, value in keys.items())]) + "\n"
    with pytest.raises(RunSpecError, match=f"fork.{line.split()[0]}"):
        lifecycle.create_run(world.state, world.now, spec_toml(name="kelp") + section, start=False)


def test_a_stopped_run_can_be_forked(world: Reef) -> None:
    world.hold("ann", world.info(2))
    world.take(lifecycle.stop(world.state, world.now, RUN))
    world.fork()
    assert world.told("run.created")[-1].endswith("from round 2 of run reef")


# --- who writes genesis ------------------------------------------------------------------------------


def test_only_a_node_that_holds_the_source_is_asked_however_low_the_peer_ids_of_others_are(world: Reef) -> None:
    world.hold("ann", world.info(2))
    world.fork()
    ids = {name: world.identities[name].peer_id for name in ("ann", "bob")}
    highest = max(ids, key=lambda name: ids[name])
    for name in ids:
        world.move(name, *([world.info(2)] if name == highest else [world.info(3)]))
    world.wait(1)
    assert world.writer == highest
    assert order_for(world.state, lookup.node(world.state, highest)) == mb.ORDER_WRITE_GENESIS


def test_a_fork_waits_with_a_reason_until_a_node_comes_that_holds_its_source(world: Reef) -> None:
    world.hold("ann", world.info(2))
    world.enrol("cyd")
    world.fork()
    world.move("bob")
    world.take(assignment.assign(world.state, world.now, "cyd", "kelp"))
    world.take(assignment.move(world.state, world.now, world.identities["cyd"].peer_id))
    world.connect("cyd")
    world.wait(2)
    assert world.state.runs["kelp"].state == "WAITING"
    assert "needs a node that holds the checkpoint of round 2 of run reef" in world.reason
    world.move("ann", world.info(2))
    world.wait(1)
    assert (world.writer, world.reason) == ("ann", "")


def test_a_fork_trains_from_the_weights_of_its_source(world: Reef) -> None:
    world.hold("ann", world.info(2))
    world.fork()
    for name in ("ann", "bob"):
        world.move(name, world.info(2))
    world.wait(1)
    world.say(world.writer, READY, genesis=world.forked_genesis(world.writer))
    assert world.state.runs["kelp"].state == "TRAINING"


def stranger(world: Reef, name: str) -> None:
    world.take(admission.set_probation(world.state, world.now, name, on_probation=True))


def fork_held_by_a_stranger(world: Reef) -> None:
    """Ann, on probation, holds the source of a fork for which one node is enough."""
    world.hold("ann", world.info(2))
    world.fork(text=spec_toml(name="kelp", min_nodes=1))
    stranger(world, "ann")


def test_a_stranger_that_alone_holds_the_source_is_not_asked_while_the_run_has_known_nodes(world: Reef) -> None:
    world.hold("ann", world.info(2))
    world.fork()
    stranger(world, "ann")
    world.move("ann", world.info(2))
    world.move("bob")
    world.wait(1)
    assert (world.state.runs["kelp"].state, world.writer) == ("WAITING", "")
    assert "only nodes on probation hold the checkpoint of round 2 of run reef here: ann" in world.reason
    assert "node vouch" in world.told("plan.impossible")[-1]
    world.say("bob", READY, former_checkpoints=[mb.FormerCheckpoint(run_id=RUN, checkpoint=world.info(2))])
    world.wait(1)
    assert (world.writer, world.reason) == ("bob", "")


def test_a_known_node_that_leaves_does_not_give_the_genesis_to_a_stranger(world: Reef) -> None:
    fork_held_by_a_stranger(world)
    for name in ("ann", "bob"):
        world.move(name, world.info(2))
    world.wait(1)
    assert world.writer == "bob"
    world.say("bob", READY, genesis=mb.GenesisReport(refusal=mb.FORK_REFUSAL_DAMAGED))
    world.wait(1)
    assert world.writer != "ann"
    world.hang_up("bob")
    world.wait(60)
    assert world.writer != "ann"
    world.take(admission.set_probation(world.state, world.now, "ann", on_probation=False))
    world.move("bob")
    world.wait(1)
    assert world.writer == "ann"


def test_strangers_that_move_before_the_known_nodes_do_not_get_the_genesis(world: Reef) -> None:
    fork_held_by_a_stranger(world)
    world.take(assignment.assign(world.state, world.now, "bob", "kelp"))  # and it is still training
    world.move("ann", world.info(2))
    world.wait(1)
    assert (world.state.runs["kelp"].state, world.writer) == ("WAITING", "")
    world.move("bob", world.info(2))
    world.wait(1)
    assert world.writer == "bob"


def test_a_stranger_that_was_asked_loses_the_genesis_when_a_known_node_comes(world: Reef) -> None:
    fork_held_by_a_stranger(world)
    world.move("ann", world.info(2))
    world.wait(1)
    assert world.writer == "ann"
    world.move("bob", world.info(2))
    world.say("ann", READY, genesis=world.forked_genesis("ann"))
    assert world.state.runs["kelp"].state != "TRAINING"
    world.wait(1)
    assert world.writer == "bob"


def test_where_a_run_has_only_strangers_one_of_them_writes(world: Reef) -> None:
    world.hold("ann", world.info(2))
    world.fork()
    for name in ("ann", "bob"):
        stranger(world, name)
        world.move(name, world.info(2))
    world.wait(1)
    assert world.writer in ("ann", "bob")


# --- a source that became void -----------------------------------------------------------------------


def recover_to(world: Reef, number: int, *names: str) -> None:
    digest = world.state.memory[RUN].committed[number].manifest_hash
    for name in names:
        world.heads[name] = (number, digest)
        world.say(name)
    world.take(recovery.recover(world.state, world.now, RUN, force=True))
    assert world.run.head_round == number


@pytest.mark.parametrize("restarted", [False, True])
def test_a_fork_whose_source_a_recovery_made_void_says_so_and_cannot_be_started(world: Reef, restarted: bool) -> None:
    world.hold("ann", world.info(3))
    world.fork(3)
    world.fork(3, name="dune", start=False)
    recover_to(world, 1, "ann", "bob")
    world.hold("ann", world.info(1))  # it has set the later one aside
    if restarted:
        world.restart()
    world.wait(1)
    assert "round 3 of run reef, with which it begins, is void" in world.reason
    assert "fork from another round" in world.told("plan.impossible")[-1]
    with pytest.raises(InvalidTransition, match="round 3 of run reef, with which it begins, is void"):
        lifecycle.start(world.state, world.now, "dune", world.policy)


def test_a_fork_whose_source_became_void_goes_on_if_a_node_that_moved_away_still_holds_it(world: Reef) -> None:
    world.enrol("cyd")
    world.connect("cyd")
    world.hold("cyd", world.info(3))
    world.fork(3)
    world.move("cyd", world.info(3))
    recover_to(world, 1, "ann", "bob")
    world.wait(1)
    assert "void" not in world.reason
    world.move("bob")
    world.wait(1)
    assert world.writer == "cyd"


def test_a_source_whose_own_genesis_has_momentum_can_be_forked(world: Reef) -> None:
    genesis = Head(world.genesis_of_reef.manifest).manifest  # from a writer that nobody checked
    for layer in genesis.layers:
        layer.momentum_digest = b"\x09" * 32
    ann = world.identities["ann"]
    world.put(replace(world.run, genesis=commit(genesis.SerializeToString(), [ann]).SerializeToString()))
    world.hold("ann", world.info(2))
    world.fork()
    for name in ("ann", "bob"):
        world.move(name, world.info(2))
    world.wait(1)
    world.say(world.writer, READY, genesis=world.forked_genesis(world.writer))
    assert world.state.runs["kelp"].state == "TRAINING"


def lying(world: Reef, how: str) -> mb.GenesisReport:
    made = world.forked_genesis(world.writer)
    match how:
        case "other weights":
            return world.forked_genesis(world.writer, fill=99)
        case "momentum":
            return world.forked_genesis(world.writer, momentum=b"\x09" * 32)
        case "another round":
            return world.forked_genesis(world.writer, number=3)
        case "no manifest":
            made.source_manifest = b""
        case "rubbish":
            made.source_manifest = b"\xff" * 100
        case "a large one":
            made.source_manifest = bytes(MAX_PAYLOAD_BYTES + 1)
        case "fewer layers":
            table = layer_table(list(layer_table().layers[:2]))
            made = genesis_report(world.identities[world.writer], run_id="kelp", table=table)
            made.source_manifest = world.reports[2].manifest.payload
    return made


@pytest.mark.parametrize(
    "how", ["other weights", "momentum", "another round", "no manifest", "rubbish", "a large one", "fewer layers"]
)
def test_a_writer_that_lies_about_the_weights_is_not_believed_and_another_one_is_asked_at_once(
    world: Reef, how: str
) -> None:
    world.hold("ann", world.info(2))
    world.fork()
    for name in ("ann", "bob"):
        world.move(name, world.info(2))
    world.wait(1)
    liar = world.writer
    world.say(liar, READY, genesis=lying(world, how))
    assert not world.state.runs["kelp"].genesis
    world.wait(0.4)
    assert world.writer not in ("", liar)
    world.say(world.writer, READY, genesis=world.forked_genesis(world.writer))
    assert world.state.runs["kelp"].state == "TRAINING"


def test_a_node_that_refuses_is_passed_over_at_once_and_asked_again_when_all_have_refused(world: Reef) -> None:
    world.hold("ann", world.info(2))
    world.fork()
    for name in ("ann", "bob"):
        world.move(name, world.info(2))
    world.wait(1)
    first = world.writer
    refusal = mb.GenesisReport(refusal=mb.FORK_REFUSAL_DAMAGED, refusal_detail="a layer\x1b differs")
    world.say(first, READY, genesis=refusal)
    assert world.told("genesis.refused") == [
        f"{first} cannot write genesis: its checkpoint is damaged: a layer differs"
    ]
    world.wait(0.4)
    second = world.writer
    assert second not in ("", first)
    world.say(second, READY, genesis=mb.GenesisReport(refusal=mb.FORK_REFUSAL_MISSING, refusal_detail="gone"))
    world.wait(5)
    assert order_for(world.state, lookup.node(world.state, first)) == mb.ORDER_UNSPECIFIED
    assert world.reason == f"{second} cannot write genesis: it lacks the checkpoint: gone"
    world.policy = replace(world.policy, genesis_seconds=1.0)
    world.wait(1)
    world.say(world.writer, READY, genesis=world.forked_genesis(world.writer))
    assert world.state.runs["kelp"].state == "TRAINING"


def test_nodes_whose_text_has_another_vocabulary_are_told_before_anyone_is_asked(world: Reef) -> None:
    world.hold("ann", world.info(2))
    world.fork()
    rows = [plan_pb2.LayerInfo(name=name, parameters=11) for name in LAYERS]
    for name in ("ann", "bob"):
        world.move(name, world.info(2))
        world.say(name, READY, layers=layer_table(rows))
    world.wait(1)
    assert world.state.runs["kelp"].state == "WAITING"
    assert "another vocabulary" in world.reason


def test_reports_of_former_runs_that_cannot_be_true_are_ignored(world: Reef) -> None:
    world.hold("ann", world.info(2))
    world.fork()
    good = world.info(2)
    short = mb.CheckpointInfo(round=2, manifest_hash=b"x", layers=ALL)
    wide = world.info(3, plan_pb2.Span(first=0, last=99))
    world.move("ann", short, wide)
    peer = world.identities["ann"].peer_id
    assert world.state.live[peer].former_checkpoints == ()
    strange = [
        mb.FormerCheckpoint(run_id="moon", checkpoint=good),
        mb.FormerCheckpoint(run_id="kelp", checkpoint=good),
        *[
            mb.FormerCheckpoint(
                run_id=RUN, checkpoint=mb.CheckpointInfo(round=number, manifest_hash=b"h" * 32, layers=ALL)
            )
            for number in range(500)
        ],
    ]
    world.say("ann", READY, former_checkpoints=strange)
    assert len(world.state.live[peer].former_checkpoints) <= 64
    assert {item.run_id for item in world.state.live[peer].former_checkpoints} == {RUN}


# --- what is kept ------------------------------------------------------------------------------------


def kept(world: Reef) -> tuple[int, ...]:
    return world.state.memory[RUN].kept_rounds


def test_nodes_keep_the_round_of_a_fork_until_its_first_round_also_after_a_restart(world: Reef) -> None:
    world.hold("ann", world.info(2))
    world.fork()
    assert kept(world) == (2,)
    world.restart()
    assert kept(world) == (2,)
    for name in ("ann", "bob"):
        world.connect(name)
        world.move(name, world.info(2))
    world.wait(1)
    world.say(world.writer, READY, genesis=world.forked_genesis(world.writer))
    assert world.state.runs["kelp"].genesis
    assert kept(world) == (2,)  # the writer may be lost before others have the weights
    draft = Draft(world.state, world.now)
    draft.put(replace(world.state.runs["kelp"], head_round=1))
    update_kept_rounds(draft, "kelp")
    assert draft.state.memory[RUN].kept_rounds == ()


def test_the_log_keeps_rounds_that_only_forks_and_nodes_that_moved_away_need(
    world: Reef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.coordinator.state.draft.KEPT_COMMITS", 4)
    monkeypatch.setattr(reports, "THIN_EVERY", 4)
    world.enrol("cyd")
    world.connect("cyd")
    world.hold("cyd", world.info(1), world.info(2))
    world.fork(1)
    world.take(lifecycle.create_run(world.state, world.now, spec_toml(name="moon"), start=False))
    world.move("cyd", world.info(1), world.info(2), run_id="moon")
    world.commit_more(9)
    assert {1, 2} <= set(world.state.memory[RUN].committed)
    assert 3 not in world.state.memory[RUN].committed
    assert next(it for it in reversed(world.records) if isinstance(it, Thin)).kept == (1, 2)
    world.hang_up("cyd")
    world.commit_more(8)
    assert fork_source.find(world.state, RUN, 1).committed  # of the fork to come, also while its holder is away


def test_claims_of_rounds_that_never_were_push_no_round_out_of_the_log(world: Reef) -> None:
    for name in ("cyd", "eve", "sue"):
        world.enrol(name)
        world.connect(name)
    world.hold("cyd", world.info(2))
    stranger(world, "sue")
    world.take(lifecycle.create_run(world.state, world.now, spec_toml(name="moon"), start=False))
    world.move("cyd", world.info(2), run_id="moon")
    claims = [world.info(2**40 + number, manifest=bytes(32)) for number in range(3)]
    world.move("eve", *claims, run_id="moon")
    world.move("sue", world.info(3), *claims, run_id="moon")
    assert rounds_held_elsewhere(world.state, RUN) == (2,)


def test_a_fork_that_is_stopped_keeps_nothing_and_many_forks_keep_a_few_rounds(world: Reef) -> None:
    digests = {number: bytes([number]) * 32 for number in range(10, 17)}
    world.hold("ann", *[world.info(number, manifest=digest) for number, digest in digests.items()])
    for number, digest in digests.items():
        world.fork(number, name=f"kelp-{number}", manifest=digest.hex(), start=False)
    assert kept(world) == tuple(sorted(digests, reverse=True)[:MAX_KEPT_ROUNDS])
    for number in digests:
        world.take(lifecycle.stop(world.state, world.now, f"kelp-{number}"))
    assert kept(world) == ()
