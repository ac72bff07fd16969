"""Messages between the daemon and its trainer process: typed dataclasses, one JSON object per line.

The same messages pass between the first process of a trainer (rank 0) and its other ranks. Both ends run the same
version of the same code on one machine. Every message is still rebuilt through its class, so that a missing or an
unknown field is an error at the reader. Tensors never travel here: they are in shared memory
(`system/shared_vectors.py`). The answer to an order repeats the order's number; `Pushed` messages have number 0.
"""

from __future__ import annotations

import json
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any, get_args

from atoll.node.data.data_report import BlockCounts
from atoll.node.pipeline.rank_order import RankOrder
from atoll.node.training.progress import Snapshot

MAX_LINE_BYTES = 4 * 1024**2
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TrainerConfig:
    """Configuration with which a trainer starts."""

    run_spec_toml: str
    corpus_path: str | None = None  # overrides data.path
    _: KW_ONLY
    device: str = "auto"  # auto | cpu | cuda:0 | mps, or several: cuda:0,cuda:1
    rank: int = 0  # index of this process's device among several
    cpu_threads: int = 1
    minimum_step_seconds: float = 0.0  # paces a volunteer's machine; other nodes do not see it
    compute_share: float = 1.0  # maximum share of the time in which the trainer computes
    vram_fraction: float = 1.0  # of the device's memory; no effect on a CPU
    memory_bytes: int = 0  # limit on a CPU for training, without torch and the corpus; 0: no limit
    span: tuple[int, int] | None = None  # first and last layer to hold; None: all layers
    layer_times: tuple[tuple[str, float, float], ...] = ()  # measured by an earlier trainer of this node
    layer_times_path: str | None = None  # cache file for layer times, which outlives the daemon
    base_path: str | None = None  # directory of the run's pretrained weights
    cache_path: str | None = None  # folder for the run's training text: fetched blocks, or tokens of local files
    cache_bytes: int = 20 * 10**9  # for fetched blocks
    peers_path: str | None = None  # the daemon's socket for reads of the corpus from other members


@dataclass(frozen=True)
class TrainerStatus:
    """Training status, pushed about twice a second. Totals are of this process; progress counts since the anchor."""

    steps: int = 0
    tokens: int = 0
    tokens_per_second: float = 0.0  # over the recent steps, rests between steps included
    step_seconds: float = 0.0  # time per recent step, rests included
    busy_seconds_per_token: float = 0.0  # compute time plus the rest that `compute_share` requires; 0: not measured yet
    train_loss: float = 0.0  # nats per token, mean over the last steps
    data_stall_seconds: float = 0.0
    data_stall_share: float = 0.0  # of the recent training time, 0 to 1
    data_bytes_fetched: int = 0  # of a corpus behind mirrors
    data_bytes_trained: int = 0  # stored bytes of the samples that training took from it
    data_blocks: tuple[int, ...] = BlockCounts()
    data_mirrors: tuple[tuple[str, str, int, str], ...] = ()  # the fields of a `MirrorReport`
    data_trouble: str = ""  # why the next batch is late; empty while batches arrive
    samples_repeated: int = 0
    training: bool = False
    # tokens trained since the last applied anchor: those that a snapshot taken now would contain
    progress_tokens: int = 0
    progress_samples: int = 0
    skipped_steps: int = 0  # steps whose gradients were not finite
    route_ready: bool = False  # a stage: whether the route can flush, as far as this stage knows
    route_trouble: str = ""  # why the route last broke; empty after the next flush that ends with a step
    flushes_aborted: int = 0  # counted at the driver


# --- parent → child -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Initialise:
    """Write the run's seeded initial parameters into the anchor."""


@dataclass(frozen=True)
class Load:
    """Set weights to the anchor; reset progress."""

    ranges: Ranges
    committed_tokens: int


@dataclass(frozen=True)
class Train:
    """Run inner steps until `Pause`."""


@dataclass(frozen=True)
class Pause:
    """Stop training at the next step boundary."""


@dataclass(frozen=True)
class TakeSnapshot:
    """Write the pseudo-gradient of the elements [start, end). The answer is a `Snapshot`."""

    start: int
    end: int


@dataclass(frozen=True)
class Apply:
    """Switch to the new anchor and keep the progress since the snapshot.

    `moved`: elements [start, end) that changed.
    """

    ranges: Ranges
    committed_tokens: int
    moved: tuple[int, int]


@dataclass(frozen=True)
class Rebase:
    """Switch to the new anchor and keep all progress. `moved`: elements [start, end) that changed."""

    ranges: Ranges
    committed_tokens: int
    moved: tuple[int, int]
    consumed_samples: int = 0  # samples of this node that the round consumed


@dataclass(frozen=True)
class SetRanges:
    """Replace the data ranges and keep the anchor, the snapshot and the progress."""

    ranges: Ranges


@dataclass(frozen=True)
class Discard:
    """Forget the snapshot; keep the progress."""


@dataclass(frozen=True)
class Evaluate:
    """Compute the held-out loss of the anchor. The answer is `Loss`."""


