"""Device names of a node: `auto`, `cpu`, `cuda:0`, `mps`, or several of a kind: `cuda:0,cuda:1`.

Only the syntax is checked here, without torch; `device.py` checks that the devices exist.
"""

from __future__ import annotations

import re
import sys

from atoll.core.errors import ConfigError

_NAME = re.compile(r"auto|cpu|mps|cuda(:\d{1,3})?")
_MOST = 16
_REMEDY = "use auto, cpu, cuda:0 or mps, or several GPUs like cuda:0,cuda:1"


def parse_device_names(text: str) -> tuple[str, ...]:
    """Parse one or several device names. Raises `ConfigError`."""
    names = tuple(name.strip() for name in text.split(","))
    wrong = next((name for name in names if not _NAME.fullmatch(name)), None)
    if wrong is not None:
        raise ConfigError(f"{wrong!r} is not a device" if wrong else f"{text!r} has an empty name at a comma", _REMEDY)
    names = tuple("cuda:0" if name == "cuda" else name for name in names)
    if len(names) == 1:
        return names
    if sys.platform != "linux":
        raise ConfigError("several devices in one node are supported on Linux only", "run one daemon per device")
    if len(names) > _MOST:
        raise ConfigError(f"{text!r} has {len(names)} devices; a node may have at most {_MOST}", "run several daemons")
    kinds = {name.partition(":")[0] for name in names}
    if len(kinds) > 1 or not kinds <= {"cpu", "cuda"} or (kinds == {"cuda"} and len(set(names)) < len(names)):
        raise ConfigError(
            f"{text!r} is not a list of several GPUs of one kind", "use a list like cuda:0,cuda:1, each GPU once"
        )
    return names
