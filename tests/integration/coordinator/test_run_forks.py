"""A fork from the operator's command to its first plan, over the real protocol."""

from __future__ import annotations

import asyncio
from pathlib import Path

from click.testing import Result
from integration.coordinator.lab import SECONDS, Coordinator, Node, coordinator
from integration.coordinator.test_membership import begin, close
from typer.testing import CliRunner
from unit.coordinator.model_files import Files, committed_checkpoint
from unit.coordinator.world import commit, genesis_report, hash_of

from atoll.coordinator.cli import main
from atoll.core.errors import NotFound
from atoll.core.run_spec import parse_run_spec
from atoll.v1 import admin_pb2 as admin
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb


async def fork(home: Coordinator, *arguments: str) -> Result:
    changes = ["--set", "run.min_nodes=1", "--credentials", str(home.data_dir / "admin")]
    command = ["run", "fork", "reef", "kelp", *arguments, *changes]
    return await asyncio.wait_for(asyncio.to_thread(CliRunner().invoke, main.app, command), SECONDS)


async def first_round(nodes: list[Node]) -> Files:
    """Round 1 commits; the opener holds a checkpoint of it."""
    identities = [node.identity for node in nodes]
    files = committed_checkpoint(hash_of(genesis_report(identities[0])), identities)
    report = mb.RoundReport(round=files.name, committed=True, manifest=files.manifest, seconds=1)
    for node in nodes:
        held = {"checkpoints": [files.info()], "checkpoints_changed": True} if node.name == "ann" else {}
        await node.acknowledged(await node.say(rounds=[report], **held))
    return files


async def move(home: Coordinator, node: Node, **first: object) -> None:
    await home.admin.AssignNode(admin.AssignNodeRequest(node=node.name, run_id="kelp"), timeout=SECONDS)
    await node.hear(lambda response: response.order == mb.ORDER_MOVE)
    async with node.channel() as channel:
        await node.stub_on(channel).MoveToRun(mb.MoveToRunRequest(), timeout=SECONDS)
    node.plan_version = 0
    await node.connect(run_id="kelp", **first)


def forked(node: Node, files: Files) -> mb.GenesisReport:
    """A genesis with the weights of that checkpoint."""
    made = genesis_report(node.identity, run_id="kelp")
    manifest = manifest_pb2.Manifest.FromString(made.manifest.payload)
    source = manifest_pb2.Manifest.FromString(files.manifest.payload)
    for layer, other in zip(manifest.layers, source.layers, strict=True):
        layer.anchor_digest = other.anchor_digest
    made.manifest.CopyFrom(commit(manifest.SerializeToString(), [node.identity]))
    made.source_manifest = files.manifest.payload
    return made


async def test_a_fork_goes_from_the_command_to_a_plan_and_a_restart_does_not_forget_what_is_kept(
    tmp_path: Path,
) -> None:
    async with coordinator(tmp_path / "home") as home:
        nodes = await begin(home, "ann", "bob")
        ann = next(node for node in nodes if node.name == "ann")
        refused = await fork(home, "--from", "1")
        assert isinstance(refused.exception, NotFound)
        files = await first_round(nodes)
        done = await fork(home, "--from", "1", "--start")
        assert done.exit_code == 0, done.output
        assert "ann (run reef)" in done.stderr
        assert "where `checkpoint_keep` is 1, the next one replaces it" in done.stderr
        spec = (await home.admin.GetRun(admin.RunRequest(run_id="kelp"), timeout=SECONDS)).spec_toml
        section = parse_run_spec(spec).fork
        assert section is not None
        assert bytes.fromhex(section.manifest) == files.info().manifest_hash
        await ann.hear(lambda response: list(response.kept_rounds) == [1])
        await close(nodes)

    async with coordinator(tmp_path / "home") as home:
        for node in nodes:
            node.home = home
        await ann.connect(mb.NODE_STATE_TRAINING, run_id="reef")
        await ann.hear(lambda response: list(response.kept_rounds) == [1])
        held = mb.FormerCheckpoint(run_id="reef", checkpoint=files.info())
        await move(home, ann, former_checkpoints=[held])
        await ann.hear(lambda response: response.order == mb.ORDER_WRITE_GENESIS)
        await ann.say(mb.NODE_STATE_READY, genesis=forked(ann, files))
        response = await ann.plan(1)
        assert response.genesis == forked(ann, files).manifest
        await ann.close()
