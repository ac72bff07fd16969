"""What the command lines share: errors become one sentence on stderr and an exit code, in one place.

A command raises errors of the tree and never prints or exits by itself; `run_cli` does both. Usage errors
exit with 2 like everybody's. An interrupt (Ctrl-C) exits with 130 and no traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from atoll.core.errors import AtollError

INTERRUPTED = 130


def run_cli(app: Callable[[], object]) -> None:
    """Run a typer app (or any callable) as a program: returns only by `SystemExit`."""
    try:
        app()
    except AtollError as error:
        report(error)
        raise SystemExit(int(error.exit_code)) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader went away (`atollctl events --follow | head`); keep the interpreter from telling us again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    raise SystemExit(0)


def report(error: AtollError) -> None:
    """`error: …` on stderr, and below it what to do."""
    print(f"error: {error}", file=sys.stderr)
    if error.remedy:
        print(f"  {error.remedy}", file=sys.stderr)
