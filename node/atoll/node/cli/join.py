"""`atoll join` and `atoll up`: run a member's daemon in the foreground (systemd restarts it).

`join` takes a token and settings; `up` starts the same node again. `join` shows the run's requirements and asks once,
after all fast checks and before a use of the token is spent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.core.errors import ConfigError, UsageError
from atoll.core.files import make_private_dir
from atoll.core.output import ask_interactively, print_to_stderr
from atoll.node.cli.detach import start_detached
from atoll.node.cli.options import ConfigFile, DataDir, load_settings, with_setting_options
from atoll.node.config import SETTING_FIELDS, LoadedConfig, NodeConfig, has_flags, save_overrides

if TYPE_CHECKING:
    from atoll.core.tokens import JoinToken
    from atoll.node.control.run_needs import RunNeeds

_SOURCE_HELP = (
    "Source of the token: '-' (standard input) or file:PATH. Default: $ATOLL_TOKEN_FILE; else the command asks."
)
_EXAMPLES = """
Examples:

  atoll join                              (asks for the token)

  atoll join --token file:token.txt --data ./books --port 7710

  pass show atoll-token | atoll join --token - --yes
"""
Token = Annotated[str | None, typer.Option("--token", help=_SOURCE_HELP, show_default=False)]
_WITHOUT_OPTION = {  # set in a configuration file or by an ATOLL_* variable
    "data_dir",  # has its own option
    "direct",
    "direct_port",
    "price_per_hour",
    "stay_in_run",
    "checkpoint_keep",
    "checkpoint_interval_seconds",
}
_SETTINGS = tuple(name for name in SETTING_FIELDS if name not in _WITHOUT_OPTION)
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Run in the background; `atoll logs -f` shows its log.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation of the run and the limits.")]


@with_setting_options(*_SETTINGS)
def join(
    token: Token = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    yes: Yes = False,
    detach: Detach = False,
    **settings: Any,
) -> None:
    """Join a run with a token, train until the run is finished, then serve the model. Ctrl-C finishes the round."""
    loaded = load_settings(data_dir, config, **_with_absolute_paths(settings))
    from atoll.core.tokens import parse_join_token  # here, so that `--help` does not import cryptography
    from atoll.node.preflight.machine import check_machine

    parsed = parse_join_token(_token_text(token))
    check_machine(loaded.config)
    make_private_dir(loaded.config.data_dir)
    save_overrides(loaded)  # kept even if the coordinator does not answer: the next try need not repeat them
    if detach:
        _enrol(loaded, parsed, yes)
        start_detached(loaded.config.data_dir, config)
    else:
        _run(loaded, parsed, lambda needs: _show(loaded.config, needs, yes))


join.__doc__ = (join.__doc__ or "") + "\n" + _EXAMPLES


@with_setting_options(*_SETTINGS)
def up(data_dir: DataDir = None, config: ConfigFile = None, detach: Detach = False, **settings: Any) -> None:
    """Start a node again that joined earlier, without a token, for example after a reboot.

    The command uses the settings of `join`. It saves settings that you give here for later starts.
    """
    loaded = load_settings(data_dir, config, **_with_absolute_paths(settings))
    if detach:
        if has_flags(loaded) and loaded.config.data_dir.is_dir():
            save_overrides(loaded)
        start_detached(loaded.config.data_dir, config)
    else:
        _run(loaded, None)


def _with_absolute_paths(settings: dict[str, Any]) -> dict[str, Any]:
    """Make the paths absolute, because the daemon may restart in another directory; a glob pattern stays as it is."""
    data, base = settings["data"], settings.get("base")
    if data and Path(data).exists():
        data = str(Path(data).absolute())
    if base:
        base = str(Path(base).expanduser().absolute())
    return {**settings, "data": data, "base": base}


def _enrol(loaded: LoadedConfig, token: JoinToken, yes: bool) -> None:
    import asyncio

    from atoll.core.clock import SystemClock
    from atoll.node.start import enrol_only

    asyncio.run(enrol_only(loaded, token, SystemClock(), lambda needs: _show(loaded.config, needs, yes)))


def _run(loaded: LoadedConfig, token: JoinToken | None, agree: Callable[[RunNeeds], None] | None = None) -> None:
    import asyncio

    from atoll.core.clock import SystemClock
    from atoll.node.start import agree_silently, run_daemon

    asyncio.run(run_daemon(loaded, token, SystemClock(), agree or agree_silently))


def _token_text(source: str | None) -> str:
    """Read the token from its source. Raises `UsageError` for a token on the command line, which others can read."""
    if source == "-":
        return sys.stdin.readline()
    if source is not None and source.startswith("file:"):
        return _read(Path(source.removeprefix("file:")))
    if source is not None and os.path.exists(source):  # `Path.exists` raises for a token: its name is too long
        raise UsageError(f"--token {source} is neither '-' nor file:PATH", f"use --token file:{source}")
    if source is not None:
        raise UsageError(
            "the token is on the command line, where every user of this machine can read it",
            "use --token -, --token file:PATH or ATOLL_TOKEN_FILE, or leave it out and paste it when asked",
        )
    if os.environ.get("ATOLL_TOKEN_FILE"):
        return _read(Path(os.environ["ATOLL_TOKEN_FILE"]))
    if not sys.stdin.isatty():
        raise UsageError("no token was given", "use --token - to read it from standard input, or --token file:PATH")
    text: str = ask_interactively(lambda: typer.prompt("Join token", hide_input=True, err=True))
    return text


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(
            f"cannot read the token from {path}: {reason}", "check the path and its permissions"
        ) from error


def _show(config: NodeConfig, needs: RunNeeds, yes: bool) -> None:
    """Print the run's requirements and the limits that this node will use, and ask once."""
    from atoll.node.cli.consent import consent_lines

    for line in consent_lines(config, needs):
        print_to_stderr(line)
    if not yes and sys.stdin.isatty() and not ask_interactively(lambda: typer.confirm("Join?", default=True, err=True)):
        raise typer.Exit(0)
