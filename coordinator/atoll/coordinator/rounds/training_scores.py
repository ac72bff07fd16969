"""Results of audits of training: scores of members, kept for a while and compared. Pure.

A round's manifest draws who is audited and by whom (`core/training_audits.py`), so a report counts only from the member
that was drawn for it. A score is the number of standard errors by which a contribution gained more on its own samples
than on others'. Its size for honest members depends on the run, so a member is compared with the median member. It is
*doubted* if its score is below half of the median and chance does not explain that. A member's score is that of its
median auditor. So one lying auditor cannot make a member doubted and, with four or more members, cannot hide one.
Members on probation are compared with the others. A doubt puts a member on probation (`live/probation.py`). If a member
on probation scores like the others, an event reports it. Only the operator ends probation, because an attacker could
earn trust for many members one after the other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from statistics import fmean, median, median_high

from atoll.coordinator.rounds.reports import reject
from atoll.coordinator.state.draft import Draft, charge_refusal
from atoll.coordinator.state.known_nodes import is_on_probation
from atoll.coordinator.state.run_memory import TrainingComparison, TrainingScore
from atoll.coordinator.store.records import Node
from atoll.core.errors import PeerMisbehaved
from atoll.core.training_audits import MAX_SAMPLES, MAX_SCORE, draw
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb

KEPT_SCORES = 16  # of each member
LEAST_AUDITS = 5
LEAST_MEMBERS = 3  # with scores; two cannot be compared
LEAST_TYPICAL = 1.0  # if the mean is lower, audits of this run are not meaningful
_LEAST_SPREAD = 1.3  # standard deviation of one member's scores; in theory 1 if its updates were all alike
_SPREAD = 0.33  # likewise, in units of the typical score, measured with `benchmarks/training_audits.py`
_SIGMAS = 5.0


def apply_training_audit(draft: Draft, peer_id: str, run_id: str, report: mb.TrainingAudit) -> None:
    """Keep an auditor's report, if the auditor was drawn for that round."""
    run, memory = draft.state.runs[run_id], draft.state.memory[run_id]
    held = memory.recent_manifests.get(report.round)
    if report.round > run.head_round or held is None:
        return  # the node sends it again once the round is known; old rounds are ignored
    if any(score.round == report.round for score in memory.training_scores.get(report.contributor, ())):
        return
    if not charge_refusal(draft, peer_id):  # charged for valid reports too, because parsing takes time
        return
    committed = manifest_pb2.CommittedManifest.FromString(held)
    manifest = manifest_pb2.Manifest.FromString(committed.payload)
    drawn = draw(manifest)
    in_range = abs(report.score) <= MAX_SCORE and report.samples <= MAX_SAMPLES  # false for NaN
    if drawn is None or (drawn.contributor, drawn.auditor) != (report.contributor, peer_id) or not in_range:
        what = f"audit of round {report.round} that was not this node's to report, or with impossible figures"
        reject(draft, run_id, peer_id, "audit", PeerMisbehaved(what))
        return
    found = TrainingScore(report.round, peer_id, report.score if report.given else None, manifest.round.fragment)
    members = set(memory.plan.members) if memory.plan is not None else set()
    between = max(len(members), 1) * max(manifest.fragments, 1)  # rounds between two audits of a member, on average
    oldest = run.head_round - KEPT_SCORES * between  # a run's scores change as it learns
    kept = {
        peer: tuple(score for score in scores if score.round > oldest)
        for peer, scores in memory.training_scores.items()
        if peer in members
    }
    if report.contributor in members:
        kept[report.contributor] = (*kept.get(report.contributor, ()), found)[-KEPT_SCORES:]
    draft.remember(run_id, training_scores=kept)
    _conclude(draft, run_id)


def forget(draft: Draft, node: Node) -> None:
    """Forget what audits found of a node so far."""
    memory = draft.state.memory[node.run_id]
    scores = {peer: it for peer, it in memory.training_scores.items() if peer != node.peer_id}
    compared = {peer: it for peer, it in memory.training_compared.items() if peer != node.peer_id}
    draft.remember(node.run_id, training_scores=scores, training_compared=compared)


