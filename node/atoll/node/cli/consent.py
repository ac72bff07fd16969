"""Text that `atoll join` shows before it asks: the run, its operator, the model, download, disk, network, limits."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.core.model_spec import ModelSection
from atoll.core.units import bytes_text, count_text
from atoll.node.cli.set_limits import limits_text
from atoll.node.config import NodeConfig
from atoll.node.control.run_needs import RunNeeds
from atoll.node.preflight.run_checks import size_of
from atoll.v1 import membership_pb2 as mb

_ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104 - only compared with
_KEY_CHARACTERS = 16  # of the fingerprint of the operator's key, in groups of four


def consent_lines(config: NodeConfig, needs: RunNeeds) -> Iterator[str]:
    """Yield what this node will do: one or two sentences per line."""
    key = " ".join(needs.operator[at : at + 4] for at in range(0, _KEY_CHARACTERS, 4))
    yield f"Run {needs.run_id}, coordinator {needs.coordinator}. Its operator has the key {key}."
    if needs.state == mb.RUN_STATE_FINISHED:
        yield "The run is finished. This node will only serve its state to others."
    if needs.trains:
        yield f"Model: {_model(needs)}. The run trains {count_text(needs.spec.run.stop_tokens)} tokens."
        yield f"Download: {_download(config, needs)}."
        yield f"Disk: {_disk(config, needs)}, in {config.data_dir}."
        yield f"This node will use: {limits_text(config)}."
    else:
        yield f"This node is a seed: it helps others find each other, and does not train. State in {config.data_dir}."
    if config.data:
        yield f"It uses the text at {config.data}, which must be the run's corpus."
    yield from _network(config)
    yield "Stop it at any time with Ctrl-C or `atoll leave`; `atoll pause` frees the machine for a while."


def _model(needs: RunNeeds) -> str:
    section, size = needs.spec.model, size_of(needs)
    name = section.preset if isinstance(section, ModelSection) else str(section.config["model_type"])
    if size is None:
        return f"{name}, of a size that is known once the run has begun"
    return f"{name}, {count_text(size.parameters)} trained parameters, {bytes_text(size.training_bytes)} to train all"


def _download(config: NodeConfig, needs: RunNeeds) -> str:
    size, told = size_of(needs), []
    if needs.head_round or needs.layers is not None:
        told.append(f"{bytes_text(size.checkpoint_bytes())} of the model's state" if size else "the model's state")
    else:
        told.append("no model: the run has not begun")
    if needs.spec.data.source == "corpus":
        told.append(f"training text as it is needed, of which it keeps {config.disk_gigabytes:g} GB at most")
    return "; ".join([*told, "updates in every round"])


def _disk(config: NodeConfig, needs: RunNeeds) -> str:
    size, kept = size_of(needs), config.checkpoint_keep + 1
    one = bytes_text(size.checkpoint_bytes()) if size else "a size that is not known yet"
    text = f" and {config.disk_gigabytes:g} GB of training text" if needs.spec.data.source == "corpus" else ""
    return f"at most {kept} checkpoints of {one}{text}"


def _network(config: NodeConfig) -> Iterator[str]:
    listen = "every address" if config.listen in _ALL_ADDRESSES else config.listen
    port = f"port {config.port}" if config.port else "a free port"
    public = not (config.listen.startswith("127.") or config.listen == "::1")
    router = " It may ask your router to forward that port (UPnP, NAT-PMP)." if public else ""
    yield f"Peers reach it on {listen}, {port}.{router}"
