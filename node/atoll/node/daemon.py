"""The node daemon, read top-down: swarm → supervise → drain. `start.py` comes before it.

One asyncio process owns p2pd, gate, DHT, rounds, the line to the coordinator and the local API; the trainer
is a child of its own. SIGTERM or SIGINT drains within a deadline; a second signal stops at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from atoll.core import log, sdnotify
from atoll.core.clock import Clock
from atoll.core.errors import AtollError, ChildDied, DeadlineExceeded, InvalidTransition, PortInUse, Unreachable
from atoll.core.files import make_private_dir
from atoll.core.identity import Identity
from atoll.core.membership import DenyList, Member
from atoll.core.run_spec import parse_run_spec
from atoll.node.config import LoadedConfig, NodeConfig
from atoll.node.control.checkpoint_upload import CheckpointUploads
from atoll.node.control.coordinator_link import CoordinatorLink
from atoll.node.control.credentials import Credentials
from atoll.node.control.directives import Directives
from atoll.node.control.local_api import LocalApi
from atoll.node.direct.direct_path import DirectConfig
from atoll.node.limits.enforcer import LimitEnforcer, LimitTargets
from atoll.node.session import LOAD_TIMEOUT, NodeContext, TrainingSession
from atoll.node.state.checkpoint import CheckpointStore
from atoll.node.state.checkpoint_writer import CheckpointWriter
from atoll.node.state.manifests import ManifestStore
from atoll.node.state.vote_store import VoteStore
from atoll.node.status import LiveStatus
from atoll.node.swarm.host import SwarmConfig, SwarmHost
from atoll.node.swarm.rtt_probe import PathProber
from atoll.node.system.remembered_ports import DIRECT_PORT_FILE, port_in, remember_port, remembered_port
from atoll.node.trainer.preload import TrainerPreload, span_to_hold
from atoll.node.trainer.trainer import TrainerConfig
from atoll.node.trainer.trainer_process import TrainerProcess
from atoll.v1 import common_pb2 as pb
from atoll.v1 import membership_pb2 as mb

START_TIMEOUT = timedelta(seconds=60)
DRAIN_TIMEOUT = timedelta(seconds=30)
CLOSE_TIMEOUT = timedelta(seconds=5)
SAVE_TIMEOUT = timedelta(seconds=60)
DRAINED_STAGE_LINGER = timedelta(seconds=20)  # of a drained stage, with what others may lack
ADDRESS_LIFETIME = timedelta(seconds=300)
ADDRESS_REFRESH = timedelta(seconds=60)
ADDRESS_RETRY = timedelta(seconds=5)
ADDRESS_CHECK_INTERVAL = timedelta(seconds=3)  # a node behind NAT learns so late that it needs a relay
LOOKUP_INTERVAL = timedelta(seconds=2)  # until every member of the plan can be dialled
AVERAGING_PROTOCOLS = ("/atoll/average/1", "/atoll/round/1")

_log = log.get("daemon")


class Daemon:
    """A running member."""

    def __init__(
        self,
        loaded: LoadedConfig,
        identity: Identity,
        credentials: Credentials,
        clock: Clock,
        child: TrainerProcess | None = None,
    ) -> None:
        """`child` is for the trainer; who made it ends it if no trainer takes it."""
        self._config = config = loaded.config  # the limits among it may change; `_limit_enforcer` has them as they are
        self._limit_enforcer = LimitEnforcer(loaded, clock)
        self._identity = identity
        self._credentials = credentials
        self._clock, self._child = clock, child
        self._preload: TrainerPreload | None = None
        self._membership: Member = credentials.authority.verify_membership(
            credentials.signed_membership(), clock.unix()
        )
        self._spec = parse_run_spec(credentials.run_spec_toml)
        self._status = LiveStatus()
        self._run_dir = make_private_dir(config.path("runs", self._spec.run.name))
        self._directives = Directives(
            credentials.authority, self._on_deny_list, self._on_seeds_changed, self._run_dir / "plan"
        )
        self._checkpoints = CheckpointWriter(
            CheckpointStore(self._run_dir / "checkpoints", self._spec, keep=config.checkpoint_keep),
            timedelta(seconds=config.checkpoint_interval_seconds),
            clock,
        )
        self._coordinator_deny_list_older = False
        self._checkpoints_reported: tuple[mb.CheckpointInfo, ...] = ()
        self._uploads = CheckpointUploads(self._send_checkpoint)
        self._leaving = asyncio.Event()
        self._notify_socket = os.environ.get("NOTIFY_SOCKET", "")
        self._leave_reason = "left"
        self._drain_timeout = DRAIN_TIMEOUT
        self._host: SwarmHost | None = None
        self._session: TrainingSession | None = None
        self._prober: PathProber | None = None
        self._layers_reported = False
        self._paths_reported_monotonic = float("-inf")
        self._link = CoordinatorLink(
            credentials,
            identity,
            clock,
            build_heartbeat=self._build_heartbeat,
            on_response=self._on_heartbeat_response,
            on_renewed=self._certificate_renewed,
        )

    async def run(self) -> None:
        """Start everything, supervise it, drain when asked."""
        self._catch_signals()
        api = LocalApi(self._config.data_dir, self._commands())
        await api.start()
        limits = self._trainer_config(self._limit_enforcer.config)
        try:
            self._preload = self._preload_trainer(limits)
            self._host = host = await self._join_unless_leaving()
            if host is None:
                return
            if "seed" in self._membership.roles:
                self._status.enter(mb.NODE_STATE_READY, "seed: bootstraps the DHT and relays")
            else:
                self._session = self._make_session(host, limits)
            await self._limit_enforcer.attach(
                LimitTargets(host.traffic, self._session, self._limit_training, lambda: self._status.facts)
            )
            work = [self._link.run(), self._fail_when_p2pd_ends(host), self._publish_address(host), self._watchdog()]
            work.append(self._limit_enforcer.run())
            if self._session is not None:
                self._prober = PathProber(host, self._members, self._clock)
                work += [
                    self._session.run(),
                    self._look_up_members(host),
                    self._leave_when_ordered(),
                    self._prober.run(),
                ]
            await self._supervise(work)
        finally:
            await api.close()
            await self._uploads.close()
            await self._limit_enforcer.close()
            if self._session is not None:
                await self._save_state(self._session)
                await self._session.stop_trainer()
            if self._preload is not None:
                await self._preload.abandon()
            if self._host is not None:
                await self._host.close(CLOSE_TIMEOUT)
            shutil.rmtree(self._config.path("run"), ignore_errors=True)

    # --- starting ------------------------------------------------------------------------------------

    def _preload_trainer(self, limits: TrainerConfig) -> TrainerPreload | None:
        """With the layers of the last plan that this node followed; the whole model where there was none."""
        if self._child is None:
            return None
        plan = self._directives.plan
        span = span_to_hold(plan, plan.span(self._identity.peer_id) if plan is not None else range(0))
        return TrainerPreload(self._child, replace(limits, span=span), LOAD_TIMEOUT, self._status.show_loading_progress)

    async def _join_unless_leaving(self) -> SwarmHost | None:
        """None when a signal came first: seeds that do not answer must not hold up the end."""
        joining, leaving = asyncio.create_task(self._join_swarm()), asyncio.create_task(self._leaving.wait())
        try:
            await asyncio.wait((joining, leaving), return_when=asyncio.FIRST_COMPLETED)
            return joining.result() if joining.done() else None
        finally:
            joining.cancel()
            leaving.cancel()
            await asyncio.gather(joining, leaving, return_exceptions=True)

    async def _join_swarm(self) -> SwarmHost:
        """On the port of the last time, if it is free: others remember where we were."""
        ports = [self._config.port] if self._config.port else [*remembered_port(self._config.data_dir), 0]
        for port in ports:
            try:
                host = await self._start_host(port)
                break
            except PortInUse:
                if port == ports[-1]:
                    raise
        if not self._credentials.seeds and "seed" not in self._membership.roles:
            _log.warning(
                "this run has no seed, through which nodes find each other: training is alone until one joins",
                remedy="its operator makes a token for one: atollctl token create --role seed",
            )
        remember_port(self._config.data_dir, port_in(host.multiaddrs()))
        remember_port(self._config.data_dir, host.direct_port, DIRECT_PORT_FILE)
        _log.info("joined the swarm", peer_id=self._identity.peer_id, addresses=list(host.multiaddrs()))
        sdnotify.notify(self._notify_socket, "READY=1")
        return host

    async def _start_host(self, port: int) -> SwarmHost:
        config = self._config
        return await SwarmHost.start(
            SwarmConfig(
                identity_path=config.path("identity.key"),
                runtime_dir=make_private_dir(config.path("run")),
                listen=(_multiaddr(config.listen, port),),
                announce=(_multiaddr(config.announce, port),) if config.announce else (),
                seeds=self._credentials.seeds,
                relay_service="seed" in self._membership.roles,
                seeds_optional=self._directives.plan is not None,  # seeds come back; the first start must find one
                direct=self._direct_config() if config.direct else None,
            ),
            identity=self._identity,
            authority=self._credentials.authority,
            membership=self._credentials.signed_membership(),
            deny=self._credentials.verified_deny_list(),
            clock=self._clock,
            timeout=START_TIMEOUT,
        )

    def _direct_config(self) -> DirectConfig:
        config = self._config
        remembered = [*remembered_port(config.data_dir, DIRECT_PORT_FILE), 0]
        return DirectConfig((config.listen,), (config.direct_port,) if config.direct_port else tuple(remembered))

    def _make_session(self, host: SwarmHost, limits: TrainerConfig) -> TrainingSession:
        return TrainingSession(
            NodeContext(
                identity=self._identity,
                spec=self._spec,
                trainer=limits,
                network=host,
                directives=self._directives,
                link=self._link,
                manifests=ManifestStore(self._run_dir / "manifests", self._spec.run.name),
                votes=VoteStore(self._run_dir),
                checkpoints=self._checkpoints,
                operator_key=self._credentials.operator_key,
                status=self._status,
                run_dir=self._run_dir,
                ahead=self._preload,
                clock=self._clock,
            )
        )

    def _trainer_config(self, config: NodeConfig) -> TrainerConfig:
        return TrainerConfig(
            run_spec_toml=self._credentials.run_spec_toml,
            corpus_path=str(Path(config.data).resolve()) if config.data else None,
            base_path=str(Path(config.base).resolve()) if config.base else None,
            layer_times_path=str(config.path("layer-times.json").resolve()),
            device=config.device,
            cpu_threads=config.cpu_threads or os.cpu_count() or 1,
            minimum_step_seconds=config.minimum_step_seconds,
            compute_share=config.compute_share,
            vram_fraction=config.vram_fraction,
            memory_bytes=int(config.memory_megabytes * 1e6),
        )

    async def _limit_training(self, config: NodeConfig) -> None:
        if self._session is not None:
            await self._session.limit(self._trainer_config(config))

    # --- supervising ---------------------------------------------------------------------------------

    async def _supervise(self, work: list[Any]) -> None:
        """Until leaving, or until one of the tasks fails; a finished session is no reason to leave."""
        tasks = [asyncio.create_task(coroutine) for coroutine in work]
        leaving = asyncio.create_task(self._leaving.wait())
        waiting: set[asyncio.Task[Any]] = {*tasks, leaving}
        try:
            while not leaving.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {leaving}:
                    task.result()
            await self._drain()
        except AtollError as error:
            self._status.enter(mb.NODE_STATE_FAILED, str(error))
            raise
        finally:
            for task in (*tasks, leaving):
                task.cancel()
            await asyncio.gather(*tasks, leaving, return_exceptions=True)

    async def _drain(self) -> None:
        """Finish the round if one comes in time, tell what is left to tell, say goodbye."""
        sdnotify.notify(self._notify_socket, "STOPPING=1")
        if self._session is not None and not self._session.finished.is_set():
            self._status.detail = "finishing the round, then leaving"  # still part of the plan until then
            await self._session.next_round(self._drain_timeout)
        plan, drained = self._directives.plan, self._directives.order == mb.ORDER_DRAIN
        if drained and plan is not None and self._identity.peer_id in plan.former:
            self._status.detail = "others fetch what they may lack, then leaving"
            await asyncio.sleep(DRAINED_STAGE_LINGER.total_seconds())
        self._status.enter(mb.NODE_STATE_DRAINING, "leaving")
        self._link.send_heartbeat_now()
        if self._link.connected:
            await self._link.flush(CLOSE_TIMEOUT)
        await self._link.leave(self._leave_reason)
        _log.info("left", reason=self._leave_reason)

    async def _save_state(self, session: TrainingSession) -> None:
        """The next start of this node, or of the whole swarm, goes on from here."""
        try:
            await session.save(SAVE_TIMEOUT)
        except AtollError as error:
            _log.warning("the state was not saved; the last checkpoint stands", reason=str(error))
        await self._checkpoints.close()

    async def _fail_when_p2pd_ends(self, host: SwarmHost) -> None:
        raise ChildDied(f"p2pd ended: {await host.died}", "start the daemon again; see its log if this repeats")

    async def _watchdog(self) -> None:
        seconds = sdnotify.watchdog_seconds(os.environ)
        while seconds is not None:
            sdnotify.notify(self._notify_socket, "WATCHDOG=1")
            await asyncio.sleep(seconds)

    async def _publish_address(self, host: SwarmHost) -> None:
        """Our address and head in the DHT, renewed long before they expire."""
        while True:
            pause = ADDRESS_REFRESH
            try:
                await host.publish_address(ADDRESS_LIFETIME)
                if self._status.head_hash:
                    await host.publish_head(self._status.head_round, self._status.head_hash, ADDRESS_LIFETIME)
            except AtollError as error:
                _log.warning("could not publish in the DHT", reason=str(error))
                pause = ADDRESS_RETRY
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause.total_seconds()):
                    await self._until_head_or_address_moves(host, self._status.head_round)

    async def _until_head_or_address_moves(self, host: SwarmHost, known: int) -> None:
        while not self._head_is_past(known):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ADDRESS_CHECK_INTERVAL.total_seconds()):
                    await self._directives.until(partial(self._head_is_past, known))
            with contextlib.suppress(Unreachable, DeadlineExceeded):
                if await host.address_changed():
                    return

    async def _look_up_members(self, host: SwarmHost) -> None:
        """Look the members of the plan up in the DHT until all can be dialled, and again for each plan."""
        missing: set[str] = set()
        while True:
            plan = self._directives.plan
            if plan is not None:
                try:
                    known = await host.lookup_addresses()
                    missing = set(plan.members) - set(known) - {self._identity.peer_id}
                except AtollError as error:
                    _log.warning("DHT lookup failed", reason=str(error))
            pause = LOOKUP_INTERVAL if missing or plan is None else ADDRESS_REFRESH
            version = plan.version if plan else 0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause.total_seconds()):
                    await self._directives.until(partial(self._newer_plan, version))

    def _head_is_past(self, round_number: int) -> bool:
        return self._status.head_round > round_number

    def _newer_plan(self, version: int) -> bool:
        return self._directives.plan is not None and self._directives.plan.version > version

    async def _leave_when_ordered(self) -> None:
        await self._directives.until(
            lambda: self._directives.order == mb.ORDER_DRAIN or self._directives.run_state == mb.RUN_STATE_STOPPED
        )
        drained = self._directives.order == mb.ORDER_DRAIN
        self.leave("drained by the operator" if drained else "the operator stopped the run")

    # --- what others ask for -------------------------------------------------------------------------

    def leave(self, reason: str) -> None:
        """Drain and stop."""
        self._leave_reason = reason
        self._leaving.set()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()

        def on_signal(number: signal.Signals) -> None:
            if self._leaving.is_set():
                _log.warning("second signal: stopping at once")
                os._exit(128 + number)  # children die with us
            self.leave(f"stopped by {number.name}")

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)

    def _build_heartbeat(self, first: bool) -> mb.HeartbeatRequest:
        status = self._status
        request = mb.HeartbeatRequest(status=status.to_proto(*self._bytes_sent()))
        facts, share = status.facts, self._limit_enforcer.config.compute_share
        if facts is not None:
            request.corpus_digest = facts.corpus_digest
            request.profile.CopyFrom(
                mb.NodeProfile(
                    device=facts.device,
                    device_name=facts.device_name,
                    device_memory_bytes=facts.device_memory_bytes,
                    cpu_threads=self._limit_enforcer.config.cpu_threads or os.cpu_count() or 1,
                    host_memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
                    atoll_version=version("atoll"),
                    tokens_per_second=facts.tokens_per_second,
                    layer_times=[
                        mb.LayerTime(kind=kind, **times) for kind, times in _by_kind(facts.layer_times, share)
                    ],
                    price_per_hour=self._config.price_per_hour,
                    minimum_step_seconds=self._limit_enforcer.config.minimum_step_seconds,
                    whole_model_bytes=facts.whole_model_bytes,
                )
            )
        ahead = self._link.clock_offset.ahead_seconds
        if ahead is not None:
            request.status.clock_offset_seconds = ahead
        if self._host is not None:
            request.multiaddrs.extend(self._host.multiaddrs())
            request.status.uplink_bytes_per_second = self._host.uplink_bytes_per_second
            request.status.downlink_bytes_per_second = self._host.traffic.downlink_bytes_per_second
        request.paths.extend(self._new_paths(first))
        self._layers_reported = self._layers_reported and not first
        if facts is not None and not self._layers_reported:
            self._layers_reported = True
            request.layers.CopyFrom(facts.layers)
        if self._session is not None and self._session.genesis is not None:
            request.genesis.CopyFrom(self._session.genesis)
        if self._coordinator_deny_list_older:  # the coordinator was restored from a backup: it must learn of later bans
            request.deny_list.CopyFrom(pb.Signed.FromString(self._credentials.deny_list))
        held = self._checkpoints.held()
        if first or held is not self._checkpoints_reported:
            self._checkpoints_reported = held
            request.checkpoints_changed = True
            request.checkpoints.extend(held)
        return request

    def _new_paths(self, first: bool) -> list[mb.PeerPath]:
        """Those measured since they were told last; all, when a stream begins."""
        if self._prober is None or self._host is None:
            return []
        since, self._paths_reported_monotonic = (
            float("-inf") if first else self._paths_reported_monotonic,
            self._clock.monotonic(),
        )
        limits = self._host.path_limits_bytes_per_second()
        return [
            mb.PeerPath(peer_id=peer, rtt_seconds=time.rtt_seconds, bytes_per_second=limits.get(peer, 0.0))
            for peer, time in self._prober.rtts.items()
            if time.at >= since
        ]

    def _members(self) -> tuple[str, ...]:
        return self._directives.plan.members if self._directives.plan is not None else ()

    def _on_heartbeat_response(self, response: mb.HeartbeatResponse) -> None:
        self._directives.apply_heartbeat(response)
        self._uploads.take(response.uploads)

    async def _send_checkpoint(self, order: mb.UploadOrder) -> None:
        await self._link.upload(order, self._checkpoints.store.path(order.round))

    def _bytes_sent(self) -> tuple[int, int]:
        if self._host is None:
            return 0, 0
        averaging = sum(self._host.bytes_sent(name) for name in AVERAGING_PROTOCOLS)
        return averaging, self._host.bytes_sent_total() - averaging

    def _save_credentials(self) -> None:
        """For the next start. A disk that does not take them now is no reason to stop; the next change tries again."""
        try:
            self._credentials.save(self._config.data_dir)
        except AtollError as error:
            _log.warning("credentials are not on disk", reason=str(error))

    def _certificate_renewed(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._save_credentials()
        if self._host is not None:
            self._host.gate.set_membership(credentials.signed_membership())

    def _on_deny_list(self, deny: DenyList, sealed: pb.Signed) -> None:
        self._coordinator_deny_list_older = deny.number < self._credentials.verified_deny_list().number
        if deny.number > self._credentials.verified_deny_list().number:
            self._credentials = self._link.credentials = self._link.credentials.with_deny_list(sealed)
            self._save_credentials()  # a restart must not forget a ban
        if self._host is not None:
            self._host.gate.set_deny_list(deny)

    def _on_seeds_changed(self, seeds: tuple[str, ...]) -> None:
        if self._host is not None:
            self._host.set_seeds(seeds)  # raises for what the next start could not read either
        self._credentials = self._link.credentials = self._link.credentials.with_seeds(seeds)
        self._save_credentials()  # the next start asks the new ones

    # --- the local API -------------------------------------------------------------------------------

    def _commands(self) -> dict[str, Any]:
        return {
            **self._limit_enforcer.commands(),
            "status": self._api_status,
            "finish": self._api_finish,
            "leave": self._api_leave,
            "generate": self._api_generate,
        }

    async def _api_status(self, _: dict[str, Any]) -> dict[str, Any]:
        return {
            "name": self._membership.node_name,
            "peer_id": self._identity.peer_id,
            "run": self._spec.run.name,
            "roles": sorted(self._membership.roles),
            "pid": os.getpid(),
            "coordinator": self._credentials.coordinator,
            "coordinator_connected": self._link.connected,
            "stop_tokens": self._spec.run.stop_tokens,
            "handler_crashes": self._host.handler_crashes if self._host else 0,
            "streams_refused": self._host.streams_refused if self._host else 0,
            "direct_peers": sorted(self._host.direct_peers()) if self._host else [],
            "uplink_bytes_per_second": round(self._host.uplink_bytes_per_second) if self._host else 0,
            "downlink_bytes_per_second": round(self._host.traffic.downlink_bytes_per_second) if self._host else 0,
            **self._status.to_json(*self._bytes_sent()),
            **self._limit_enforcer.status_json(self._checkpoints.problem),
        }

    async def _api_finish(self, _: dict[str, Any]) -> dict[str, Any]:
        warning = self._limit_enforcer.finish()
        self.leave("finished its round at its owner's wish")
        return {"leaving": True, "warning": warning}

    async def _api_leave(self, _: dict[str, Any]) -> dict[str, Any]:
        self._drain_timeout = timedelta(0)
        self.leave("left at its owner's wish")
        return {"leaving": True}

    async def _api_generate(self, request: dict[str, Any]) -> dict[str, Any]:
        text = await self._training().generate(str(request.get("prompt", "")), int(request.get("tokens", 200)))
        return {"text": text}

    def _training(self) -> TrainingSession:
        if self._session is None:
            raise InvalidTransition("this member is a seed or still starting; it does not train")
        return self._session


def _multiaddr(host: str, port: int) -> str:
    kind = "ip6" if ":" in host else "ip4" if host.replace(".", "").isdigit() else "dns4"
    return f"/{kind}/{host}/tcp/{port}"


def _by_kind(times: tuple[tuple[str, float, float], ...], share: float) -> list[tuple[str, dict[str, float]]]:
    """Of a device that computes for `share` of the time."""
    return [
        (kind, {"forward_seconds_per_token": forward / share, "backward_seconds_per_token": backward / share})
        for kind, forward, backward in times
    ]
