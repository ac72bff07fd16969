"""What the daemon and its trainer process say to one another: typed messages, one JSON object a line.

Both ends are the same version of the same code on one machine; still every message is rebuilt through its class,
so that a field too many or too few is an error where it is read. Tensors never travel here: they stand in shared
memory (`shared.py`). An order carries a number that its answer repeats; `Pushed` status comes unasked.
"""

from __future__ import annotations

import json
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any

from atoll.node.pipeline.rank_order import RankOrder

MAX_LINE_BYTES = 4 * 1024**2
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TrainerConfig:
    """What a trainer is started with."""

    run_spec_toml: str
    corpus_path: str | None = None  # overrides data.path
    _: KW_ONLY
    device: str = "auto"  # auto | cpu | cuda:0 | mps, or several: cuda:0,cuda:1
    rank: int = 0  # which of several devices is this process's
    cpu_threads: int = 1
    minimum_step_seconds: float = 0.0  # paces a volunteer's machine; unknown to others
    compute_share: float = 1.0  # of the time; it rests in between
    vram_fraction: float = 1.0  # of the device's memory; without effect on a CPU
    memory_bytes: int = 0  # that training may take on a CPU, beside torch and the corpus; 0: as much as there is
    span: tuple[int, int] | None = None  # layers to hold, both included; None: all of them
    layer_times: tuple[tuple[str, float, float], ...] = ()  # what an earlier trainer of this node measured
    layer_times_path: str | None = None  # where they are kept from one daemon to the next
    base_path: str | None = None  # where the run's pretrained weights lie


@dataclass(frozen=True)
class TrainerStatus:
    """How training goes, pushed about twice a second. Totals are of this process; progress is since the anchor."""

    steps: int = 0
    tokens: int = 0
    tokens_per_second: float = 0.0  # over the last seconds of training, pauses between steps included
    step_seconds: float = 0.0  # the same as a time per step
    busy_seconds_per_token: float = 0.0  # that computing took, at the owner's share of the time; 0: not measured yet
    train_loss: float = 0.0  # nats per token, mean over the last steps
    data_stall_seconds: float = 0.0
    samples_repeated: int = 0
    training: bool = False
    progress_tokens: int = 0  # since the last applied anchor: what a snapshot taken now would say
    progress_samples: int = 0
    skipped_steps: int = 0  # gradients that were not finite
    route_ready: bool = False  # a stage: the route can flush, as far as this stage knows
    route_trouble: str = ""  # why the route last broke, until a flush is stepped again
    flushes_aborted: int = 0  # at the driver


# --- parent → child -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Initialise:
    """Write the seeded initial parameters into the anchor."""


@dataclass(frozen=True)
class Load:
    """Weights := anchor; forget progress."""

    ranges: Ranges
    committed_tokens: int


@dataclass(frozen=True)
class Train:
    """Step until told otherwise."""


@dataclass(frozen=True)
class Pause:
    """Stop at the next step boundary."""


@dataclass(frozen=True)
class TakeSnapshot:
    """Write the pseudo-gradient of the elements [start, end); answer what it holds."""

    start: int
    end: int


@dataclass(frozen=True)
class Apply:
    """Take the new anchor, carry what was trained since the snapshot. `moved`: the elements that changed."""

    ranges: Ranges
    committed_tokens: int
    moved: tuple[int, int]


@dataclass(frozen=True)
class Rebase:
    """Take the new anchor, keep all progress. `moved`: the elements that changed."""

    ranges: Ranges
    committed_tokens: int
    moved: tuple[int, int]
    consumed_samples: int = 0  # samples of ours that the round took


@dataclass(frozen=True)
class SetRanges:
    """Other samples at the same anchor; snapshot and progress stay."""

    ranges: Ranges


@dataclass(frozen=True)
class Discard:
    """Forget the snapshot, keep the progress."""


@dataclass(frozen=True)
class Evaluate:
    """Held-out loss of the anchor."""


