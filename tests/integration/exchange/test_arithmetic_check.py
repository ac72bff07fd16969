"""A process that computes other bits than all members is told so before it takes part in a round."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch
torch.set_num_threads(int(sys.argv[1]))
if sys.argv[2] == "flush":
    torch.set_flush_denormal(True)
from atoll.core.errors import ArithmeticDiffers
from atoll.node.exchange.arithmetic_check import require_equal_bits
try:
    require_equal_bits()
except ArithmeticDiffers as error:
    print(error)
"""


def said(capability: str, threads: int, how: str) -> str:
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", PROGRAM, str(threads), how]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=True).stdout


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_every_capability_and_number_of_threads_passes(capability):
    assert [said(capability, threads, "as it is") for threads in (1, 2)] == ["", ""]


def test_a_process_that_flushes_subnormal_numbers_to_zero_is_refused():
    assert "flushed to zero" in said("default", 1, "flush")


def test_other_bits_of_the_outer_step_are_refused(monkeypatch):
    from atoll.core.errors import ArithmeticDiffers
    from atoll.node.exchange import arithmetic_check

    def contracted(anchor_E, momentum_E, average_E, learning_rate, momentum):
        """As a fused multiply-add would round."""
        wide = momentum_E.double() * momentum + average_E.double()
        step = (wide * momentum + average_E.double()) * learning_rate
        return (anchor_E.double() - step).float(), wide.float()

    monkeypatch.setattr(arithmetic_check, "outer_step", contracted)
    with pytest.raises(ArithmeticDiffers, match="known vector"):
        arithmetic_check.require_equal_bits()
