"""Node daemon, read top-down: join the swarm → supervise → drain. `start.py` runs one for each run that it moves to.

One asyncio process owns p2pd, the gate, the DHT, rounds, the coordinator link and the local API; the trainer is a child
process. SIGTERM or SIGINT drains within a deadline; a second signal stops at once.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.core import log, sdnotify
from atoll.core.clock import Clock
from atoll.core.errors import AtollError, Busy, P2pdDied, PortInUse, Rejected, Unreachable
from atoll.core.files import make_private_dir
from atoll.core.identity import Identity
from atoll.core.membership import DenyList, Member
from atoll.core.run_spec import parse_run_spec
from atoll.node.config import LoadedConfig, NodeConfig
from atoll.node.control.announce_end import reason_of
from atoll.node.control.begin_membership import begin_membership
from atoll.node.control.checkpoint_upload import CheckpointUploads
from atoll.node.control.coordinator_link import CoordinatorLink
from atoll.node.control.credentials import Credentials
from atoll.node.control.directives import Directives
from atoll.node.control.local_api import LocalApi
from atoll.node.control.manifest_answers import ManifestAnswers
from atoll.node.direct.direct_path import DirectConfig
from atoll.node.limits.enforcer import LimitEnforcer, LimitTargets, not_training
from atoll.node.run.address_book import AddressBook
from atoll.node.run.corpus_sharing import CorpusSharing
from atoll.node.run.dial_scope import dial_policy
from atoll.node.run.heartbeat import HeartbeatBuilder, bytes_sent
from atoll.node.run.status import LiveStatus
from atoll.node.state.manifests import ManifestStore
from atoll.node.state.vote_store import VoteStore
from atoll.node.swarm.host import SwarmConfig, SwarmHost
from atoll.node.swarm.rtt_probe import PathProber
from atoll.node.system.remembered_ports import DIRECT_PORT_FILE, port_in, remember_port, remembered_port
from atoll.node.trainer.trainer_process import TrainerProcess
from atoll.v1 import common_pb2 as pb
from atoll.v1 import membership_pb2 as mb

if TYPE_CHECKING:  # a seed has no torch
    from atoll.node.session import TrainingSession
    from atoll.node.training_member import TrainingMember

START_TIMEOUT = timedelta(seconds=60)
DRAIN_TIMEOUT = timedelta(seconds=30)
CLOSE_TIMEOUT = timedelta(seconds=5)
STOP_TIMEOUT = timedelta(seconds=105)  # those who start nodes kill them after 120 s (deploy/)
_MOVE_PAUSES = tuple(timedelta(seconds=2**power) for power in range(5))  # after tries to move
_ORDERS_TO_LEAVE = (mb.ORDER_DRAIN, mb.ORDER_MOVE)
DRAINED_STAGE_LINGER = timedelta(seconds=20)  # a drained stage serves its layers so long before it leaves

_log = log.get("daemon")


class Daemon:
    """A running member: builds its parts, supervises them, passes events between them, and drains.

    It has many attributes and methods because every part of the process is connected here and nowhere else.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        identity: Identity,
        credentials: Credentials,
        clock: Clock,
        child: TrainerProcess | None = None,
        *,
        has_moved: bool = False,
    ) -> None:
        """`child` becomes the trainer's process; its creator ends it if no trainer takes it. None for a seed.

        `has_moved`: another daemon of this process was in another run. The seeds of this run may move just now.
        """
        self._has_moved = has_moved
        self._config = config = loaded.config  # limits as at the start; `_limit_enforcer.config` has those in force
        self._limit_enforcer = LimitEnforcer(loaded, clock)
        self._identity = identity
        self._credentials = credentials
        self._clock = clock
        self._membership: Member = credentials.member(clock.unix())
        self._spec = parse_run_spec(credentials.run_spec_toml)
        self._status = LiveStatus()
        self._run_dir = make_private_dir(config.path("runs", self._spec.run.name))
        self._directives = Directives(
            credentials.authority, self._on_deny_list, self._on_seeds_changed, self._run_dir / "plan"
        )
        self._manifests = ManifestStore(
            self._run_dir / "manifests",
            self._spec.run.name,
            checkpointed=lambda: [item.round for item in self._checkpoints_held()],
        )
        self._votes = VoteStore(self._run_dir)
        self._manifest_answers = ManifestAnswers(self._manifests, lambda: self._link.send_heartbeat_now())
        self._coordinator_deny_list_older = False
        self._uploads = CheckpointUploads(self._send_checkpoint)
        self._leaving = asyncio.Event()
        self._notify_socket = os.environ.get("NOTIFY_SOCKET", "")
        self._leave_reason, self._leave_why = "left", mb.NODE_REASON_STOPPED
        self._moves = False  # leaves this run for another one
        self.stop_asked = False  # by a signal, the owner or the operator: no further run
        self._drain_timeout = DRAIN_TIMEOUT
        self._stop_by = math.inf  # monotonic
        self._host: SwarmHost | None = None
        self._corpus = self._make_corpus_sharing(config)
        self._training = self._make_training(child) if child is not None else None
        self._heartbeats = HeartbeatBuilder(
            self._status,
            clock,
            run_id=credentials.run_id,
            checkpoints=self._checkpoints_held,
            former_checkpoints=lambda: self._training.former_checkpoints if self._training is not None else (),
            config=lambda: self._limit_enforcer.config,
            clock_ahead_seconds=lambda: self._link.clock_offset.ahead_seconds,
            newer_deny_list=self._deny_list_for_coordinator,
            manifest_answer=self._manifest_answers.take,
            promised=lambda: self._votes.promised,
        )
        self._link = CoordinatorLink(
            credentials,
            identity,
            clock,
            build_heartbeat=self._heartbeats.build,
            on_response=self._on_heartbeat_response,
            on_renewed=self._on_certificate_renewed,
        )

    @property
    def loaded(self) -> LoadedConfig:
        """The configuration with the limits that apply now."""
        return self._limit_enforcer.loaded

    async def run(self) -> bool:
        """Start all parts, supervise them, drain when asked, close them.

        Returns True if the node moves to another run: the credentials on disk are for the next daemon.
        """
        self._catch_signals()
        api = LocalApi(self._config.data_dir, self._commands())
        await api.start()
        training = self._training
        try:
            if self._corpus is not None:
                await self._corpus.start()
            if training is not None:
                training.preload()
            self._host = self._heartbeats.host = host = await self._join_unless_leaving()
            if host is None:
                return False
            session = training.join(host, host.traffic, self._link) if training is not None else None
            if session is None:
                self._status.enter(
                    mb.NODE_STATE_READY, "seed: bootstraps the DHT and relays", mb.NODE_REASON_UNSPECIFIED
                )
            await self._limit_enforcer.attach(
                LimitTargets(host.traffic, session, self._limit_training, lambda: self._status.facts)
            )
            if self._corpus is not None:
                self._corpus.join(host, self._directives, lambda: self._credentials.seeds, self._may_share_corpus)
            await self._supervise(self._work(host))
        except Exception as error:
            await self._link.announce_failure(error)
            raise
        finally:
            await api.close()
            await self._close()
        return self._moves and not self.stop_asked

    def _work(self, host: SwarmHost) -> list[Coroutine[Any, Any, None]]:
        """List what runs until the daemon leaves."""
        addresses = AddressBook(host, self._directives, self._identity.peer_id)
        work = [self._link.run(), self._fail_when_p2pd_ends(host), self._admitted(addresses.publish)]
        work += [self._limit_enforcer.run(), self._leave_when_ordered()]
        if (session := self._session) is not None:
            prober = self._heartbeats.prober = PathProber(host, self._members, self._clock)
            if self._corpus is not None:
                work.append(self._corpus.look_up(host, self._directives))
            work += [self._admitted(session.run), addresses.look_up(), prober.run()]
        return work

    async def _admitted(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin once the coordinator answered: if another process has this identity, it refuses this one first."""
        await self._link.first_answer()
        await work()

    async def _close(self) -> None:
        await self._uploads.close()
        await self._manifest_answers.close()
        await self._limit_enforcer.close()
        if self._training is not None:
            await self._training.close(self._stop_by)
        if self._corpus is not None:
            await self._corpus.close()
        if self._host is not None:
            await self._host.close(CLOSE_TIMEOUT)
        shutil.rmtree(self._config.path("run"), ignore_errors=True)

    # --- starting ------------------------------------------------------------------------------------

    def _make_corpus_sharing(self, config: NodeConfig) -> CorpusSharing | None:
        if self._spec.data.corpus is None:
            return None
        own = Path(config.data).resolve() if config.data else None
        cache, sockets, is_seed = config.path("corpora"), config.path("run"), "seed" in self._membership.roles
        return CorpusSharing(self._spec, own, cache, sockets, self._clock, is_seed=is_seed)

    def _may_share_corpus(self) -> bool:
        return not self._limit_enforcer.reason  # neither its owner nor a limit pauses this node

    def _make_training(self, child: TrainerProcess) -> TrainingMember:
        from atoll.node.training_member import MemberParts, TrainingMember  # here, because a seed has no torch

        parts = MemberParts(
            config=self._config,
            identity=self._identity,
            credentials=self._credentials,
            spec=self._spec,
            run_dir=self._run_dir,
            status=self._status,
            directives=self._directives,
            manifests=self._manifests,
            votes=self._votes,
            corpus_socket=self._corpus.socket_path if self._corpus is not None else None,
            clock=self._clock,
        )
        return TrainingMember(parts, child)

    @property
    def _session(self) -> TrainingSession | None:
        """The training session, once the node has joined the swarm; a seed has none."""
        return self._training.session if self._training is not None else None

    def _checkpoints_held(self) -> tuple[mb.CheckpointInfo, ...]:
        return self._training.checkpoints.held() if self._training is not None else ()

    async def _join_unless_leaving(self) -> SwarmHost | None:
        """Join the swarm; None if the node is told to leave first: seeds that do not answer must not delay that."""
        joining, leaving = asyncio.create_task(self._join_swarm()), asyncio.create_task(self._leaving.wait())
        try:
            await asyncio.wait((joining, leaving), return_when=asyncio.FIRST_COMPLETED)
            return joining.result() if joining.done() else None
        finally:
            joining.cancel()
            leaving.cancel()
            await asyncio.gather(joining, leaving, return_exceptions=True)

    async def _join_swarm(self) -> SwarmHost:
        """Join on the port of the last start, if it is free: other members remember that address."""
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
                "run has no seed: nodes cannot find each other, so this node trains alone until a seed joins",
                remedy="the operator creates a token for a seed: atollctl token create --role seed",
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
                dial=await dial_policy(config, self._credentials),
                seeds_optional=self._has_moved
                or self._directives.plan is not None,  # only the first start must find a seed
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

    async def _limit_training(self, config: NodeConfig) -> None:
        if self._training is not None:
            await self._training.limit(config)

    # --- supervising ---------------------------------------------------------------------------------

    async def _supervise(self, work: list[Coroutine[Any, Any, None]]) -> None:
        """Run all work until told to leave, then drain. Raises the first error; a finished session does not end it."""
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
            self._status.enter(mb.NODE_STATE_FAILED, str(error), reason_of(error))
            raise
        finally:
            for task in (*tasks, leaving):
                task.cancel()
            await asyncio.gather(*tasks, leaving, return_exceptions=True)

    async def _drain(self) -> None:
        """Finish the round if it ends in time, send the last reports, and announce the leave, or move."""
        if not self._moves:
            sdnotify.notify(self._notify_socket, "STOPPING=1")
        self._stop_by = self._clock.monotonic() + STOP_TIMEOUT.total_seconds()
        if (session := self._session) is not None and not session.finished.is_set():
            self._status.detail = "finishing the round, then leaving"  # the node stays in the plan until then
            _log.info(
                "finishing the round, then leaving; a second signal stops at once",
                most_seconds=self._drain_timeout.total_seconds(),
            )
            await session.next_round(self._drain_timeout)
        plan, ordered = self._directives.plan, self._directives.order in _ORDERS_TO_LEAVE
        if ordered and plan is not None and self._identity.peer_id in plan.former:
            self._status.detail = "serving layers to other nodes, then leaving"
            await asyncio.sleep(DRAINED_STAGE_LINGER.total_seconds())
        self._status.enter(mb.NODE_STATE_DRAINING, "leaving", self._leave_why)
        self._link.send_heartbeat_now()
        if self._link.connected:
            await self._link.flush(CLOSE_TIMEOUT)
        if self._moves and not self.stop_asked:
            await self._move()
        else:
            await self._link.leave(self._leave_reason, self._leave_why)
            _log.info("left", reason=self._leave_reason)

    async def _move(self) -> None:
        """Become a member of the run that this node is assigned to.

        Out of the coordinator's reach, the next daemon begins in the old run and is told again. Raises other errors.
        """
        for pause in _MOVE_PAUSES:
            try:
                credentials = await self._link.move_to_run()
            except (Unreachable, Busy) as error:
                _log.warning("not moved to another run yet", reason=str(error))
                await asyncio.sleep(pause.total_seconds())
            else:
                begin_membership(self._config.data_dir, credentials)
                _log.info("moved", run=credentials.run_id)
                return

    async def _fail_when_p2pd_ends(self, host: SwarmHost) -> None:
        raise P2pdDied(f"p2pd ended: {await host.died}", "start the daemon again; see its log if this repeats")

    async def _leave_when_ordered(self) -> None:
        directives, trains = self._directives, self._session is not None

        def must_leave() -> bool:
            if directives.order == mb.ORDER_MOVE and self._config.stay_in_run:
                return directives.run_state == mb.RUN_STATE_UNSPECIFIED  # it has moved already: its answer was lost
            stopped = trains and directives.run_state == mb.RUN_STATE_STOPPED
            return stopped or directives.order in _ORDERS_TO_LEAVE

        await directives.until(must_leave)
        if self._leaving.is_set():
            return
        self._moves = directives.order == mb.ORDER_MOVE
        if self._moves:
            self.leave("moved to another run by the operator", mb.NODE_REASON_DRAINED)
        elif directives.order == mb.ORDER_DRAIN:
            self.leave("drained by the operator", mb.NODE_REASON_DRAINED)
        else:
            self.leave("the operator stopped the run", mb.NODE_REASON_RUN_STOPPED)

    # --- events --------------------------------------------------------------------------------------

    def leave(self, reason: str, why: mb.NodeReason = mb.NODE_REASON_STOPPED) -> None:
        """Begin to drain and stop."""
        self._leave_reason, self._leave_why = reason, why
        self._leaving.set()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()

        def on_signal(number: signal.Signals) -> None:
            first, self.stop_asked = not self.stop_asked, True
            if self._moves and first:
                _log.info("stopping instead of moving to another run", signal=number.name)
                return
            if self._leaving.is_set():
                _log.warning("second signal: stopping at once")
                os._exit(128 + number)  # children die with us
            self.leave(f"stopped by {number.name}")

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)

    def _members(self) -> tuple[str, ...]:
        return self._directives.plan.members if self._directives.plan is not None else ()

    def _on_heartbeat_response(self, response: mb.HeartbeatResponse) -> None:
        if response.order != mb.ORDER_WRITE_GENESIS:
            self._status.forget_refusal()
        self._directives.apply_heartbeat(response)
        if response.HasField("authorities"):
            self._on_authorities(response.authorities)
        self._uploads.take(response.uploads)
        if self._session is not None:
            self._session.follow_checkpoint_order()
        if response.HasField("manifests"):
            self._manifest_answers.ask(response.manifests)

    async def _send_checkpoint(self, order: mb.UploadOrder) -> None:
        if self._training is not None:  # a seed reports no checkpoints, so nobody asks it for one
            await self._link.upload(order, self._training.checkpoints.store.path(order.round))

    def _save_credentials(self) -> None:
        """Save the credentials for the next start. After a failed write the node goes on; the next change retries."""
        try:
            self._credentials.save(self._config.data_dir)
        except AtollError as error:
            _log.warning("credentials not saved", reason=str(error))

    def _on_certificate_renewed(self, credentials: Credentials) -> None:
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

    def _on_authorities(self, sealed: pb.Signed) -> None:
        """Trust the coordinator's new CA too, or no longer the old one; the link renews the certificate."""
        known = self._link.credentials
        try:
            self._credentials = self._link.credentials = known.with_authorities(sealed)
        except Rejected as error:
            _log.warning("certificate authorities not adopted", reason=str(error))
        if self._credentials != known:
            self._save_credentials()

    def _deny_list_for_coordinator(self) -> pb.Signed | None:
        """Return this node's deny-list if the coordinator's is older, as after a restore from a backup."""
        return pb.Signed.FromString(self._credentials.deny_list) if self._coordinator_deny_list_older else None

    def _on_seeds_changed(self, seeds: tuple[str, ...]) -> None:
        if self._host is not None:
            self._host.set_seeds(seeds)  # raises for addresses that the next start could not use either
        self._credentials = self._link.credentials = self._link.credentials.with_seeds(seeds)
        self._save_credentials()  # the next start uses the new seeds

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
            "eta_unix_ms": self._eta_unix_ms(),
            "handler_crashes": self._host.handler_crashes if self._host else 0,
            "streams_refused": self._host.streams_refused if self._host else 0,
            "direct_peers": sorted(self._host.direct_peers()) if self._host else [],
            "uplink_bytes_per_second": round(self._host.uplink_bytes_per_second) if self._host else 0,
            "downlink_bytes_per_second": round(self._host.traffic.downlink_bytes_per_second) if self._host else 0,
            **(self._corpus.status_json() if self._corpus is not None else {}),
            **self._status.to_json(*bytes_sent(self._host)),
            **self._limit_enforcer.status_json([*self._checkpoint_problems(), *self._status.warnings]),
        }

    def _eta_unix_ms(self) -> int | None:
        """When the run reaches `stop_tokens`, by this machine's clock; None: unknown, or the coordinator is away."""
        eta = self._directives.eta_unix_ms if self._link.connected else None
        return None if eta is None else eta + round(1000 * (self._link.clock_offset.ahead_seconds or 0.0))

    def _checkpoint_problems(self) -> list[str]:
        problem = self._training.checkpoints.problem if self._training is not None else ""
        return [problem] if problem else []

    async def _api_finish(self, _: dict[str, Any]) -> dict[str, Any]:
        warning = self._limit_enforcer.finish()
        self.stop_asked = True
        self.leave("finished by its owner")
        return {"leaving": True, "warning": warning}

    async def _api_leave(self, _: dict[str, Any]) -> dict[str, Any]:
        self._drain_timeout, self.stop_asked = timedelta(0), True
        self.leave("stopped by its owner")
        return {"leaving": True}

    async def _api_generate(self, request: dict[str, Any]) -> dict[str, Any]:
        if (session := self._session) is None:
            raise not_training()
        return {"text": await session.generate(str(request.get("prompt", "")), int(request.get("tokens", 200)))}


def _multiaddr(host: str, port: int) -> str:
    kind = "ip6" if ":" in host else "ip4" if host.replace(".", "").isdigit() else "dns4"
    return f"/{kind}/{host}/tcp/{port}"
