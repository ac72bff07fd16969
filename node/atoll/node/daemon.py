"""Node daemon, read top-down: join the swarm → supervise → drain.

`start.py` runs a new daemon after each move to another run. One asyncio process owns p2pd, the gate, the DHT, rounds,
the coordinator link and the local API; the trainer is a child process. SIGTERM or SIGINT drains within a deadline; a
second signal stops at once.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.core import sdnotify
from atoll.core.clock import Clock
from atoll.core.errors import AtollError, P2pdDied
from atoll.core.files import make_private_dir
from atoll.core.identity import Identity
from atoll.core.membership import Member
from atoll.core.run_spec import parse_run_spec
from atoll.node.config import LoadedConfig, NodeConfig
from atoll.node.control.announce_end import reason_of
from atoll.node.control.checkpoint_upload import CheckpointUploads
from atoll.node.control.coordinator_link import CoordinatorLink
from atoll.node.control.credentials import Credentials
from atoll.node.control.directives import Directives
from atoll.node.control.local_api import LocalApi
from atoll.node.control.manifest_answers import ManifestAnswers
from atoll.node.limits.enforcer import LimitEnforcer, LimitTargets, not_training
from atoll.node.run.address_book import AddressBook
from atoll.node.run.corpus_sharing import CorpusSharing
from atoll.node.run.credential_updates import CredentialUpdates
from atoll.node.run.departure import Departure
from atoll.node.run.heartbeat import HeartbeatBuilder, bytes_sent
from atoll.node.run.joining import Joining
from atoll.node.run.status import LiveStatus
from atoll.node.state.manifests import ManifestStore
from atoll.node.state.vote_store import VoteStore
from atoll.node.swarm.host import SwarmHost
from atoll.node.swarm.rtt_probe import PathProber
from atoll.node.trainer.trainer_process import TrainerProcess
from atoll.v1 import membership_pb2 as mb

if TYPE_CHECKING:  # a seed has no torch
    from atoll.node.session import TrainingSession
    from atoll.node.training_member import TrainingMember

CLOSE_TIMEOUT = timedelta(seconds=5)


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
        """`child` becomes the trainer's process; its creator ends it if it was not used. None for a seed.

        `has_moved`: this process had a daemon in another run before. The seeds of this run may also be moving now.
        """
        self._has_moved = has_moved
        self._config = config = loaded.config  # limits as at the start; `_limit_enforcer.config` has the current ones
        self._limit_enforcer = LimitEnforcer(loaded, clock)
        self._identity = identity
        self._clock = clock
        self._membership: Member = credentials.member(clock.unix())
        self._spec = parse_run_spec(credentials.run_spec_toml)
        self._status = LiveStatus()
        self._run_dir = make_private_dir(config.path("runs", self._spec.run.name))
        self._credential_updates = updates = CredentialUpdates(config.data_dir)
        self._directives = Directives(
            credentials.authority,
            updates.take_deny_list,
            updates.take_seeds,
            self._run_dir / "plan",
        )
        self._manifests = ManifestStore(
            self._run_dir / "manifests",
            self._spec.run.name,
            checkpointed=lambda: [item.round for item in self._checkpoints_held()],
        )
        self._votes = VoteStore(self._run_dir)
        self._manifest_answers = ManifestAnswers(self._manifests, lambda: self._link.send_heartbeat_now())
        self._uploads = CheckpointUploads(self._send_checkpoint)
        self._host: SwarmHost | None = None
        self._corpus = self._make_corpus_sharing(config)
        self._training = self._make_training(child, credentials) if child is not None else None
        self._heartbeats = self._make_heartbeats(credentials.run_id)
        self._link = updates.link = CoordinatorLink(
            credentials,
            identity,
            clock,
            build_heartbeat=self._heartbeats.build,
            on_response=self._on_heartbeat_response,
            on_renewed=updates.renew,
        )
        self._departure = Departure(config, self._status, self._directives, self._link, clock)

    @property
    def stop_asked(self) -> bool:
        """Whether a signal, the owner or the operator asked this node to stop and join no further run."""
        return self._departure.stop_asked

    @property
    def loaded(self) -> LoadedConfig:
        """The configuration with the limits that apply now."""
        return self._limit_enforcer.loaded

    async def run(self) -> bool:
        """Start all parts, supervise them, drain when asked, close them.

        Returns True if the node moves to another run. The credentials on disk are then for the next daemon.
        """
        self._departure.catch_signals()
        api = LocalApi(self._config.data_dir, self._commands())
        await api.start()
        training = self._training
        try:
            if self._corpus is not None:
                await self._corpus.start()
            if training is not None:
                training.preload()
            host = await self._departure.unless_told(self._join_swarm())
            if host is None:  # told to leave while the seeds did not answer
                return False
            self._host = self._heartbeats.host = self._credential_updates.host = host
            session = training.join(host, host.traffic, self._link) if training is not None else None
            if session is None:
                self._status.enter(
                    mb.NODE_STATE_READY, "seed: bootstraps the DHT and relays", mb.NODE_REASON_UNSPECIFIED
                )
            await self._limit_enforcer.attach(
                LimitTargets(host.traffic, session, self._limit_training, lambda: self._status.facts)
            )
            if self._corpus is not None:
                self._corpus.join(host, self._directives, lambda: self._link.credentials.seeds, self._may_share_corpus)
            await self._supervise(self._work(host))
        except Exception as error:
            await self._link.announce_failure(error)
            raise
        finally:
            await api.close()
            await self._close()
        return self._departure.goes_on

    def _work(self, host: SwarmHost) -> list[Coroutine[Any, Any, None]]:
        """List the coroutines that run until the daemon leaves."""
        addresses = AddressBook(host, self._directives, self._identity.peer_id)
        work = [self._link.run(), self._fail_when_p2pd_ends(host), self._admitted(addresses.publish)]
        work += [self._limit_enforcer.run(), self._departure.leave_when_ordered(trains=self._session is not None)]
        if (session := self._session) is not None:
            prober = self._heartbeats.prober = PathProber(host, self._members, self._clock)
            if self._corpus is not None:
                work.append(self._corpus.look_up(host, self._directives))
            work += [self._admitted(session.run), addresses.look_up(), prober.run()]
        return work

    async def _admitted(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start `work` after the coordinator's first answer: it refuses this process if another has its identity."""
        await self._link.first_answer()
        await work()

    async def _close(self) -> None:
        await self._uploads.close()
        await self._manifest_answers.close()
        await self._limit_enforcer.close()
        if self._training is not None:
            await self._training.close(self._departure.stop_by)
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

    def _make_training(self, child: TrainerProcess, credentials: Credentials) -> TrainingMember:
        from atoll.node.training_member import MemberParts, TrainingMember  # here, because a seed has no torch

        parts = MemberParts(
            config=self._config,
            identity=self._identity,
            credentials=credentials,
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

    def _make_heartbeats(self, run_id: str) -> HeartbeatBuilder:
        return HeartbeatBuilder(
            self._status,
            self._clock,
            run_id=run_id,
            checkpoints=self._checkpoints_held,
            former_checkpoints=lambda: self._training.former_checkpoints if self._training is not None else (),
            config=lambda: self._limit_enforcer.config,
            clock_ahead_seconds=lambda: self._link.clock_offset.ahead_seconds,
            newer_deny_list=self._credential_updates.deny_list_for_coordinator,
            manifest_answer=self._manifest_answers.take,
            promised=lambda: self._votes.promised,
        )

    @property
    def _session(self) -> TrainingSession | None:
        """The training session, once the node has joined the swarm; a seed has none."""
        return self._training.session if self._training is not None else None

    def _checkpoints_held(self) -> tuple[mb.CheckpointInfo, ...]:
        return self._training.checkpoints.held() if self._training is not None else ()

    async def _join_swarm(self) -> SwarmHost:
        is_seed, is_first_start = "seed" in self._membership.roles, self._directives.plan is None
        joining = Joining(self._config, self._identity, self._link.credentials, self._clock, is_seed=is_seed)
        host = await joining.join(seeds_optional=self._has_moved or not is_first_start)
        sdnotify.notify(os.environ.get("NOTIFY_SOCKET", ""), "READY=1")
        return host

    async def _limit_training(self, config: NodeConfig) -> None:
        if self._training is not None:
            await self._training.limit(config)

    # --- supervising ---------------------------------------------------------------------------------

    async def _supervise(self, work: list[Coroutine[Any, Any, None]]) -> None:
        """Run all work until told to leave, then drain. Raises the first error.

        A finished session does not end the daemon.
        """
        tasks = [asyncio.create_task(coroutine) for coroutine in work]
        leaving = asyncio.create_task(self._departure.told())
        waiting: set[asyncio.Task[Any]] = {*tasks, leaving}
        try:
            while not leaving.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {leaving}:
                    task.result()
            finish_round = None
            if (session := self._session) is not None and not session.finished.is_set():
                finish_round = session.next_round
            await self._departure.drain(self._identity.peer_id, finish_round)
        except AtollError as error:
            self._status.enter(mb.NODE_STATE_FAILED, str(error), reason_of(error))
            raise
        finally:
            for task in (*tasks, leaving):
                task.cancel()
            await asyncio.gather(*tasks, leaving, return_exceptions=True)

    async def _fail_when_p2pd_ends(self, host: SwarmHost) -> None:
        raise P2pdDied(f"p2pd ended: {await host.died}", "start the daemon again; see its log if this repeats")

    # --- events --------------------------------------------------------------------------------------

    def _members(self) -> tuple[str, ...]:
        return self._directives.plan.members if self._directives.plan is not None else ()

    def _on_heartbeat_response(self, response: mb.HeartbeatResponse) -> None:
        if response.order != mb.ORDER_WRITE_GENESIS:
            self._status.forget_refusal()
        self._directives.apply_heartbeat(response)
        if response.HasField("authorities"):
            self._credential_updates.take_authorities(response.authorities)
        self._uploads.take(response.uploads)
        if self._session is not None:
            self._session.follow_checkpoint_order()
        if response.HasField("manifests"):
            self._manifest_answers.ask(response.manifests)

    async def _send_checkpoint(self, order: mb.UploadOrder) -> None:
        if self._training is not None:  # a seed reports no checkpoints, so it gets no order to send one
            await self._link.upload(order, self._training.checkpoints.store.path(order.round))

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
            "coordinator": self._link.credentials.coordinator,
            "coordinator_connected": self._link.connected,
            "stop_tokens": self._spec.run.stop_tokens,
            "eta_unix_ms": self._eta_unix_ms(),
            "credit": self._credit(),
            "handler_crashes": self._host.handler_crashes if self._host else 0,
            "streams_refused": self._host.streams_refused if self._host else 0,
            "direct_peers": sorted(self._host.direct_peers()) if self._host else [],
            "uplink_bytes_per_second": round(self._host.uplink_bytes_per_second) if self._host else 0,
            "downlink_bytes_per_second": round(self._host.traffic.downlink_bytes_per_second) if self._host else 0,
            **(self._corpus.status_json() if self._corpus is not None else {}),
            **self._status.to_json(*bytes_sent(self._host)),
            **self._limit_enforcer.status_json([*self._checkpoint_problems(), *self._status.warnings]),
        }

    def _credit(self) -> dict[str, int] | None:
        credit = self._directives.credit
        names = ("tokens", "rounds", "rank", "nodes")
        return None if credit is None else {name: getattr(credit, name) for name in names}

    def _eta_unix_ms(self) -> int | None:
        """When the run reaches `stop_tokens`, by this machine's clock; None if unknown or without the coordinator."""
        eta = self._directives.eta_unix_ms if self._link.connected else None
        return None if eta is None else eta + round(1000 * (self._link.clock_offset.ahead_seconds or 0.0))

    def _checkpoint_problems(self) -> list[str]:
        problem = self._training.checkpoints.problem if self._training is not None else ""
        return [problem] if problem else []

    async def _api_finish(self, _: dict[str, Any]) -> dict[str, Any]:
        warning = self._limit_enforcer.finish()
        self._departure.stop("finished by its owner")
        return {"leaving": True, "warning": warning}

    async def _api_leave(self, _: dict[str, Any]) -> dict[str, Any]:
        self._departure.stop("stopped by its owner", drain=False)
        return {"leaving": True}

    async def _api_generate(self, request: dict[str, Any]) -> dict[str, Any]:
        if (session := self._session) is None:
            raise not_training()
        return {"text": await session.generate(str(request.get("prompt", "")), int(request.get("tokens", 200)))}
