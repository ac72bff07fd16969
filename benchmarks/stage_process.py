"""One stage of a route for benchmarks: a trainer process and the bridge to its neighbours, on any network."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from atoll.core.clock import SystemClock
from atoll.core.data_position import SampleRange
from atoll.core.errors import ChildDied
from atoll.core.run_spec import parse_run_spec
from atoll.node.pipeline.dispatcher import RouteDispatcher
from atoll.node.pipeline.route import RoutePlace
from atoll.node.pipeline.route_connection import RouteConnection
from atoll.node.trainer.trainer import Trainer, TrainerConfig

_LOAD = timedelta(minutes=3)
_ENDS = timedelta(seconds=5)
_ALL: tuple[SampleRange, ...] = ((0, 10**9),)


@dataclass
class StageProcess:
    """From `start` to `stop`."""

    trainer: Trainer
    bridge: RouteConnection
    _running: asyncio.Task[None]

    @classmethod
    async def start(
        cls,
        dispatcher: RouteDispatcher,
        place: RoutePlace,
        config: TrainerConfig,
        log: Path,
        *,
        kind: type[Trainer] = Trainer,
        initialise: bool = True,
    ) -> StageProcess:
        """A trainer with its span, on its route, told to train; the driver gets all samples. Raises as `Trainer`."""
        trainer = await kind.spawn(config, log_path=log, timeout=_LOAD)
        try:
            if initialise:
                await trainer.initialise()
            await trainer.load(ranges=_ALL if place.stage == 0 else (), committed_tokens=0)
            await trainer.enter_route(place)
            assert trainer.stage_socket is not None
            spec = parse_run_spec(config.run_spec_toml)
            bridge = RouteConnection(dispatcher, trainer.stage_socket, place, spec, trainer.facts.layers, SystemClock())
            running = asyncio.create_task(_bridged(bridge))
            await trainer.train()
        except BaseException:
            await trainer.stop(_ENDS)
            raise
        return cls(trainer, bridge, running)

    async def stop(self) -> None:
        """Leave the route, then end the child. Safe when it is dead."""
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self.trainer.stop(_ENDS)


async def _bridged(bridge: RouteConnection) -> None:
    with suppress(ChildDied):
        await bridge.run()
