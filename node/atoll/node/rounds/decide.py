"""The decisions of a round as pure functions. Opener and members use the same ones, so each rule exists once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import pairwise

from google.protobuf.message import DecodeError

from atoll.core import protocol
from atoll.core.data_position import DataPosition, advance, with_first_leases
from atoll.core.errors import AtollError, PeerMisbehaved, ProtocolMismatch
from atoll.core.fragments import fragment_of_round
from atoll.core.manifest import MAX_MEMBERS, Head, changed_layers, half_attest
from atoll.core.plan import Plan
from atoll.core.probation import keeps_to_limit, limit_weights
from atoll.core.quorum import COORDINATOR, MARK_BYTES, MAX_SEATS, next_seats
from atoll.core.round_id import RoundId
from atoll.core.training_audits import SEED_BYTES, audit_seed
from atoll.core.verdicts import counted_tokens, require_valid_verdicts, strip_unknown_verdict_fields
from atoll.node.exchange.codecs import BY_NUMBER, CODECS, Codec
from atoll.node.exchange.partition import MIN_PART_ELEMENTS, ReduceRange, part_elements, partition
from atoll.node.rounds.settlement import MAX_HOLDERS, NONCE_BYTES
from atoll.node.rounds.types import RoundPolicy, VoteSigner
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

MAX_SAMPLES = 2**40  # that a member may claim to have consumed in one round


def build_start(
    policy: RoundPolicy,
    plan: Plan,
    round_id: RoundId,
    ready: Mapping[str, dp.Ready],
    *,
    codec: Codec,
    unix_ms: int,
    exchange_seconds: float,
    poor_reducers: Set[str] = frozenset(),
) -> dp.Start:
    """The Start message: the members that answered, their weights, and the partition by the plan's bandwidth caps.

    A weight is min(tokens, cap), so no single claim can end the run. At most a quarter of the reducers (or one of few)
    is in `poor_reducers` and sums nothing. A member that does not hold the fragment is a witness: it contributes and
    sums nothing.
    """
    members = round_id.order(ready)
    fragment = policy.fragment_of(round_id.number)
    holders = plan.holders(fragment.layers)
    reducers = _reducers(plan, members, holders)
    kept_out = [peer for peer in reducers if peer in poor_reducers][: _most_kept_out(reducers)]
    claims = {peer: min(ready[peer].tokens, _cap(plan, peer)) for peer in members if peer in holders}
    weights = dict(
        zip(claims, limit_weights([*claims.values()], [it in plan.on_probation for it in claims]), strict=True)
    )
    most = max((claims[peer] for peer in plan.without_probation(claims.keys())), default=0)
    ranges = _ranges(fragment.elements, plan, [peer for peer in reducers if peer not in kept_out])
    contributions = [
        manifest_pb2.Contribution(
            peer_id=peer,
            tokens=0 if peer in plan.on_probation else weights[peer] // len(policy.fragments),
            weight=weights[peer],
            samples=min(ready[peer].samples, MAX_SAMPLES),
            mark=ready[peer].mark,
            on_probation=peer in plan.on_probation,
            judged_tokens=min(claims[peer], most) if peer in plan.on_probation else 0,
        )
        if peer in holders
        else manifest_pb2.Contribution(peer_id=peer, mark=ready[peer].mark, on_probation=peer in plan.on_probation)
        for peer in members
    ]
    return dp.Start(
        round=round_id.to_proto(),
        contributions=contributions,
        partition=_to_proto(ranges),
        codec=codec.number,
        elements=fragment.elements,
        part_elements=part_elements(ranges, codec.encoded_bytes, policy.part_elements),
        deadline_ms=int(exchange_seconds * 1000),
        unix_ms=unix_ms,
        not_reducing=[place for place, peer in enumerate(members) if peer in kept_out],
    )


def check_start(policy: RoundPolicy, plan: Plan, round_id: RoundId, mine: dp.Ready, me: str, start: dp.Start) -> None:
    """Raise `PeerMisbehaved` unless an honest opener could have sent this to us."""
    members = tuple(item.peer_id for item in start.contributions)
    if me not in members or not set(members) <= set(plan.members) or members != round_id.order(set(members)):
        raise PeerMisbehaved("Start names members that are not the plan's, or in another order, or leaves us out")
    fragment = policy.fragment_of(round_id.number)
    holders = plan.holders(fragment.layers)
    for item in start.contributions:
        cap, samples = (_cap(plan, item.peer_id), MAX_SAMPLES) if item.peer_id in holders else (0, 0)
        counted = 0 if item.on_probation else item.weight // len(policy.fragments)
        if item.tokens != counted or item.weight > cap or item.samples > samples:
            raise PeerMisbehaved(f"Start gives {item.peer_id} more than the plan allows")
        if item.present:
            raise PeerMisbehaved("Start says how the round ended before it began")
        if item.on_probation != (item.peer_id in plan.on_probation):
            raise PeerMisbehaved(f"Start says of {item.peer_id} what the plan does not: whether it is on probation")
        told = min(mine.tokens, cap)
        if item.peer_id == me and (
            item.samples != mine.samples or item.weight > told or (item.weight < told and not item.on_probation)
        ):
            raise PeerMisbehaved("Start does not repeat what we reported")
        if not is_mark(item.mark) or (item.peer_id == me and item.mark != mine.mark):
            raise PeerMisbehaved(f"Start has another mark of {item.peer_id} than its own")
    if not any(item.weight for item in start.contributions):
        raise PeerMisbehaved("Start of a round to which nobody contributes")
    if not keeps_to_limit(start.contributions):
        raise PeerMisbehaved("Start gives members on probation more weight than they may have together")
    if not _may_use(policy, start.codec):
        raise PeerMisbehaved("Start names another codec than the run spec")
    reducers = _reducers(plan, members, holders)
    kept_out = {members[place] for place in start.not_reducing if place < len(members)}
    if (
        len(kept_out) != len(start.not_reducing)
        or not kept_out <= set(reducers)
        or len(kept_out) > _most_kept_out(reducers)
    ):
        raise PeerMisbehaved("Start keeps too many holders from reducing, or members that hold nothing")
    ranges = _ranges(fragment.elements, plan, [peer for peer in reducers if peer not in kept_out])
    if start.elements != fragment.elements or list(start.partition) != _to_proto(ranges):
        raise PeerMisbehaved("Start cuts the vector otherwise than the plan's caps do")
    if start.part_elements != part_elements(ranges, BY_NUMBER[start.codec].encoded_bytes, policy.part_elements):
        raise PeerMisbehaved("Start cuts the ranges otherwise than codec and run spec say")


def parts_total(start: dp.Start) -> int:
    """How many parts the vector is cut into."""
    return sum(_parts_in(piece, start.part_elements) for piece in start.partition)


def check_verdicts(start: dp.Start, verdicts: Sequence[manifest_pb2.Verdict], said_by: str | None = None) -> None:
    """Raise `PeerMisbehaved` unless these can be the verdicts of reducers, or of `said_by` alone."""
    parts = {piece.reducer: _parts_in(piece, start.part_elements) for piece in start.partition}
    members = [item.peer_id for item in start.contributions]
    if said_by is not None and any(members[it.reducer : it.reducer + 1] != [said_by] for it in verdicts):
        raise PeerMisbehaved("a verdict is not its sender's")
    if any(it.parts_missing and it.reducer == it.contributor for it in verdicts):
        raise PeerMisbehaved("a reducer misses its own contribution")
    require_valid_verdicts(
        verdicts, start.contributions, parts_total(start), lambda place: parts.get(members[place], 0)
    )


def check_nonces(start: dp.Start, settle: dp.Settle, opener: str) -> None:
    """Raise `PeerMisbehaved` unless `settle` has the nonce of every present contributor except the opener.

    The opener could choose its nonce after all others are known, and with it the parts that audits draw.
    """
    if len(settle.nonces) != len(start.contributions) or {*map(len, settle.nonces)} - {0, NONCE_BYTES}:
        raise PeerMisbehaved("Settle does not have one nonce, or none, for each member")
    present = set(settle.present)
    for item, nonce in zip(start.contributions, settle.nonces, strict=True):
        if item.peer_id == opener and nonce:
            raise PeerMisbehaved("Settle has a nonce of its opener")
        if item.peer_id in present - {opener} and item.weight and not nonce:
            raise PeerMisbehaved(f"Settle leaves out the nonce of {item.peer_id}, which contributed and is present")


def check_settle(start: dp.Start, settle: dp.Settle, *, holds_parts: bool) -> None:
    """Raise `PeerMisbehaved` unless `settle` can end this exchange. A witness's Settle lists no parts."""
    members = [item.peer_id for item in start.contributions]
    present = list(settle.present)
    if not present or present != [peer for peer in members if peer in set(present)]:
        raise PeerMisbehaved("Settle names nobody, or members that Start does not, or in another order")
    check_verdicts(start, settle.verdicts)
    if 0 < parts_total(start) <= settle.parts_zeroed:  # a fragment without trained layers has no parts
        raise PeerMisbehaved("Settle gives up every part")
    if not holds_parts:
        return
    if len(settle.digests) != parts_total(start) or any(len(item) not in (0, 32) for item in settle.digests):
        raise PeerMisbehaved("Settle does not have one digest for each part")
    if settle.parts_zeroed != sum(not item for item in settle.digests):
        raise PeerMisbehaved("Settle miscounts the parts that nobody has")
    named = [*settle.whole, *(place for repair in settle.repairs for place in repair.members)]
    if any(place >= len(members) for place in named):
        raise PeerMisbehaved(f"Settle names a holder of parts beyond the {len(members)} members of Start")
    if any(repair.part >= len(settle.digests) or len(repair.members) > MAX_HOLDERS for repair in settle.repairs):
        raise PeerMisbehaved(f"Settle repairs a part that Start does not have, or names over {MAX_HOLDERS} holders")


