"""What a limit on main memory counts: tensors, not what torch loads when it is first used."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, queue, socket, sys
import torch
from atoll.core.clock import SystemClock
from atoll.node.pipeline.stage_io import StageIO
from atoll.node.trainer import loading
from atoll.node.training.device import (choose_device, device_facts)
from atoll.node.trainer.messages import (TrainerConfig)

known = set()
loading.limit_host_memory = lambda _: known.update(sys.modules)
one, _ = socket.socketpair()
times = (("embedding", 1e-6, 1e-6), ("block", 1e-6, 1e-6), ("head", 1e-6, 1e-6))  # of a trainer that is loaded again
config = TrainerConfig({spec!r}, device="cpu", memory_bytes=10**10, span={span!r}, layer_times=times)
facts = device_facts(choose_device("cpu"), 1.0, config.memory_bytes)
here = loading.load_trainer_state(config, facts, StageIO(one, queue.SimpleQueue().put), SystemClock())
scratch_E = torch.zeros(here.elements)
if not {span!r}:
    here.loop.initialise_into(scratch_E)
here.ready_message(here.probe(scratch_E, 0.0))
here.loop.close()
print(json.dumps(sorted(set(sys.modules) - known)))
"""

SPEC = """
version = 1
[run]
name = "t"
stop_tokens = 100000
[model]
preset = "nano"
dimension = 32
layers = 2
heads = 2
kv_heads = 2
hidden_dimension = 32
[data]
path = "{path}"
sequence_length = 16
validation_samples = 8
[sync]
round_tokens = 1000
"""


def later_imports(tmp_path: Path, span: tuple[int, int] | None) -> str:
    (tmp_path / "text.txt").write_text("a reef is a ring of islands; " * 100)
    program = PROGRAM.format(spec=SPEC.format(path=tmp_path / "text.txt"), span=span)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_stage_imports_nothing_once_memory_is_limited(tmp_path: Path) -> None:
    assert later_imports(tmp_path, (1, 2)) == "[]"


def test_nor_does_a_trainer_of_the_whole_model(tmp_path: Path) -> None:
    assert later_imports(tmp_path, None) == "[]"
