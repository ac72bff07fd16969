"""Memory of a node whose model is sharded over several devices (`training/fsdp_model.py`). Pure.

The planner counts a node's memory as that of one device. Several devices together take more memory for a model than one
device. `trainer/loading.py` therefore subtracts the difference from the memory that the node reports.
"""

from __future__ import annotations

from atoll.core.layer_kinds import is_block
from atoll.node.model.memory_estimate import FP32_BYTES
from atoll.v1 import plan_pb2


def padded_rows(samples: int, devices: int) -> int:
    """Round a micro-batch up so that all devices compute the same number of rows; some rows may have no weight."""
    return devices * -(-samples // devices)


def usable_bytes(table: plan_pb2.LayerTable, memory_bytes: int, devices: int, times: float) -> int:
    """Compute how much of `memory_bytes` is left for what one device alone would take.

    Each device gathers the embedding and the head with their gradient, the block that computes with its gradient, and
    the next block. Each device holds frozen parameters in full. `times` is how much more than an even share the largest
    device takes, because shards are uneven or the samples do not divide evenly.
    """
    largest = max((row.parameters for row in table.layers if is_block(row.kind)), default=0)
    ends = sum(row.parameters for row in table.layers if not is_block(row.kind))
    left = memory_bytes - FP32_BYTES * devices * (2 * ends + 3 * largest)
    copies = devices if any(row.frozen_parameters for row in table.layers) else 1
    return max(0, int(left / (copies * times)))


def evaluation_copy_bytes(table: plan_pb2.LayerTable) -> int:
    """Count the bytes of the copy that a trainer of all layers needs to evaluate an anchor.

    It keeps the trained weights there meanwhile.
    """
    return FP32_BYTES * sum(row.parameters for row in table.layers)
