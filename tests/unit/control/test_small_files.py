"""Small files from which a node starts: a truncated file or a changed byte is always detected."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.machine_plans import make_plan

from atoll.core.errors import ConfigError
from atoll.core.identity import Identity
from atoll.core.membership import MembershipVerifier
from atoll.core.plan import sign_plan
from atoll.core.quorum import Ballot, LastVote, VoteRecord
from atoll.node.control.directives import Directives
from atoll.node.state.vote_store import VoteStore
from atoll.v1 import membership_pb2 as mb

OPERATOR = Identity.generate()
PLAN = make_plan(["ann", "bob"], 7)
RECORD = VoteRecord(5, b"\x07" * 32, Ballot(2, 3), LastVote(Ballot(2, 1), b"payload" * 5))


def directives(path: Path) -> Directives:
    authority = MembershipVerifier(OPERATOR.public_key, PLAN.run_id)
    return Directives(authority, lambda deny, sealed: None, lambda seeds: None, path)


@pytest.fixture
async def plan_file(tmp_path):
    """The file of a saved plan."""
    directives(tmp_path / "plan").apply_heartbeat(mb.HeartbeatResponse(plan=sign_plan(OPERATOR, PLAN)))
    assert directives(tmp_path / "plan").plan == PLAN
    return tmp_path / "plan"


async def test_the_notice_is_kept_until_the_coordinator_counts_the_node(tmp_path):
    told = directives(tmp_path / "plan")
    told.apply_heartbeat(mb.HeartbeatResponse(notice="its text is another"))
    assert told.notice == "its text is another"
    told.apply_heartbeat(mb.HeartbeatResponse())
    assert told.notice == ""


async def test_the_rounds_of_forks_are_kept_by_a_node_that_starts_while_the_coordinator_is_away(tmp_path):
    directives(tmp_path / "plan").apply_heartbeat(mb.HeartbeatResponse(kept_rounds=[120, 7]))
    again = directives(tmp_path / "plan")
    assert again.kept_rounds == (120, 7)
    again.apply_heartbeat(mb.HeartbeatResponse(kept_rounds=range(9, 0, -1)))
    assert directives(tmp_path / "plan").kept_rounds == (9, 8, 7, 6)
    again.apply_heartbeat(mb.HeartbeatResponse())
    assert directives(tmp_path / "plan").kept_rounds == ()


async def test_an_order_to_move_does_not_drop_the_rounds_of_forks(tmp_path):
    told = directives(tmp_path / "plan")
    told.apply_heartbeat(mb.HeartbeatResponse(kept_rounds=[120]))
    told.apply_heartbeat(mb.HeartbeatResponse(order=mb.ORDER_MOVE))
    assert told.kept_rounds == (120,)


def checked(body):
    return body + b"\n" + hashlib.sha256(body).hexdigest().encode()


@given(st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_kept_rounds_are_not_believed(tmp_path, data):
    directives(tmp_path / "plan").apply_heartbeat(mb.HeartbeatResponse(kept_rounds=[120, 7]))
    path = tmp_path / "kept-rounds"
    sound = path.read_bytes()
    damaged = bytearray(sound)
    damaged[data.draw(st.integers(0, len(sound) - 1))] ^= data.draw(st.integers(1, 255))
    wrong = [bytes(damaged), sound[: len(sound) // 2], b"", b"[]\n", checked(b"[Infinity]"), checked(b"[" * 9999)]
    path.write_bytes(data.draw(st.sampled_from(wrong)))
    assert directives(tmp_path / "plan").kept_rounds == ()
    path.unlink()


async def test_a_full_disk_does_not_lose_the_kept_rounds_of_this_process(tmp_path):
    told = directives(tmp_path / "plan")
    (tmp_path / "kept-rounds").mkdir()
    told.apply_heartbeat(mb.HeartbeatResponse(kept_rounds=[120]))
    assert told.kept_rounds == (120,)
    (tmp_path / "kept-rounds").rmdir()
    told.apply_heartbeat(mb.HeartbeatResponse(kept_rounds=[120]))  # there is room again
    assert directives(tmp_path / "plan").kept_rounds == (120,)


async def test_the_time_of_the_end_is_kept_until_the_coordinator_does_not_know_it(tmp_path):
    told = directives(tmp_path / "plan")
    for sent, kept in ((1_700_000_000_000, 1_700_000_000_000), (None, None), (0, None), (-5, None), (2**62, None)):
        told.apply_heartbeat(mb.HeartbeatResponse(eta_unix_ms=sent))
        assert told.eta_unix_ms == kept


async def test_the_credit_stays_known_while_the_coordinator_tells_none(tmp_path):
    told = directives(tmp_path / "plan")
    assert told.credit is None
    for sent, kept in ((mb.Credit(tokens=7, rounds=1, rank=2, nodes=3), 7), (None, 7), (mb.Credit(tokens=9), 9)):
        told.apply_heartbeat(mb.HeartbeatResponse(credit=sent))
        assert told.credit.tokens == kept


async def test_a_node_remembers_when_its_run_was_created_once_it_hears_it(tmp_path):
    told = directives(tmp_path / "plan")
    for sent in (0, -5, 2**62):
        told.apply_heartbeat(mb.HeartbeatResponse(run_created_unix_ms=sent))
        assert not (tmp_path / "created").exists()
    for sent in (1_700_000_000_000, 0, 1_800_000_000_000):
        told.apply_heartbeat(mb.HeartbeatResponse(run_created_unix_ms=sent))
        assert (tmp_path / "created").read_text() == "1700000000000"


async def test_a_disk_on_which_that_cannot_be_written_does_not_stop_the_rest_of_the_message(tmp_path):
    told = directives(tmp_path / "missing" / "plan")
    told.apply_heartbeat(mb.HeartbeatResponse(run_created_unix_ms=5, order=mb.ORDER_DRAIN))
    assert told.order == mb.ORDER_DRAIN


def test_a_truncated_plan_file_is_ignored(plan_file):
    data = plan_file.read_bytes()
    for length in range(len(data)):
        plan_file.write_bytes(data[:length])
        assert directives(plan_file).plan is None


def test_a_plan_file_with_a_changed_byte_is_ignored(plan_file):
    data = plan_file.read_bytes()
    for offset in range(len(data)):
        plan_file.write_bytes(data[:offset] + bytes([data[offset] ^ (1 << offset % 8)]) + data[offset + 1 :])
        assert directives(plan_file).plan is None, offset


def test_truncated_votes_make_the_node_abstain(tmp_path):
    VoteStore(tmp_path).save(RECORD)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    assert VoteStore(tmp_path).load() == RECORD
    for length in range(len(data.rstrip())):
        path.write_bytes(data[:length])
        assert VoteStore(tmp_path).load() is None


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(junk=st.binary(max_size=100) | st.sampled_from([b"[]", b"1", b'{"voted": 1}', b'{"voted": []}', b"null"]))
def test_random_bytes_as_votes_do_not_crash(tmp_path, junk):
    VoteStore(tmp_path).save(RECORD)
    (path,) = tmp_path.iterdir()
    path.write_bytes(junk)
    assert VoteStore(tmp_path).load() is None


async def test_rejected_seeds_do_not_stop_the_rest_of_the_message(tmp_path):
    def refuse(seeds: tuple[str, ...]) -> None:
        raise ConfigError(f"{seeds[0]!r} does not name a seed")

    authority = MembershipVerifier(OPERATOR.public_key, PLAN.run_id)
    taken = Directives(authority, lambda deny, sealed: None, refuse, tmp_path / "plan")
    taken.apply_heartbeat(mb.HeartbeatResponse(seeds=["/foo"], order=mb.ORDER_DRAIN, run_state=mb.RUN_STATE_TRAINING))
    assert (taken.order, taken.run_state) == (mb.ORDER_DRAIN, mb.RUN_STATE_TRAINING)
