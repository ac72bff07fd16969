"""PeerSlots: bounds on what one peer, and all peers together, may have in progress at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from atoll.core.errors import PeerMisbehaved

Key = TypeVar("Key", bound=Hashable)


class PeerSlots(Generic[Key]):
    """Slots in use by key (a peer, an address): at most `per_key` for each, and `total` for all together."""

    def __init__(self, per_key: int, total: int | None = None) -> None:
        self._per_key = per_key
        self._total = total
        self._in_use: Counter[Key] = Counter()

    def __len__(self) -> int:
        return self._in_use.total()

    def in_use(self, key: Key) -> int:
        """How many slots a key holds."""
        return self._in_use[key]

    def try_take(self, key: Key, extra: int = 0) -> bool:
        """Take a slot and return True, or return False if none is left; `release` must follow a True.

        `extra` raises both bounds for this call.
        """
        if self._in_use[key] >= self._per_key + extra or (self._total is not None and len(self) >= self._total + extra):
            return False
        self._in_use[key] += 1
        return True

    def take(self, key: Key, what: str) -> None:
        """Take a slot; `release` must follow. Raises `PeerMisbehaved`, which names `what` the slots are for."""
        if not self.try_take(key):
            raise PeerMisbehaved(f"a peer has at most {self._per_key} {what} at once")

    def release(self, key: Key) -> None:
        """Give a slot back."""
        self._in_use[key] -= 1
        self._in_use += Counter()  # drop keys without slots in use

    @contextmanager
    def hold(self, key: Key, what: str) -> Iterator[None]:
        """Hold a slot inside a `with` statement. Raises `PeerMisbehaved` as `take` does."""
        self.take(key, what)
        try:
            yield
        finally:
            self.release(key)
