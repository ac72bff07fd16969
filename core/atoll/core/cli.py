"""Entry point of every command line: converts errors to a sentence on stderr and an exit code.

A command raises an `AtollError` and never prints it or exits; `run_cli` does both. Usage errors exit with 2. An
interrupt (Ctrl-C) exits with 130 and no traceback. One distribution serves volunteers and operators, so a missing
package of an extra is also reported as a sentence that names the extra.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from atoll.core.errors import AtollError, ConfigError, UsageError
from atoll.core.output import print_to_stderr

INTERRUPTED = 130
_EXTRAS = {
    "node": ("hivemind", "msgpack", "numpy", "psutil", "pynvml", "safetensors", "torch"),
    "seed": ("cid", "idna", "msgpack", "multihash", "netaddr", "psutil", "sortedcontainers", "uvloop", "varint"),
    "coordinator": ("alembic", "numpy", "prometheus_client", "scipy", "sqlalchemy", "starlette", "uvicorn"),
    "eval": ("evaluate", "lm_eval"),
    "hf": ("datasets", "peft", "pyarrow", "tokenizers", "transformers"),
}


def local_path(path: Path) -> Path:
    """Return the path. Raises `UsageError` for a URL: it would become a directory with a colon in its name."""
    url = re.match(r"([a-z][a-z0-9+.-]+:)/+", str(path))
    if url:
        raise UsageError(
            f"{url[1]}//{str(path)[url.end() :]} is a URL, and not a directory of this machine",
            "name a directory; programs such as `aws s3 sync` copy one from and to other places",
        )
    return path


def run_cli(app: Callable[[], object]) -> None:
    """Run a typer app (or any callable) as a program. Always raises `SystemExit`."""
    try:
        _explain_missing_extra(app)
    except AtollError as error:
        print_error(error)
        raise SystemExit(int(error.exit_code)) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader closed the pipe (`atollctl events --follow | head`). The interpreter would print the error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    raise SystemExit(0)


def _explain_missing_extra(app: Callable[[], object]) -> None:
    try:
        app()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        extras = [name for name, packages in _EXTRAS.items() if missing in packages]
        if not extras:
            raise
        raise ConfigError(
            f"{missing} is not installed: this command needs atoll's {' or '.join(map(repr, extras))} extra",
            f"in a checkout: pip install -c constraints.txt '.[{extras[0]}]'; "
            f"with a wheel: pip install 'FILE[{extras[0]}]'",
        ) from error


def print_error(error: AtollError) -> None:
    """Print `error: …` on stderr, and the remedy on the next line."""
    print_to_stderr(f"error: {error}")
    if error.remedy:
        print_to_stderr(f"  {error.remedy}")
