"""Start of a daemon: lock → identity → credentials → daemon.

Problems with a token, a key or a directory are reported here, within a second: hivemind and, on a node, torch are
imported only after enrolment. The trainer's process imports torch at the same time. A seed has no torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from typing import TYPE_CHECKING

from atoll.core import log
from atoll.core.clock import Clock
from atoll.core.errors import ConfigError, UsageError
from atoll.core.files import make_private_dir, raise_descriptor_limit
from atoll.core.identity import Identity
from atoll.core.tokens import JoinToken
from atoll.node.config import LoadedConfig, NodeConfig
from atoll.node.control.credentials import Credentials
from atoll.node.control.enrol import enrol
from atoll.node.control.identity_rotation import KEY_FILE, finish_rotation
from atoll.node.limits.owner_files import OwnerIntent, save_owner_intent
from atoll.node.run.begin_membership import begin_membership
from atoll.node.swarm.lazy_hivemind import install_lazy_hivemind
from atoll.node.system.data_dir_lock import data_dir_lock
from atoll.node.system.malloc_arenas import limit_malloc_arenas
from atoll.node.trainer.trainer_process import LOG_NAME, TrainerProcess

if TYPE_CHECKING:
    from atoll.node.daemon import Daemon

MAX_FILES = 1 << 16  # file descriptors: a libp2p stream takes four here and four in p2pd


async def run_daemon(loaded: LoadedConfig, token: JoinToken | None, clock: Clock) -> None:
    """Run a member until it leaves. Raises the error that prevents it."""
    require_hivemind()
    limit_malloc_arenas()  # enrolment has threads
    config = loaded.config
    make_private_dir(config.data_dir)
    with data_dir_lock(config.data_dir):
        finish_rotation(config.data_dir)
        identity = Identity.load_or_create(config.path(KEY_FILE))
        name = config.name or f"node-{identity.peer_id[-6:].lower()}"
        log.configure(config.log_level, config.log_format, node=name)  # type: ignore[arg-type]
        credentials = await load_or_enrol(config, identity, name, token, clock)
        if token is not None:
            save_owner_intent(config.data_dir, OwnerIntent())  # a new join ends an earlier pause
        # torch would make this folder in the system's temporary directory and leave it there
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(config.path("torch-cache")))
        use_huge_pages()
        raise_descriptor_limit(MAX_FILES)  # p2pd gets as many
        install_lazy_hivemind()
        await _serve_runs(loaded, identity, credentials, clock)


async def _serve_runs(loaded: LoadedConfig, identity: Identity, credentials: Credentials, clock: Clock) -> None:
    """Run a daemon; when it has moved to another run, or is to try that again, run the next one."""
    daemon: Daemon | None = None
    while True:
        async with contextlib.AsyncExitStack() as undo:
            child = await _start_child(loaded.config, credentials, clock)
            if child is not None:
                undo.push_async_callback(child.end)
            from atoll.node.daemon import Daemon  # here, because torch and hivemind take seconds to import

            if daemon is not None and daemon.stop_asked:
                return
            daemon = Daemon(loaded, identity, credentials, clock, child)
            if not await daemon.run():
                return
        loaded, credentials = daemon.loaded, Credentials.load(loaded.config.data_dir) or credentials


def require_hivemind() -> None:
    """Raise `ConfigError` before a use of a token is spent: the extra of seeds cannot bring hivemind along."""
    if importlib.util.find_spec("hivemind") is None:
        raise ConfigError(
            "hivemind is not installed",
            "a node needs atoll's 'node' extra; for a seed without torch: pip install --no-deps hivemind==1.1.12",
        )


async def _start_child(config: NodeConfig, credentials: Credentials, clock: Clock) -> TrainerProcess | None:
    """Start the trainer's process, which imports torch while the daemon does. None for a seed: it does not train."""
    member = credentials.authority.verify_membership(credentials.signed_membership(), clock.unix())
    if "seed" in member.roles:
        return None
    return await TrainerProcess.start(make_private_dir(config.path("runs", credentials.run_id)) / LOG_NAME)


def use_huge_pages() -> None:
    """Have torch allocate huge pages. Call it before torch allocates the first tensor.

    Rounds touch fresh vectors, and the page faults of small pages cost more time than the sums.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


async def load_or_enrol(
    config: NodeConfig, identity: Identity, name: str, token: JoinToken | None, clock: Clock
) -> Credentials:
    """Return the credentials of an earlier enrolment, or enrol with the token. Raises `UsageError` without either."""
    known = Credentials.load(config.data_dir)
    if known is not None and token is None:
        return known
    if token is None:
        raise UsageError(
            "this node has not joined a run yet, and no token was given",
            "ask your operator for a token, then: atoll join --token - (and paste it)",
        )
    credentials = await enrol(token, identity, name, clock)
    begin_membership(config.data_dir, credentials)
    return credentials
