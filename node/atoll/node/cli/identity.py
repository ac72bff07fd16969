"""`atoll identity rotate`: give a node a new key, because somebody else may have the old one."""

from __future__ import annotations

import typer

from atoll.core.output import Output, OutputOption, print_json, print_to_stderr
from atoll.node.cli.options import ConfigFile, DataDir, load_settings

app = typer.Typer(help="This node's identity key.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """This node's identity key."""


@app.command()
def rotate(data_dir: DataDir = None, config: ConfigFile = None, output: OutputOption = Output.TEXT) -> None:
    """Replace this node's key. Coordinator and members then refuse the old key. Stop the daemon first.

    The node keeps its membership, its name, its probation and its state. If the command fails, run it again.

    Example:

      atoll identity rotate      (after `atoll leave`; then start the node again with `atoll up`)
    """
    import asyncio

    from atoll.core.clock import SystemClock
    from atoll.node.control.identity_rotation import not_joined, rotate_identity
    from atoll.node.system.data_dir_lock import data_dir_lock

    directory = load_settings(data_dir, config).config.data_dir
    if not directory.is_dir():
        raise not_joined(directory)
    with data_dir_lock(directory):
        peer_id = asyncio.run(rotate_identity(directory, SystemClock()))
    if output is Output.JSON:
        print_json({"identity": {"peer_id": peer_id}})
    else:
        print_to_stderr(f"This node is {peer_id} now, and its old identity is refused. Start it again: atoll up")
