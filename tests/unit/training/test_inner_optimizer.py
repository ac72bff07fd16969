"""Parameters that AdamW and Muon step, and the restored state of the optimiser."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.core.built_in_shape import ModelShape
from atoll.core.run_spec import OptimizerSection
from atoll.node.model.built_in import BuiltInArchitecture
from atoll.node.model.llama import initial_parameters
from atoll.node.model.span import Span
from atoll.node.model.span_model import SpanModel
from atoll.node.training import stacked_muon
from atoll.node.training.inner_optimizer import InnerOptimizer, Stepper
from atoll.node.training.stacked_muon import StackedMuon, stacks

SHAPE = ModelShape(256, 32, 2, 4, 2, 48)
CPU = torch.device("cpu")


def stepper(name: str, shape: ModelShape = SHAPE) -> tuple[SpanModel, Stepper]:
    model = SpanModel(BuiltInArchitecture(shape).span_definition(Span(0, shape.layers + 1)), CPU)
    for parameter, (_, values) in zip(model.parameters(), initial_parameters(shape, 3), strict=True):
        parameter.data.copy_(values)
    section = OptimizerSection.model_validate(
        {"name": name, "learning_rate": 2e-3, "weight_decay": 0.0, "clip_norm": 1e9}
    )
    return model, Stepper(model, section, "fp32")


def test_muon_takes_the_matrices_of_blocks_and_steps_as_far_as_adamw():
    """Its updates are orthogonal, with 0.2 of the learning rate as root mean square (Liu et al. 2025, section 2.2)."""
    model, muon = stepper("muon")
    gradients_E, module = model.gradients_E, model.span_definition.module
    muon_matrices = [matrix for _, matrix in model.muon_matrices]
    matrices = [
        parameter for block in list(module.layers)[1:-1] for parameter in block.parameters() if parameter.dim() == 2
    ]
    assert [id(matrix) for matrix in muon_matrices] == [id(matrix) for matrix in matrices]
    assert len(muon_matrices) == 7 * SHAPE.layers
    before = [parameter.detach().clone() for parameter in muon_matrices]
    gradients_E.copy_(torch.randn(len(gradients_E), generator=torch.Generator().manual_seed(0)))
    muon.set_learning_rate(0.01)
    muon.step()
    for old, new in zip(before, muon_matrices, strict=True):
        change = (old - new.detach()) / 0.01
        assert 0.1 < float(change.square().mean().sqrt()) < 0.3
        values = torch.linalg.svdvals(change)
        assert float(values.max() / values.quantile(0.1)) < 2  # nearly orthogonal; of the gradient itself far more


def test_adamw_alone_steps_all_parameters_and_its_state_is_restored():
    for name, optimizers in (("adamw", 1), ("muon", 2)):
        model, first = stepper(name)
        assert len(first.optimizer.optimizers) == optimizers
        noise = torch.randn(len(model.gradients_E), generator=torch.Generator().manual_seed(1))
        model.gradients_E.copy_(noise)
        first.step()
        again_model, again = stepper(name)
        for mine, other in zip(again_model.parameters(), model.parameters(), strict=True):
            mine.data.copy_(other.data)
        again.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        for one, its in ((first, model), (again, again_model)):
            its.gradients_E.copy_(noise * 0.5)
            one.step()
        for mine, other in zip(again_model.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, other)


def test_a_span_without_blocks_does_not_use_muon():
    table = torch.nn.Parameter(torch.ones(4, 4))
    table.grad = torch.ones(4, 4)
    optimizer = InnerOptimizer([table], table, OptimizerSection(name="muon", learning_rate=2e-3, weight_decay=0.1), CPU)
    optimizer.step()
    assert not torch.equal(table, torch.ones(4, 4))


def test_a_tied_model_is_one_graph_for_the_compiler_and_learns_the_same():
    losses = {}
    for compiled in (False, True):
        model, steps = stepper("adamw", replace(SHAPE, tie_embeddings=True))
        run = model.span_definition.run
        forward = torch.compile(run, backend="eager", fullgraph=True) if compiled else run
        tokens = torch.arange(48).reshape(2, 24)
        losses[compiled] = []
        for _ in range(3):
            for half in tokens.split(1):
                loss = torch.nn.functional.cross_entropy(forward(half[:, :-1]).flatten(0, 1), half[:, 1:].flatten())
                steps.backward(loss / 2)
                losses[compiled].append(float(loss.detach()))
            steps.step()
    assert losses[True] == losses[False]
    assert losses[True][-1] < losses[True][0]


SHAPES = [(24, 24), (24, 40), (40, 24), (24, 24), (24, 40), (24, 24)]


def test_stacked_muon_steps_as_muon_does_whatever_the_stack(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stacked_muon, "_stackable", lambda matrices: True)
    generator = torch.Generator().manual_seed(2)
    begin = [torch.randn(shape, generator=generator) for shape in SHAPES]
    gradients = [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(3)]

    def stepped(kind: type[torch.optim.Muon], restart: bool = False) -> list[Tensor]:
        matrices = [torch.nn.Parameter(values.clone()) for values in begin]
        settings = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
        optimizer = kind(matrices, **settings)
        for each in gradients:
            if restart:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = kind(matrices, **settings)
                optimizer.load_state_dict(state)
            for matrix, gradient in zip(matrices, each, strict=True):
                matrix.grad = gradient.clone()
            optimizer.step()
        return [matrix.detach() for matrix in matrices]

    expected = stepped(torch.optim.Muon)
    for elements in (stacked_muon.STACK_ELEMENTS, 24 * 24, 1):
        monkeypatch.setattr(stacked_muon, "STACK_ELEMENTS", elements)
        for restart in (False, True):
            for mine, theirs, first in zip(stepped(StackedMuon, restart), expected, begin, strict=True):
                assert float((mine - theirs).norm() / (theirs - first).norm()) < 0.02  # theirs rounds to bf16


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (1, 9)])
def test_a_device_without_bf16_units_iterates_in_fp32(shape: tuple[int, int]):
    """Against the quintic of Jordan et al. in fp64; bf16 differs by more than a thousandth."""
    gradient_MN = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    matrix = torch.nn.Parameter(torch.zeros(shape))
    matrix.grad = gradient_MN.clone()
    StackedMuon([matrix], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
    x_MN = gradient_MN.double() / gradient_MN.double().norm()
    for _ in range(5):
        gram_MM = x_MN @ x_MN.T
        x_MN = 3.4445 * x_MN + (-4.7750 * gram_MM + 2.0315 * gram_MM @ gram_MM) @ x_MN
    expected_MN = -0.02 * 0.2 * max(shape) ** 0.5 * x_MN
    assert float((matrix.detach().double() - expected_MN).norm() / expected_MN.norm()) < 1e-4


@given(st.lists(st.sampled_from([(2, 3), (3, 2), (4, 4), (1, 9)]), max_size=12), st.integers(1, 40))
def test_stacks_hold_each_matrix_once_and_one_shape_each(shapes: list[tuple[int, int]], most: int):
    matrices = [torch.empty(shape) for shape in shapes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacked_muon, "STACK_ELEMENTS", most)
        found = list(stacks(matrices, together=True))
    assert sorted(id(matrix) for stack in found for matrix in stack) == sorted(map(id, matrices))
    assert all(len({matrix.shape for matrix in stack}) == 1 for stack in found)
    assert all(len(stack) == 1 or sum(matrix.numel() for matrix in stack) <= most for stack in found)
