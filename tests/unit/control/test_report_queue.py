"""Reports are kept until they are acknowledged; no batch is larger than the coordinator accepts."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.node.control.coordinator_link import MAX_REPORT_BYTES, MAX_REPORTS, ReportQueue
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
