"""Start of a daemon: lock → identity → what the run needs → checks → consent → enrolment → daemon.

Problems with a token, a key or a directory are reported here, within a second: hivemind and, on a node, torch are
imported only after enrolment. The token is used only after all checks. The trainer's process and the daemon import
torch at the same time. A seed has no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import secrets
import signal
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from atoll.core import log, sdnotify
from atoll.core.clock import Clock
from atoll.core.errors import AtollError, ConfigError, DataDirUnusable, UsageError
from atoll.core.files import make_private_dir, raise_descriptor_limit
from atoll.core.identity import Identity
from atoll.core.rotating_log import RotatingLog
from atoll.core.run_spec import parse_run_spec
from atoll.core.tokens import JoinToken
from atoll.node.config import LOG_FILE, LoadedConfig, NodeConfig, has_flags, save_overrides
from atoll.node.control.announce_end import INSTANCE_BYTES, announce_end, announcement
from atoll.node.control.begin_membership import begin_membership
from atoll.node.control.channel import dial
from atoll.node.control.credentials import Credentials
from atoll.node.control.enrol import enrol, preview
from atoll.node.control.identity_rotation import KEY_FILE, finish_rotation
from atoll.node.control.run_directories import put_in_place
from atoll.node.control.run_needs import RunNeeds
from atoll.node.limits.owner_files import OwnerIntent, save_owner_intent
from atoll.node.preflight.machine import check_machine, check_writable
from atoll.node.preflight.run_checks import Request, check_base_is_there, check_directory_of_corpus, check_disk
from atoll.node.preflight.start_checker import check_run_apart
from atoll.node.swarm.lazy_hivemind import install_lazy_hivemind
from atoll.node.system.data_dir_lock import data_dir_lock
from atoll.node.system.malloc_arenas import limit_malloc_arenas
from atoll.node.trainer.trainer_process import LOG_NAME, TrainerProcess

if TYPE_CHECKING:
    from atoll.node.daemon import Daemon

_log = log.get("daemon")
MAX_FILES = 1 << 16  # file descriptors: a libp2p stream takes four in this process and four in p2pd

Agree = Callable[[RunNeeds], None]  # shows what the run needs; raises if the owner does not agree


def agree_silently(_: RunNeeds) -> None:
    """Accept the run's needs without asking."""


async def run_daemon(
    loaded: LoadedConfig,
    token: JoinToken | None,
    clock: Clock,
    agree: Agree = agree_silently,
    *,
    detached: bool = False,
) -> None:
    """Run a member until it leaves. Raises the error that prevents it.

    `detached`: standard error goes to the log file.
    """
    require_hivemind()
    limit_malloc_arenas()  # enrolment starts threads
    config = loaded.config
    with _locked(config, detached=detached) as (identity, name):
        credentials = await load_or_enrol(config, identity, name, token, clock, agree)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # sent when a terminal closes; children inherit this setting
        if token is None:
            await _check_again(loaded, credentials, clock)
        # torch would make this folder in the system's temporary directory and leave it there
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(config.path("torch-cache")))
        use_huge_pages()
        raise_descriptor_limit(MAX_FILES)  # p2pd inherits the limit
        install_lazy_hivemind()
        await _serve_runs(loaded, identity, credentials, clock)


async def _serve_runs(loaded: LoadedConfig, identity: Identity, credentials: Credentials, clock: Clock) -> None:
    """Run a daemon. When it has moved to another run, or must retry the move, run the next daemon."""
    pinging = asyncio.create_task(_ping_watchdog())
    daemon: Daemon | None = None
    try:
        while True:
            async with contextlib.AsyncExitStack() as undo:
                child = await _start_child(loaded.config, credentials, clock)
                if child is not None:
                    undo.push_async_callback(child.end)
                from atoll.node.daemon import Daemon  # here, because torch and hivemind take seconds to import

                if daemon is not None and daemon.stop_asked:
                    return
                daemon = Daemon(loaded, identity, credentials, clock, child, has_moved=daemon is not None)
                if not await daemon.run():
                    return
            loaded, credentials = daemon.loaded, Credentials.load(loaded.config.data_dir) or credentials
    finally:
        pinging.cancel()


async def _ping_watchdog() -> None:
    """Ping systemd's watchdog while the event loop runs, also while a daemon saves its state and between daemons."""
    seconds = sdnotify.watchdog_seconds(os.environ)
    while seconds is not None:
        sdnotify.notify(os.environ.get("NOTIFY_SOCKET", ""), "WATCHDOG=1")
        await asyncio.sleep(seconds)


def require_hivemind() -> None:
    """Raise `ConfigError` before the token is used. The extra for seeds cannot install hivemind."""
    if importlib.util.find_spec("hivemind") is None:
        raise ConfigError(
            "hivemind is not installed",
            "a node needs atoll's 'node' extra; for a seed without torch: pip install --no-deps hivemind==1.1.12",
        )


