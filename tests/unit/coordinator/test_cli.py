"""`atollctl` as a person or a script sees it: what stands on stdout, on stderr, and in the exit code.

The coordinator is replaced by canned answers; `golden/` holds what each command prints for them.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner
from unit.coordinator.world import spec_toml

from atoll.coordinator.cli import (
    ca,
    checkpoint,
    confirmation,
    events,
    main,
    metrics,
    metrics_rows,
    node,
    node_forget,
    plan,
    run,
    run_assign,
    run_clone,
    run_credits,
    run_diff,
    run_end,
    run_fork,
    run_plan,
    spec_changes,
    token,
    trust,
)
from atoll.coordinator.cli.output import Column, show
from atoll.coordinator.runs import admission
from atoll.core import protocol
from atoll.core.cli import run_cli
from atoll.core.errors import (
    AlreadyExists,
    AtollError,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    InvalidTransition,
    NotFound,
    RunSpecError,
    TokenExpired,
    Unreachable,
    UsageError,
)
from atoll.core.identity import Identity
from atoll.core.manifest import Head, sign_vote
from atoll.core.output import Output
from atoll.core.proofs import double_votes
from atoll.core.quorum import Ballot
from atoll.core.run_spec import parse_run_spec
from atoll.v1 import admin_pb2 as wire
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2, plan_pb2
from atoll.v1 import membership_pb2 as mb

GOLDEN = Path(__file__).parent / "golden"
NOW = 1_700_000_600.0
SECRET = "atl1." + "a" * 64 + "." + "b" * 12 + "." + "c" * 48 + ".swarm.example.org:7700"

TOKEN = wire.TokenView(
    id="b" * 12,
    run_id="reef",
    roles=[pb.ROLE_NODE],
    uses_left=2,
    uses_total=3,
    created_unix_ms=1_700_000_000_000,
    expires_unix_ms=1_700_001_800_000,
)
NODE = wire.NodeView(
    peer_id="12D3KooWAbcdefghijklmnop",
    name="basement",
    run_id="reef",
    roles=[pb.ROLE_NODE],
    profile=mb.NodeProfile(
        device="cuda:0",
        device_name="RTX 4090",
        device_memory_bytes=24 << 30,
        host_memory_bytes=64 << 30,
        tokens_per_second=9000.0,
    ),
    status=mb.NodeStatus(
        state=mb.NODE_STATE_TRAINING, steps=120, tokens=61440, tokens_per_second=8400.0, train_loss=2.5, head_round=7
    ),
    enrolled_unix_ms=1_700_000_000_000,
    last_seen_unix_ms=1_700_000_598_000,
    connected=True,
    multiaddrs=["/ip4/192.0.2.1/tcp/4001"],
    span=plan_pb2.Span(last=3),
    route=1,
    pin="0-3",
)
SOURCE = wire.ForkSourceView(
    run_id="reef",
    round=6,
    manifest_hash=b"\x06" * 32,
    committed=True,
    holders=[
        wire.ForkHolder(node_name="attic", run_id="reef"),
        wire.ForkHolder(node_name="basement", run_id="dune", connected=True),
    ],
    spec_toml=spec_toml(),
)
MOVING = wire.NodeView()
MOVING.CopyFrom(NODE)
MOVING.draining, MOVING.assigned_run = True, "kelp"
SPARE = "12D3KooWZyxwvutsrqponmlk"  # stands by
RUN = wire.RunView(
    run_id="reef",
    state=mb.RUN_STATE_TRAINING,
    spec_toml=spec_toml(),
    head_round=7,
    committed_tokens=250_000,
    stop_tokens=1_000_000,
    rounds_opened=8,
    rounds_committed=7,
    plan_version=2,
    validation_loss=2.25,
    nodes_ready=3,
    min_nodes=2,
    layers=plan_pb2.LayerTable(layers=[plan_pb2.LayerInfo(name="embedding", parameters=1000, kind="embedding")]),
    evaluations=[
        mb.EvaluationReport(round=1, loss=4.5, sources=[mb.SourceLoss(name="web", loss=4.25, windows=48)]),
        mb.EvaluationReport(
            round=7,
            loss=2.25,
            sources=[
                mb.SourceLoss(name="web", loss=2.0, windows=48, tokens=190_000),
                mb.SourceLoss(name="code", loss=3.0, windows=16, tokens=60_000),
            ],
        ),
    ],
    uncounted=["cid has another corpus", "dan is joining"],
    eta_unix_ms=1_700_006_600_000,
    recent_tokens_per_second=125.0,
)
PLAN = plan_pb2.Plan(
    run_id="reef",
    version=2,
    assignments=[
        plan_pb2.Assignment(peer_id=NODE.peer_id, span=plan_pb2.Span(last=3), max_round_tokens=4096),
        plan_pb2.Assignment(peer_id=SPARE, span=plan_pb2.Span(last=3), max_round_tokens=4096),
    ],
    routes=[plan_pb2.Route(peer_ids=[NODE.peer_id], since_version=1)],
    base=plan_pb2.Base(manifest_hash=b"\x01\x02", since_version=1, seats=[NODE.peer_id]),
    issued_unix_ms=1_700_000_000_000,
    reason="basement joins",
)
FIGURES = wire.PlanFigures(
    version=2,
    issued_unix_ms=1_700_000_000_000,
    reason="basement joins",
    nodes=1,
    routes=1,
    predicted_tokens_per_second=9000.0,
    measured_tokens_per_second=8400.0,
    measured_seconds=600.0,
    moved_bytes=2.0**31,
)
AUTHORITIES = wire.AuthoritiesView(
    trusted=[
        wire.AuthorityView(sha256="ab" * 32, expires_unix_ms=2_015_000_000_000, members=3),
        wire.AuthorityView(sha256="cd" * 32, expires_unix_ms=2_010_000_000_000, members=1),
    ],
    until_unix_ms=1_700_043_800_000,
    waiting=["basement"],
)
WRITTEN = wire.OrderCheckpointResponse(
    run_id="reef",
    round=6,
    written_round=7,
    checkpoints=[
        wire.CheckpointView(
            checkpoint=mb.CheckpointInfo(
                round=7,
                manifest_hash=b"\x01\x02",
                bytes=2_000_000,
                written_unix_ms=1_700_000_000_000,
                committed_tokens=250_000,
                layers=plan_pb2.Span(last=3),
            ),
            peer_id=NODE.peer_id,
            node_name="basement",
            connected=True,
            committed=True,
        )
    ],
)
EVENT = wire.Event(
    id=3,
    unix_ms=1_700_000_000_000,
    kind="node.enrolled",
    run_id="reef",
    subject=NODE.peer_id,
    message="basement enrolled",
)

ROUNDS = [
    wire.RoundView(
        round=pb.RoundId(run_id="reef", plan_version=2, number=7, attempt=1),
        committed=True,
        tokens=40_000,
        members=5,
        present=4,
        partial=1,
        screened=[NODE.peer_id],
        codec="int4",
        parts_zeroed=2,
        seconds=3.25,
        unix_ms=1_700_000_000_000,
        opener=NODE.peer_id,
    ),
    wire.RoundView(
        round=pb.RoundId(run_id="reef", plan_version=2, number=8),
        reason="no majority: 1 of 4 deciding members voted in time",
        seconds=15,
        unix_ms=1_700_000_020_000,
        opener=NODE.peer_id,
    ),
]

METRICS = [
    wire.MetricsRow(
        peer_id=NODE.peer_id,
        name="basement",
        unix_ms=1_700_000_000_000,
        metrics=mb.NodeMetrics(
            round=7,
            train_loss=2.5,
            learning_rate=3e-4,
            tokens=40_960,
            seconds=32.0,
            update_norm=0.75,
            compute_seconds=28.5,
            stall_seconds=1.25,
            exchange_seconds=4.0,
            bytes_sent=5 << 20,
            bytes_received=6 << 20,
        ),
    ),
    wire.MetricsRow(peer_id=SPARE, unix_ms=1_700_000_001_000, metrics=mb.NodeMetrics(round=8, bytes_sent=100)),
]

CULPRIT = Identity.generate()
BALLOT = Ballot(3, 0)


def committed(fill: int) -> manifest_pb2.CommittedManifest:
    """One of two results of round 7 for which the culprit voted."""
    name = pb.RoundId(run_id="reef", plan_version=3, number=7)
    manifest = manifest_pb2.Manifest(protocol=protocol.ours(), round=name, previous_hash=b"b" * 32, parts_total=fill)
    payload = manifest.SerializeToString()
    return manifest_pb2.CommittedManifest(
        payload=payload, signatures=[sign_vote(CULPRIT, payload, BALLOT)], ballot_plan_version=3
    )


(PROOF,) = double_votes(Head(committed(1)), Head(committed(2)))
PROOF_VIEW = wire.ProofView(
    id="3f9a0c1d2e4b5a69",
    run_id="reef",
    culprit=NODE.peer_id,
    culprit_name="basement",
    kind="double-vote",
    round=7,
    found_unix_ms=1_700_000_000_000,
    banned=True,
    sentence="it voted for two results of round 7 in attempt 0 under plan 3: 0a0b0c0d0e0f… and 1a1b1c1d1e1f…",
)

ANSWERS = {
    "CreateToken": wire.CreateTokenResponse(token=SECRET, view=TOKEN),
    "ListTokens": wire.ListTokensResponse(tokens=[TOKEN]),
    "RevokeToken": wire.RevokeTokenResponse(view=TOKEN),
    "ListNodes": wire.ListNodesResponse(nodes=[NODE]),
    "GetNode": NODE,
    "DrainNode": NODE,
    "BanNode": NODE,
    "UnbanNode": NODE,
    "SetProbation": NODE,
    "ListProofs": wire.ListProofsResponse(proofs=[PROOF_VIEW]),
    "GetProof": wire.ProofView(**{**{field.name: value for field, value in PROOF_VIEW.ListFields()}, "proof": PROOF}),
    "CreateRun": RUN,
    "StartRun": RUN,
    "PauseRun": RUN,
    "StopRun": RUN,
    "RecoverRun": RUN,
    "GetRun": RUN,
    "ListRuns": wire.ListRunsResponse(runs=[RUN]),
    "ListRounds": wire.ListRoundsResponse(rounds=ROUNDS),
    "ListCheckpoints": wire.ListCheckpointsResponse(
        checkpoints=[
            wire.CheckpointView(
                checkpoint=mb.CheckpointInfo(
                    round=7,
                    manifest_hash=b"\x0a" * 32,
                    bytes=5_000_000,
                    written_unix_ms=1_700_000_000_000,
                    committed_tokens=250_000,
                ),
                peer_id=NODE.peer_id,
                node_name="basement",
                connected=True,
                committed=True,
            )
        ]
    ),
    "GetPlan": wire.PlanView(
        plan=PLAN,
        signed=pb.Signed(payload=b"\x03"),
        nodes=[
            wire.PlacedNode(
                peer_id=NODE.peer_id,
                name="basement",
                route=1,
                span=plan_pb2.Span(last=3),
                memory_bytes=9.5 * 2**30,
                copies=[plan_pb2.Span(first=4, last=7)],
                memory_lent_bytes=24 * 2**30,
            ),
            wire.PlacedNode(peer_id=SPARE, name="cellar", span=plan_pb2.Span(last=3), memory_bytes=9.5 * 2**30),
        ],
        left_out=[
            wire.LeftOutNode(peer_id="12D3KooWB", name="attic", reason="the swarm would be equally fast with it")
        ],
        figures=FIGURES,
    ),
    "PlanHistory": wire.PlanHistoryResponse(plans=[wire.PlanFigures(version=1, reason="the run starts"), FIGURES]),
    "ApplyPlan": wire.ApplyPlanResponse(
        changes=True,
        reason="12.0 % better over 6 h 00 min, after moving 2.0 GiB",
        before_tokens_per_second=1000.0,
        after_tokens_per_second=1120.0,
        moves=[
            wire.MovedNode(
                peer_id=NODE.peer_id,
                name="basement",
                before="0-3",
                after="0-5",
                fetched_bytes=2.0**31,
            ),
            wire.MovedNode(peer_id="12D3KooWB", name="attic", after="6-9"),
        ],
    ),
    "GetAuthorities": AUTHORITIES,
    "RotateAuthority": AUTHORITIES,
    "RetireAuthority": wire.AuthoritiesView(trusted=AUTHORITIES.trusted[:1]),
    "AssignNode": MOVING,
    "DeleteRun": wire.DeleteRunResponse(run_id="reef", head_round=7, nodes=3, tokens=1),
    "ForgetNode": wire.ForgetNodeResponse(
        peer_id=NODE.peer_id, name="basement", run_id="reef", last_seen_unix_ms=1_700_000_000_000
    ),
    "ListCredits": wire.ListCreditsResponse(
        run_id="reef",
        tokens=250_000,
        nodes=2,
        credits=[
            wire.CreditView(
                peer_id=NODE.peer_id,
                name="basement",
                rank=1,
                tokens=200_000,
                rounds=7,
                first_unix_ms=1_700_000_000_000,
                last_unix_ms=1_700_000_600_000,
            ),
            wire.CreditView(
                peer_id=SPARE,
                name="cellar",
                rank=2,
                rounds=3,
                first_unix_ms=1_700_000_000_000,
                last_unix_ms=1_700_000_300_000,
            ),
            wire.CreditView(tokens=50_000, rounds=2, first_unix_ms=1_700_000_000_000, last_unix_ms=1_700_000_100_000),
        ],
    ),
    "OrderCheckpoint": WRITTEN,
    "FindForkSource": SOURCE,
    "PinNode": NODE,
    "UnpinNode": NODE,
    "ListMetrics": wire.ListMetricsResponse(rows=METRICS),
    "Events": [EVENT],
}
COMMANDS = {
    "token-create": ["token", "create", "--uses", "3", "--ttl", "30m"],
    "token-list": ["token", "list"],
    "token-revoke": ["token", "revoke", "b" * 12],
    "node-list": ["node", "list"],
    "node-show": ["node", "show", "basement"],
    "node-drain": ["node", "drain", "basement"],
    "node-ban": ["node", "ban", "basement", "--yes"],
    "node-vouch": ["node", "vouch", "basement"],
    "node-probation": ["node", "probation", "basement"],
    "run-create": ["run", "create", "-"],
    "run-plan": ["run", "plan", "-", "--price-per-hour", "0.4", "--set", "model.preset=micro"],
    "run-plan-offline": ["run", "plan", "-", "--offline", "--set", "data.tokenizer=gpt2"],
    "run-clone": ["run", "clone", "reef", "kelp", "--set", "run.min_nodes=3"],
    "run-fork": ["run", "fork", "reef", "kelp", "--from", "6", "--set", "optimizer.learning_rate=0.001"],
    "run-assign": ["run", "assign", "kelp", "basement"],
    "run-list": ["run", "list"],
    "run-show": ["run", "show"],
    "run-rounds": ["run", "rounds", "--after", "6"],
    "run-start": ["run", "start"],
    "run-pause": ["run", "pause"],
    "run-stop": ["run", "stop", "--yes"],
    "run-delete": ["run", "delete", "reef", "--yes"],
    "run-checkpoint": ["run", "checkpoint", "reef"],
    "node-forget": ["node", "forget", "basement", "--yes"],
    "run-resume": ["run", "resume"],
    "run-recover": ["run", "recover", "--yes"],
    "run-credits": ["run", "credits", "reef"],
    "plan-show": ["plan", "show"],
    "plan-history": ["plan", "history"],
    "plan-diff": ["plan", "diff", "1", "2"],
    "plan-pin": ["plan", "pin", "basement", "--layers", "0-3"],
    "node-unban": ["node", "unban", "basement"],
    "trust-list": ["trust", "list"],
    "trust-show": ["trust", "show", "3f9a"],
    "plan-unpin": ["plan", "unpin", "basement"],
    "plan-apply": ["plan", "apply", "--dry-run"],
    "checkpoint-list": ["checkpoint", "list"],
    "metrics": ["metrics", "reef"],
    "events": ["events"],
    "ca-show": ["ca", "show"],
    "ca-rotate": ["ca", "rotate", "--overlap", "12h"],
    "ca-retire": ["ca", "retire"],
}


PLANNED = spec_toml(name="kelp")


class Canned:
    """Answers from the table, and remembers what was asked."""

    def __init__(self) -> None:
        self.stub = SimpleNamespace(**{name: name for name in ANSWERS})
        self.asked: list[tuple[str, object]] = []

    def call(self, method: str, request: object) -> object:
        self.asked.append((method, request))
        return ANSWERS[method]

    stream = call


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> Iterator[Canned]:
    made = Canned()

    @contextmanager
    def connect(_directory: Path | None) -> Iterator[Canned]:
        yield made

    for module in (
        token,
        node,
        node_forget,
        run,
        run_assign,
        run_clone,
        run_credits,
        run_diff,
        run_end,
        run_fork,
        run_plan,
        plan,
        ca,
        checkpoint,
        events,
        metrics,
        trust,
    ):
        monkeypatch.setattr(module, "connect", connect)
    monkeypatch.setattr("time.time", lambda: NOW)
    with monkeypatch.context() as zone:
        zone.setenv("TZ", "UTC")
        time.tzset()
        yield made
    time.tzset()


@pytest.mark.parametrize("output", ["text", "json"])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_its_golden_output(canned: Canned, name: str, output: str) -> None:
    spec = PLANNED if COMMANDS[name][:2] == ["run", "plan"] else "version = 1\n"
    result = CliRunner().invoke(main.app, [*COMMANDS[name], "--output", output], input=spec)
    assert result.exit_code == 0, result.output
    golden = GOLDEN / f"{name}.{'json' if output == 'json' else 'txt'}"
    assert result.stdout == golden.read_text(), f"golden file {golden.name} says otherwise"
    if output == "json":
        assert json.loads(result.stdout)["version"] == 1


@pytest.mark.parametrize("output", ["text", "json"])
def test_run_diff_shows_the_keys_that_differ_and_the_runs_beside_each_other(
    canned: Canned, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    spec = 'version = 1\n[run]\nname = "{}"\nstop_tokens = {}\n[data]\npath = "x"\n[sync]\nround_tokens = 1000\n'
    specs = {"reef": spec.format("reef", 10_000), "kelp": spec.format("kelp", 20_000)}
    monkeypatch.setattr(canned, "call", lambda _, request: wire.RunView(spec_toml=specs[request.run_id]))
    done = CliRunner().invoke(main.app, ["run", "diff", "reef", "kelp", "--output", output])
    assert done.exit_code == 0, done.output
    if output == "json":
        told = {"run.stop_tokens": {"reef": 10_000, "kelp": 20_000}}
        assert json.loads(done.stdout) == {"version": 1, "runs": ["reef", "kelp"], "differences": told}
    else:
        assert [line.split() for line in done.stdout.splitlines()[-1:]] == [["run.stop_tokens", "10000", "20000"]]
    equal = CliRunner().invoke(main.app, ["run", "diff", "reef", "reef"])
    assert isinstance(equal.exception, UsageError)
    assert "1 different runs" in str(equal.exception)


def test_a_checkpoint_that_is_not_whole_in_time_is_an_error_that_says_what_is_missing(
    canned: Canned, monkeypatch: pytest.MonkeyPatch
) -> None:
    partly = wire.OrderCheckpointResponse(
        run_id="reef", round=7, checkpoints=WRITTEN.checkpoints, waiting=["attic"], missing="layers 4-7"
    )
    monkeypatch.setitem(ANSWERS, "OrderCheckpoint", partly)
    result = CliRunner().invoke(main.app, ["run", "checkpoint", "--timeout", "20ms"])
    assert isinstance(result.exception, DeadlineExceeded)
    assert result.exception.exit_code == 69
    assert result.stdout == ""
    assert "layers 4-7 missing; not written by: attic" in str(result.exception)
    asked = [request for name, request in canned.asked if name == "OrderCheckpoint"]
    assert [(request.run_id, request.round) for request in asked[:2]] == [("", 0), ("reef", 7)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("command", "typed", "called"),
    [
        (["run", "delete", "reef"], "reef\n", True),
        (["run", "delete", "reef"], "kelp\n", False),
        (["node", "forget", "basement"], "y\n", True),
        (["node", "forget", "basement"], "n\n", False),
    ],
)
def test_what_is_for_good_asks_first(
    canned: Canned, monkeypatch: pytest.MonkeyPatch, command: list[str], typed: str, called: bool
) -> None:
    monkeypatch.setattr(confirmation, "ask_interactively", lambda question: question())
    result = CliRunner().invoke(main.app, command, input=typed)
    assert ({"DeleteRun", "ForgetNode"} & {name for name, _ in canned.asked} != set()) == called
    assert (result.exit_code == 0) == called
    assert called or isinstance(result.exception, UsageError)


def test_nodes_lost_for_days_are_those_without_a_connection_for_so_long(
    canned: Canned, monkeypatch: pytest.MonkeyPatch
) -> None:
    day_ms, now_ms = 86_400_000, int(1000 * NOW)
    seen = {"long": now_ms - 3 * day_ms, "short": now_ms - day_ms, "never": 0, "new": 0}
    enrolled = {"long": 1, "short": 1, "never": now_ms - 9 * day_ms, "new": now_ms - 10}
    nodes = [
        wire.NodeView(peer_id=name, name=name, last_seen_unix_ms=seen[name], enrolled_unix_ms=enrolled[name])
        for name in seen
    ]
    nodes.append(wire.NodeView(peer_id="here", name="here", connected=True))
    monkeypatch.setitem(ANSWERS, "ListNodes", wire.ListNodesResponse(nodes=nodes))
    result = CliRunner().invoke(main.app, ["node", "forget", "--lost-for", "2", "--run", "reef", "--yes"])
    assert result.exit_code == 0, result.output
    assert [request.node for name, request in canned.asked if name == "ForgetNode"] == ["never", "long"]  # type: ignore[attr-defined]
    for wrong in ([], ["basement", "--lost-for", "2"], ["basement", "--run", "reef"], ["--lost-for", "-1"]):
        assert CliRunner().invoke(main.app, ["node", "forget", *wrong]).exit_code != 0


def test_a_node_that_is_refused_does_not_keep_the_others(canned: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
    old = [wire.NodeView(peer_id=name, name=name, last_seen_unix_ms=1) for name in ("attic", "basement")]
    monkeypatch.setitem(ANSWERS, "ListNodes", wire.ListNodesResponse(nodes=old))
    answer = canned.call

    def call(method: str, request: object) -> object:
        answered = answer(method, request)
        if isinstance(request, wire.ForgetNodeRequest) and request.node == "attic":
            raise InvalidTransition("attic has a place in plan 1")
        return answered

    monkeypatch.setattr(canned, "call", call)
    result = CliRunner().invoke(main.app, ["node", "forget", "--lost-for", "1", "--yes"])
    assert "basement" in result.stdout
    assert "not forgotten: attic has a place in plan 1" in result.stderr
    assert isinstance(result.exception, UsageError)
    assert "1 of 2 nodes" in str(result.exception)


def test_texts_of_nodes_cannot_control_the_terminal(canned: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = wire.NodeView()
    evil.CopyFrom(NODE)
    evil.profile.device_name = "[bold red]RTX[/] \x1b[2J\x07 [link=http://x]"
    evil.status.state = 99  # type: ignore[assignment]
    event = wire.Event(id=1, kind="node.left", message="bye \x1b[31m\n1 forged line")
    monkeypatch.setitem(ANSWERS, "GetNode", evil)
    monkeypatch.setitem(ANSWERS, "ListNodes", wire.ListNodesResponse(nodes=[evil]))
    monkeypatch.setitem(ANSWERS, "Events", [event])
    for command in (["node", "show", "x"], ["node", "list"], ["events"]):
        shown = CliRunner().invoke(main.app, command)
        assert shown.exit_code == 0, shown.output
        assert "\x1b" not in shown.stdout
        if command[0] == "node":
            assert "[bold red]RTX[/] [2J [link=http://x]" in shown.stdout
        else:
            assert len(shown.stdout.splitlines()) == 1


def test_all_nodes_of_a_run_are_assigned_once_its_seeds_first_and_without_the_banned(
    canned: Canned, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = []
    for peer, role, connected, banned in (
        ("a", pb.ROLE_NODE, True, False),
        ("b", pb.ROLE_NODE, False, False),
        ("c", pb.ROLE_NODE, True, True),
        ("d", pb.ROLE_SEED, True, False),
    ):
        listed.append(wire.NodeView(peer_id=peer, roles=[role], connected=connected, banned=banned))
    monkeypatch.setitem(ANSWERS, "ListNodes", wire.ListNodesResponse(nodes=listed))
    done = CliRunner().invoke(main.app, ["run", "assign", "kelp", "--all-of", "reef"])
    assert done.exit_code == 0, done.output
    asked = [request for method, request in canned.asked if method == "AssignNode"]
    assert asked == [wire.AssignNodeRequest(node=peer, run_id="kelp") for peer in ("d", "a")]


@pytest.mark.parametrize("arguments", [[], ["basement", "--all-of", "reef"]])
def test_an_assignment_says_which_nodes_it_means(canned: Canned, arguments: list[str]) -> None:
    done = CliRunner().invoke(main.app, ["run", "assign", "kelp", *arguments])
    assert isinstance(done.exception, UsageError)
    assert canned.asked == []


def test_a_clone_keeps_every_number_but_those_that_are_changed() -> None:
    before = parse_run_spec(spec_toml())
    changes = ["run.stop_tokens = 77", "optimizer.name=adamw", 'sync.codec="fp32"']
    text = spec_changes.changed_spec(before.resolved_toml(), "kelp", changes, ["optimizer.learning_rate"])
    after = parse_run_spec(text)
    assert (after.run.name, after.run.stop_tokens) == ("kelp", 77)
    assert (after.optimizer.name, after.sync.codec) == ("adamw", "fp32")
    adamw = parse_run_spec(spec_toml() + '[optimizer]\nname = "adamw"\n')
    assert after.optimizer.learning_rate == adamw.optimizer.learning_rate != before.optimizer.learning_rate
    assert (after.model, after.data) == (before.model, before.data)
    assert after.sync.round_tokens == before.sync.round_tokens


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (["optimizer.weight_decay"], UsageError),
        (["weight_decay=1"], UsageError),
        (["run.name.x=1"], UsageError),
        ([".=1"], UsageError),
        (["optimizer.wait_decay=1"], RunSpecError),
        (["run.stop_tokens=-1"], RunSpecError),
    ],
)
def test_a_clone_with_a_wrong_change_is_refused_before_the_coordinator_is_asked(
    canned: Canned, changes: list[str], error: type[AtollError]
) -> None:
    flags = [word for change in changes for word in ("--set", change)]
    done = CliRunner().invoke(main.app, ["run", "clone", "reef", "kelp", *flags])
    assert isinstance(done.exception, error), done.output
    assert [method for method, _ in canned.asked] == ["GetRun"]


def test_a_fork_names_its_source_in_the_spec_and_says_who_holds_it(canned: Canned) -> None:
    flags = ["--from", "6", "--set", "optimizer.learning_rate=0.001"]
    done = CliRunner().invoke(main.app, ["run", "fork", "reef", "kelp", *flags])
    assert done.exit_code == 0, done.output
    (_, asked), (method, created) = canned.asked
    assert asked == wire.ForkSourceRequest(run_id="reef", round=6)
    assert method == "CreateRun"
    made = parse_run_spec(created.spec_toml)  # type: ignore[attr-defined]
    assert made.fork is not None
    assert (made.fork.run, made.fork.round, made.fork.manifest) == ("reef", 6, "06" * 32)
    assert (made.run.name, made.optimizer.learning_rate) == ("kelp", 0.001)
    assert parse_run_spec(made.resolved_toml()) == made
    assert "basement (run dune), attic (run reef, not connected)" in done.stderr


def test_a_fork_of_a_fork_names_the_newest_source_only() -> None:
    section = f'[fork]\nrun = "moon"\nround = 1\nmanifest = "{"01" * 32}"\n'
    before = parse_run_spec(spec_toml() + section).resolved_toml()
    begins = {"run": "reef", "round": 6, "manifest": "06" * 32}
    after = parse_run_spec(spec_changes.changed_spec(before, "kelp", (), (), begins))
    assert after.fork is not None
    assert after.fork.run == "reef"


def test_a_clone_of_a_fork_keeps_its_source_and_says_so_or_drops_it(
    canned: Canned, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = f'[fork]\nrun = "moon"\nround = 1\nmanifest = "{"01" * 32}"\n'
    forked = wire.RunView()
    forked.CopyFrom(RUN)
    forked.spec_toml = spec_toml() + section
    monkeypatch.setitem(ANSWERS, "GetRun", forked)
    monkeypatch.setitem(ANSWERS, "CreateRun", forked)
    done = CliRunner().invoke(main.app, ["run", "clone", "reef", "kelp"])
    assert "begins with the weights of round 1 of run moon" in done.stderr
    kept = canned.asked[-1][1]
    CliRunner().invoke(main.app, ["run", "clone", "reef", "kelp", "--unset", "fork"])
    dropped = canned.asked[-1][1]
    specs = [parse_run_spec(request.spec_toml) for request in (kept, dropped)]  # type: ignore[attr-defined]
    assert [spec.fork is None for spec in specs] == [False, True]


def test_a_clone_of_a_run_that_is_no_fork_cannot_drop_its_source(canned: Canned) -> None:
    done = CliRunner().invoke(main.app, ["run", "clone", "reef", "kelp", "--unset", "fork"])
    assert isinstance(done.exception, UsageError)
    assert "that run is no fork" in str(done.exception)
    assert "CreateRun" not in {method for method, _ in canned.asked}


@pytest.mark.parametrize(("kept", "where", "noted"), [(1, "reef", True), (2, "reef", False), (1, "dune", False)])
def test_the_operator_is_told_where_the_source_of_a_fork_may_be_gone_soon(
    canned: Canned, monkeypatch: pytest.MonkeyPatch, kept: int, where: str, noted: bool
) -> None:
    source = wire.ForkSourceView()
    source.CopyFrom(SOURCE)
    del source.holders[:]
    source.holders.add(peer_id="p", node_name="ann", run_id=where, connected=True)
    held = [wire.CheckpointView(checkpoint=mb.CheckpointInfo(round=number), peer_id="p") for number in range(kept)]
    held += [wire.CheckpointView(checkpoint=mb.CheckpointInfo(round=number), peer_id="q") for number in range(3)]
    monkeypatch.setitem(ANSWERS, "FindForkSource", source)
    monkeypatch.setitem(ANSWERS, "ListCheckpoints", wire.ListCheckpointsResponse(checkpoints=held))
    done = CliRunner().invoke(main.app, ["run", "fork", "reef", "kelp", "--from", "6"])
    assert done.exit_code == 0, done.output
    assert ("where `checkpoint_keep` is 1" in done.stderr) == noted


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--from", "-1"],
        ["--from", "6", "--manifest", "06"],
        ["--from", "6", "--set", "fork.round=7"],
        ["--from", "6", "--unset", "fork"],
        ["--from", "6", "--set", "run.name=dune"],
    ],
)
def test_a_fork_that_does_not_say_where_it_begins_creates_nothing(canned: Canned, flags: list[str]) -> None:
    done = CliRunner().invoke(main.app, ["run", "fork", "reef", "kelp", *flags])
    assert done.exit_code != 0
    assert "CreateRun" not in [method for method, _ in canned.asked]


@pytest.mark.parametrize(("typed", "ends"), [("reef\n", True), ("kelp\n", False), ("\n", False), ("", False)])
def test_a_run_ends_only_for_who_types_its_name(canned: Canned, typed: str, ends: bool) -> None:
    done = CliRunner().invoke(main.app, ["run", "stop"], input=typed)
    assert (done.exit_code == 0) is ends, done.output
    assert ("StopRun" in [method for method, _ in canned.asked]) is ends


def test_token_create_prints_the_token_and_nothing_else_on_stdout(canned: Canned) -> None:
    result = CliRunner().invoke(main.app, ["token", "create"])
    assert result.stdout == SECRET + "\n"
    assert "valid for 30 min" in result.stderr
    assert SECRET not in result.stderr


def test_options_become_the_request(canned: Canned) -> None:
    CliRunner().invoke(main.app, ["token", "create", "--run", "reef", "--ttl", "2h", "--uses", "9", "--role", "seed"])
    assert canned.asked == [
        ("CreateToken", wire.CreateTokenRequest(run_id="reef", uses=9, ttl_seconds=7200, roles=[pb.ROLE_SEED]))
    ]


@pytest.mark.parametrize(("overlap", "seconds"), [("12h", 43200), ("0s", 0)])
def test_no_overlap_is_not_rounded_up_to_one_that_locks_members_out(canned: Canned, overlap: str, seconds: int) -> None:
    CliRunner().invoke(main.app, ["ca", "rotate", "--overlap", overlap])
    assert canned.asked == [("RotateAuthority", wire.RotateAuthorityRequest(overlap_seconds=seconds))]


def test_arguments_of_pin_become_the_request(canned: Canned) -> None:
    CliRunner().invoke(main.app, ["plan", "pin", "basement", "--layers", "4-11"])
    CliRunner().invoke(main.app, ["plan", "pin", "basement", "--out"])
    span = plan_pb2.Span(first=4, last=11)
    assert canned.asked == [
        ("PinNode", wire.PinNodeRequest(node="basement", span=span)),
        ("PinNode", wire.PinNodeRequest(node="basement")),
    ]


@pytest.mark.parametrize("options", [[], ["--layers", "4"], ["--layers", "4-x"], ["--layers", "0-3", "--out"]])
def test_a_pin_is_to_layers_or_out(canned: Canned, options: list[str]) -> None:
    result = CliRunner().invoke(main.app, ["plan", "pin", "basement", *options])
    assert isinstance(result.exception, UsageError)
    assert canned.asked == []


def test_a_diff_lists_nodes_that_hold_other_layers(canned: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
    views = [wire.PlanView(), wire.PlanView()]
    for view, spans in zip(views, [{"a": (0, 3), "b": (4, 7)}, {"a": (0, 5), "c": (6, 7)}], strict=True):
        for peer, (first, last) in spans.items():
            view.plan.assignments.add(peer_id=peer, span=plan_pb2.Span(first=first, last=last))
            view.nodes.add(peer_id=peer, name=f"node-{peer}")
    monkeypatch.setattr(canned, "call", lambda _method, _request: views.pop(0))
    told = json.loads(CliRunner().invoke(main.app, ["plan", "diff", "1", "2", "--output", "json"]).stdout)
    assert [(it["node"], it["before"], it["after"]) for it in told["changes"]] == [
        ("node-a", "0-3", "0-5"),
        ("node-b", "4-7", "–"),
        ("node-c", "–", "6-7"),
    ]


def test_ban_asks_first_and_a_no_changes_nothing(canned: Canned) -> None:
    result = CliRunner().invoke(main.app, ["node", "ban", "basement"], input="n\n")
    assert isinstance(result.exception, AtollError)
    assert [method for method, _ in canned.asked] == ["GetNode"]


def test_a_proof_is_saved_and_verified_without_a_coordinator(canned: Canned, tmp_path: Path) -> None:
    path = tmp_path / "basement.proof"
    saved = CliRunner().invoke(main.app, ["trust", "show", "3f9a", "--save", str(path)])
    assert (saved.exit_code, path.read_bytes()) == (0, PROOF)
    again = CliRunner().invoke(main.app, ["trust", "show", "3f9a", "--save", str(path)])
    assert isinstance(again.exception, AlreadyExists)
    canned.asked.clear()
    told = json.loads(CliRunner().invoke(main.app, ["trust", "verify", str(path), "--output", "json"]).stdout)
    assert (told["breach"]["culprit"], told["breach"]["round"]) == (CULPRIT.peer_id, 7)
    assert CULPRIT.peer_id in CliRunner().invoke(main.app, ["trust", "verify", str(path)]).stdout
    path.write_bytes(PROOF[:-1])
    assert isinstance(CliRunner().invoke(main.app, ["trust", "verify", str(path)]).exception, AtollError)
    missing = CliRunner().invoke(main.app, ["trust", "verify", str(tmp_path / "none")])
    assert isinstance(missing.exception, InvalidRequest)
    assert canned.asked == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["node", "list", "--output", "xml"], "Invalid value"),
        (["token", "create", "--uses", "0"], "uses"),
        (["token", "create", "--uses", "100001"], "uses"),
        (["plan", "show", "--version", "9" * 30], "version"),
        (["events", "--after", "9" * 30], "after"),
        (["token", "create", "--no-such-option"], "No such option"),
        (["nodes"], "No such command"),
    ],
)
def test_wrong_usage_exits_with_two(canned: Canned, arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(main.app, arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert canned.asked == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Unreachable("no answer", "look"), 69),
        (TokenExpired("too late", "ask"), 77),
        (ConfigError("bad key", "read"), 78),
        (NotFound("no such node", "see"), 1),
    ],
)
def test_errors_are_a_sentence_a_remedy_and_a_code(
    error: AtollError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def app() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_cli(app)
    assert ended.value.code == code
    shown = capsys.readouterr()
    assert shown.err == f"error: {error}\n  {error.remedy}\n"
    assert shown.out == ""


@pytest.mark.parametrize("ttl", ["9" * 400 + "d", "99999999999s", "1e9d", "-1s"])
def test_a_time_beyond_reason_is_wrong_usage(canned: Canned, ttl: str) -> None:
    result = CliRunner().invoke(main.app, ["token", "create", "--ttl", ttl])
    assert result.exit_code != 0
    assert isinstance(result.exception, UsageError)
    assert canned.asked == []


def test_the_command_line_and_the_coordinator_agree_on_the_uses_of_a_token() -> None:
    assert token.MAX_USES == admission.MAX_USES


def test_a_time_that_nobody_knows_is_a_dash_and_null(canned: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = wire.RunView()
    waiting.CopyFrom(RUN)
    waiting.ClearField("eta_unix_ms")
    waiting.ClearField("recent_tokens_per_second")
    monkeypatch.setitem(ANSWERS, "GetRun", waiting)
    monkeypatch.setitem(ANSWERS, "ListRuns", wire.ListRunsResponse(runs=[waiting]))
    document = json.loads(CliRunner().invoke(main.app, ["run", "show", "--output", "json"]).stdout)["run"]
    assert (document["eta_unix_ms"], document["recent_tokens_per_second"]) == (None, None)
    shown = [line.split() for line in CliRunner().invoke(main.app, ["run", "show"]).stdout.splitlines()]
    assert ["finishes", "–"] in shown
    assert CliRunner().invoke(main.app, ["run", "list"]).stdout.split()[-1] == "–"


def test_a_run_that_is_hardly_meant_is_created_with_a_note(canned: Canned) -> None:
    spec = 'version = 1\n[run]\nname = "t"\nstop_tokens = 1000\n[data]\npath = "c"\n[sync]\nround_tokens = 900\n'
    result = CliRunner().invoke(main.app, ["run", "create", "-"], input=spec)
    assert result.exit_code == 0
    assert "note: sync.round_tokens (900) is more than a tenth of run.stop_tokens (1000)" in result.output


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("sqlalchemy.orm", "'coordinator'"),
        ("psutil", "'node' or 'seed'"),
        ("netaddr", "'seed'"),
        ("torch.nn", "'node'"),
        ("peft", "'hf'"),
    ],
)
def test_a_missing_extra_is_a_sentence(capsys: pytest.CaptureFixture[str], module: str, extra: str) -> None:
    def app() -> None:
        raise ModuleNotFoundError(f"No module named '{module}'", name=module)

    with pytest.raises(SystemExit) as ended:
        run_cli(app)
    assert ended.value.code == 78
    package = module.partition(".")[0]
    assert f"{package} is not installed: this command needs atoll's {extra} extra" in capsys.readouterr().err


def test_a_missing_module_of_ours_is_a_bug_and_shows() -> None:
    def app() -> None:
        raise ModuleNotFoundError("No module named 'atoll.gone'", name="atoll.gone")

    with pytest.raises(ModuleNotFoundError):
        run_cli(app)


def test_an_interrupt_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    def app() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run_cli(app)
    assert ended.value.code == 130
    assert capsys.readouterr().err == ""


def test_a_missing_credential_says_where_to_get_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(main.app, ["node", "list", "--credentials", str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
    assert "ATOLL_CREDENTIALS" in result.exception.remedy


@pytest.mark.parametrize("group", [[], ["token"], ["node"], ["run"], ["plan"], ["events"], ["token", "create"]])
def test_help_is_there_and_commands_have_examples(group: list[str]) -> None:
    result = CliRunner().invoke(main.app, [*group, "--help"])
    assert result.exit_code == 0
    if group and group[-1] in ("create", "events"):
        assert "Example" in result.stdout


def test_atollctl_imports_nothing_heavy() -> None:
    check = (
        "import sys, atoll.coordinator.cli.main;"
        "heavy = {'torch', 'hivemind', 'sqlalchemy', 'starlette', 'pydantic', 'alembic', 'uvicorn', 'cryptography'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "[]\n"


def test_the_server_needs_neither_torch_nor_hivemind() -> None:
    check = "import sys, atoll.coordinator.server; print(sorted({'torch', 'hivemind', 'numpy'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "[]\n"


def test_every_program_has_a_version() -> None:
    from atoll.coordinator.cli import serve

    for app in (serve.app, main.app):
        result = CliRunner().invoke(app, ["--version"])
        assert result.exit_code == 0
        assert result.stdout.startswith("atoll ")


def test_a_narrow_terminal_drops_whole_columns_but_not_names(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("LINES", "25")  # else a dumb terminal has 80 columns whatever it says
    columns = [Column("name"), Column("peer", drop_order=1), Column("run", drop_order=2), Column("state")]
    row = {"name": "a-name-of-some-length", "peer": "…6xy9abcd", "run": "reef", "state": "training"}
    widths = {80: {"NAME", "PEER", "RUN", "STATE"}, 40: {"NAME", "RUN", "STATE"}, 32: {"NAME", "STATE"}}
    for width, headings in widths.items():
        monkeypatch.setenv("COLUMNS", str(width))
        show(Output.TEXT, {}, columns, [row])
        lines = capsys.readouterr().out.splitlines()
        assert set(lines[0].split()) == headings
        assert row["name"] in lines[1]
        assert "…" not in lines[1].replace(row["peer"], "")
        assert max(map(len, lines)) <= width


def metrics_pages(monkeypatch: pytest.MonkeyPatch, canned: Canned, rows: list[wire.MetricsRow], size: int) -> None:
    """The coordinator has these rows, and pages of `size`."""
    monkeypatch.setattr(metrics_rows, "PAGE_ROWS", size)

    def call(method: str, request: object) -> object:
        if not isinstance(request, wire.ListMetricsRequest):
            return ANSWERS[method]
        assert request.limit == size
        place = (request.since_round, request.after_peer_id)
        left = [row for row in rows if (row.metrics.round, row.peer_id) > place]
        return wire.ListMetricsResponse(rows=left[:size])

    monkeypatch.setattr(canned, "call", call)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 100])
def test_csv_has_all_pages_and_the_units(canned: Canned, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    rows = [
        wire.MetricsRow(
            peer_id=peer,
            name=f"node-{peer}",
            unix_ms=1000 * number,
            metrics=mb.NodeMetrics(round=number, train_loss=5.5 - number, tokens=64, seconds=4.0),
        )
        for number in (6, 7, 8)
        for peer in ("p1", "p2")
    ]
    metrics_pages(monkeypatch, canned, rows, size)
    result = CliRunner().invoke(main.app, ["metrics", "--csv"])
    assert result.exit_code == 0, result.output
    found = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [(row["round"], row["node"]) for row in found] == [
        (str(row.metrics.round), f"node-{row.peer_id}") for row in rows
    ]
    first = found[2]
    assert first["train_loss [nats/token]"] == "-1.5"
    assert first["validation_loss [nats/token]"] == "2.25"  # of round 7
    assert (found[0]["validation_loss [nats/token]"], first["learning_rate"]) == ("", "")
    assert (first["tokens_per_second [tokens/s]"], first["unix_ms [ms]"]) == ("16.0", "7000")


def test_metrics_are_one_json_object_whatever_their_number(canned: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (0, 1, 5):
        rows = [wire.MetricsRow(peer_id="p", metrics=mb.NodeMetrics(round=1 + number)) for number in range(count)]
        metrics_pages(monkeypatch, canned, rows, 2)
        document = json.loads(CliRunner().invoke(main.app, ["metrics", "--output", "json"]).stdout)
        assert [row["round"] for row in document["metrics"]] == list(range(1, count + 1))
        assert document["validation_losses"] == [{"round": 1, "loss": 4.5}, {"round": 7, "loss": 2.25}]


def test_metrics_are_csv_or_json(canned: Canned) -> None:
    result = CliRunner().invoke(main.app, ["metrics", "--csv", "--output", "json"])
    assert isinstance(result.exception, UsageError)
    assert canned.asked == []


def test_a_name_in_metrics_cannot_control_the_terminal(canned: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
    row = wire.MetricsRow(peer_id="p\x1b[2J", name="a\x1b[31m\nb,c", metrics=mb.NodeMetrics(round=1))
    for options in ([], ["--csv"], ["--output", "json"]):
        metrics_pages(monkeypatch, canned, [row], 100)
        monkeypatch.setattr(metrics, "TABLE_ROWS", 100)
        shown = CliRunner().invoke(main.app, ["metrics", *options])
        assert shown.exit_code == 0, shown.output
        assert "\x1b" not in shown.stdout


def test_filters_of_events_become_the_request(canned: Canned) -> None:
    options = ["--run", "reef", "--node", "attic", "--kind", "node", "--since", "1500ms", "--tail", "5", "--after", "3"]
    CliRunner().invoke(main.app, ["events", *options])
    CliRunner().invoke(main.app, ["events", "--since", "10ms"])
    assert canned.asked == [
        (
            "Events",
            wire.EventsRequest(after_id=3, run_id="reef", node="attic", kind="node", since_seconds=2, tail=5),
        ),
        ("Events", wire.EventsRequest(since_seconds=1)),
    ]


def test_a_wrong_age_of_events_asks_nothing(canned: Canned) -> None:
    assert isinstance(CliRunner().invoke(main.app, ["events", "--since", "yesterday"]).exception, UsageError)
    assert canned.asked == []


def test_tensorboard_files_are_of_nodes_and_of_the_run(canned: Canned, tmp_path: Path) -> None:
    result = CliRunner().invoke(main.app, ["metrics", "--tensorboard", str(tmp_path), "--output", "json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tensorboard"] == {
        "directory": str(tmp_path),
        "files": 3,
        "rows": 2,
        "losses": 2,
    }
    files = {path.parent.relative_to(tmp_path) for path in tmp_path.rglob("*tfevents*")}
    assert files == {Path("reef"), Path("reef/basement"), Path(f"reef/{SPARE}")}
    assert b"train_loss" in (tmp_path / "reef/basement/events.out.tfevents.atoll").read_bytes()
    assert b"validation_loss" in (tmp_path / "reef/events.out.tfevents.atoll").read_bytes()


def test_csv_and_tensorboard_exclude_each_other(canned: Canned, tmp_path: Path) -> None:
    result = CliRunner().invoke(main.app, ["metrics", "--csv", "--tensorboard", str(tmp_path)])
    assert isinstance(result.exception, UsageError)
    assert (canned.asked, list(tmp_path.iterdir())) == ([], [])


def test_a_plan_of_a_run_names_a_wrong_key_as_creating_it_does(canned: Canned) -> None:
    for arguments in (["--set", "sync.codek=int8"], ["--set", "sync.codec=int3"]):
        failed = CliRunner().invoke(main.app, ["run", "plan", "-", *arguments], input=PLANNED)
        assert isinstance(failed.exception, RunSpecError)
        assert "sync.codec" in str(failed.exception)
    no_toml = CliRunner().invoke(main.app, ["run", "plan", "-", "--set", "run.seed=1"], input="version = ")
    assert isinstance(no_toml.exception, RunSpecError)
    assert isinstance(
        CliRunner().invoke(main.app, ["run", "plan", "-", "--set", "x"], input=PLANNED).exception, UsageError
    )
    assert canned.asked == []


def test_a_plan_of_a_run_asks_no_coordinator_if_it_is_offline(canned: Canned) -> None:
    assert CliRunner().invoke(main.app, ["run", "plan", "-", "--offline"], input=PLANNED).exit_code == 0
    refused = CliRunner().invoke(main.app, ["run", "plan", "-", "--offline", "--run", "reef"], input=PLANNED)
    assert isinstance(refused.exception, UsageError)
    assert canned.asked == []
