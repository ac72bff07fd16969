"""What a node tells the coordinator about its own end."""

import pytest

from atoll.core import errors
from atoll.core.node_reasons import is_failure
from atoll.node.control.announce_end import announcement, reason_of
from atoll.node.trainer.trainer import TrainerExit
from atoll.v1 import membership_pb2 as mb


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.CorpusError("x"), mb.NODE_REASON_TEXT_UNUSABLE),
        (errors.CorpusDiffers("x"), mb.NODE_REASON_TEXT_DIFFERS),
        (errors.PretrainedWeightsUnusable("x"), mb.NODE_REASON_BASE_UNUSABLE),
        (errors.ModelTooLarge("x"), mb.NODE_REASON_MODEL_TOO_LARGE),
        (errors.DataDirUnusable("x"), mb.NODE_REASON_DISK),
        (errors.PortInUse("x"), mb.NODE_REASON_NETWORK),
        (errors.DeadlineExceeded("x"), mb.NODE_REASON_NETWORK),
        (errors.P2pdDied("x"), mb.NODE_REASON_NETWORK),
        (errors.ArithmeticDiffers("x"), mb.NODE_REASON_DEVICE),
        (errors.ProtocolMismatch("x"), mb.NODE_REASON_REFUSED),
        (errors.ConfigError("x"), mb.NODE_REASON_SETTINGS),
        (errors.PeerMisbehaved("x"), mb.NODE_REASON_INTERNAL),
        (TrainerExit(1, "torch.OutOfMemoryError: CUDA out of memory.").error(), mb.NODE_REASON_OUT_OF_MEMORY),
        (TrainerExit(-9, "").error(), mb.NODE_REASON_TRAINER_DIED),
    ],
)
def test_an_error_has_a_typed_reason(error: errors.AtollError, reason: int) -> None:
    told = announcement(error)
    assert told is not None
    assert (told.why, told.reason, is_failure(told.why)) == (reason, str(error), True)


def test_a_bug_is_told_by_its_type_because_its_text_may_hold_a_secret() -> None:
    told = announcement(KeyError("atl1.secret"))
    assert told is not None
    assert (told.reason, told.why) == ("internal error: KeyError", mb.NODE_REASON_INTERNAL)


@pytest.mark.parametrize("kind", [errors.Banned, errors.Forgotten, errors.IdentityInUse, errors.IdentityReplaced])
def test_what_the_coordinator_said_is_not_told_back(kind: type[errors.AtollError]) -> None:
    assert announcement(kind("x")) is None


def test_every_error_of_the_tree_has_a_reason_of_a_failure() -> None:
    pending, seen = [errors.AtollError], 0
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        seen += 1
        assert is_failure(reason_of(cls("x")))
    assert seen > 40
