"""`atollctl node`: list, inspect, drain, ban and unban nodes, vouch for them or put them on probation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from atoll.coordinator.cli.client import connect
from atoll.coordinator.cli.confirmation import confirm
from atoll.coordinator.cli.formatting import count_or_dash, local_time, loss_or_dash, size_or_dash, time_ago
from atoll.coordinator.cli.options import CredentialsOption, NodeArgument, RunOption, YesOption
from atoll.coordinator.cli.output import Column, JsonObject, message_dict, show, show_facts, show_messages
from atoll.coordinator.sanitize import clean, enum_word
from atoll.core.node_reasons import is_failure, reason_words, telling_words
from atoll.core.output import Output, OutputOption, print_to_stderr
from atoll.v1 import admin_pb2 as wire
from atoll.v1 import common_pb2 as pb
from atoll.v1 import membership_pb2 as mb

app = typer.Typer(help="Nodes: list, show, drain, vouch, ban, forget.", no_args_is_help=True)
_CLOCK_AGREES_SECONDS = 0.5
_COLUMNS = [
    Column("name"),
    Column("peer", "peer", drop_order=1),
    Column("run", "run_id", drop_order=2),
    Column("role", "role", drop_order=4),
    Column("state", "state"),
    Column("device", "device"),
    Column("tok/s", "pace", align_right=True),
    Column("steps", "steps", align_right=True, drop_order=3),
    Column("round", "round", align_right=True, drop_order=5),
    Column("loss", "loss", align_right=True, drop_order=6),
    Column("seen", "seen", align_right=True),
]


@app.command("list")
def list_nodes(run: RunOption = "", output: OutputOption = Output.TEXT, credentials: CredentialsOption = None) -> None:
    """Show all nodes and seeds.

    [bold]Examples[/bold]

      atollctl node list

      atollctl node list --run reef --output json
    """
    with connect(credentials) as client:
        nodes = client.call(client.stub.ListNodes, wire.ListNodesRequest(run_id=run)).nodes
    show_nodes(output, nodes)


@app.command("show")
def show_node(node: NodeArgument, output: OutputOption = Output.TEXT, credentials: CredentialsOption = None) -> None:
    """Show everything that the coordinator knows about a node.

    [bold]Example[/bold]

      atollctl node show reef-3
    """
    with connect(credentials) as client:
        view = client.call(client.stub.GetNode, wire.GetNodeRequest(node=node))
    show_facts(output, {"node": message_dict(view)}, _facts(view, time.time()))


@app.command()
def drain(node: NodeArgument, output: OutputOption = Output.TEXT, credentials: CredentialsOption = None) -> None:
    """Ask a node to finish its round and leave. The node may come back later.

    [bold]Example[/bold]

      atollctl node drain reef-3
    """
    with connect(credentials) as client:
        view = client.call(client.stub.DrainNode, wire.DrainNodeRequest(node=node))
    _show_one(output, view)


@app.command()
def vouch(node: NodeArgument, output: OutputOption = Output.TEXT, credentials: CredentialsOption = None) -> None:
    """End a node's probation, because you know who runs the node.

    [bold]Example[/bold]

      atollctl node vouch reef-3
    """
    _set_probation(node, False, output, credentials)


@app.command()
def probation(node: NodeArgument, output: OutputOption = Output.TEXT, credentials: CredentialsOption = None) -> None:
    """Put a node on probation. It weighs little in rounds and decides nothing until you vouch for it.

    [bold]Example[/bold]

      atollctl node probation reef-3
    """
    _set_probation(node, True, output, credentials)


def _set_probation(node: str, on_probation: bool, output: Output, credentials: Path | None) -> None:
    with connect(credentials) as client:
        request = wire.SetProbationRequest(node=node, on_probation=on_probation)
        view = client.call(client.stub.SetProbation, request)
    _show_one(output, view)


@app.command()
def ban(
    node: NodeArgument,
    reason: Annotated[str, typer.Option(help="reason of the ban, for the event log")] = "",
    yes: YesOption = False,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Ban a node: the coordinator and all members refuse it at once.

    [bold]Example[/bold]

      atollctl node ban reef-3 --reason "sends garbage" --yes
    """
    with connect(credentials) as client:
        view = client.call(client.stub.GetNode, wire.GetNodeRequest(node=node))
        if not yes:
            print_to_stderr(f"this bans {clean(view.name)} ({clean(view.peer_id)}); it loses its place at once")
            confirm("ban it?")
        view = client.call(client.stub.BanNode, wire.BanNodeRequest(node=view.peer_id, reason=reason))
    _show_one(output, view)


@app.command()
def unban(node: NodeArgument, output: OutputOption = Output.TEXT, credentials: CredentialsOption = None) -> None:
    """End a ban. The node may join again.

    [bold]Example[/bold]

      atollctl node unban reef-3
    """
    with connect(credentials) as client:
        view = client.call(client.stub.UnbanNode, wire.UnbanNodeRequest(node=node))
    _show_one(output, view)


def show_nodes(output: Output, nodes: Sequence[wire.NodeView]) -> None:
    """Print nodes as `node list` does."""
    show_messages(output, "nodes", nodes, _columns(nodes), lambda node: _row(node, time.time()))


def _show_one(output: Output, node: wire.NodeView) -> None:
    show(output, {"node": message_dict(node)}, _COLUMNS, [_row(node, time.time())])


def _columns(nodes: Sequence[wire.NodeView]) -> list[Column]:
    """Table columns; the run is never dropped if the nodes belong to several runs."""
    several = len({node.run_id for node in nodes}) > 1
    return [replace(column, drop_order=0) if several and column.key == "run_id" else column for column in _COLUMNS]


