"""Main memory that training on a CPU may use. No torch."""

from __future__ import annotations

import os

HOST_OVERHEAD_BYTES = 32 << 20  # subtracted from a host memory limit: thread stacks, queues, allocator caches


def usable_host_memory(memory_bytes: int) -> int:
    """Bytes that training may use under the owner's limit; 0 means all of the machine's memory."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(most, max(0, memory_bytes - HOST_OVERHEAD_BYTES)) if memory_bytes else most
