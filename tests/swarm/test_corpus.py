"""Whole swarms that train on a corpus behind mirrors: empty disks, mirrors that lie and end, no mirror but members."""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.corpus_server import CorpusServer, files_of, write_corpus
from support.process_swarm import READY, ROUNDS, SWARM_TEST, process_swarm

from atoll.core.errors import ExitCode
from atoll.lab.faults import kill

pytestmark = SWARM_TEST


def waves(seed: int, size: int) -> bytes:
    """Text that a small model can learn."""
    numbers = np.random.default_rng(seed).integers(0, 10_000, size // 30)
    return b"".join(b"The %dth wave broke on the reef.\0" % number for number in numbers)


async def test_nodes_with_empty_disks_train_what_mirrors_give_and_wait_while_none_does(tmp_path):
    sources = {"web": [waves(1, 3 << 20), waves(2, 2 << 20)], "sea": [waves(3, 1 << 20)]}
    digest = write_corpus(tmp_path / "corpus", sources)
    files = files_of(tmp_path / "corpus")
    with CorpusServer(files) as liar, CorpusServer(files) as honest:
        liar.faults.lies = lambda path, start: path.endswith("tokens") and start // 8192 % 2 == 1
        data = f"""source = "corpus"
corpus = "{digest}"
mirrors = ["{liar.address}", "{honest.address}"]
tokenizer = "corpus"
mixture = [{{ weights = {{ web = 3, sea = 1 }} }}]
sequence_length = 512"""
        async with process_swarm(tmp_path) as swarm:
            await swarm.begin(nodes=2, tokens=200_000, round_tokens=6000, codec="fp32", data=data)
            await swarm.node("ann")
            await swarm.node("bob", 0.05, "--device", "cpu,cpu")
            await swarm.rounds("ann", 2)
            liar.faults.status = honest.faults.status = 503
            waits = "waits for training text"
            await swarm.until(
                lambda: waits in (swarm.status("ann") or {}).get("detail", ""), "ann does not say that it waits", ROUNDS
            )
            assert "503" in swarm.status("ann")["detail"]
            assert 0 < swarm.status("ann")["data_bytes_fetched"] <= liar.body_bytes + honest.body_bytes
            assert swarm.status("ann")["data_blocks"]["server"] > 0, swarm.status("ann")
            problems = {mirror["name"]: mirror["problem"] for mirror in swarm.status("ann")["data_mirrors"]}
            assert "503" in problems[honest.address]
            await swarm.until(
                lambda: (swarm.status("ann") or {}).get("data_stall_share", 0) > 0, "ann does not say how long", ROUNDS
            )
            async with asyncio.timeout(ROUNDS.total_seconds()):  # the operator hears it with the next heartbeats
                while waits not in (await swarm.json("node", "show", "ann"))["node"]["status"]["detail"]:
                    await asyncio.sleep(0.5)
            stopped_at = swarm.round("ann")
            liar.faults.status = honest.faults.status = 0
            doctor = await diagnose(swarm.root / "ann")
            assert [item["ok"] for item in doctor if item["name"] in ("mirror", "text disk")] == [True] * 3
            assert [item["name"] for item in doctor].count("line") == 1  # how fast it is, is the machine's affair
            for name in ("ann", "bob"):
                await swarm.reach(name, "finished")
            assert swarm.round("ann") > stopped_at
            check_sources(swarm.status("ann"))
            told = [row for name in ("ann", "bob") for row in swarm.status(name)["sources"] if "validation_loss" in row]
            assert {row["name"] for row in told} == {"web", "sea"}  # of the node that evaluated last
            assert swarm.anchor_digest("ann") == swarm.anchor_digest("bob")
            run = (await swarm.json("run", "show", "reef"))["run"]
            losses = [item["loss"] for item in run["evaluations"]]
            assert losses[-1] < 0.9 * losses[0]
            for item in run["evaluations"]:
                assert {source["name"] for source in item["sources"]} == {"web", "sea"}
                parts = [(source["loss"], source["windows"]) for source in item["sources"]]
                total = sum(windows for _, windows in parts)
                assert item["loss"] == pytest.approx(sum(loss * windows for loss, windows in parts) / total)
            trained = {source["name"]: source["tokens"] for source in run["evaluations"][-1]["sources"]}
            assert 2.5 < trained["web"] / trained["sea"] < 3.5


def check_sources(status):
    """The owner sees each source's share of what the run trained, and its loss."""
    rows = {row["name"]: row for row in status["sources"]}
    assert abs(rows["web"]["share"] - 0.75) < 0.02
    assert rows["web"]["share_wanted"] == pytest.approx(0.75)
    assert status["data_blocks"]["server"] > 0


async def diagnose(directory):
    command = [str(Path(sys.executable).parent / "atoll"), "doctor", "--data-dir", str(directory), "--output", "json"]
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    answer, _ = await child.communicate()
    return json.loads(answer)["doctor"]


async def test_a_seed_is_the_only_mirror_and_members_go_on_while_it_is_dead(tmp_path):
    digest = write_corpus(tmp_path / "corpus", {"web": [waves(1, 4 << 20), waves(2, 4 << 20)]})
    data = f'source = "corpus"\ncorpus = "{digest}"\ntokenizer = "corpus"\nsequence_length = 512'
    async with process_swarm(tmp_path) as swarm:
        flags = ("--data", str(tmp_path / "corpus"))
        await swarm.begin(nodes=2, tokens=10**9, round_tokens=6000, codec="fp32", data=data, seed_flags=flags)
        assert "2 of 2 shards" in swarm.programs["seed"].log.read_text()
        await swarm.start_member("second", "seed")
        await swarm.until(lambda: swarm.in_state("second", "ready"), "no second seed", READY)
        await swarm.node("ann")
        await swarm.node("bob", 0.05, "--device", "cpu,cpu")
        await swarm.rounds("ann", 2)
        assert swarm.status("ann")["corpus_bytes_from_members"] >= swarm.status("ann")["data_bytes_fetched"] > 0
        assert swarm.status("ann")["data_blocks"]["members"] > 0
        assert swarm.status("seed")["corpus_bytes_to_members"] > 0
        assert not mapped_libraries(swarm.programs["seed"].pid) & {"torch", "numpy", "scipy"}

        await kill(swarm, "seed")
        await swarm.node("cleo")  # the card, the tokenizer and the held-out samples are at ann and bob
        await swarm.until(lambda: loaded(swarm, "cleo"), "cleo does not load its corpus from ann and bob", ROUNDS)
        assert swarm.status("cleo")["corpus_bytes_from_members"] > 0
        assert sum(swarm.status(name)["corpus_bytes_to_members"] for name in ("ann", "bob")) > 0
        waits = "waits for training text: no member gives web/"
        await swarm.until(
            lambda: waits in (swarm.status("ann") or {}).get("detail", ""), "ann does not say that it waits", ROUNDS
        )

        await swarm.restart_member("seed")
        await swarm.rounds("ann", 3)
        await swarm.reach("cleo", "training")
        await swarm.rounds("cleo", 3)


def mapped_libraries(pid):
    """The packages of Python of which a process has loaded a shared object."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    found = {line.partition("site-packages/")[2].partition("/")[0] for line in lines if "site-packages/" in line}
    assert "grpc" in found  # a library that every member has loaded
    return found


def loaded(swarm, name):
    return bool((swarm.status(name) or {}).get("device"))


async def test_a_seed_with_a_wrong_directory_says_so(tmp_path):
    write_corpus(tmp_path / "other", {"web": [waves(1, 1 << 16)]})
    data = f'source = "corpus"\ncorpus = "{"0" * 64}"\nsequence_length = 64'
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=1, tokens=20_000, data=data)
        program = await swarm.start_member("wrong", "seed", "--data", str(tmp_path / "other"))
        async with asyncio.timeout(ROUNDS.total_seconds()):
            assert await program.child.wait() == ExitCode.CONFIG
        assert "the run demands 000000000000" in swarm.programs.pop("wrong").log.read_text()


async def test_a_node_whose_mirrors_give_another_corpus_says_so(tmp_path):
    write_corpus(tmp_path / "corpus", {"web": [waves(1, 1 << 20)]})
    with CorpusServer(files_of(tmp_path / "corpus")) as server:
        data = f'source = "corpus"\ncorpus = "{"0" * 64}"\nmirrors = ["{server.address}"]\nsequence_length = 64'
        async with process_swarm(tmp_path) as swarm:
            await swarm.begin(nodes=1, tokens=20_000, data=data)
            await swarm.node("ann")
            await swarm.until(
                lambda: "another digest" in (swarm.status("ann") or {}).get("detail", ""),
                "ann does not say why",
                ROUNDS,
            )
