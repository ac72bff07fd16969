"""What a model that is spread over several devices takes more of them together than one device would with it. Pure.

A planner counts a node's memory as one device's, so what being several costs is taken off what the node says it has.
"""

from __future__ import annotations

from atoll.core.layer_kinds import is_block
from atoll.node.model.memory_estimate import FP32_BYTES
from atoll.v1 import plan_pb2


def padded_rows(samples: int, devices: int) -> int:
    """Of a micro-batch: all devices compute as many, so that some of these may count for nothing."""
    return devices * -(-samples // devices)


def usable_bytes(table: plan_pb2.LayerTable, memory_bytes: int, devices: int, times: float) -> int:
    """What is left of `memory_bytes` for what one device would take.

    On each, embedding and head are together, with their gradient, and of blocks the one that computes, with its
    gradient, and the next one. What is frozen is whole on each. `times` as much as one would, the others take of the
    rest: because pieces are uneven, or samples do not divide.
    """
    largest = max((row.parameters for row in table.layers if is_block(row.kind)), default=0)
    ends = sum(row.parameters for row in table.layers if not is_block(row.kind))
    left = memory_bytes - FP32_BYTES * devices * (2 * ends + 3 * largest)
    copies = devices if any(row.frozen_parameters for row in table.layers) else 1
    return max(0, int(left / (copies * times)))


def evaluation_copy_bytes(table: plan_pb2.LayerTable) -> int:
    """By a trainer of all layers: what was trained stays beside an anchor that is evaluated."""
    return FP32_BYTES * sum(row.parameters for row in table.layers)
