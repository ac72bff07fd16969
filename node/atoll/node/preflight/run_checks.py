"""Checks of a run's requirements on this machine: pretrained weights, memory, disk, text; cheap ones first.

They run in a process of their own (`checker.py`): reading text and asking a GPU takes time and memory, and Ctrl-C must
end it. The text that they read stays in the node's cache, so that its trainer does not read it again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.core.errors import CorpusDiffers, CorpusError
from atoll.core.model_size import ModelSize, model_size
from atoll.core.model_spec import HuggingFaceModel
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.node.config import CORPORA, NodeConfig
from atoll.node.control.run_directories import run_directories
from atoll.node.control.run_needs import RunNeeds
from atoll.node.model.base_files import BaseFiles
from atoll.node.preflight.machine import LEAST_FREE_BYTES, check_free_space
from atoll.node.system.host_memory import usable_host_memory
from atoll.v1 import plan_pb2

OnProgress = Callable[[str, int], object]  # the name of the input that is read, and how much of it was read


@dataclass(frozen=True)
class Request:
    """The facts to check. The checker gets them as JSON."""

    run_spec_toml: str
    layers_hex: str = ""  # the run's layer table, if it is known
    corpus_digest: str = ""  # of the run, if it is decided yet
    data: str = ""  # the owner's paths
    base: str = ""
    cache: str = ""
    device: str = "auto"
    cpu_threads: int = 1
    vram_fraction: float = 1.0
    memory_bytes: int = 0
    read_text: bool = True

    @classmethod
    def of(cls, config: NodeConfig, needs: RunNeeds) -> Request:
        """Build the request for all checks of `atoll join`."""
        return cls(
            run_spec_toml=needs.spec_toml,
            layers_hex=needs.layers.SerializeToString().hex() if needs.layers is not None else "",
            corpus_digest=needs.corpus_digest,
            data=str(Path(config.data).resolve()) if config.data else "",
            base=str(Path(config.base).expanduser().resolve()) if config.base else "",
            cache=str(config.path(CORPORA).resolve()),
            device=config.device,
            cpu_threads=config.cpu_threads or os.cpu_count() or 1,
            vram_fraction=config.vram_fraction,
            memory_bytes=int(config.memory_megabytes * 1e6),
        )

    @property
    def layers(self) -> plan_pb2.LayerTable | None:
        """The run's layer table."""
        return plan_pb2.LayerTable.FromString(bytes.fromhex(self.layers_hex)) if self.layers_hex else None


@dataclass(frozen=True)
class Found:
    """Results of the checks. The parent gets them as JSON."""

    device: str
    memory_bytes: int  # device memory that training may use
    share: float  # share of the layers that fit, approximately; 1: all, or not known


def check_run(request: Request, on_progress: OnProgress) -> Found:
    """Make all checks. Raises `PretrainedWeightsUnusable`, `ModelTooLarge`, `CorpusError`, `ConfigError`, …"""
    spec = parse_run_spec(request.run_spec_toml, "the spec of the run")
    base = check_base_is_there(spec, request.base)
    check_directory_of_corpus(spec, request.data)
    name, memory_bytes, cuda = _device(request)
    size = model_size(spec, request.layers, cuda=cuda)
    share = size.share_that_fits(memory_bytes) if size is not None else 1.0
    if base is not None:
        base.check_all(lambda: on_progress("pretrained weights", 0))
    check_text(spec, request, on_progress)
    return Found(name, memory_bytes, share)


def check_base_is_there(spec: RunSpec, base: str) -> BaseFiles | None:
    """Find the files of the run's pretrained weights, if it has some. Raises `PretrainedWeightsUnusable`."""
    if not isinstance(spec.model, HuggingFaceModel) or spec.model.base is None:
        return None
    return BaseFiles(spec.model.base, Path(base) if base else None)


def check_directory_of_corpus(spec: RunSpec, data: str) -> None:
    """Check that the owner's directory has the card of the run's corpus. Raises `CorpusError`, `CorpusDiffers`."""
    if spec.data.source != "corpus" or not data:
        return
    from atoll.node.data.card import CARD_NAME, MAX_CARD_BYTES, card_digest

    card = Path(data) / CARD_NAME
    try:
        with card.open("rb") as file:
            found = card_digest(file.read(MAX_CARD_BYTES))
    except OSError as error:
        raise CorpusError(
            f"{data} is not a corpus: cannot read {CARD_NAME}: {error.strerror}",
            "name the directory that `atoll data build` wrote with --data, or leave it out",
        ) from error
    if found != spec.data.corpus:
        raise CorpusDiffers(
            f"{data} has another corpus ({found[:12]}…) than the run ({str(spec.data.corpus)[:12]}…)",
            "name a copy of the run's corpus with --data, or leave it out",
        )


def check_text(spec: RunSpec, request: Request, on_progress: OnProgress) -> None:
    """Read and tokenise the text of a run without a corpus of shards. Raises `CorpusError`, `ConfigError`."""
    if spec.data.source == "corpus" or not request.read_text:
        return  # blocks are fetched while the node trains, and each is checked against the card
    os.environ["RAYON_NUM_THREADS"] = str(max(1, request.cpu_threads))  # threads of the tokenizers library
    from atoll.node.data.corpus import load_corpus

    corpus = load_corpus(
        spec,
        request.data or None,
        on_progress=lambda tokens: on_progress("training text", tokens),
        cache_path=Path(request.cache) if request.cache else None,
        cpu_threads=request.cpu_threads,
    )
    if request.corpus_digest and corpus.digest != request.corpus_digest:
        where = request.data or spec.data.path
        size = f"{len(corpus.tokens):,} tokens of {corpus.report.documents:,} documents"
        raise CorpusDiffers(
            f"the text at {where} ({corpus.digest[:12]}…, {size}) is not the run's ({request.corpus_digest[:12]}…)",
            "get exactly the files that your operator names, and give their path with --data",
        )


def check_disk(config: NodeConfig, needs: RunNeeds, share: float = 1.0) -> None:
    """Check that the disk has room for two checkpoints, so that one can replace the other. Raises `DataDirUnusable`."""
    size = model_size(needs.spec, needs.layers) if needs.trains else None
    wanted = 2 * size.checkpoint_bytes(share) if size is not None else 0
    found = [path for run in run_directories(config.data_dir) for path in run.glob("checkpoints/*/*")]
    held = sum(path.stat().st_size for path in found if path.is_file())
    check_free_space(config, max(LEAST_FREE_BYTES, wanted - held), f"a node of the run {needs.run_id}")


def size_of(needs: RunNeeds) -> ModelSize | None:
    """The model's size, for messages."""
    return model_size(needs.spec, needs.layers)


def surely_on_cpu(device: str) -> bool:
    """Whether training will certainly use the CPU. False if only torch can decide it."""
    if device.startswith("cpu"):
        return True
    drivers = (Path("/dev/kfd"), Path("/dev/dxg"))
    gpus = [*Path("/dev").glob("nvidia[0-9]*"), *(path for path in drivers if path.exists())]
    return device == "auto" and sys.platform == "linux" and not gpus


def _device(request: Request) -> tuple[str, int, bool]:
    """Name, usable memory, and whether the device is a CUDA GPU."""
    if surely_on_cpu(request.device):
        return "the CPU", usable_host_memory(request.memory_bytes), False
    from atoll.node.training.device_group import choose_devices, combined_facts  # here, because torch takes seconds

    facts = combined_facts(choose_devices(request.device), request.vram_fraction, request.memory_bytes)
    return facts.name, facts.memory_bytes, facts.device.startswith("cuda")
