"""The newest installed head and its state, which change together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from atoll.core.manifest import Head
from atoll.node.state.anchor import AnchorState
from atoll.node.state.manifests import ManifestStore


class InstalledState:
    """`state` belongs to `head`, except while `moving` is set. It must not be served then."""

    def __init__(self, head: Head, state: AnchorState, manifests: ManifestStore) -> None:
        self.head = head
        self.state = state
        self.manifests = manifests
        self.moving = False
        self._told: tuple[Callable[[Head], None], ...] = ()

    def tell(self, *told: Callable[[Head], None]) -> None:
        """Set the functions that are called, in this order, with every head installed from now on."""
        self._told = told

    async def record(self, head: Head) -> None:
        """Write the manifest of `head` to disk before its state is installed."""
        await asyncio.to_thread(self.manifests.try_append, head)

    async def move(self, head: Head, change: Callable[..., None], *arguments: object) -> None:
        """Change the state to that of `head` in a thread. `moving` is set meanwhile, so that no mixture is served.

        State and head change together even if this call is cancelled.
        """
        self.moving = True
        changing = asyncio.create_task(asyncio.to_thread(change, *arguments))
        try:
            await asyncio.shield(changing)
        finally:
            await asyncio.wait([changing])
            changing.result()
            self.head = head
            self.moving = False
            for tell in self._told:
                tell(head)