def check_payload(policy: RoundPolicy, plan: Plan, head: Head, payload: bytes) -> None:
    """Raise `PeerMisbehaved` unless a round after `head` can have ended with this manifest.

    This checks everything except the digests; position, fragment and witnesses only if it was made under `plan`. Used
    for results that others propose or say that they voted for.
    """
    try:
        manifest = manifest_pb2.Manifest.FromString(payload)
        protocol.check(manifest.protocol, "the manifest's writer")
        data = DataPosition.from_proto(manifest.data)
    except (DecodeError, ProtocolMismatch) as error:
        raise PeerMisbehaved("a result to vote for does not parse") from error
    _check_history(policy, plan, head, manifest)
    named, made = manifest.round, manifest.contributions
    ours = named.plan_version == plan.version
    fragment = policy.fragment_of(head.round + 1)
    turn = fragment.index if ours else fragment_of_round(named.number, manifest.fragments or 1)
    if named.fragment != turn or not 1 <= manifest.fragments <= policy.layers:
        raise PeerMisbehaved("a result to vote for is of another fragment")
    if ours and manifest.fragments != len(policy.fragments):
        raise PeerMisbehaved("a result to vote for is of other fragments than the plan's")
    holders = plan.holders(fragment.layers)
    most = max(item.max_round_tokens for item in plan.assignments)
    most *= 1 if ours else 2 * manifest.fragments  # caps follow the cuts
    _check_contributions(plan, manifest, holders, most, ours=ours)
    if len(manifest.audit_seed) != SEED_BYTES:
        raise PeerMisbehaved("a result to vote for has a seed of a wrong length")
    if len({item.peer_id for item in made}) != len(made) or not any(item.present for item in made):
        raise PeerMisbehaved("a result to vote for has doubled members, or leaves nobody to decide the next round")
    if manifest.committed_tokens != head.committed_tokens + sum(item.tokens for item in made):
        raise PeerMisbehaved("a result to vote for counts its tokens wrongly")
    _check_seats(plan, head, payload, ours=ours)
    _check_layers(policy, head, manifest, fragment.layers if ours else None)
    elements = fragment.elements if ours else policy.fragments[-1].end
    most_parts = -(-elements // min(MIN_PART_ELEMENTS, policy.part_elements)) + len(made)
    if not _may_use(policy, manifest.codec) or not manifest.parts_zeroed <= manifest.parts_total <= most_parts:
        raise PeerMisbehaved("a result to vote for has another codec, or more parts than there are")
    if ours and data != _position_after(policy, plan, head, {item.peer_id: item.samples for item in made}):
        raise PeerMisbehaved("a result to vote for moves the data elsewhere")


def _check_history(policy: RoundPolicy, plan: Plan, head: Head, manifest: manifest_pb2.Manifest) -> None:
    """Raise `PeerMisbehaved` unless this is the next round of our history and had a majority of its seats."""
    named, made = manifest.round, manifest.contributions
    if (named.run_id, named.number) != (policy.run_id, head.round + 1):
        raise PeerMisbehaved("a result to vote for is of another round")
    if manifest.previous_hash != head.hash or named.plan_version > plan.version or not plan.accepts(head):
        raise PeerMisbehaved("a result to vote for builds on another history")
    if manifest.epoch != plan.base.since_version or named.plan_version < plan.base.since_version:
        raise PeerMisbehaved("a result to vote for was made void by a recovery")
    if not plan.electorate(head).decides({COORDINATOR, *(item.peer_id for item in made)}):
        raise PeerMisbehaved("a result to vote for is of an attempt without a majority of the seats")


def _check_contributions(
    plan: Plan, manifest: manifest_pb2.Manifest, holders: Set[str], most: int, *, ours: bool
) -> None:
    """Raise `PeerMisbehaved` if a contribution exceeds its cap (`most` for a result of another plan)."""
    made = manifest.contributions
    require_valid_verdicts(manifest.verdicts, made, manifest.parts_total)
    for item, counted in zip(made, counted_tokens(manifest), strict=True):
        assignment = plan.assignment(item.peer_id)
        cap = assignment.max_round_tokens if assignment and ours else most
        if ours and item.peer_id not in holders:
            cap = 0
        if item.weight > cap or item.tokens != counted or item.samples > MAX_SAMPLES:
            raise PeerMisbehaved("a result to vote for counts more than a plan allows")
        if not is_mark(item.mark):
            raise PeerMisbehaved("a result to vote for has a mark of a wrong length")
        if ours and item.on_probation != (item.peer_id in plan.on_probation):
            raise PeerMisbehaved(f"a result to vote for says of {item.peer_id} whether it is on probation, wrongly")
    if not keeps_to_limit(made):
        raise PeerMisbehaved("a result to vote for gives members on probation more weight than they may have")


def _check_layers(policy: RoundPolicy, head: Head, manifest: manifest_pb2.Manifest, due: range | None) -> None:
    """Raise `PeerMisbehaved` unless only the fragment's layers change.

    `due`: those layers, if `plan` made the result.
    """
    digests = [digest for layer in manifest.layers for digest in (layer.anchor_digest, layer.momentum_digest)]
    if [layer.layer for layer in manifest.layers] != list(range(policy.layers)) or {*map(len, digests)} != {32}:
        raise PeerMisbehaved("a result to vote for has other layers than the model")
    changed = changed_layers(manifest)
    if due is not None and changed != due:
        raise PeerMisbehaved("a result to vote for does not change its fragment's layers")
    others = set(range(policy.layers)) - set(changed)
    if any(manifest.layers[layer] != head.manifest.layers[layer] for layer in others):
        raise PeerMisbehaved("a result to vote for changes layers that are not of its fragment")


def is_mark(mark: bytes) -> bool:
    """Whether `mark` has a valid length. It is empty if the member could not store one."""
    return len(mark) in (0, MARK_BYTES)


def is_witness(plan: Plan, me: str, payload: bytes) -> bool:
    """Whether this result changes no layer that `me` holds. Raises `PeerMisbehaved` if it is not a manifest."""
    try:
        changed = changed_layers(manifest_pb2.Manifest.FromString(payload))
    except DecodeError as error:
        raise PeerMisbehaved("a result to vote for does not parse") from error
    mine = plan.span(me)
    return len(mine) > 0 and (changed.stop <= mine.start or mine.stop <= changed.start)


def is_attested(plan: Plan, payload: bytes, said: Set[str]) -> bool:
    """Whether a result may be proposed: at least half of the holders that took part attest to it.

    Most layers have two holders, and one may be gone. Members that leave count, because somebody must hold the last
    layers. Members on probation do not count. For a result of an earlier plan the holders are unknown: all contributors
    count.
    """
    manifest = manifest_pb2.Manifest.FromString(payload)
    made = manifest.contributions
    if manifest.round.plan_version != plan.version:
        return half_attest(made, said)
    holders = plan.without_probation(plan.holders(changed_layers(manifest)) & {item.peer_id for item in made})
    return bool(holders & said) and 2 * len(holders & said) >= len(holders)


def check_attested(plan: Plan, signer: VoteSigner, proposal: dp.Proposal) -> None:
    """Raise `PeerMisbehaved` unless enough holders attest to the proposed result."""
    made = manifest_pb2.Manifest.FromString(proposal.payload).contributions
    if len(proposal.attestations) > min(len(made), MAX_MEMBERS):
        raise PeerMisbehaved(f"a proposal shows {len(proposal.attestations)} attestations")
    try:
        said = {signer.attested_by(proposal.payload, attestation) for attestation in proposal.attestations}
    except AtollError as error:
        raise PeerMisbehaved(f"a proposal shows a word that nobody gave: {error}") from error
    if len(said) != len(proposal.attestations) or not is_attested(plan, proposal.payload, said):
        raise PeerMisbehaved("a proposal shows the word of too few who hold its layers, or one of them twice")


def seats_after(plan: Plan, head: Head, round_id: RoundId, present: Set[str]) -> tuple[str, ...]:
    """The seats after `round_id`, an attempt at the round after `head`. The opener of `round_id` comes first.

    Present members keep their seats, so one member opens rounds for as long as it can. Members on probation get seats
    only if nobody else is present.
    """
    candidates = [round_id.opener(plan.openers(head)), *plan.seats(head), *plan.by_uplink]
    proved = [peer for peer in candidates if peer not in plan.on_probation]
    return next_seats(proved if present & set(proved) else candidates, present, ())


def _check_seats(plan: Plan, head: Head, payload: bytes, *, ours: bool) -> None:
    """Raise `PeerMisbehaved` unless the manifest gives the seats to the members that are due."""
    after = Head(manifest_pb2.CommittedManifest(payload=payload))
    seats, present = after.seats, after.present
    members = set(seats) - {COORDINATOR}
    if not members <= present or len(set(seats)) != len(seats) or len(seats) % 2 == 0 or len(members) > MAX_SEATS:
        raise PeerMisbehaved("a result to vote for gives seats to absent members, twice, or a wrong number of them")
    on_probation = {item.peer_id for item in after.manifest.contributions if item.on_probation}
    if not set(plan.seats(head)) & present - on_probation <= members:
        raise PeerMisbehaved("a result to vote for takes a seat from a member that was present")
    if ours and seats != seats_after(plan, head, RoundId.from_proto(after.manifest.round), present):
        raise PeerMisbehaved("a result to vote for gives the seats to others than are due")


def manifest_payload(
    policy: RoundPolicy,
    plan: Plan,
    head: Head,
    start: dp.Start,
    settle: dp.Settle,
    layers: tuple[manifest_pb2.LayerState, ...],
) -> bytes:
    """The serialised manifest that seats vote for. Members that computed the same digests get the same bytes.

    If most sums lack a contribution, its samples count as consumed, but its tokens do not count.
    """
    present = set(settle.present)
    seats = seats_after(plan, head, RoundId.from_proto(start.round), present)
    place = {item.peer_id: index for index, item in enumerate(start.contributions)}
    contributions = [
        manifest_pb2.Contribution(
            peer_id=item.peer_id,
            weight=item.weight,
            samples=item.samples,
            present=item.peer_id in present,
            mark=item.mark,
            on_probation=item.on_probation,
            judged_tokens=item.judged_tokens,
        )
        for item in start.contributions
    ]
    message = manifest_pb2.Manifest(
        protocol=protocol.ours(),
        round=start.round,
        previous_hash=head.hash,
        contributions=contributions,
        layers=layers,
        codec=start.codec,
        data=_position_after(policy, plan, head, {item.peer_id: item.samples for item in contributions}).to_proto(),
        parts_total=parts_total(start),
        parts_zeroed=settle.parts_zeroed,
        committed_unix_ms=start.unix_ms,
        verdicts=strip_unknown_verdict_fields(settle.verdicts),
        fragments=len(policy.fragments),
        seats=[place[peer] for peer in seats if peer != COORDINATOR],
        coordinator_seat=COORDINATOR in seats,
        epoch=plan.base.since_version,
        audit_seed=audit_seed(RoundId.from_proto(start.round), settle.nonces),
    )
    counted = counted_tokens(message)
    for item, tokens in zip(message.contributions, counted, strict=True):
        item.tokens = tokens
    message.committed_tokens = head.committed_tokens + sum(counted)
    return message.SerializeToString(deterministic=True)


def _position_after(policy: RoundPolicy, plan: Plan, head: Head, samples: Mapping[str, int]) -> DataPosition:
    before = position_at(head, plan, policy.round_samples)
    return advance(before, plan.drivers, samples, policy.round_samples, len(plan.cuts) + 1, plan.routes_begun)


def position_at(head: Head, plan: Plan, round_samples: int) -> DataPosition:
    """The data position at `head`. Genesis has no contributions, so the plan gives the data ranges of genesis.

    A node that newly drives a route gets a first lease. All others keep theirs, so no plan takes away samples that a
    node may have trained on. The next plan at the same head gives the same leases.
    """
    if head.round > 0:
        began = [(*plan.name_of(number), route[0]) for number, route in enumerate(plan.routes)]
        return with_first_leases(head.data, began, round_samples, max(1, head.manifest.fragments))
    holdings = {item.peer_id: item.data_ranges for item in plan.assignments if item.data_ranges}
    cursor = max((end for ranges in holdings.values() for _, end in ranges), default=0)
    held = sorted(piece for ranges in holdings.values() for piece in ranges)
    gaps = pairwise([(0, 0), *held])  # ranges of members that left before any commit
    returned = tuple((end, start) for (_, end), (start, _) in gaps if start > end)
    return DataPosition(cursor, returned, holdings, epoch_samples=head.data.epoch_samples)


def _reducers(plan: Plan, members: Sequence[str], holders: Set[str]) -> list[str]:
    """The holders that sum. Members on probation sum only if there are no others."""
    there = [peer for peer in members if peer in holders]
    return [peer for peer in there if peer not in plan.on_probation] or there


def _most_kept_out(reducers: Sequence[str]) -> int:
    """How many holders an opener may keep from reducing, so that a lying opener cannot choose the reducers."""
    return max(len(reducers) // 4, min(1, len(reducers) // 2))


def _parts_in(piece: dp.PartRange, elements: int) -> int:
    return -(-(piece.end - piece.start) // elements)


def _may_use(policy: RoundPolicy, codec: int) -> bool:
    return codec in {CODECS[name].number for name in policy.codecs}


def _cap(plan: Plan, peer: str) -> int:
    assignment = plan.assignment(peer)
    return assignment.max_round_tokens if assignment else 0


def _ranges(elements: int, plan: Plan, reducers: Sequence[str]) -> tuple[ReduceRange, ...]:
    bandwidth = {item.peer_id: item.max_reduce_bytes_per_second for item in plan.assignments}
    if not reducers:
        raise PeerMisbehaved("nobody who takes part holds the round's layers")
    return partition(elements, reducers, bandwidth)


def _to_proto(ranges: Sequence[ReduceRange]) -> list[dp.PartRange]:
    return [dp.PartRange(reducer=piece.reducer, start=piece.start, end=piece.end) for piece in ranges]
