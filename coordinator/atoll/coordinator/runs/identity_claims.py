"""Two processes with the identity of one node: the one that has the heartbeat stream stays. Pure.

A data directory that was copied, or restored while its node runs, makes two such processes. A new process may also take
the place of one that died and whose stream is not known to be broken yet. So the process that has the stream is given a
challenge. If it answers, it lives, and the new one is refused. If its stream ends, because it is broken or silent for
too long, the new one gets its place. Heartbeats alone do not count: those of a dead process may still be on their way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from atoll.coordinator.runs import machine
from atoll.coordinator.runs.departure import is_of_another_process
from atoll.coordinator.state import lookup
from atoll.coordinator.state.draft import Draft, Step, charge_row
from atoll.coordinator.state.snapshot import State, StepTime


@dataclass(frozen=True)
class Claim:
    """What came of a process that wants the stream. None of all: wait, and claim again."""

    session: int = 0  # of its stream, which is open; 0: another process has one
    challenge: bytes = b""  # that the other process has to answer
    refused: bool = False  # the other one answered


def claim(
    state: State, now: StepTime, peer_id: str, instance: bytes, challenge: bytes, authority: str = ""
) -> Step[Claim]:
    """Open a heartbeat stream for a process, unless another one of the node lives.

    `challenge` is random at the first claim of a process, and that of the last `Claim` afterwards. Raises `Banned`,
    `CertificateInvalid`.
    """
    node, live = lookup.member(state, peer_id), state.live.get(peer_id)
    if live is None or not is_of_another_process(live, instance):
        opened = machine.connect(state, now, peer_id, instance, authority)
        return Step(opened.state, Claim(session=opened.result), opened.records, opened.plans, opened.deny)
    draft = Draft(state, now)
    if live.challenge == challenge and live.challenge_answered:
        if charge_row(draft, peer_id):
            message = f"{node.name}: a second process with its identity was refused; its data directory was copied"
            draft.event("node.identity-in-use", node.run_id, peer_id, message)
        return draft.done(Claim(refused=True))
    if not live.challenge or live.challenge_answered:  # else one that another process waits for
        live = replace(live, challenge=challenge, challenge_answered=False)
        draft.set_live(peer_id, live)
    return draft.done(Claim(challenge=live.challenge))
