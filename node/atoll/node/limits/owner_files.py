"""What outlives the daemon of the owner's wishes and of the month's traffic: two small files in the data directory.

`owner.json` says whether the owner wants the node to rest, and until when; a restart must not train behind the owner's
back. `traffic.json` holds the bytes of each calendar month: a start with a wrong clock counts into another one and
erases nothing. A file that cannot be read counts as rest, and as nothing sent: the owner can say more, and the month
ends.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from atoll.core import log
from atoll.core.files import write_atomic
from atoll.node.training_policy import month_of

MONTHS_KEPT = 24  # the last that were counted into
_INTENT_FILE, _TRAFFIC_FILE = "owner.json", "traffic.json"

_log = log.get("owner")


@dataclass(frozen=True)
class OwnerIntent:
    """What the owner last said."""

    paused: bool = False
    until_unix: float | None = None  # of a pause; None: until `atoll resume`
    finished: bool = False  # paused by `atoll finish`

    def is_paused_at(self, unix: float) -> bool:
        """Whether the node must rest at that time."""
        return self.paused and (self.until_unix is None or unix < self.until_unix)

    def reason(self, unix: float) -> str:
        """For `atoll status`."""
        if self.finished:
            return "finished by its owner; `atoll resume` trains again"
        if self.until_unix is None:
            return "paused by its owner"
        return f"paused by its owner until {datetime.fromtimestamp(self.until_unix).astimezone():%Y-%m-%d %H:%M}"


def load_owner_intent(data_dir: Path) -> OwnerIntent:
    """The owner's last word; rest, if it cannot be read."""
    try:
        plain = json.loads((data_dir / _INTENT_FILE).read_bytes())
        until = plain["until_unix"]
        return OwnerIntent(bool(plain["paused"]), None if until is None else float(until), bool(plain["finished"]))
    except FileNotFoundError:
        return OwnerIntent()
    except (OSError, ValueError, TypeError, KeyError) as error:
        _log.warning("what the owner said last cannot be read: resting until `atoll resume`", reason=str(error))
        return OwnerIntent(paused=True)


def save_owner_intent(data_dir: Path, intent: OwnerIntent) -> None:
    """Make it durable. Raises `DataDirUnusable`."""
    write_atomic(data_dir / _INTENT_FILE, json.dumps({"version": 1, **asdict(intent)}).encode())


class MonthlyTraffic:
    """Bytes to and from peers by calendar month, over all starts of the daemon."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / _TRAFFIC_FILE
        self._bytes = _read(self._path)  # by month, the one that was counted into last at the end
        self._counted = 0  # of the process's own total

    def count(self, process_total: int, local: datetime) -> int:
        """Take the process's total so far into the month of `local`; returns the month's bytes."""
        month = month_of(local)
        self._bytes[month] = self._bytes.pop(month, 0) + process_total - self._counted
        self._counted = process_total
        while len(self._bytes) > MONTHS_KEPT:
            del self._bytes[next(iter(self._bytes))]
        return self._bytes[month]

    def save(self) -> None:
        """Make it durable. Raises `DataDirUnusable`."""
        plain = {"version": 2, "bytes_by_month": self._bytes}
        write_atomic(self._path, json.dumps(plain).encode())


def _read(path: Path) -> dict[str, int]:
    try:
        plain = json.loads(path.read_bytes())["bytes_by_month"]
        return {str(month): max(0, int(count)) for month, count in plain.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        _log.warning("this month's traffic cannot be read: counting from nothing", reason=str(error))
        return {}