async def enrol_only(
    loaded: LoadedConfig, token: JoinToken, clock: Clock, agree: Agree = agree_silently
) -> Credentials:
    """Do everything that `run_daemon` does before the daemon starts. Raises the error that prevents it."""
    with _locked(loaded.config) as (identity, name):
        return await load_or_enrol(loaded.config, identity, name, token, clock, agree)


@contextlib.contextmanager
def _locked(config: NodeConfig, *, detached: bool = False) -> Iterator[tuple[Identity, str]]:
    """Lock the data directory and open the log file. Yields the node's identity and name."""
    make_private_dir(config.data_dir)
    with data_dir_lock(config.data_dir):
        finish_rotation(config.data_dir)
        identity = Identity.load_or_create(config.path(KEY_FILE))
        name = config.name or f"node-{identity.peer_id[-6:].lower()}"
        file = RotatingLog(config.path(LOG_FILE))
        if detached:
            file.take_stderr()
        log.configure(config.log_level, config.log_format, file=file, file_only=detached, node=name)  # type: ignore[arg-type]
        try:
            yield identity, name
        except Exception as error:
            if not detached:  # if detached, standard error already goes to the file
                file.write(_last_words(error))
            raise
        finally:
            if not detached:
                log.configure(config.log_level, config.log_format, node=name)  # type: ignore[arg-type]
                file.close()


def _last_words(error: Exception) -> str:
    """The error as the terminal shows it."""
    if isinstance(error, AtollError):
        return "".join(f"{line}\n" for line in (f"error: {error}", error.remedy) if line)
    return "".join(traceback.format_exception(error))


async def _start_child(config: NodeConfig, credentials: Credentials, clock: Clock) -> TrainerProcess | None:
    """Start the trainer, which imports torch in parallel with the daemon. None for a seed, which has no trainer."""
    if "seed" in credentials.member(clock.unix()).roles:
        return None
    return await TrainerProcess.start(make_private_dir(config.path("runs", credentials.run_id)) / LOG_NAME)


def use_huge_pages() -> None:
    """Have torch allocate huge pages. Call it before torch allocates the first tensor.

    Rounds touch fresh vectors, and the page faults of small pages cost more time than the sums.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


async def load_or_enrol(
    config: NodeConfig, identity: Identity, name: str, token: JoinToken | None, clock: Clock, agree: Agree
) -> Credentials:
    """Return earlier credentials, or enrol with the token. Raises `UsageError` if there is neither."""
    known = Credentials.load(config.data_dir)
    if known is not None and token is None:
        put_in_place(config.path("runs", known.run_id), known.run_created_unix_ms)  # repairs an interrupted join
        return known
    if token is None:
        raise UsageError(
            "this node has not joined a run yet, and no token was given",
            "ask your operator for a token, then: atoll join --token - (and paste it)",
        )
    check_writable(config.data_dir)
    needs = await preview(token, identity, name, clock)
    await _check(config, needs, agree)
    credentials = await enrol(token, identity, name, clock)
    begin_membership(config.data_dir, credentials)
    save_owner_intent(config.data_dir, OwnerIntent())  # a new join ends an earlier pause
    return credentials


async def _check_again(loaded: LoadedConfig, credentials: Credentials, clock: Clock) -> None:
    """At a later start, repeat the quick checks. A failure is reported to the operator."""
    config = loaded.config
    try:
        try:
            check_machine(config)
            check_writable(config.data_dir)
        except DataDirUnusable as error:  # a node deletes old fetched text, and its state may still fit
            _log.warning("little room", reason=str(error), remedy=error.remedy)
        if "seed" not in credentials.member(clock.unix()).roles:
            spec = parse_run_spec(credentials.run_spec_toml)
            check_base_is_there(spec, config.base)
            check_directory_of_corpus(spec, config.data)
    except AtollError as error:
        # a new instance id, so that it is not taken for another process
        request = announcement(error, secrets.token_bytes(INSTANCE_BYTES))
        if request is not None:
            await announce_end(lambda: dial(credentials), request)
        raise
    if has_flags(loaded):
        save_overrides(loaded)


def _ask(agree: Agree, needs: RunNeeds) -> None:
    """Ask the owner. Ctrl-C ends the program at once, because asyncio's handler would wait for the answer."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        agree(needs)
    finally:
        signal.signal(signal.SIGINT, before)


async def _check(config: NodeConfig, needs: RunNeeds, agree: Agree) -> None:
    """Check the run's needs: quick checks before the owner is asked, slow ones afterwards."""
    if not needs.trains:
        _ask(agree, needs)
        return
    check_base_is_there(needs.spec, config.base)
    check_directory_of_corpus(needs.spec, config.data)
    _ask(agree, needs)
    found = await check_run_apart(Request.of(config, needs))
    check_disk(config, needs, found.share)
