"""Reports are kept until they are acknowledged; no batch is larger than the coordinator accepts."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.interceptors import MAX_ENTRIES
from atoll.core.message_bounds import parse_bounded
from atoll.core.metrics_bounds import EARLY_METRICS_ROUNDS
from atoll.node.control.report_queue import (
    MAX_KEPT,
    MAX_KEPT_METRICS,
    MAX_KEPT_ROUNDS,
    MAX_REPORT_BYTES,
    MAX_REPORTS,
    ReportQueue,
)
from atoll.v1 import common_pb2 as pb
from atoll.v1 import membership_pb2 as mb


@given(st.lists(st.sampled_from(["report", "take", "acknowledge", "break"]), max_size=60), st.data())
def test_every_report_is_pending_sent_or_acknowledged(actions, data):
    outgoing, made, acknowledged, sequence = ReportQueue(), 0, set(), 0
    for action in actions:
        match action:
            case "report":
                outgoing.pending.append(mb.EvaluationReport(round=made))
                made += 1
            case "take":
                sequence += 1
                outgoing.take(sequence)
            case "acknowledge" if sequence:
                upto = data.draw(st.integers(0, sequence))
                acknowledged |= {r.round for n, batch in outgoing.sent.items() if n <= upto for r in batch}
                outgoing.acknowledged(upto)
            case "break":
                outgoing.requeue_unacknowledged()
    waiting = [r.round for batch in outgoing.sent.values() for r in batch] + [r.round for r in outgoing.pending]
    assert sorted([*waiting, *acknowledged]) == list(range(made))


def test_reports_after_a_long_absence_are_sent_in_bounded_batches():
    outgoing = ReportQueue()
    outgoing.pending = [mb.RoundReport(reason="x" * 6000) for _ in range(2000)]
    sequence = 0
    while outgoing.pending:
        sequence += 1
        batch = outgoing.take(sequence)
        assert 0 < len(batch) <= MAX_REPORTS
        assert sum(report.ByteSize() for report in batch) <= MAX_REPORT_BYTES
    huge = mb.RoundReport(reason="x" * (2 * MAX_REPORT_BYTES))
    outgoing.pending = [huge, huge]
    assert outgoing.take(sequence + 1) == [huge]


def round_report(number):
    return mb.RoundReport(round=pb.RoundId(number=number))


def test_reports_that_the_coordinator_cannot_place_yet_are_sent_again():
    outgoing = ReportQueue()
    loss, third, seventh = mb.EvaluationReport(round=3), round_report(3), round_report(7)
    for report in (third, loss, seventh):
        outgoing.add(report)
    outgoing.take(1)
    outgoing.acknowledged(1, known_round=1)
    assert outgoing.pending == []
    outgoing.acknowledged(1, known_round=2)
    assert outgoing.take(2) == [third]
    outgoing.acknowledged(2, known_round=3)
    assert outgoing.take(3) == [loss]
    outgoing.acknowledged(3, known_round=40)
    assert outgoing.take(4) == [seventh]
    outgoing.acknowledged(4, known_round=40)
    assert (outgoing.pending, outgoing.sent, outgoing.early) == ([], {}, [])


def test_a_coordinator_that_does_not_say_what_it_knows_gets_each_report_once():
    outgoing = ReportQueue()
    outgoing.add(round_report(9))
    outgoing.take(1)
    outgoing.acknowledged(1)
    assert (outgoing.pending, outgoing.early) == ([], [])


def test_a_long_absence_of_the_coordinator_fills_no_memory():
    outgoing = ReportQueue()
    for number in range(MAX_KEPT + 500):
        outgoing.add(mb.EvaluationReport(round=number))
        outgoing.add(round_report(number))
    kept = [report for report in outgoing.pending if isinstance(report, mb.RoundReport)]
    assert len(outgoing.pending) <= MAX_KEPT
    assert [report.round.number for report in kept] == list(range(MAX_KEPT + 500 - MAX_KEPT_ROUNDS, MAX_KEPT + 500))
    assert outgoing.pending[-2].round == MAX_KEPT + 499


def test_a_backlog_of_losses_by_source_fits_the_coordinator() -> None:
    outgoing, sequence, delivered = ReportQueue(), 0, 0
    sources = [mb.SourceLoss(name=f"source-{number}", loss=1.5, windows=1, tokens=10**9) for number in range(64)]
    for number in range(300):
        outgoing.add(mb.EvaluationReport(round=number, loss=1.5, committed_tokens=10**9, sources=sources))
    while outgoing.pending:
        sequence += 1
        request = mb.HeartbeatRequest(evaluations=outgoing.take(sequence))  # type: ignore[arg-type]
        parsed = parse_bounded(mb.HeartbeatRequest, request.SerializeToString(), MAX_ENTRIES)
        delivered += len(parsed.evaluations)
    assert delivered == 300


def test_metrics_of_a_long_absence_push_out_older_metrics_and_no_losses():
    outgoing = ReportQueue()
    outgoing.add(mb.EvaluationReport(round=1))
    for number in range(1, MAX_KEPT + 1):
        outgoing.add(mb.NodeMetrics(round=number))
    assert outgoing.pending[0] == mb.EvaluationReport(round=1)
    assert [item.round for item in outgoing.pending[1:]] == list(range(MAX_KEPT - MAX_KEPT_METRICS + 1, MAX_KEPT + 1))


def test_metrics_wait_only_where_the_coordinator_knows_much_older_rounds():
    outgoing = ReportQueue()
    near, far = mb.NodeMetrics(round=3 + EARLY_METRICS_ROUNDS), mb.NodeMetrics(round=4 + EARLY_METRICS_ROUNDS)
    for report in (near, far):
        outgoing.add(report)
    outgoing.take(1)
    outgoing.acknowledged(1, known_round=3)
    assert (outgoing.early, outgoing.pending) == ([far], [])
    outgoing.acknowledged(1, known_round=4)
    assert outgoing.pending == [far]
