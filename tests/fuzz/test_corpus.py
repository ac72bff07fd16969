"""Members that ask and answer whatever they like on `/atoll/corpus/1`: readers get the corpus's bytes or an error."""

from __future__ import annotations

import asyncio
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpus_swarm import RUN, CorpusSwarm, ranges_of
from support.memory_network import FrameInTransit
from support.mutation import CASES, Mutator, cases, seeds

from atoll.core.errors import AtollError
from atoll.core.frames import Frame, FrameKind
from atoll.node.data.block_server import PROTOCOL
from atoll.node.data.card import CARD_NAME, MAX_CARD_BYTES
from atoll.node.data.corpus_table import PIECE_BYTES
from atoll.v1 import dataplane_pb2 as dp


@pytest.mark.parametrize("examples", CASES)
def test_whatever_one_member_answers(examples: int) -> None:
    """One of two members sends changed frames. All that is read is right, and the other one is enough."""
    with tempfile.TemporaryDirectory() as directory:
        base = CorpusSwarm(Path(directory))
        wanted = [item for item in ranges_of(base.truth) if not item[0].startswith("web/000000")]

        @cases(examples)
        @given(seeds, st.sampled_from([0.1, 0.5, 1.0]))
        def read(seed: int, often: float) -> None:
            mutator = Mutator(seed)

            async def change(passage: FrameInTransit) -> Frame:
                if passage.sender != "liar" or mutator.rng.random() >= often:
                    return passage.frame
                kind = dp.CorpusReply if passage.frame.kind is FrameKind.MESSAGE else None
                return mutator.frame(passage.frame, kind)

            async def scene() -> None:
                swarm = CorpusSwarm(Path(directory), change)
                files = swarm.files(swarm.corpus)
                swarm.serve("liar", files)
                swarm.serve("honest", files)
                client = swarm.client()
                async with asyncio.timeout(120):
                    assert await client.read_whole(CARD_NAME, MAX_CARD_BYTES) == swarm.truth[CARD_NAME]
                    for path, start, stop in wanted:
                        assert await client.read(path, start, stop) == swarm.truth[path][start:stop]
                await client.close()
                await swarm.hub.close()

            asyncio.run(scene())

        read()


@pytest.mark.parametrize("examples", CASES)
def test_whatever_a_member_asks(examples: int) -> None:
    """It gets bytes of the corpus, the word that they are not here, or a refusal; no handler crashes."""
    with tempfile.TemporaryDirectory() as directory:
        base = CorpusSwarm(Path(directory))
        ranges = list(ranges_of(base.truth, blocks=3))

        @cases(examples)
        @given(seeds, st.lists(st.sampled_from(ranges), min_size=1, max_size=6))
        def ask(seed: int, asked: list[tuple[str, int, int]]) -> None:
            mutator = Mutator(seed)

            async def scene() -> None:
                swarm = CorpusSwarm(Path(directory))
                swarm.serve("seed", swarm.files(swarm.corpus))
                stream = await swarm.hub.join("me").open("seed", PROTOCOL, timedelta(seconds=60))
                try:
                    async with asyncio.timeout(120):
                        for path, start, stop in asked:
                            valid = dp.CorpusRequest(run_id=RUN, path=path, start=start, stop=stop)
                            frame = Frame(FrameKind.MESSAGE, valid.SerializeToString())
                            sent = mutator.frame(frame, dp.CorpusRequest)
                            await stream.send(sent.kind, sent.header, sent.body)
                            reply = dp.CorpusReply.FromString((await stream.receive(timedelta(seconds=60))).header)
                            if reply.body_bytes:
                                body = (await stream.receive(timedelta(seconds=60))).body
                                read = dp.CorpusRequest.FromString(sent.header)
                                stop = read.stop or read.start + PIECE_BYTES
                                assert bytes(body) == swarm.truth[read.path][read.start : stop]
                except AtollError:
                    pass
                assert swarm.networks["seed"].crashes == 0
                await swarm.hub.close()

            asyncio.run(scene())

        ask()