def move(draft: Draft, old: Node, node: Node) -> None:
    """Move a node's scores and audits to its new identity. Otherwise the node would count as two auditors."""
    memory = draft.state.memory[node.run_id]
    names = {old.peer_id: node.peer_id}
    scores = {
        names.get(peer, peer): tuple(replace(it, auditor=names.get(it.auditor, it.auditor)) for it in told)
        for peer, told in memory.training_scores.items()
    }
    compared = {names.get(peer, peer): it for peer, it in memory.training_compared.items()}
    draft.remember(node.run_id, training_scores=scores, training_compared=compared)


def compare(
    scores: Mapping[str, Sequence[TrainingScore]], on_probation: Set[str] = frozenset()
) -> dict[str, TrainingComparison]:
    """Compare every member that has a score with the members that are not on probation. Returns by peer id.

    In some fragments, updates distinguish samples better, so a score is compared with the typical score of its
    fragment. Contributions that were not given do not count.
    """
    typical, comparable = dict[int, float](), set[int]()
    for fragment in {it.fragment for found in scores.values() for it in found if it.score is not None}:
        of_it = {peer: [it for it in found if it.fragment == fragment] for peer, found in scores.items()}
        found = {peer: value for peer, told in of_it.items() if (value := _median_auditor(told, {})) is not None}
        others = [score for peer, score in found.items() if peer not in on_probation]
        typical[fragment] = median(others or found.values())
        if len(others) >= LEAST_MEMBERS:
            comparable.add(fragment)
    compared = {}
    for peer, told in scores.items():
        counted = [it for it in told if it.score is not None and it.fragment in (comparable or typical)]
        beyond = _median_auditor(counted, typical)
        if beyond is None:
            continue
        expected = fmean(typical[it.fragment] for it in counted)
        score, audits = expected + beyond, len(counted)
        can_tell = bool(comparable) and expected >= LEAST_TYPICAL
        compared[peer] = TrainingComparison(
            audits,
            score,
            expected,
            doubted=can_tell and _is_behind(score, expected, audits),
            proved=can_tell and audits >= LEAST_AUDITS and 2 * score >= expected,
        )
    return compared


def _median_auditor(scores: Sequence[TrainingScore], usual: Mapping[int, float]) -> float | None:
    """By how much scores exceed the `usual` ones of their fragments: the mean of the median auditor.

    None without scores. So one lying auditor does not count. Of two auditors, the higher mean counts.
    """
    by_auditor: defaultdict[str, list[float]] = defaultdict(list)
    for it in scores:
        if it.score is not None:
            by_auditor[it.auditor].append(it.score - usual.get(it.fragment, 0.0))
    return median_high(map(fmean, by_auditor.values())) if by_auditor else None


def _is_behind(score: float, typical: float, audits: int) -> bool:
    """Whether a member is below half of the typical score by more than chance."""
    chance = _SIGMAS * max(_LEAST_SPREAD, _SPREAD * typical) / math.sqrt(audits)
    return audits >= LEAST_AUDITS and score < typical / 2 and typical - score > chance


def _conclude(draft: Draft, run_id: str) -> None:
    """Compare again, and log changes. A doubt puts a member on probation, and lasts until half of the typical score."""
    memory = draft.state.memory[run_id]
    on_probation = frozenset(peer for peer in memory.training_scores if is_on_probation(draft.state, peer))
    before = {peer for peer, it in memory.training_compared.items() if it.doubted}
    proved = {peer for peer, it in memory.training_compared.items() if it.proved}
    found = {
        peer: replace(it, doubted=it.doubted or (peer in before and it.score < it.typical / 2))
        for peer, it in compare(memory.training_scores, on_probation).items()
    }
    draft.remember(run_id, training_compared=found)
    for peer in sorted(peer for peer, it in found.items() if it.doubted and peer not in before):
        node, it = draft.state.nodes.get(peer), found[peer]
        name = node.name if node is not None else peer
        message = (
            f"{name} seems to train less than it claims: its updates score {it.score:.1f} on its own samples in "
            f"{it.audits} audits, those of others {it.typical:.1f}"
        )
        draft.event("node.training-doubted", run_id, peer, f"{message}; it is on probation")
        if node is not None:
            draft.put(replace(node, on_probation=True))
    for peer in sorted(peer for peer in on_probation & found.keys() if found[peer].proved and peer not in proved):
        node, it = draft.state.nodes[peer], found[peer]
        message = (
            f"{node.name}, which is on probation, trains what it claims: score {it.score:.1f} in {it.audits} audits, "
            f"those of others {it.typical:.1f}. To end its probation: atollctl node vouch {node.name}"
        )
        draft.event("node.proved", run_id, peer, message)
