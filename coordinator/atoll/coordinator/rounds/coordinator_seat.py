"""The coordinator's seat: one Paxos acceptor for every undecided round. Pure.

Where an even number of members have seats, the coordinator has one more (core/quorum.py). It promises not to vote in
earlier attempts than the requested one, returns its last vote, and never votes for two results in one attempt. Promises
and votes are rows. They are stored before the response is sent, and kept until the round is known to be decided.

A coordinator that was restored from a backup has forgotten votes. Once a round first made *under a plan issued since
the restore* has committed, no earlier vote can matter. Until then the coordinator abstains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError

from atoll.coordinator.rounds.round_checks import MAX_ATTEMPT, MAX_PAYLOAD_BYTES, MAX_ROUNDS_AHEAD, fragments_of
from atoll.coordinator.state import lookup
from atoll.coordinator.state.deciding import abstains
from atoll.coordinator.state.draft import Draft, Step
from atoll.coordinator.state.rate_limits import ATTEMPT_RAISES_RATE, Allowance
from atoll.coordinator.state.run_memory import RunMemory, epoch_of, is_void, seats_after
from atoll.coordinator.state.snapshot import State, StepTime
from atoll.coordinator.store.records import Run, Vote
from atoll.core.errors import InvalidRequest, SignatureInvalid
from atoll.core.fragments import fragment_of_round
from atoll.core.manifest import half_attest, verify_attestation
from atoll.core.quorum import COORDINATOR, Ballot, Electorate
from atoll.core.round_id import RoundId
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

MAX_UNREPORTED_ROUNDS = 16  # rounds that may have committed without a report; openers report within seconds
MAX_FAR_ROUNDS = 8  # votes on rounds even further ahead, so that requests cannot displace the next rounds
MAX_FIRST_ATTEMPT = 10_000  # in the first request about a round; plus one per second since the head is known


@dataclass(frozen=True)
class VoteReply:
    """Answer to the opener. A refusal has a `reason`, and the earlier promise if there is one."""

    granted: bool
    vote: Vote | None
    reason: str = ""


def promise(known: Vote | None, run_id: str, number: int, ballot: Ballot) -> VoteReply:
    """Promise not to vote in attempts before `ballot`.

    Granted once: a restarted opener must not open the attempt again.
    """
    if known is not None and ballot <= _promised(known):
        return VoteReply(False, known, _later_promise_text(known))
    return VoteReply(True, _with_promise(known, run_id, number, ballot))


def cast_vote(known: Vote | None, run_id: str, number: int, ballot: Ballot, proposal: bytes) -> VoteReply:
    """Vote for `proposal` in `ballot`, unless a later attempt was promised or this ballot has another vote."""
    if known is not None and ballot < _promised(known):
        return VoteReply(False, known, _later_promise_text(known))
    vote = _with_promise(known, run_id, number, ballot)
    if vote.proposal and Ballot(vote.voted_plan, vote.voted_attempt) == ballot and vote.proposal != proposal:
        return VoteReply(False, known, "the coordinator voted for another result in this attempt")
    voted = replace(vote, voted_plan=ballot.plan_version, voted_attempt=ballot.attempt, proposal=proposal)
    return VoteReply(True, voted)


def _with_promise(known: Vote | None, run_id: str, number: int, ballot: Ballot) -> Vote:
    if known is None:
        return Vote(run_id, number, *ballot)
    return replace(known, promised_plan=ballot.plan_version, promised_attempt=ballot.attempt)


def answer_vote_request(
    state: State, now: StepTime, peer_id: str, round_id: RoundId, proposal: bytes
) -> Step[VoteReply]:
    """Answer the request of `peer_id`, the opener of `round_id`: a promise or, with a proposal, a vote.

    Raises `InvalidRequest` for a request that no correct opener sends, `Banned`, `CertificateInvalid`.
    """
    draft = Draft(state, now)
    node = lookup.member(state, peer_id)
    run = state.runs[node.run_id]
    memory = state.memory[run.run_id]
    _check_request(run, memory, peer_id, round_id)
    if proposal:
        _check_proposal(memory, round_id, proposal)
    known = memory.votes.get(round_id.number)
    refusal = _refusal(run, memory, round_id.number)
    if refusal:
        return draft.done(VoteReply(False, known, refusal))
    allowance = _allowance_after_raise(memory, now, peer_id, round_id)
    if proposal:
        given = cast_vote(known, run.run_id, round_id.number, round_id.ballot, proposal)
    else:
        given = promise(known, run.run_id, round_id.number, round_id.ballot)
    if given.granted and given.vote is not None and given.vote != known:
        draft.set_vote(given.vote)
        draft.remember(run.run_id, raise_allowances={**memory.raise_allowances, peer_id: allowance})
        if proposal:
            message = f"the coordinator's seat voted in round {round_id} for {node.name}"
            draft.event("round.voted", run.run_id, str(round_id.number), message)
    return draft.done(given)


def _refusal(run: Run, memory: RunMemory, number: int) -> str:
    if run.state not in ("TRAINING", "PAUSED"):
        return f"the run is {run.state.lower()}"
    if number <= run.head_round:
        return f"round {number} is committed; the newest known is {run.head_round}"
    if abstains(run, memory):
        return (
            "the coordinator was restored from a backup; it does not vote until a round has committed without its vote"
        )
    far = [voted for voted in memory.votes if voted > run.head_round + MAX_UNREPORTED_ROUNDS]
    if number not in memory.votes and number > run.head_round + MAX_UNREPORTED_ROUNDS and len(far) >= MAX_FAR_ROUNDS:
        return f"round {number} is far from round {run.head_round}, the newest known: report the rounds between first"
    return ""


def _check_seats(seats: Sequence[str], openers: Sequence[str], peer_id: str, round_id: RoundId) -> None:
    if COORDINATOR not in seats:
        raise InvalidRequest(f"the coordinator has no seat in round {round_id.number}")
    if round_id.opener(openers) != peer_id:
        raise InvalidRequest(f"this node is not the opener of attempt {round_id.attempt} at round {round_id.number}")


def _check_request(run: Run, memory: RunMemory, peer_id: str, round_id: RoundId) -> None:
    members = memory.token_caps.get(round_id.plan_version, {})
    current = memory.plan.members if memory.plan else ()
    if round_id.run_id != run.run_id or peer_id not in current or peer_id not in members:
        raise InvalidRequest("a vote request must come from a member of the run's plan and of the attempt's plan")
    fragment = fragment_of_round(round_id.number, fragments_of(run, memory, round_id.plan_version))
    if round_id.fragment != fragment:
        raise InvalidRequest(f"fragment of round {round_id.number} is {round_id.fragment}; must be {fragment}")
    if not 0 < round_id.number <= run.head_round + MAX_ROUNDS_AHEAD:
        raise InvalidRequest(f"round {round_id.number} is too far from round {run.head_round}, the newest known")
    if round_id.attempt > MAX_ATTEMPT:
        raise InvalidRequest(f"attempt is {round_id.attempt}; must be at most {MAX_ATTEMPT}")
    seats = seats_after(memory, round_id.number - 1)
    if seats is not None:
        _check_seats(seats, [peer for peer in seats if peer in members], peer_id, round_id)
    if is_void(memory.bases, round_id.number, round_id.plan_version):
        raise InvalidRequest(f"round {round_id.number} under plan {round_id.plan_version} is void")


def _allowance_after_raise(memory: RunMemory, now: StepTime, peer_id: str, round_id: RoundId) -> Allowance:
    """The opener's allowance after this attempt. Raises `InvalidRequest` if it is exceeded.

    The number of attempts is bounded, so no opener may use them up alone. Every opener has an allowance for raising the
    promised attempt, far above what a correct opener needs. Only the first request about a round may have a high
    attempt number: openers send no requests while they do not need the coordinator or cannot reach it.
    """
    known, before = memory.votes.get(round_id.number), memory.raise_allowances.get(peer_id, Allowance())
    if known is None or known.promised_plan < round_id.plan_version:
        head_age_seconds = now.monotonic - memory.head_known_since
        enough = round_id.attempt <= MAX_FIRST_ATTEMPT + ATTEMPT_RAISES_RATE.per_second * head_age_seconds
        remaining = before if enough else None
    else:
        raised = max(0, round_id.attempt - known.promised_attempt)
        remaining = (
            before.spend(ATTEMPT_RAISES_RATE, now.monotonic, raised)
            if known.promised_plan == round_id.plan_version
            else before
        )
    if remaining is None:
        raise InvalidRequest(
            f"attempt {round_id.attempt} at round {round_id.number} is too far above the attempts before it"
        )
    return remaining


def _check_proposal(memory: RunMemory, round_id: RoundId, proposal: bytes) -> None:
    if len(proposal) > MAX_PAYLOAD_BYTES:
        raise InvalidRequest(f"the proposal has {len(proposal)} bytes; must be at most {MAX_PAYLOAD_BYTES}")
    try:
        parsed = dp.Proposal.FromString(proposal)
        manifest = manifest_pb2.Manifest.FromString(parsed.payload)
    except DecodeError as error:
        raise InvalidRequest("the proposal does not have a manifest") from error
    made = RoundId.from_proto(manifest.round)
    other_fragment = made.plan_version == round_id.plan_version and made.fragment != round_id.fragment
    if other_fragment or (made.run_id, made.number) != (round_id.run_id, round_id.number):
        raise InvalidRequest(
            f"the manifest is of round {made.number}; must be of round {round_id.number}, its run and its fragment"
        )
    if made.ballot > round_id.ballot or is_void(memory.bases, made.number, made.plan_version):
        raise InvalidRequest("the manifest is of a later attempt, or of a void round")
    before = memory.committed.get(round_id.number - 1)
    if before is not None and manifest.previous_hash != before.manifest_hash:
        raise InvalidRequest(f"the manifest does not follow the known round {round_id.number - 1}")
    if manifest.epoch != epoch_of(memory.bases, round_id.number):
        raise InvalidRequest("the manifest is of another epoch")
    names, seats = {item.peer_id for item in manifest.contributions}, seats_after(memory, round_id.number - 1)
    if seats is not None and not Electorate(frozenset(seats)).decides({COORDINATOR, *names}):
        raise InvalidRequest("the manifest is of an attempt without a majority of the seats")
    _check_attestations(parsed, manifest)


def _check_attestations(proposal: dp.Proposal, manifest: manifest_pb2.Manifest) -> None:
    """Raise `InvalidRequest` unless at least half of the contributors attest to the proposal."""
    if len(proposal.attestations) > len(manifest.contributions):
        raise InvalidRequest("the proposal has more attestations than contributions")
    try:
        said = {verify_attestation(proposal.payload, attestation) for attestation in proposal.attestations}
    except SignatureInvalid as error:
        raise InvalidRequest(f"the proposal has a wrong attestation: {error}") from error
    if not half_attest(manifest.contributions, said):
        raise InvalidRequest("too few members attest to the proposal")


def _promised(vote: Vote) -> Ballot:
    return Ballot(vote.promised_plan, vote.promised_attempt)


def _later_promise_text(vote: Vote) -> str:
    return f"attempt {vote.promised_attempt} under plan {vote.promised_plan} was promised already"
