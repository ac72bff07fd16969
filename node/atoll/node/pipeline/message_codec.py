"""Encoding of stage messages, and the checks of a peer's header before anything is allocated.

Activations and gradients use codecs of `exchange/codecs.py`: `fp32`, `bf16`, or `int8` in blocks of 128. `int8` costs a
run nothing in loss; 4 bits do (docs/explain/pipelines.md). Tied weights and their gradient travel in fp32. A tensor
with values that are not finite is only announced and arrives as NaN: the route skips its step as one process would.

Shape suffixes: B batch, T sequence, D model, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from atoll.core.errors import PeerMisbehaved
from atoll.core.frames import Buffer
from atoll.core.run_spec import RunSpec
from atoll.node.exchange.codecs import BY_NUMBER, CODECS, Codec, is_finite
from atoll.node.pipeline.messages import (
    Activation,
    Begin,
    Decision,
    Gradient,
    Join,
    Message,
    Ready,
    Report,
    TiedGradient,
    TiedWeights,
    Verdict,
)
from atoll.v1 import pipeline_pb2 as pb
from atoll.v1 import plan_pb2

ACTIVATION_CODECS = ("fp32", "bf16", "int8")
FP32_BYTES = 4
_TARGET_BYTES = 4
_CLASSES: dict[str, type[Message]] = {
    "join": Join,
    "ready": Ready,
    "begin": Begin,
    "activation": Activation,
    "gradient": Gradient,
    "report": Report,
    "verdict": Verdict,
    "tied_gradient": TiedGradient,
    "tied_weights": TiedWeights,
}


@dataclass(frozen=True)
class LinkFormat:
    """Facts that both ends of a link know: route, incarnation, and the largest tensors of the run."""

    plan_version: int
    route: int
    samples: int  # samples in the largest micro-batch
    tokens: int  # tokens of each sample
    dimension: int
    vocabulary: int
    incarnation: int = 0  # of the route; 0: none has started
    document_masks: bool = False  # activations carry the starts of documents

    @classmethod
    def of(cls, spec: RunSpec, table: plan_pb2.LayerTable, plan_version: int, route: int) -> LinkFormat:
        """Build the format from facts that every node of a run knows."""
        return cls(
            plan_version,
            route,
            spec.optimizer.micro_batch_samples,
            spec.data.sequence_length,
            table.layers[0].activation_bytes_per_token // FP32_BYTES,
            table.layers[-1].activation_bytes_per_token // FP32_BYTES,
            document_masks=spec.data.document_masks,
        )


def pack(message: Message, link_format: LinkFormat, codec: Codec = CODECS["fp32"]) -> tuple[pb.StageMessage, Buffer]:
    """Encode a message as header and body. `codec` is used for activations and gradients."""
    header = pb.StageMessage(
        plan_version=link_format.plan_version,
        route=link_format.route,
        incarnation=link_format.incarnation,
        flush=message.flush,
    )
    body: Buffer = b""
    match message:
        case Join(decided=decided):
            header.join.CopyFrom(pb.StageJoin(decided=_decision(decided) if decided is not None else None))
        case Ready():
            header.ready.SetInParent()
        case Begin(micro_batches=count, anchor=anchor, targets=counted):
            header.begin.CopyFrom(pb.FlushBegin(micro_batches=count, anchor_committed_tokens=anchor, targets=counted))
        case Activation(micro_batch=number, x_BTD=x_BTD, targets_BT=targets_BT, starts_BT=starts_BT):
            targets = targets_BT.cpu().numpy().astype("<i4").tobytes()
            starts = b"" if starts_BT is None else np.packbits(starts_BT.cpu().numpy()).tobytes()
            body = b"".join((_put(header.activation, x_BTD, codec, number), targets, starts))
        case Gradient(micro_batch=number, gradient_BTD=gradient_BTD):
            body = _put(header.gradient, gradient_BTD, codec, number)
        case Report(norms=norms, loss=loss, at_same_anchor=at_same_anchor):
            header.report.CopyFrom(pb.StageReport(norms=norms, loss=loss, other_anchor=not at_same_anchor))
        case Verdict(factor=None):
            header.verdict.skipped = True
        case Verdict(factor=float(factor)):
            header.verdict.factor = factor
        case TiedGradient(gradient_VD=matrix_VD):
            body = _put(header.tied_gradient, matrix_VD, CODECS["fp32"])
        case TiedWeights(weights_VD=matrix_VD):
            body = _put(header.tied_weights, matrix_VD, CODECS["fp32"])
    header.body_bytes = len(body)
    return header, body


def _decision(decided: Decision) -> pb.FlushDecision:
    ending: dict[str, Any] = {"skipped": True} if decided.factor is None else {"factor": decided.factor}
    return pb.FlushDecision(incarnation=decided.incarnation, flush=decided.flush, **ending)


def _put(header: pb.StageTensor, tensor: Tensor, codec: Codec, micro_batch: int = 0) -> Buffer:
    values_E = tensor.detach().cpu().reshape(-1)
    finite = is_finite(values_E)
    header.MergeFrom(
        pb.StageTensor(micro_batch=micro_batch, shape=tensor.shape, codec=codec.number, not_finite=not finite)
    )
    return codec.encode(values_E) if finite else b""


def parse_header(data: bytes) -> pb.StageMessage:
    """Parse a header without further checks. Raises `PeerMisbehaved`."""
    try:
        return pb.StageMessage.FromString(data)
    except DecodeError as error:
        raise PeerMisbehaved("the header of a stage message does not parse") from error


def message_class(header: pb.StageMessage) -> type[Message]:
    """Kind of message that a header announces. Raises `PeerMisbehaved`."""
    kind = header.WhichOneof("content")
    if kind is None:
        raise PeerMisbehaved("a stage message has no content field")
    return _CLASSES[kind]


def read_header(data: bytes, link_format: LinkFormat) -> pb.StageMessage:
    """Parse a header and check its route, incarnation, shape, codec and body length. Raises `PeerMisbehaved`."""
    header = parse_header(data)
    if (header.plan_version, header.route, header.incarnation) != (
        link_format.plan_version,
        link_format.route,
        link_format.incarnation,
    ):
        raise PeerMisbehaved(
            f"a message for plan {header.plan_version}, route {header.route}, incarnation {header.incarnation} arrived "
            f"on plan {link_format.plan_version}, route {link_format.route}, incarnation {link_format.incarnation}"
        )
    message_class(header)
    kind = str(header.WhichOneof("content"))
    expected = sum(_body_bytes(kind, header, link_format))
    if header.body_bytes != expected:
        raise PeerMisbehaved(f"{kind}: the header announces {header.body_bytes} body bytes; must be {expected}")
    return header


def _body_bytes(kind: str, header: pb.StageMessage, link_format: LinkFormat) -> tuple[int, int, int]:
    """Bytes of the encoded tensor, of the targets and of the document starts.

    Raises `PeerMisbehaved` for a shape or codec out of bounds.
    """
    if kind in ("join", "ready", "begin", "report", "verdict"):
        return 0, 0, 0
    tensor: pb.StageTensor = getattr(header, kind)
    shape, codec = tuple(tensor.shape), BY_NUMBER.get(tensor.codec)
    if codec is None or codec.name not in ACTIVATION_CODECS or not _fits(kind, shape, link_format):
        raise PeerMisbehaved(f"{kind}: shape {list(shape)[:4]} or codec {tensor.codec} is not allowed on this route")
    coded = 0 if tensor.not_finite else codec.encoded_bytes(math.prod(shape))
    if kind != "activation":
        return coded, 0, 0
    tokens = shape[0] * shape[1]
    return coded, _TARGET_BYTES * tokens, -(-tokens // 8) if link_format.document_masks else 0


def _fits(kind: str, shape: tuple[int, ...], link_format: LinkFormat) -> bool:
    if kind.startswith("tied"):
        return shape == (link_format.vocabulary, link_format.dimension)
    return (
        len(shape) == 3
        and 1 <= shape[0] <= link_format.samples
        and shape[1:] == (link_format.tokens, link_format.dimension)
    )


def unpack(header: pb.StageMessage, body: Buffer, link_format: LinkFormat) -> Message:
    """Decode the body of a checked header. Raises `PeerMisbehaved` for bytes that do not decode."""
    kind, flush = header.WhichOneof("content"), header.flush
    assert kind is not None
    if len(body) != header.body_bytes:
        raise PeerMisbehaved(f"{kind}: {len(body)} body bytes arrived; the header announced {header.body_bytes}")
    if kind == "join":
        return _join(header)
    if kind == "ready":
        return Ready()
    if kind == "begin":
        begin = header.begin
        anchor = begin.anchor_committed_tokens if begin.HasField("anchor_committed_tokens") else None
        return Begin(flush, begin.micro_batches, anchor, begin.targets if begin.HasField("targets") else None)
    if kind == "report":
        return Report(flush, tuple(header.report.norms), header.report.loss, not header.report.other_anchor)
    if kind == "verdict":
        return _verdict(header)
    tensor: pb.StageTensor = getattr(header, kind)
    coded, targets, starts = _body_bytes(kind, header, link_format)
    values = _get(tensor, memoryview(body)[:coded])
    if kind == "activation":
        targets_BT = _targets(memoryview(body)[coded : coded + targets], tensor.shape)
        starts_BT = _starts(memoryview(body)[coded + targets :], tensor.shape) if starts else None
        return Activation(flush, tensor.micro_batch, values, targets_BT, starts_BT)
    if kind == "gradient":
        return Gradient(flush, tensor.micro_batch, values)
    return TiedGradient(flush, values) if kind == "tied_gradient" else TiedWeights(flush, values)


def _verdict(header: pb.StageMessage) -> Verdict:
    return Verdict(header.flush, _factor(header.verdict))


def _join(header: pb.StageMessage) -> Join:
    if not header.join.HasField("decided"):
        return Join()
    decided = header.join.decided
    return Join(Decision(decided.incarnation, decided.flush, _factor(decided)))


def _factor(said: pb.FlushVerdict | pb.FlushDecision) -> float | None:
    ending = said.WhichOneof("ending")
    if ending is None:
        raise PeerMisbehaved("a verdict has neither factor nor skipped")
    if ending == "factor" and not 0.0 <= said.factor <= 1.0:
        raise PeerMisbehaved(f"a verdict's factor is {said.factor}; must be 0 to 1")
    return said.factor if ending == "factor" else None


def _get(tensor: pb.StageTensor, coded: Buffer) -> Tensor:
    shape = tuple(tensor.shape)
    if tensor.not_finite:
        # not allocated, since a header alone must not cost memory; no code writes to it
        return torch.full((), torch.nan).expand(shape)
    return BY_NUMBER[tensor.codec].decode(coded, math.prod(shape)).view(shape)


def _targets(data: Buffer, shape: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype="<i4").astype(np.int64)).view(shape[0], shape[1])


def _starts(data: Buffer, shape: Sequence[int]) -> Tensor:
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), count=shape[0] * shape[1])
    return torch.from_numpy(bits).view(shape[0], shape[1]).bool()
