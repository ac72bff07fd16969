"""The owner's intent and the month's traffic, kept over restarts in two files of the data directory.

- `owner.json`: whether the owner paused the node, and until when. If it cannot be read, the node stays paused until
  `atoll resume`, so that a restart never trains against the owner's will.
- `traffic.json`: bytes by calendar month. A daemon started with a wrong clock counts into another month and erases
  nothing. If the file cannot be read, counting starts at 0.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from atoll.core import log
from atoll.core.files import write_atomic
from atoll.node.system.training_policy import month_of

MONTHS_KEPT = 24  # the months that traffic was counted for last
_INTENT_FILE, _TRAFFIC_FILE = "owner.json", "traffic.json"

_log = log.get("owner")


@dataclass(frozen=True)
class OwnerIntent:
    """The owner's last pause, resume or finish."""

    paused: bool = False
    until_unix: float | None = None  # end of the pause; None: until `atoll resume`
    finished: bool = False  # paused by `atoll finish`

    def is_paused_at(self, unix: float) -> bool:
        """Return whether the pause applies at that time."""
        return self.paused and (self.until_unix is None or unix < self.until_unix)

    def reason(self, unix: float) -> str:
        """Reason for the pause, for `atoll status`."""
        if self.finished:
            return "finished by its owner; `atoll resume` trains again"
        if self.until_unix is None:
            return "paused by its owner"
        return f"paused by its owner until {datetime.fromtimestamp(self.until_unix).astimezone():%Y-%m-%d %H:%M}"


def load_owner_intent(data_dir: Path) -> OwnerIntent:
    """Read the owner's last intent; paused if the file cannot be read."""
    try:
        plain = json.loads((data_dir / _INTENT_FILE).read_bytes())
        until = plain["until_unix"]
        return OwnerIntent(bool(plain["paused"]), None if until is None else float(until), bool(plain["finished"]))
    except FileNotFoundError:
        return OwnerIntent()
    except (OSError, ValueError, TypeError, KeyError) as error:
        _log.warning("owner.json cannot be read; training stays paused until `atoll resume`", reason=str(error))
        return OwnerIntent(paused=True)


def save_owner_intent(data_dir: Path, intent: OwnerIntent) -> None:
    """Write the intent durably. Raises `DataDirUnusable`."""
    write_atomic(data_dir / _INTENT_FILE, json.dumps({"version": 1, **asdict(intent)}).encode())


class MonthlyTraffic:
    """Bytes to and from peers by calendar month, summed over restarts of the daemon."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / _TRAFFIC_FILE
        self._bytes = _read(self._path)  # by month, in the order in which they were last counted into
        self._counted = 0  # bytes of this process already added

    def count(self, process_total: int, local: datetime) -> int:
        """Add the growth of `process_total` since the last call to the month of `local`; return that month's bytes."""
        month = month_of(local)
        self._bytes[month] = self._bytes.pop(month, 0) + process_total - self._counted
        self._counted = process_total
        while len(self._bytes) > MONTHS_KEPT:
            del self._bytes[next(iter(self._bytes))]
        return self._bytes[month]

    def save(self) -> None:
        """Write the counts durably. Raises `DataDirUnusable`."""
        plain = {"version": 2, "bytes_by_month": self._bytes}
        write_atomic(self._path, json.dumps(plain).encode())


def _read(path: Path) -> dict[str, int]:
    try:
        plain = json.loads(path.read_bytes())["bytes_by_month"]
        return {str(month): max(0, int(count)) for month, count in plain.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        _log.warning("traffic.json cannot be read; the month's traffic is counted from 0", reason=str(error))
        return {}
