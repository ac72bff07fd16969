"""This node's training since the head and its samples, and which part of the training remains when the head moves."""

from __future__ import annotations

from torch import Tensor

from atoll.core import log
from atoll.core.data_position import goes_on
from atoll.core.fragments import Fragment
from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.core.round_id import RoundId
from atoll.node.rounds import types as rt
from atoll.node.rounds.decide import is_witness, position_at
from atoll.node.rounds.installed_state import InstalledState
from atoll.node.rounds.machine import RoundMachine
from atoll.node.rounds.outer_schedule import is_stale
from atoll.node.rounds.snapshot_ledger import CountedShare
from atoll.node.rounds.token_account import TokenAccount
from atoll.node.rounds.training_audits import TrainingAudits
from atoll.node.trainer.trainer import Trainer

_log = log.get("rounds")


class OwnProgress:
    """The trainer's progress in rounds. Its coroutines are orders to the trainer, which run one after another."""

    def __init__(
        self,
        me: str,
        trainer: Trainer,
        machine: RoundMachine,
        installed: InstalledState,
        audits: TrainingAudits,
    ) -> None:
        self._me = me
        self._trainer = trainer
        self._machine = machine
        self._installed = installed
        self.audits = audits  # audits use the pseudo-gradient's memory while it is free
        self._token_account = TokenAccount(trainer.status.tokens, installed.head.round)
        self._given = self._ranges(installed.head)  # our data ranges
        nothing = CountedShare(rt.Counted.UNKNOWN)
        self._accounted = b"", nothing  # hash of the head before the last commit; what that commit counts of ours

    def report(self) -> rt.Progress:
        """Tokens trained, and seconds of a step."""
        status = self._trainer.status
        account = self._token_account
        return rt.Progress(
            account.unreported(status.tokens), status.step_seconds, account.tokens_since_snapshot(status.tokens)
        )

    def pseudo_gradient(self, fragment: Fragment) -> Tensor:
        """The pseudo-gradient of the last snapshot: the fragment's part of the layers held here."""
        return self._trainer.pseudo_gradient[self._installed.state.slice(fragment.start, fragment.end)]

    async def freeze(self, round_id: RoundId, fragment: Fragment) -> rt.Frozen:
        """Take a snapshot of this node's training on the fragment."""
        await self.audits.stop()
        own = self._installed.state.slice(fragment.start, fragment.end)
        snapshot = await self._trainer.snapshot(own.start, own.stop)
        self._token_account.freeze(snapshot.tokens, self._trainer.status.tokens)
        return rt.Frozen(round_id, snapshot.fragment_tokens, snapshot.samples)

    async def thaw(self) -> None:
        """Discard the snapshot."""
        await self._trainer.discard()

    # --- the samples of a plan -------------------------------------------------------------------------

    def begins_to_drive(self, before: Plan) -> bool:
        """Whether this node drives a route on other samples than under the plan `before`, or for the first time."""
        plan, head = self._machine.plan, self._installed.head
        if self._me not in plan.drivers:
            return False
        return self._me not in before.drivers or self._ranges(head, plan) != self._ranges(head, before)

    async def drive(self) -> None:
        """Set this node's data ranges in the trainer.

        If this node drove before, others may have its snapshot and commit it.
        """
        self._given = self._ranges(self._installed.head)
        await self._trainer.set_ranges(self._given)

    # --- when a round is committed -----------------------------------------------------------------------

    def account(self, head: Head, counted: rt.Counted) -> CountedShare:
        """Stop reporting the tokens that a committed round counts of ours, while its state is still being written."""
        share = CountedShare.of(self._me, head.manifest, counted)
        self._accounted = (head.manifest.previous_hash, share)
        if is_witness(self._machine.plan, self._me, head.committed.payload):
            self._token_account.pass_by(self._trainer.status.tokens)
        elif counted is rt.Counted.SNAPSHOT:
            self._token_account.count(head.round)
        elif counted is rt.Counted.UNKNOWN:
            self._token_account.begin_anew(self._trainer.status.tokens)
        return share

    def accounted_after(self, head: Head) -> CountedShare | None:
        """What the last committed round counts of ours, if it is the round after `head`."""
        previous_hash, share = self._accounted
        return share if previous_hash == head.hash else None

    async def take_anchor(self, head: Head, share: CountedShare, moved: tuple[int, int] | None = None) -> None:
        """Continue from `head` with the training that `head` does not contain, or with none if that part is unknown.

        Training is also dropped if others got its samples: the node began under a plan that the round did not know, or
        no round counted this node for long.
        """
        before, ranges, committed_tokens = self._given, self._ranges(head), head.committed_tokens
        self._given = ranges
        counted = share.counted
        if not goes_on(before, share.samples, ranges):
            _log.info("training dropped: its samples were given to others", round=head.round)
            counted = rt.Counted.UNKNOWN
        match counted:
            case rt.Counted.NOTHING:
                consumed_samples = share.samples
                await self._trainer.rebase(
                    ranges=ranges, committed_tokens=committed_tokens, consumed_samples=consumed_samples, moved=moved
                )
            case rt.Counted.SNAPSHOT:
                await self._trainer.apply(ranges=ranges, committed_tokens=committed_tokens, moved=moved)
            case rt.Counted.UNKNOWN:
                await self._trainer.load(ranges=ranges, committed_tokens=committed_tokens)
                self._token_account.begin_anew(self._trainer.status.tokens)

    async def keep(self, before: Head, head: Head, share: CountedShare) -> None:
        """After a catch-up, rebase the uncounted training onto the new anchor, unless it is stale."""
        usual_tokens, was_counted = self._token_account.usual_tokens, share.counted is rt.Counted.SNAPSHOT
        if was_counted:
            self._token_account.count(before.round + 1)
        tokens = self._token_account.uncounted(self._trainer.status.tokens)
        missed = head.round - before.round - was_counted
        # before that, most of it is of layers that no missed round averaged
        whole_turn = missed >= len(self._machine.policy.fragments)
        stale = whole_turn and is_stale(tokens, usual_tokens, missed)
        await self.take_anchor(head, CountedShare(rt.Counted.UNKNOWN) if stale else share)

    def _ranges(self, head: Head, plan: Plan | None = None) -> tuple[tuple[int, int], ...]:
        """Our data ranges at `head`, under the current plan or `plan`."""
        lease = self._machine.policy.round_samples
        return position_at(head, plan or self._machine.plan, lease).holdings.get(self._me, ())
