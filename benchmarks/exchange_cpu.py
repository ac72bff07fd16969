"""Where the processor time of an exchange goes: each thing that is done with its bytes, alone, beside the whole.

Two hosts average 160 MB of fp32 over 1 Gbit/s × 20 ms, as in `allreduce`: seconds of processor time that both take, for
each GB that they send. Beside it what codecs, judging, sums, digests, TLS and the kernel take of that, each measured
alone, on one thread, on parts as long as the exchange has them. What is left are the event loop, frames, copies into
the average, memory that is fresh, caches that are cold, waiting for each other's locks, p2pd, the benchmark's own look
at memory, and a TUN device instead of loopback: all that no part of the work explains.

    python -m benchmarks.exchange_cpu                    # needs root and iproute2
    python -m benchmarks.exchange_cpu --codec int8 --hosts 4
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from atoll.lab.wan.network import wan_network
from atoll.node.direct.tls import dialling_context, listening_context
from atoll.node.exchange.codecs import CODECS, PIECE_ELEMENTS, Codec, is_finite
from atoll.node.exchange.partition import part_elements, partition
from atoll.node.exchange.screening import Screen
from atoll.node.exchange.weighted_sum import encoded_mean, screening_factors, tensor_source
from benchmarks import allreduce
from benchmarks.common import Report, median_seconds

MEGABYTES = 160.0  # of fp32
ROUNDS = 7
_WRITE = 256 * 1024  # what a direct connection encrypts at a time
_SCREEN = Screen(max_change_per_token=1.0)  # what the optimiser may move an element a token: nobody is scaled


cpu_seconds = partial(median_seconds, repetitions=9, clock=time.process_time)  # of all threads


def steps(codec: Codec, hosts: int, elements: int) -> Iterator[tuple[str, float]]:
    """What one member does in a round, and the seconds that it takes alone."""
    peers = [f"member-{i}" for i in range(hosts)]
    length = part_elements(partition(elements, peers, {}), codec.encoded_bytes, 2**20)
    values = [torch.randn(length) * 1e-3 for _ in peers]
    bodies = [codec.encode(value_E) for value_E in values]
    opened = [codec.open(body, length) for body in bodies[1:]]
    sources, work = [tensor_source(values[0]), *(it.decode_into for it in opened)], [1] * hosts
    decoded = torch.empty(min(PIECE_ELEMENTS, length))

    def decode() -> None:
        whole = codec.open(bodies[0], length)
        for first in range(0, length, PIECE_ELEMENTS):
            whole.decode_into(first, decoded[: length - first])

    parts = elements / length
    others, ours = parts * (hosts - 1) / hosts, parts / hosts
    sent = 2 * (hosts - 1) / hosts * codec.encoded_bytes(elements)
    yield "is our own update finite", parts * cpu_seconds(lambda: is_finite(values[0]))
    yield "encode it for its reducers", others * cpu_seconds(lambda: codec.encode(values[0]))
    yield "check what others sent", others * cpu_seconds(lambda: codec.open(bodies[0], length))
    yield "judge it", ours * cpu_seconds(lambda: screening_factors(sources, work, length, _SCREEN))
    yield "sum and encode", ours * cpu_seconds(lambda: encoded_mean(codec, sources, work, (1.0,) * hosts, length))
    yield "digest the average (SHA-256)", parts * cpu_seconds(lambda: hashlib.sha256(bodies[0]).digest())
    yield "decode it", parts * cpu_seconds(decode)
    yield "TLS, both ways", sent * tls_seconds_per_byte()
    yield "TCP in the kernel, both ways", sent * tcp_seconds_per_byte()


def tls_seconds_per_byte() -> float:
    """To encrypt and to decrypt, as asyncio has it: by way of memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    with tempfile.TemporaryDirectory() as place:
        context, _ = listening_context(Path(place), time.time())
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = dialling_context().wrap_bio(to_client, to_server)
    done: set[ssl.SSLObject] = set()
    while len(done) < 2:
        for side in (client, server):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                continue
    plaintext, taken = bytes(_WRITE), bytearray(_WRITE)

    def across() -> None:
        client.write(plaintext)
        got = 0
        while got < _WRITE:
            got += server.read(_WRITE - got, memoryview(taken)[got:])  # type: ignore[arg-type]

    return cpu_seconds(lambda: [across() for _ in range(16)]) / (16 * _WRITE)


def tcp_seconds_per_byte() -> float:
    """To send and to receive over loopback, in this process's two threads."""
    count, piece, room = 64 * _WRITE, bytes(_WRITE), bytearray(_WRITE)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        there = socket.create_connection(listening.getsockname())
        here = listening.accept()[0]

    def send() -> None:
        for _ in range(count // _WRITE):
            there.sendall(piece)

    def across() -> None:
        sending = threading.Thread(target=send)
        sending.start()
        got = 0
        while got < count:
            got += here.recv_into(room)
        sending.join()

    with there, here:
        return cpu_seconds(across) / count


async def whole(codec: str, hosts: int) -> dict[str, Any]:
    """The exchange itself: `allreduce`'s figures."""
    setting = allreduce.Setting("", (1000.0,) * hosts, 20.0)
    async with wan_network(setting.topology()) as network:
        links = await allreduce.goodput(network)
        with tempfile.TemporaryDirectory(prefix="atoll-") as place:
            task = allreduce.Task(int(MEGABYTES * 1e6 / 4), codec)
            return await allreduce.cell(network, "atoll", task, links, ROUNDS, Path(place))


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", nargs="+", choices=allreduce.CODEC_NAMES, default=list(allreduce.CODEC_NAMES))
    parser.add_argument("--hosts", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    report, elements = Report("exchange_cpu"), int(MEGABYTES * 1e6 / 4)
    columns: dict[str, dict[str, float | None]] = {}
    notes: list[str] = []
    for name in chosen.codec:
        figures = asyncio.run(whole(name, chosen.hosts))
        gigabytes = 2 * (chosen.hosts - 1) / chosen.hosts * CODECS[name].encoded_bytes(elements) / 1e9
        column: dict[str, float | None] = {
            step: seconds / gigabytes for step, seconds in steps(CODECS[name], chosen.hosts, elements)
        }
        explained, measured = sum(it for it in column.values() if it), figures["cpu_s_per_gb"]
        column["all of that"] = explained
        column["the exchange"] = measured
        column["of it the rest"] = measured - explained if measured else None
        column["share of the link (warm)"] = figures["warm"]
        columns[name] = column
        notes += [f"{name}: {figures['note']}"] if figures["note"] else []
    for step in columns[chosen.codec[0]]:
        report.cell(step=step, **{name: column[step] for name, column in columns.items()})
    report.finish(
        "".join(f"{note}; " for note in notes) + "seconds of processor time for each GB sent; "
        f"{chosen.hosts} hosts, 1 Gbit/s, 20 ms, {MEGABYTES:g} MB of fp32; "
        "hosts share this machine's cores with the lab's hub, whose time is not counted"
    )


if __name__ == "__main__":
    main()
