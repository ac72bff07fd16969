"""Whatever stands where a signature should: manifests, votes, plans, certificates, deny-lists, records, tokens.

Also what is signed by somebody who may sign it, and makes no sense: a member signs whatever it likes.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from support.donors import ANN, BOB, CLEO, DAN, GENESIS, OPERATOR, commit, plan_of, state_of
from support.mutation import CASES, Mutator, cases, seeds

from atoll.core.data_position import genesis_position
from atoll.core.errors import AtollError, TokenMalformed
from atoll.core.identity import Identity
from atoll.core.manifest import Head, parse_and_verify_head, require_quorum, sign_vote
from atoll.core.membership import MembershipVerifier, issue_deny_list, issue_membership
from atoll.core.plan import Plan, sign_plan, verify_plan
from atoll.core.quorum import Ballot
from atoll.core.tokens import new_join_token, parse_join_token
from atoll.node.control.directives import Directives
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2, plan_pb2

MEMBERS = [ANN, BOB, CLEO]
ELECTORATE = plan_of(*MEMBERS).electorate(GENESIS)
HEAD = commit(state_of(1.0), 1, MEMBERS, after=GENESIS)
NOW = 1_700_000_000.0


def manifest() -> manifest_pb2.Manifest:
    message = manifest_pb2.Manifest()
    message.CopyFrom(HEAD.manifest)
    message.data.CopyFrom(genesis_position([member.peer_id for member in MEMBERS], 100).to_proto())
    message.data.returned.add(start=5, end=9)
    message.corpus_digest = b"c" * 32
    return message


MANIFEST = manifest()


@pytest.mark.parametrize("examples", CASES)
def test_whatever_manifest_is_shown(examples: int) -> None:
    @cases(examples)
    @given(seeds)
    def show(seed: int) -> None:
        mutator = Mutator(seed)
        liars = mutator.rng.choice(([], [ANN], [ANN, DAN], [DAN]))  # never a majority
        payload = mutator.message(MANIFEST)
        ballot = Ballot(mutator.rng.choice((1, 0, 2**64 - 1)), mutator.rng.choice((0, 2**32 - 1)))
        own = manifest_pb2.CommittedManifest(
            payload=payload,
            signatures=[sign_vote(liar, payload, ballot) for liar in liars],
            ballot_plan_version=ballot.plan_version,
            ballot_attempt=ballot.attempt,
        )
        valid = mutator.rng.choice((HEAD.committed, own))
        try:
            committed = manifest_pb2.CommittedManifest.FromString(mutator.message(valid))
        except DecodeError:
            return  # not for these functions to judge
        try:
            head = parse_and_verify_head(committed, "r")
        except AtollError:
            return
        _ = (head.round, head.hash, head.data, head.electorate, head.committed_tokens, head.signers)
        try:
            require_quorum(head, ELECTORATE, OPERATOR.public_key)
        except AtollError:
            return
        assert committed.payload == HEAD.committed.payload

    show()


def rich_plan() -> Plan:
    made = plan_of(*MEMBERS, version=2)
    assignments = tuple(replace(item, data_ranges=((0, 5), (7, 9))) for item in made.assignments)
    return replace(made, assignments=assignments, reason="a reason", issued_unix_ms=5)


PLAN = rich_plan()


@pytest.mark.parametrize("examples", CASES)
def test_whatever_plan_a_member_shares(examples: int) -> None:
    """Not signed by the operator: nothing happens. Signed, and beyond sense: read, or refused by name."""
    with tempfile.TemporaryDirectory() as directory:

        @cases(examples)
        @given(seeds)
        def share(seed: int) -> None:
            mutator = Mutator(seed)
            payload = mutator.message(PLAN.to_proto())
            signer = mutator.rng.choice((OPERATOR, ANN))
            sealed = signer.sign_message("plan", payload)
            try:
                shown = pb.Signed.FromString(mutator.message(sealed))
            except DecodeError:
                return
            try:
                plan = verify_plan(shown, OPERATOR.public_key, "r")
                assert signer is OPERATOR
                assert plan == Plan.from_proto(plan_pb2.Plan.FromString(payload))
            except AtollError:
                plan = None

            async def take() -> Plan | None:
                authority = MembershipVerifier(OPERATOR.public_key, "r")
                path = Path(directory) / f"{seed}.plan"
                directives = Directives(authority, lambda *_: None, lambda _: None, path)
                directives.accept_plan(shown)
                assert path.exists() == (directives.plan is not None)
                path.unlink(missing_ok=True)
                return directives.plan

            assert asyncio.run(take()) == plan

        share()


CARD = issue_membership(
    OPERATOR,
    public_key=ANN.public_key,
    run_id="r",
    roles=frozenset({"node", "seed"}),
    epoch=3,
    now=NOW,
    node_name="ann",
)
DENY = issue_deny_list(OPERATOR, 7, frozenset({BOB.peer_id, DAN.peer_id}), NOW)


@pytest.mark.parametrize("examples", CASES)
def test_whatever_certificate_or_deny_list_is_shown(examples: int) -> None:
    authority = MembershipVerifier(OPERATOR.public_key, "r")

    @cases(examples)
    @given(seeds)
    def show(seed: int) -> None:
        mutator = Mutator(seed)
        signer: Identity = mutator.rng.choice((OPERATOR, OPERATOR, DAN))
        card = signer.sign_message("membership", mutator.message(pb.Membership.FromString(CARD.payload)))
        listed = signer.sign_message("deny-list", mutator.message(pb.DenyList.FromString(DENY.payload)))
        swapped = pb.Signed(payload=DENY.payload, signature=DENY.signature, public_key=DENY.public_key)
        for sealed in (card, listed, swapped, CARD, DENY):
            try:
                shown = pb.Signed.FromString(mutator.message(sealed))
            except DecodeError:
                continue
            try:
                member = authority.verify_membership(shown, NOW, expect_peer_id=ANN.peer_id)
                assert member.public_key == ANN.public_key
                assert shown.public_key == OPERATOR.public_key
            except AtollError:
                pass
            try:
                authority.verify_deny_list(shown)
                assert shown.public_key == OPERATOR.public_key
                assert (shown.payload, shown.signature) != (CARD.payload, CARD.signature)
            except AtollError:
                pass

    show()


@pytest.mark.parametrize("examples", CASES)
def test_whatever_token_is_pasted(examples: int) -> None:
    good = new_join_token("a" * 64, "host.example:7400").text()

    @cases(examples)
    @given(seeds)
    def paste(seed: int) -> None:
        text = Mutator(seed).bytes(good.encode()).decode(errors="replace")
        try:
            token = parse_join_token(text)
        except TokenMalformed as refused:
            said = str(refused)
        else:
            said = repr(token)
            assert parse_join_token(token.text()) == token
        assert good.split(".")[3] not in said  # secrets are not repeated

    paste()


def test_head_of_nothing_is_not_read() -> None:
    with pytest.raises(AtollError):
        parse_and_verify_head(Head(manifest_pb2.CommittedManifest()).committed, "r")
    with pytest.raises(AtollError):
        verify_plan(sign_plan(ANN, PLAN), OPERATOR.public_key, "r")
