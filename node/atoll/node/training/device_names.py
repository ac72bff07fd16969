"""How a node's devices are written: `auto`, `cpu`, `cuda:0`, `mps`, or several of a kind: `cuda:0,cuda:1`.

Whether they are there, `device.py` knows; this needs no torch.
"""

from __future__ import annotations

import re
import sys

from atoll.core.errors import ConfigError

_NAME = re.compile(r"auto|cpu|mps|cuda(:\d{1,3})?")
_MOST = 16
_REMEDY = "write auto, cpu, cuda:0 or mps, or several GPUs like cuda:0,cuda:1"


def parse_device_names(text: str) -> tuple[str, ...]:
    """One or several. Raises `ConfigError`."""
    names = tuple(name.strip() for name in text.split(","))
    wrong = next((name for name in names if not _NAME.fullmatch(name)), None)
    if wrong is not None:
        raise ConfigError(f"{wrong!r} is no device" if wrong else f"{text!r} names no device at a comma", _REMEDY)
    names = tuple("cuda:0" if name == "cuda" else name for name in names)
    if len(names) == 1:
        return names
    if sys.platform != "linux":
        raise ConfigError("a node has several devices on Linux only", "run a daemon for each device")
    if len(names) > _MOST:
        raise ConfigError(f"{len(names)} devices; {_MOST} are the most of one node")
    kinds = {name.partition(":")[0] for name in names}
    if len(kinds) > 1 or not kinds <= {"cpu", "cuda"} or (kinds == {"cuda"} and len(set(names)) < len(names)):
        raise ConfigError(
            f"{text!r} does not name several GPUs of one kind", "write them like cuda:0,cuda:1, each of them once"
        )
    return names
