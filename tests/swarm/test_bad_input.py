"""Bad input against a real coordinator: one clear sentence, the right exit code, nothing lost."""

import socket
from datetime import timedelta

from support.process_swarm import READY, SWARM_TEST, process_swarm

from atoll.core.files import write_private

pytestmark = SWARM_TEST


async def test_every_bad_start_says_what_happened_and_what_to_do(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=2, tokens=10**9)

        async def refused(name: str, code: int, *words: str) -> None:
            program = swarm.programs.pop(name)
            await program.child.wait()
            log = program.log.read_text()
            assert program.child.returncode == code, log
            assert "Traceback" not in log
            assert "error: " in log
            for word in words:
                assert word in log

        async def join_with(token: str, name: str, *flags: str) -> None:
            directory = tmp_path / name
            directory.mkdir(mode=0o700, exist_ok=True)
            write_private(directory / "token", token.encode())
            command = ["join", "--yes", "--data-dir", str(directory), "--token", f"file:{directory / 'token'}"]
            await swarm.start_program(name, directory, "atoll", *command, "--listen", "127.0.0.1", *flags)

        used = (await swarm.ctl("token", "create", "--uses", "1", "--role", "seed")).strip()
        await join_with(used, "first")
        await swarm.until(lambda: swarm.in_state("first", "ready"), "no second seed", READY)
        await join_with(used, "second")
        await refused("second", 77, "no uses left", "atollctl token create")

        revoked = (await swarm.ctl("token", "create")).strip()
        await swarm.ctl("token", "revoke", revoked.split(".")[2])
        await join_with(revoked, "third")
        await refused("third", 77, "token")

        wrong = (await swarm.ctl("token", "create")).strip().split(".")
        wrong[3] = "0" * 48
        await join_with(".".join(wrong), "fourth")
        await refused("fourth", 77, "token")

        good = (await swarm.ctl("token", "create", "--uses", "3")).strip()
        empty = tmp_path / "empty.txt"
        empty.write_text("")
        await join_with(good, "fifth", "--data", str(empty))
        await refused("fifth", 78, "empty.txt")
        binary = tmp_path / "binary.txt"
        binary.write_bytes(bytes(range(256)) * 100)
        await join_with(good, "sixth", "--data", str(binary))
        await refused("sixth", 78, "binary.txt")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            await join_with(good, "seventh", "--port", port)
            await refused("seventh", 78, port)

        # nothing was lost: the token has all its uses, and the same directory joins with it
        (token,) = [item for item in (await swarm.json("token", "list"))["tokens"] if item["id"] == good.split(".")[2]]
        assert token["uses_left"] == 3
        await join_with(good, "seventh", "--port", "0")
        await swarm.until(lambda: swarm.status("seventh") is not None, "does not start", timedelta(seconds=60))
