"""The daemon in the background: `python -m atoll.node.cli.detached DATA-DIR [CONFIG]`, started by `detach.py`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from atoll.core.cli import run_cli
from atoll.core.clock import SystemClock
from atoll.node.cli.options import load_settings
from atoll.node.start import run_daemon


def main() -> None:
    """Run the daemon until it leaves."""
    data_dir, *config = map(Path, sys.argv[1:])
    loaded = load_settings(data_dir, config[0] if config else None)
    asyncio.run(run_daemon(loaded, None, SystemClock(), detached=True))


if __name__ == "__main__":
    run_cli(main)
