"""NAT filter: answers come in, calls do not, and idle flows are forgotten."""

from atoll.lab.wan.nat import OTHER_IDLE_SECONDS, TCP_IDLE_SECONDS, FlowTable
from atoll.lab.wan.packets import TCP, UDP, Flow

HOME, PEER, OTHER = bytes([11, 0, 0, 1]), bytes([11, 0, 0, 2]), bytes([11, 0, 0, 3])


def test_only_the_called_address_and_port_may_answer():
    table = FlowTable()
    table.sent(Flow(TCP, HOME, 4000, PEER, 80), 0.0)
    assert table.admits(Flow(TCP, PEER, 80, HOME, 4000), 1.0)
    for stranger in (
        Flow(TCP, PEER, 81, HOME, 4000),
        Flow(TCP, OTHER, 80, HOME, 4000),
        Flow(TCP, PEER, 80, HOME, 4001),
        Flow(UDP, PEER, 80, HOME, 4000),
        Flow(TCP, HOME, 4000, PEER, 80),
        None,
    ):
        assert not table.admits(stranger, 1.0)


def test_idle_flows_close_and_use_in_either_direction_keeps_them():
    table = FlowTable()
    out, back = Flow(UDP, HOME, 4000, PEER, 53), Flow(UDP, PEER, 53, HOME, 4000)
    table.sent(out, 0.0)
    assert table.admits(back, OTHER_IDLE_SECONDS - 1)
    assert table.admits(back, 2 * OTHER_IDLE_SECONDS - 2)
    assert not table.admits(back, 3 * OTHER_IDLE_SECONDS)
    table.sent(out, 1000.0)
    assert table.admits(back, 1001.0)


def test_the_table_forgets_closed_flows():
    table = FlowTable()
    for port in range(1000):
        table.sent(Flow(UDP, HOME, port, PEER, 53), 0.0)
    table.sent(Flow(TCP, HOME, 1, PEER, 80), 0.0)
    table.sent(None, 500.0)
    assert len(table) == 1
    table.sent(None, TCP_IDLE_SECONDS + 500.0)
    assert len(table) == 0
