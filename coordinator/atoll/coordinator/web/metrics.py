"""Prometheus metrics of the coordinator: read from the state at each scrape; errors are counted as they happen.

Labels are runs, node states, methods, error names, sources of a corpus (64 of a run and one for the rest) and names of
nodes (`MAX_NAMED_NODES`), which are all bounded. No label is a peer id.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections import defaultdict
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from atoll.coordinator.controller import Controller
from atoll.coordinator.live.attendance import ready_count
from atoll.coordinator.rounds.source_losses import from_text
from atoll.coordinator.sanitize import enum_word
from atoll.coordinator.state.snapshot import State
from atoll.v1 import membership_pb2 as mb

MAX_NAMED_NODES = 256  # of all runs; only the first nodes by run and name have their own series


def rpc_errors(registry: CollectorRegistry) -> Counter:
    """Counter of RPCs that ended in an error."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per counter without a use
    return Counter("atoll_rpc_errors", "RPCs that ended in an error", ["method", "reason"], registry=registry)


class StateCollector(Collector):
    """Collector of gauges and counters from the state."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def collect(self) -> Iterator[Metric]:
        """Metrics of the current state, at each scrape."""
        state = self._controller.state
        healthy = not self._controller.store_failure
        yield GaugeMetricFamily("atoll_store_healthy", "1 unless the last write failed", value=healthy)
        failures = self._controller.tick_failures
        yield CounterMetricFamily("atoll_tick_failures", "Ticks that failed", value=failures)
        yield from _nodes(state)
        yield from _named_nodes(state)
        yield from _runs(state)


def _nodes(state: State) -> Iterator[Metric]:
    nodes = GaugeMetricFamily("atoll_nodes", "Connected nodes and seeds by state", labels=["run", "state"])
    pace = GaugeMetricFamily("atoll_tokens_per_second", "Sum of the rates that connected nodes measure", labels=["run"])
    stall = GaugeMetricFamily(
        "atoll_data_stall_ratio",
        "Share of recent training time that waited for training text, of nodes that train",
        labels=["run", "statistic"],
    )
    fetched = GaugeMetricFamily(
        "atoll_data_fetched_bytes", "Training text that connected nodes fetched", labels=["run"]
    )
    trained = GaugeMetricFamily(
        "atoll_data_trained_bytes", "Stored bytes of corpus samples that connected nodes trained", labels=["run"]
    )
    counts: Counts[tuple[str, str]] = Counts()
    text: Counts[tuple[str, str]] = Counts()
    stalls: defaultdict[str, list[float]] = defaultdict(list)
    speeds: defaultdict[str, float] = defaultdict(float)
    for node in state.present_nodes():
        live = state.live.get(node.peer_id)
        if live is not None and live.connected:
            name = enum_word(mb.NodeState.DESCRIPTOR, live.status.state)
            counts[node.run_id, name] += 1
            speeds[node.run_id] += live.status.tokens_per_second
            text[node.run_id, "fetched"] += live.status.data_bytes_fetched
            text[node.run_id, "trained"] += live.status.data_bytes_trained
            if live.status.state == mb.NODE_STATE_TRAINING:
                stalls[node.run_id].append(live.status.data_stall_share)
    for (run_id, name), count in sorted(counts.items()):
        nodes.add_metric([run_id, name], count)
    for run_id in sorted(state.runs):
        pace.add_metric([run_id], speeds[run_id])
        fetched.add_metric([run_id], text[run_id, "fetched"])
        trained.add_metric([run_id], text[run_id, "trained"])
        if shares := stalls[run_id]:
            stall.add_metric([run_id, "mean"], sum(shares) / len(shares))
            stall.add_metric([run_id, "max"], max(shares))
    yield from (nodes, pace, stall, fetched, trained)


def _named_nodes(state: State) -> Iterator[Metric]:
    """Metrics that connected nodes report, one series for each node."""
    labels = ["run", "node"]
    loss = GaugeMetricFamily("atoll_node_train_loss", "Mean loss of recent steps, nats per token", labels=labels)
    pace = GaugeMetricFamily("atoll_node_tokens_per_second", "Rate that the node measures", labels=labels)
    stall = GaugeMetricFamily("atoll_node_data_stall_ratio", "Share of its time that waited for text", labels=labels)
    head = GaugeMetricFamily("atoll_node_head_round", "Newest round that the node holds", labels=labels)
    unnamed = GaugeMetricFamily("atoll_nodes_without_series", "Connected nodes beyond those with series of their own")
    trainers = [node for node in state.present_nodes() if "node" in node.roles]
    here = [(node, live) for node in trainers if (live := state.live.get(node.peer_id)) is not None and live.connected]
    for node, live in sorted(here, key=lambda item: (item[0].run_id, item[0].name))[:MAX_NAMED_NODES]:
        names = [node.run_id, node.name]
        pace.add_metric(names, live.status.tokens_per_second)
        stall.add_metric(names, live.status.data_stall_share)
        head.add_metric(names, live.status.head_round)
        if live.status.train_loss:
            loss.add_metric(names, live.status.train_loss)
    unnamed.add_metric([], max(0, len(here) - MAX_NAMED_NODES))
    yield from (loss, pace, stall, head, unnamed)


def _runs(state: State) -> Iterator[Metric]:
    head = GaugeMetricFamily("atoll_run_head_round", "Newest committed round", labels=["run"])
    tokens = CounterMetricFamily("atoll_run_committed_tokens", "Tokens in committed rounds", labels=["run"])
    rounds = CounterMetricFamily("atoll_run_rounds", "Reported rounds", labels=["run", "outcome"])
    members = GaugeMetricFamily("atoll_round_members", "Members of the newest round, by kind", labels=["run", "kind"])
    zeroed = CounterMetricFamily("atoll_run_parts_zeroed", "Parts of rounds that nobody held", labels=["run"])
    plan = GaugeMetricFamily("atoll_run_plan_version", "Newest plan", labels=["run"])
    loss = GaugeMetricFamily("atoll_run_validation_loss", "Newest validation loss, nats per token", labels=["run"])
    ready = GaugeMetricFamily("atoll_run_nodes_ready", "Nodes that train or could", labels=["run"])
    source_loss = GaugeMetricFamily(
        "atoll_run_source_validation_loss", "Newest validation loss by source, nats per token", labels=["run", "source"]
    )
    source_tokens = GaugeMetricFamily(
        "atoll_run_source_tokens", "Tokens of a source in committed rounds, of a mixture", labels=["run", "source"]
    )
    for run_id, run in sorted(state.runs.items()):
        memory = state.memory[run_id]
        head.add_metric([run_id], run.head_round)
        tokens.add_metric([run_id], run.committed_tokens)
        rounds.add_metric([run_id, "committed"], run.head_round)
        rounds.add_metric([run_id, "abandoned"], max(0, run.rounds_opened - run.head_round))
        newest = memory.committed.get(run.head_round) if run.head_round else None
        if newest is not None:
            kinds = {
                "contributed": newest.members,
                "present": len(newest.present),
                "partial": newest.partial,
                "screened": newest.screened,
            }
            for kind, number in kinds.items():
                members.add_metric([run_id, kind], number)
        zeroed.add_metric([run_id], run.parts_zeroed)
        plan.add_metric([run_id], run.plan_version)
        ready.add_metric([run_id], ready_count(state, run_id))
        if run.loss:
            loss.add_metric([run_id], run.loss)
        for source in from_text(run.sources):
            source_loss.add_metric([run_id, source.name], source.loss)
            if source.tokens:
                source_tokens.add_metric([run_id, source.name], source.tokens)
    yield from (head, tokens, rounds, members, zeroed, plan, loss, ready, source_loss, source_tokens)
