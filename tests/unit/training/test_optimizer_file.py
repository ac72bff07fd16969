"""The optimiser's state on disk: training goes on bit for bit; what belongs to something else is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll.core.errors import CheckpointCorrupt, DataDirUnusable, InvalidTransition
from atoll.core.run_spec import OptimizerSection
from atoll.node.training import optimizer_file
from atoll.node.training.inner_optimizer import InnerOptimizer

CPU = torch.device("cpu")
OWNER = {"run": "r", "layers": "(0, 3)"}


class Net:
    """A matrix that Muon may step, and a vector."""

    def __init__(self, name: str, rows: int = 4, rate: float = 0.01) -> None:
        self.parameters = [torch.nn.Parameter(torch.ones(rows, 6)), torch.nn.Parameter(torch.ones(5))]
        section = OptimizerSection.model_validate({"name": name, "learning_rate": rate, "weight_decay": 0.1})
        matrix = self.parameters[0]
        self.optimizer = InnerOptimizer(self.parameters, None, section, CPU, [(matrix, matrix)])

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        self.optimizer.step()

    def values(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]


@pytest.fixture(params=["adamw", "muon"])
def trained(request: pytest.FixtureRequest) -> tuple[str, Net]:
    net = Net(request.param)
    for seed in range(3):
        net.step(seed)
    return request.param, net


def test_training_goes_on_as_if_it_had_not_stopped(trained: tuple[str, Net], tmp_path: Path) -> None:
    name, net = trained
    path = tmp_path / "state"
    optimizer_file.keep(net.optimizer, OWNER, path)
    assert path.stat().st_mode & 0o777 == 0o600
    again = Net(name, rate=0.5)  # its own rate stays
    for mine, other in zip(again.parameters, net.parameters, strict=True):
        mine.data.copy_(other.data)
    optimizer_file.restore(again.optimizer, OWNER, path)
    again.optimizer.set_learning_rate(0.01)
    fresh = Net(name)
    for mine, other in zip(fresh.parameters, net.parameters, strict=True):
        mine.data.copy_(other.data)
    for each in (net, again, fresh):
        each.step(9)
    assert all(map(torch.equal, again.values(), net.values()))
    assert not all(map(torch.equal, fresh.values(), net.values()))


def test_a_restored_optimiser_keeps_its_own_rate(trained: tuple[str, Net], tmp_path: Path) -> None:
    name, net = trained
    optimizer_file.keep(net.optimizer, OWNER, tmp_path / "state")
    again = Net(name, rate=0.5)
    optimizer_file.restore(again.optimizer, OWNER, tmp_path / "state")
    assert {group["lr"] for part in again.optimizer.optimizers for group in part.param_groups} == {0.5}


@pytest.mark.parametrize("damage", ["owner", "shape", "optimizer", "truncated", "nan", "bytes", "missing"])
def test_what_is_not_the_state_of_this_optimiser_changes_nothing(damage: str, tmp_path: Path) -> None:
    net, path, owner, again = Net("adamw"), tmp_path / "state", dict(OWNER), Net("adamw")
    net.step(0)
    if damage == "nan":
        net.optimizer.optimizers[0].state[net.parameters[0]]["exp_avg"][0, 0] = torch.nan
    optimizer_file.keep(net.optimizer, OWNER, path)
    if damage == "owner":
        owner["layers"] = "(0, 1)"
    elif damage == "shape":
        again = Net("adamw", rows=3)
    elif damage == "optimizer":
        again = Net("muon")
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-200])
    elif damage == "bytes":
        path.write_bytes(b"nothing of torch's")
    elif damage == "missing":
        path.unlink()
    with pytest.raises(CheckpointCorrupt):
        optimizer_file.restore(again.optimizer, owner, path)
    assert not any(part.state for part in again.optimizer.optimizers)


def test_before_the_first_step_and_on_an_unusable_disk_nothing_is_written(tmp_path: Path) -> None:
    net = Net("muon")
    with pytest.raises(InvalidTransition, match="no step"):
        optimizer_file.keep(net.optimizer, OWNER, tmp_path / "state")
    net.step(0)
    with pytest.raises(DataDirUnusable):
        optimizer_file.keep(net.optimizer, OWNER, tmp_path / "missing" / "state")
    assert list(tmp_path.iterdir()) == []
