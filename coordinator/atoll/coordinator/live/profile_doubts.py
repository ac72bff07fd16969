"""What the planner found out about nodes: how far their word is from what was measured. Pure.

Whoever is far off is told to people once, and shown while it is so. By how much a node's layers take longer at work
than it said is kept: a trainer that begins with other layers has no figure for a while, and its node should not look
as fast as its word meanwhile.
"""

from __future__ import annotations

from atoll.coordinator.planner.question import Answer, Question
from atoll.coordinator.state.snapshot import Draft


def record_findings(draft: Draft, run_id: str, question: Question, answer: Answer) -> None:
    """Of those who were asked about; of the others nothing changes."""
    memory, peers = draft.state.memory[run_id], {node.name: node.peer_id for node in question.nodes}
    found = {peers[name]: told for name, told in answer.doubts.items() if name in peers}
    for peer in sorted(found.keys() - memory.claim_doubts.keys()):
        draft.event("node.doubted", run_id, peer, f"{found[peer]}: plans go by what was measured")
    asked = set(peers.values())
    claim_doubts = {peer: told for peer, told in memory.claim_doubts.items() if peer not in asked} | found
    learned = {peers[name]: factor for name, factor in answer.corrections.items() if name in peers}
    draft.remember(run_id, claim_doubts=claim_doubts, corrections={**memory.corrections, **learned})
