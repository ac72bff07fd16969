"""The newest head that is installed on this node, with its state: they change together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from atoll.core.manifest import Head
from atoll.node.state.anchor import AnchorState
from atoll.node.state.manifests import ManifestStore


class InstalledState:
    """`state` is that of `head`, except while it is `moving`: then it must not be served."""

    def __init__(self, head: Head, state: AnchorState, manifests: ManifestStore) -> None:
        self.head = head
        self.state = state
        self.manifests = manifests
        self.moving = False
        self._told: tuple[Callable[[Head], None], ...] = ()

    def tell(self, *told: Callable[[Head], None]) -> None:
        """Call these, in this order, with every head that is installed from now on."""
        self._told = told

    async def record(self, head: Head) -> None:
        """Write the manifest of `head` down, before its state is installed."""
        await asyncio.to_thread(self.manifests.try_append, head)

    async def move(self, head: Head, change: Callable[..., None], *arguments: object) -> None:
        """Change the state to that of `head`, off the event loop; nobody is served a mixture meanwhile.

        State and head change together even when this is cancelled in between.
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