def _state(node: wire.NodeView) -> str:
    if node.banned:
        return "banned"
    if not node.connected and is_failure(node.ended):
        return f"failed: {reason_words(node.ended)}"
    if not node.connected:
        return "left" if node.left else "offline"
    word = enum_word(mb.NodeState.DESCRIPTOR, node.status.state).replace("_", " ")
    why = telling_words(node.status.reason)
    word += f": {why}" if why and why != word else ""
    if node.assigned_run:
        word += f", will move to {node.assigned_run}"
    elif node.draining and word != "draining":
        word += ", will drain"
    return f"{word}, on probation" if node.on_probation else word


def _row(node: wire.NodeView, now: float) -> JsonObject:
    return {
        "name": node.name,
        "peer": f"…{node.peer_id[-8:]}",
        "run_id": node.run_id,
        "role": roles(node),
        "state": _state(node),
        "device": node.profile.device_name or node.profile.device or "–",
        "pace": count_or_dash(node.status.tokens_per_second) if node.connected else "–",
        "steps": node.status.steps or "–",
        "round": node.status.head_round or "–",
        "loss": loss_or_dash(node.status.train_loss),
        "seen": time_ago(node.last_seen_unix_ms, now),
    }


def _facts(node: wire.NodeView, now: float) -> list[tuple[str, object]]:
    status, profile = node.status, node.profile
    facts: list[tuple[str, object]] = [
        ("name", node.name),
        ("peer id", node.peer_id),
        ("run", node.run_id),
        ("role", roles(node)),
        ("state", _state(node)),
        ("status", status.detail or "–"),
        ("reason", reason_words(status.reason) if node.connected and status.reason else "–"),
        ("ended", _end(node)),
        ("enrolled", local_time(node.enrolled_unix_ms)),
        ("last seen", time_ago(node.last_seen_unix_ms, now)),
        ("device", profile.device_name or profile.device or "–"),
        ("device memory", size_or_dash(profile.device_memory_bytes)),
        ("atoll version", profile.atoll_version or "–"),
        ("tokens/s", count_or_dash(status.tokens_per_second)),
        ("seconds per step", f"{status.step_seconds:.3f}" if status.step_seconds else "–"),
        ("compute time per token", _computing(status)),
        ("steps", status.steps),
        ("tokens", count_or_dash(status.tokens)),
        ("training loss", loss_or_dash(status.train_loss)),
        ("head round", status.head_round),
        ("follows plan", status.plan_version or "–"),
        ("place in the plan", _plan_part_text(node)),
        ("pinned", f"to layers {node.pin}" if node.pin and node.pin != "out" else node.pin or "–"),
        ("availability", _availability_text(node)),
        ("profile warning", node.doubt or "–"),
        ("audits of its training", _audits(node)),
        ("on probation", "yes: it weighs little until you vouch for it" if node.on_probation else "no"),
        ("clock", _clock(status)),
        ("sent for averaging", size_or_dash(status.averaging_bytes_sent)),
        ("the same in fp32", size_or_dash(status.averaging_bytes_fp32)),
        ("round trips", _round_trips(node)),
        ("uplink", _rate(status.uplink_bytes_per_second)),
        ("downlink, at least", _rate(status.downlink_bytes_per_second)),
    ]
    return facts + [("address", address) for address in node.multiaddrs]


def _end(node: wire.NodeView) -> str:
    """Why the node's last process ended; empty after another one has connected."""
    told = ": ".join(filter(None, [reason_words(node.ended), node.ended_detail]))
    return told if node.left and told else "–"


def _audits(node: wire.NodeView) -> str:
    if not node.training_audits:
        return "–"
    doubted = ": it seems to train less than it claims" if node.training_doubted else ""
    audits = "1 audit" if node.training_audits == 1 else f"{node.training_audits} audits"
    return f"score {node.training_score:.1f} in {audits}, median member {node.typical_training_score:.1f}{doubted}"


def _availability_text(node: wire.NodeView) -> str:
    if not node.availability:
        return "–"
    return f"connected {node.availability:.1%} of the time, lost {24 * node.failures_per_hour:.1f} times a day"


def _clock(status: mb.NodeStatus) -> str:
    """The offset of the node's clock from the coordinator's."""
    if not status.HasField("clock_offset_seconds"):
        return "–"
    ahead = status.clock_offset_seconds
    if abs(ahead) < _CLOCK_AGREES_SECONDS:
        return "agrees"
    return f"{abs(ahead):,.1f} s {'ahead' if ahead > 0 else 'behind'}"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 125_000:.1f} Mbit/s" if bytes_per_second else "–"


def _computing(status: mb.NodeStatus) -> str:
    took = status.computed
    if not took.seconds_per_token:
        return "–"
    return f"{1000 * took.seconds_per_token:.3g} ms, layers {took.layers.first}–{took.layers.last}"


def _plan_part_text(node: wire.NodeView) -> str:
    if node.route:
        return f"layers {node.span.first}–{node.span.last}, in route {node.route}"
    if node.HasField("span"):
        return f"standby with layers {node.span.first}–{node.span.last}"
    return f"none: {node.left_out}" if node.left_out else "–"


def _round_trips(node: wire.NodeView) -> str:
    times = [1000 * path.rtt_seconds for path in node.paths]
    members = "1 member" if len(times) == 1 else f"{len(times)} members"
    return f"{min(times):.0f}–{max(times):.0f} ms to {members}" if times else "–"


def roles(node: wire.NodeView) -> str:
    return ", ".join(enum_word(pb.Role.DESCRIPTOR, role) for role in node.roles)
