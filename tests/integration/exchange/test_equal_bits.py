"""Decoding and the outer step give the same bits on every CPU capability and number of threads."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import hashlib, sys, torch
from atoll.node.exchange.codecs import CODECS
from atoll.node.exchange.weighted_sum import (weighted_mean)
from atoll.node.state.outer_step import (digest, outer_step)
data = open(sys.argv[1], "rb").read()
values = torch.frombuffer(bytearray(data), dtype=torch.float32)
for threads in (1, 2):
    torch.set_num_threads(threads)
    total = hashlib.sha256()
    anchor, momentum = values[:200_000].clone(), values[200_000:400_000].clone()
    for name, codec in sorted(CODECS.items()):
        body = open(sys.argv[1] + "." + name, "rb").read()
        average = codec.decode(body, 200_000)
        for _ in range(3):
            anchor, momentum = outer_step(anchor, momentum, average, 0.7, 0.9)
        total.update(digest(average) + digest(anchor) + digest(momentum))
    total.update(digest(weighted_mean([anchor, momentum], [3, 7])))
    print(threads, total.hexdigest())
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    import torch

    from atoll.node.exchange.codecs import CODECS

    path = tmp_path_factory.mktemp("bits") / "values"
    values = torch.randn(600_000, generator=torch.Generator().manual_seed(1))
    path.write_bytes(values.numpy().tobytes())
    for name, codec in CODECS.items():
        path.with_name(f"values.{name}").write_bytes(codec.encode(values[400_000:] * 1e-3))
    return path


def digests(path, capability: str) -> set[str]:
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "PYTHONWARNINGS": "ignore"}
    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    ).stdout
    lines = printed.split("\n")[:2]
    assert [line[0] for line in lines] == ["1", "2"]
    return {line[2:] for line in lines}


def test_equal_bits_on_every_capability_and_thread_count(inputs):
    found = {capability: digests(inputs, capability) for capability in ("default", "avx2", "avx512")}
    assert len(set().union(*found.values())) == 1, found
