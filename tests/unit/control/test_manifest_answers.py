"""The coordinator asks for rounds; the next heartbeat brings what is on disk, once."""

import asyncio

import pytest
from support.small_state import state_of

from atoll.core.errors import DataDirUnusable
from atoll.node.control.manifest_answers import MAX_MANIFESTS, ManifestAnswers
from atoll.node.state.manifests import ManifestStore
from atoll.v1 import membership_pb2 as mb


async def answer_to(store, first, count):
    due = asyncio.Event()
    answers = ManifestAnswers(store, due.set)
    assert answers.take() is None
    answers.ask(mb.ManifestRequest(first=first, count=count))
    async with asyncio.timeout(60):
        await due.wait()
    answer = answers.take()
    assert answers.take() is None
    await answers.close()
    return answer


async def test_an_answer_has_the_manifests_that_follow_each_other(tmp_path):
    store = ManifestStore(tmp_path, "reef")
    for number in (3, 4, 6):
        store.append(state_of(number).head)
    answer = await answer_to(store, 3, 9)
    assert answer.first == 3
    assert list(answer.manifests) == [state_of(number).head.committed for number in (3, 4)]
    assert await answer_to(store, 5, 9) == mb.ManifestAnswer(first=5)


async def test_an_unreadable_disk_gives_an_empty_answer():
    class Unreadable:
        def consecutive(self, first, count, most_bytes):
            raise DataDirUnusable("the disk is gone")

    assert await answer_to(Unreadable(), 5, 9) == mb.ManifestAnswer(first=5)


@pytest.mark.parametrize("count", [MAX_MANIFESTS, 2**32 - 1])
async def test_an_answer_is_bounded_whatever_is_asked(count):
    asked = []

    class Counting:
        def consecutive(self, first, count, most_bytes):
            asked.append((count, most_bytes))
            return []

    await answer_to(Counting(), 1, count)
    assert asked == [(MAX_MANIFESTS, 1 << 20)]
