"""Runs orders to the trainer one after another, so a round's snapshot never overtakes the previous commit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

Order = Callable[[], Awaitable[None]]


class TrainerOrders:
    """The order queue of one engine."""

    def __init__(self) -> None:
        self._orders: asyncio.Queue[Order] = asyncio.Queue()

    def put(self, order: Order) -> None:
        """Queue an order."""
        self._orders.put_nowait(order)

    async def join(self) -> None:
        """Wait until all queued orders are carried out."""
        await self._orders.join()

    async def run(self) -> None:
        """Carry out orders until cancelled. Raises what an order raises."""
        while True:
            order = await self._orders.get()
            try:
                await order()
            finally:
                self._orders.task_done()