@dataclass(frozen=True)
class Generate:
    """Text sampled from the anchor."""

    prompt: str
    tokens: int
    seed: int


@dataclass(frozen=True)
class SetLimits:
    """The owner changed what this machine gives."""

    cpu_threads: int
    minimum_step_seconds: float
    compute_share: float
    vram_fraction: float


@dataclass(frozen=True)
class EnterRoute:
    """The span's place on a route from now on; what was under way on another one is dropped."""

    plan_version: int
    route: int
    stage: int
    stages: int


@dataclass(frozen=True)
class Probe:
    """To followers: steps on what stands in the anchor, which is scratch, to see how fast they are."""

    minimum_step_seconds: float
    compute_share: float


@dataclass(frozen=True)
class Step:
    """To followers: one inner step. Without an answer: the step itself waits for them."""


@dataclass(frozen=True)
class WriteInitial:
    """Write the seeded initial parameters of the whole model to a file: fp32, little-endian, in layer order."""

    path: str


@dataclass(frozen=True)
class Stop:
    """End the process."""


Order = (Initialise | Load | Train | Pause | TakeSnapshot | Apply | Rebase | SetRanges | Discard | Evaluate) | (
    Generate | SetLimits | EnterRoute | WriteInitial | Probe | RankOrder | Step | Stop
)


# --- child → parent -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loading:
    """Pushed while the child loads and gets on; one that is silent for too long hangs."""

    tokens: int  # of the corpus, so far


@dataclass(frozen=True)
class Ready:
    """The first word of a child that has corpus, model and device."""

    layer_table_hex: str  # serialised atoll.v1.LayerTable
    corpus_digest: str
    corpus_samples: int
    device: str
    device_name: str
    device_memory_bytes: int  # of which the owner allows a fraction
    device_uuid: str  # as NVIDIA's tools know it; empty for other devices
    tokens_per_step: int
    tokens_per_second: float
    layer_times: tuple[tuple[str, float, float], ...]  # kind; seconds a token, forward and backward
    span: tuple[int, int] | None = None  # the layers that are held; None: none, they do not fit
    whole_model_bytes: int = 0  # what all of them would take of the device


@dataclass(frozen=True)
class Refused:
    """An `AtollError` of the child: at start, or as the answer to an order."""

    reason: str
    message: str
    remedy: str


@dataclass(frozen=True)
class Done:
    """An order was carried out."""


@dataclass(frozen=True)
class SnapshotTaken:
    """A snapshot."""

    tokens: int
    samples: int
    steps: int
    fragment_tokens: int


@dataclass(frozen=True)
class Loss:
    """Nats per token."""

    value: float


@dataclass(frozen=True)
class Text:
    """Generated text."""

    text: str


Pushed = Loading | TrainerStatus
Answer = Ready | Refused | Done | SnapshotTaken | Loss | Text
Message = TrainerConfig | Order | Answer | Pushed

_CLASSES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        *(TrainerConfig, TrainerStatus, Initialise, Load, Train, Pause, TakeSnapshot, Apply, Rebase, SetRanges),
        *(Discard, Evaluate, Generate, SetLimits, EnterRoute, WriteInitial, Probe, RankOrder, Step, Stop),
        *(Loading, Ready, Refused, Done, SnapshotTaken, Loss, Text),
    )
}


@dataclass(frozen=True)
class Envelope:
    """A message and the number that joins an order to its answer; 0 for what is not asked for."""

    number: int
    body: Message

    def line(self) -> bytes:
        """The bytes on the socket, newline included."""
        fields = asdict(self.body)
        return json.dumps({"number": self.number, "kind": type(self.body).__name__, "fields": fields}).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> Envelope:
        """The inverse. Raises `ValueError`."""
        try:
            raw = json.loads(line)
            fields = {name: _tuples(value) for name, value in raw["fields"].items()}
            return cls(int(raw["number"]), _CLASSES[raw["kind"]](**fields))
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"not a message of ours: {line[:80]!r}") from error


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