@dataclass(frozen=True)
class Audit:
    """Measure how much the update in the pseudo-gradient lowers the loss on these samples.

    The answer is `AuditGains`.
    """

    own: tuple[int, ...]  # sample numbers
    other: tuple[int, ...]
    start: int  # first element of the update
    end: int


@dataclass(frozen=True)
class Generate:
    """Sample text from the anchor. The answer is `Text`."""

    prompt: str
    tokens: int
    seed: int


@dataclass(frozen=True)
class SetLimits:
    """Apply the owner's new limits."""

    cpu_threads: int
    minimum_step_seconds: float
    compute_share: float
    vram_fraction: float


@dataclass(frozen=True)
class EnterRoute:
    """Make the span a stage of this route, and drop the running flush of the previous route."""

    plan_version: int
    route: int
    stage: int
    stages: int


@dataclass(frozen=True)
class Probe:
    """Rank 0 to ranks: measure the speed with real steps. The anchor's memory serves as scratch space."""

    minimum_step_seconds: float
    compute_share: float


@dataclass(frozen=True)
class Step:
    """Rank 0 to ranks: run one inner step. It has no answer: the step's collective operations synchronise all ranks."""


@dataclass(frozen=True)
class WriteInitial:
    """Write the initial parameters of the whole model to a file: raw fp32, little-endian, in layer order."""

    path: str


@dataclass(frozen=True)
class KeepOptimizer:
    """Write the inner optimiser's state to a file of this node."""

    path: str


@dataclass(frozen=True)
class RestoreOptimizer:
    """Continue with the inner optimiser's state that an earlier trainer of this node wrote."""

    path: str


@dataclass(frozen=True)
class Stop:
    """End the process."""


ModelOrder = (
    Load | TakeSnapshot | Apply | Rebase | SetRanges | Discard | Evaluate | Audit | Generate | SetLimits
)  # on all ranks
KeptOptimizer = KeepOptimizer | RestoreOptimizer
Order = (
    ModelOrder
    | Initialise
    | Train
    | Pause
    | EnterRoute
    | WriteInitial
    | KeptOptimizer
    | Probe
    | RankOrder
    | Step
    | Stop
)


# --- child → parent -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loading:
    """Progress report of a child that loads. A child that sends none for too long is assumed to hang."""

    tokens: int  # of the corpus read so far
    trouble: str = ""  # why loading cannot continue now


@dataclass(frozen=True)
class Ready:
    """First answer of a child: it has loaded corpus, model and device.

    All fields but `span` describe the whole model.
    """

    layer_table_hex: str  # serialised atoll.v1.LayerTable
    corpus_digest: str
    corpus_samples: int
    device: str
    device_name: str
    device_memory_bytes: int  # the part that the owner allows
    device_uuid: str  # as NVIDIA's tools print it; empty for other devices
    tokens_per_step: int
    tokens_per_second: float
    layer_times: tuple[tuple[str, float, float], ...]  # kind; seconds per token, forward and backward
    span: tuple[int, int] | None = None  # first and last held layer; None: no layers, because the model is too large
    whole_model_bytes: int = 0  # device memory that all layers would take
    text_left_out: str = ""  # one clause about the training text that is unusable
    sample_tokens: int = 0
    sources: tuple[tuple[str, int], ...] = ()  # of a corpus: name and samples in an epoch
    # stages of the mixture: first sample, weights of the sources
    mixture: tuple[tuple[int, tuple[float, ...]], ...] = ()


@dataclass(frozen=True)
class Refused:
    """An `AtollError` of the child, at start or as the answer to an order."""

    reason: str
    message: str
    remedy: str


@dataclass(frozen=True)
class Done:
    """Answer: the order is executed."""


@dataclass(frozen=True)
class Loss:
    """Answer to `Evaluate`."""

    value: float  # nats per token
    sources: tuple[tuple[str, float, int], ...] = ()  # if there are several: name, loss, number of held-out windows


@dataclass(frozen=True)
class AuditGains:
    """Answer to `Audit`; see `core/training_audits.py`."""

    score: float
    own: float  # nats per token
    other: float
    samples: int


@dataclass(frozen=True)
class Text:
    """Answer to `Generate`."""

    text: str


Pushed = Loading | TrainerStatus
Answer = Ready | Refused | Done | Snapshot | Loss | AuditGains | Text
Message = TrainerConfig | Order | Answer | Pushed

_CLASSES: dict[str, type[Any]] = {cls.__name__: cls for cls in get_args(Message)}


@dataclass(frozen=True)
class Envelope:
    """A message with the number that links an answer to its order; 0 for pushed messages."""

    number: int
    body: Message

    def line(self) -> bytes:
        """Encode the message as one line, newline included."""
        fields = asdict(self.body)
        return json.dumps({"number": self.number, "kind": type(self.body).__name__, "fields": fields}).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> Envelope:
        """Decode a line. Raises `ValueError`."""
        try:
            raw = json.loads(line)
            fields = {name: _tuples(value) for name, value in raw["fields"].items()}
            return cls(int(raw["number"]), _CLASSES[raw["kind"]](**fields))
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"not a trainer message: {line[:80]!r}") from error


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
