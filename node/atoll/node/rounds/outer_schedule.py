"""Learning rate and momentum of outer rounds, and which progress is too old to contribute. Pure."""

from __future__ import annotations

from atoll.core.run_spec import SyncSection

STALE = 3  # progress of less than 1/STALE of the usual tokens is too little for its age


def outer_schedule(sync: SyncSection, committed_tokens: int) -> tuple[float, float]:
    """Outer learning rate and momentum of a round that begins at `committed_tokens`.

    Far from a minimum, pseudo-gradients of successive rounds agree, and full momentum overshoots. So both values move
    linearly from plain averaging (1, 0) to the spec's values. Measured in docs/adr/0001.
    """
    warm = min(1.0, committed_tokens / sync.outer_warmup_tokens) if sync.outer_warmup_tokens else 1.0
    return 1.0 + (sync.outer_learning_rate - 1.0) * warm, sync.outer_momentum * warm


def is_stale(tokens: int, usual_tokens: int, rounds: int) -> bool:
    """Whether `tokens` are few beside what this node usually trains in the `rounds` committed without it.

    `usual_tokens` is what rounds counted of this node before. A node that was frozen has few tokens, computed on an old
    anchor. A node that trained while it was cut off has its usual share, and keeps it. Measured in virtual time (8
    members, 3 of them frozen for up to 12 rounds, 2 seeds): dropping stale progress made the loss 0.3 % and 1.1 % lower
    than rebasing it.
    """
    return STALE * tokens < usual_tokens * rounds
