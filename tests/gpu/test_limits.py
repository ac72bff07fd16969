"""The owner's share of the GPU's memory, kept by torch's allocator."""

from __future__ import annotations

import pytest
import torch

from atoll.core.errors import ModelTooLarge
from atoll.node.training.device import choose_device, device_facts, limit_device_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(choose_device("auto").type != "cuda", reason="there is no CUDA device here"),
]


def test_what_goes_beyond_the_share_fails_and_what_is_held_already_is_refused() -> None:
    device = choose_device("auto")
    whole = device_facts(device)
    share = device_facts(device, 0.1)
    assert share.memory_bytes == int(whole.memory_bytes * 0.1)
    assert share.uuid.startswith("GPU-")
    try:
        limit_device_memory(device, share, 0.1)
        held = torch.empty(int(whole.memory_bytes * 0.05), dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(int(whole.memory_bytes * 0.08), dtype=torch.uint8, device=device)
        with pytest.raises(ModelTooLarge, match="holds"):
            limit_device_memory(device, share, 0.02)
        del held
        limit_device_memory(device, share, 0.02)
    finally:
        limit_device_memory(device, whole, 1.0)
