"""Two processes with the identity of one node: the one that has the heartbeat stream stays. Pure.

Two such processes exist if a data directory is copied, or restored while its node runs. A new process may also replace
one that died and whose broken stream is not detected yet. So the process with the stream gets a challenge. If it
answers, it is alive, and the new process is refused. If its stream breaks or is silent for too long, the new process
gets the place. Heartbeats are no proof: a dead process's heartbeats may still be in transit.
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
    """The outcome for a process that wants the stream. With no field set: wait, and claim again."""

    session: int = 0  # of the stream that was opened; 0: another process has one
    challenge: bytes = b""  # that the other process must answer
    refused: bool = False  # the other process answered


def claim(
    state: State, now: StepTime, peer_id: str, instance: bytes, challenge: bytes, authority: str = ""
) -> Step[Claim]:
    """Open a heartbeat stream for a process, unless another one of the node lives.

    `challenge`: random in a process's first claim, afterwards that of the last `Claim`. Raises `Banned`,
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
    if not live.challenge or live.challenge_answered:  # otherwise another process waits for the answer
        live = replace(live, challenge=challenge, challenge_answered=False)
        draft.set_live(peer_id, live)
    return draft.done(Claim(challenge=live.challenge))
