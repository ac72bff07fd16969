"""A limit on what training may allocate on a CPU, enforced by the kernel."""

import subprocess
import sys

import pytest
import torch

from atoll.node.training.device import THREADS_BYTES, device_facts

PROGRAM = """
import sys, torch
from atoll.node.training.device import limit_host_memory
limit_host_memory(64 << 20)
try:
    torch.ones(int(sys.argv[1]) << 20, dtype=torch.uint8)
except RuntimeError:
    print("refused")
else:
    print("given")
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")


@pytest.mark.parametrize(("megabytes", "told"), [(16, "given"), (128, "refused")])
def test_what_goes_beyond_the_limit_is_not_given(megabytes, told):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(megabytes)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == [told]


def test_a_node_tells_what_is_left_for_the_model():
    cpu = torch.device("cpu")
    assert device_facts(cpu, memory_bytes=200 << 20).memory_bytes == (200 << 20) - THREADS_BYTES
    assert device_facts(cpu, memory_bytes=1).memory_bytes == 0
    assert device_facts(cpu, memory_bytes=1 << 60).memory_bytes == device_facts(cpu).memory_bytes
