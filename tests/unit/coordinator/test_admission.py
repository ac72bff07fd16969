"""Who gets in with which token, and who must go."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.coordinator.world import RUN, SECRET, World, spec_toml

from atoll.coordinator.runs import admission, bans, departure, lifecycle, machine
from atoll.coordinator.services import views
from atoll.coordinator.state import lookup
from atoll.coordinator.store.records import Event
from atoll.core.errors import (
    AlreadyExists,
    Ambiguous,
    AtollError,
    Banned,
    CertificateInvalid,
    InvalidRequest,
    NotFound,
    TokenExpired,
    TokenRevoked,
    TokenUnknown,
    TokenUsedUp,
)
from atoll.core.node_reasons import named_reason, reason_name, reason_words
from atoll.core.tokens import hash_secret
from atoll.v1 import membership_pb2 as mb


@pytest.fixture
def world() -> World:
    made = World()
    made.create_run()
    return made


def last_event(world: World, kind: str) -> str:
    return [record.message for record in world.records if isinstance(record, Event) and record.kind == kind][-1]


def test_a_token_admits_as_often_as_it_says(world: World) -> None:
    token = world.token(uses=2)
    world.enrol("ann", token)
    world.enrol("bob", token)
    with pytest.raises(TokenUsedUp, match="no uses left"):
        world.enrol("cid", token)
    assert world.state.tokens[token.token_id].uses_left == 0


def test_wrong_secret_and_unknown_token_look_the_same(world: World) -> None:
    token = world.token()
    with pytest.raises(TokenUnknown) as wrong:
        world.enrol("ann", token, secret="6" * 48)
    world.state = World().state
    world.create_run()
    with pytest.raises(TokenUnknown) as unknown:
        world.enrol("ann", token)
    assert str(wrong.value) == str(unknown.value)


def test_an_expired_token_says_since_when(world: World) -> None:
    token = world.token(ttl_seconds=60)
    world.wait(180)
    with pytest.raises(TokenExpired, match="2 min 00 s ago") as refusal:
        world.enrol("ann", token)
    assert "atollctl token create" in refusal.value.remedy


def test_a_revoked_token_is_refused_and_may_be_revoked_twice(world: World) -> None:
    token = world.token()
    for _ in range(2):
        world.take(admission.revoke_token(world.state, world.now, token.token_id))
    assert world.kinds().count("token.revoked") == 1
    with pytest.raises(TokenRevoked):
        world.enrol("ann", token)


def test_enrolling_again_raises_the_epoch_and_keeps_the_name(world: World) -> None:
    peer = world.enrol("ann").peer_id
    world.enrol("ann")
    assert (world.state.nodes[peer].epoch, world.state.nodes[peer].name) == (2, "ann")
    world.take(admission.renew(world.state, world.now, peer))
    assert world.state.nodes[peer].epoch == 3


def test_names_are_made_unique_per_run(world: World) -> None:
    first = world.enrol("ann")
    world.identities.pop("ann")
    second = world.enrol("ann")
    assert world.state.nodes[first.peer_id].name == "ann"
    assert world.state.nodes[second.peer_id].name == "ann-2"


def test_a_banned_peer_can_neither_enrol_nor_renew_nor_connect(world: World) -> None:
    peer = world.enrol("ann").peer_id
    step = bans.ban(world.state, world.now, "ann", "sent garbage")
    world.take(step)
    assert step.deny is not None
    assert (step.deny.number, step.deny.peer_ids) == (1, {peer})
    with pytest.raises(Banned):
        world.enrol("ann")
    with pytest.raises(Banned):
        admission.renew(world.state, world.now, peer)
    with pytest.raises(Banned):
        machine.connect(world.state, world.now, peer)


def test_the_reason_of_a_leave_is_one_printable_line(world: World) -> None:
    peer = world.enrol("ann").peer_id
    world.take(departure.leave(world.state, world.now, peer, "\x1b[31mgone\nfor \u202egood" + "!" * 999))
    told = [record.message for record in world.records if isinstance(record, Event)][-1]
    assert told.startswith("ann left: [31mgone for good!")
    assert told.isprintable()
    assert len(told) < 250


def test_a_failure_is_told_with_its_reason_until_the_node_connects(world: World) -> None:
    peer = world.enrol("ann").peer_id
    why, told = mb.NODE_REASON_TEXT_DIFFERS, "the text at /books is not the run's\x1b[31m" + "!" * 9999
    for _ in range(3):
        world.take(departure.leave(world.state, world.now, peer, told, b"", why))
    world.take(departure.leave(world.state, world.now, peer, "bye"))  # a failure is not told otherwise later
    events = [record for record in world.records if isinstance(record, Event) and record.kind == "node.failed"]
    assert len(events) == 1
    assert events[0].message.startswith("ann failed: text differs: the text at /books is not the run's[31m!!!")
    assert len(events[0].message) < 600
    view = views.node_view(world.state, world.state.nodes[peer], world.now.unix_ms, world.now.monotonic)
    assert (view.ended, view.left, view.connected) == (why, True, False)
    assert view.ended_detail.startswith("the text at /books")
    rows = len(world.records)
    for number in range(1000):  # a flood of reasons costs nothing
        world.take(departure.leave(world.state, world.now, peer, f"full {number}", b"", mb.NODE_REASON_DISK))
    assert len(world.records) == rows
    world.wait(departure.FAILURE_SECONDS + 1)
    world.take(departure.leave(world.state, world.now, peer, "full", b"", mb.NODE_REASON_DISK))  # the next try
    assert world.state.nodes[peer].ended == "DISK"
    world.take(machine.connect(world.state, world.now, peer))
    node = world.state.nodes[peer]
    assert (node.left, node.ended, node.ended_detail) == (False, "", "")


@given(st.integers(-(2**31), 2**31 - 1))
def test_any_number_of_a_reason_has_words_and_a_name(number: int) -> None:
    assert reason_words(number).isprintable()
    assert reason_name(number) == "" or named_reason(reason_name(number)) == number
    assert named_reason("OF_A_LATER_RELEASE") == mb.NODE_REASON_UNSPECIFIED


def test_banning_twice_does_not_issue_another_list(world: World) -> None:
    world.enrol("ann")
    world.take(bans.ban(world.state, world.now, "ann", ""))
    assert bans.ban(world.state, world.now, "ann", "").deny is None


def test_one_identity_works_for_one_run_at_a_time(world: World) -> None:
    world.join("ann")
    world.take(lifecycle.create_run(world.state, world.now, spec_toml(name="other"), start=False))
    wanted = admission.TokenRequest("f" * 12, world.state.tokens["0" * 12].secret_hash, "other", 1, 60, ())
    token = world.take(admission.create_token(world.state, world.now, wanted))
    with pytest.raises(AlreadyExists, match="run 'reef'"):
        world.enrol("ann", token)  # type: ignore[arg-type]
    world.hang_up("ann")
    peer = world.enrol("ann", token).peer_id  # type: ignore[arg-type]
    assert world.state.nodes[peer].run_id == "other"


@pytest.mark.parametrize("name", ["", "UPPER", "with space", "x" * 64, "ümlaut"])
def test_bad_names_are_refused(world: World, name: str) -> None:
    with pytest.raises(InvalidRequest, match="1 to 63 characters"):
        world.enrol(name)


@pytest.mark.parametrize(("uses", "ttl"), [(0, 60), (1, 0), (10**9, 60), (1, 10**10)])
def test_absurd_tokens_are_refused(world: World, uses: int, ttl: int) -> None:
    with pytest.raises(InvalidRequest):
        world.token(uses=uses, ttl_seconds=ttl)


def test_admin_is_not_a_role_for_tokens(world: World) -> None:
    with pytest.raises(InvalidRequest, match="roles are admin"):
        world.token(roles=("admin",))


def test_a_token_needs_a_run() -> None:
    with pytest.raises(NotFound, match="no run exists yet"):
        World().token()


def test_strangers_have_no_row(world: World) -> None:
    for call in (
        lambda: admission.renew(world.state, world.now, "12D3KooWnobody"),
        lambda: departure.leave(world.state, world.now, "12D3KooWnobody", ""),
        lambda: machine.connect(world.state, world.now, "12D3KooWnobody"),
    ):
        with pytest.raises(CertificateInvalid, match="not enrolled"):
            call()


def test_nodes_are_found_by_name_id_and_the_end_of_the_id(world: World) -> None:
    peer = world.enrol("ann").peer_id
    world.enrol("bob")
    for text in ("ann", peer, peer[-8:]):
        assert lookup.node(world.state, text).peer_id == peer
    with pytest.raises(Ambiguous, match="matches 2 nodes"):
        lookup.node(world.state, "12D3KooW")
    with pytest.raises(NotFound):
        lookup.node(world.state, "cid")


def test_seeds_are_handed_out_with_their_peer_id(world: World) -> None:
    seed = world.enrol("seed", world.token(roles=("seed",)))
    world.connect("seed")
    world.say("seed", multiaddrs=["/ip4/192.0.2.7/tcp/4001"])
    assert admission.seeds_of(world.state, RUN) == (f"/ip4/192.0.2.7/tcp/4001/p2p/{seed.peer_id}",)
    world.take(bans.ban(world.state, world.now, "seed", ""))
    assert admission.seeds_of(world.state, RUN) == ()


def test_a_seed_hands_out_no_address_of_another(world: World) -> None:
    honest, liar = (world.enrol(name, world.token(roles=("seed",))) for name in ("honest", "liar"))
    for name in ("honest", "liar"):
        world.connect(name)
    world.say("honest", multiaddrs=[f"/ip4/192.0.2.7/tcp/4001/p2p/{honest.peer_id}"])
    world.say("liar", multiaddrs=[f"/ip4/192.0.2.9/tcp/4001/p2p/{honest.peer_id}"])
    told = [address.rpartition("/p2p/") for address in admission.seeds_of(world.state, RUN)]
    assert [way for way, _, peer in told if peer == honest.peer_id] == ["/ip4/192.0.2.7/tcp/4001"]
    assert {peer for _, _, peer in told} == {honest.peer_id, liar.peer_id}


def test_a_node_that_enrols_before_any_seed_is_logged(world: World) -> None:
    world.enrol("ann")
    assert "no seed" in last_event(world, "run.no-seed")
    seen = len(world.records)
    world.enrol("seed", world.token(roles=("seed",)))
    world.enrol("bob")
    told = world.records[seen:]
    world.take(bans.ban(world.state, world.now, "seed", ""))
    world.enrol("cid")
    assert any(isinstance(it, Event) and it.kind == "run.no-seed" for it in world.records[seen + len(told) :])
    assert not any(isinstance(it, Event) and it.kind == "run.no-seed" for it in told)


@given(
    uses=st.integers(1, 4),
    attempts=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["enrol", "revoke", "wait"])), max_size=25),
)
def test_no_token_is_used_more_often_than_it_may(uses: int, attempts: list[tuple[int, str]]) -> None:
    world = World()
    world.create_run()
    token = world.token(uses=uses, ttl_seconds=4)
    admitted = set()
    for who, what in attempts:
        if what == "wait":
            world.wait(0.5)
        elif what == "revoke" and who == 0:
            world.take(admission.revoke_token(world.state, world.now, token.token_id))
        else:
            try:
                world.enrol(f"node-{who}", token)
                admitted.add(who)
            except AtollError:
                continue
    assert len(admitted) == uses - world.state.tokens[token.token_id].uses_left
    assert len(admitted) <= uses


def test_a_lost_answer_is_given_again_at_no_cost(world: World) -> None:
    token = world.token(uses=1)
    for _ in range(3):
        world.enrol("ann", token)
    assert world.state.tokens[token.token_id].uses_left == 0
    assert world.kinds().count("token.used-up") == 1
    with pytest.raises(TokenUsedUp):
        world.enrol("bob", token)
    world.take(admission.revoke_token(world.state, world.now, token.token_id))
    with pytest.raises(TokenRevoked):
        world.enrol("ann", token)


def test_enrolling_again_keeps_the_record_of_a_node_and_its_drain_until_a_new_token(world: World) -> None:
    """A drain until it shows another token: the operator gave it that."""
    world.join("ann")
    world.wait(60)
    world.take(departure.drain(world.state, world.now, "ann"))
    world.hang_up("ann")
    world.wait(60)  # it is lost
    peer = world.identities["ann"].peer_id
    before = world.state.nodes[peer]
    assert before.draining
    assert before.losses > 0
    for token, drains in ((world.state.tokens[before.token_id], True), (world.token(), False)):
        world.enrol("ann", token)
        after = world.state.nodes[peer]
        assert (after.draining, after.token_id) == (drains, token.token_id)
        same = {"epoch": before.epoch, "enrolled_ms": before.enrolled_ms, "token_id": before.token_id}
        assert replace(after, draining=True, **same) == before
    assert after.epoch == before.epoch + 2


def test_a_name_that_the_plan_still_names_is_not_free() -> None:
    world = World()
    world.train("ann", "bob")
    world.take(lifecycle.create_run(world.state, world.now, spec_toml(name="other"), start=True))
    tokens = {}
    for number, run in enumerate((RUN, "other")):
        wanted = admission.TokenRequest(f"{number:012d}", hash_secret(SECRET), run, 1, 1800, ("node",))
        tokens[run] = world.take(admission.create_token(world.state, world.now, wanted))
    bob, stranger = world.identities["bob"], world.new_identity("bob")
    world.hang_up("bob")
    for identity, run, name in ((bob, "other", "bob"), (stranger, RUN, "bob-2")):
        applicant = admission.Applicant(tokens[run].token_id, SECRET, identity.peer_id, identity.public_key, "bob")
        assert world.take(admission.enrol(world.state, world.now, applicant)).name == name
    assert bob.peer_id in world.plans[-1].members


def test_a_start_that_failed_elsewhere_does_not_end_the_node_that_runs(world: World) -> None:
    peer = world.join("ann")[0].peer_id
    live = replace(world.state.live[peer], instance=b"the one that runs")
    world.state = replace(world.state, live={**world.state.live, peer: live})
    for instance in (b"", b"a copy"):
        world.take(departure.leave(world.state, world.now, peer, "port in use", instance, mb.NODE_REASON_NETWORK))
    assert not world.state.nodes[peer].left
    assert "node.failed" not in world.kinds()
