"""Routes of spans of Hugging Face decoders compute, bit for bit, what the whole, unmodified model computes."""

from __future__ import annotations

import pytest
import torch
from support.families import FAMILIES, VOCABULARY, config_of, initialise_span, lora_of
from support.routes import RouteStages
from support.single_process_reference import SingleProcessReference
from torch import Tensor

from atoll.core.run_spec import OptimizerSection
from atoll.node.model.huggingface import HuggingFaceArchitecture
from atoll.node.pipeline.stage_checks import MicroBatchShape

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SAMPLES, TOKENS = 2, 8
SECTION = OptimizerSection(name="adamw", weight_decay=0.1, learning_rate=0.01, clip_norm=0.5)


def batches(steps: int) -> list[list[Tensor]]:
    """Two micro-batches a step, counting from a random start: there is something to learn."""
    generator = torch.Generator().manual_seed(3)
    starts = torch.randint(0, VOCABULARY, (steps, 2, SAMPLES, 1), generator=generator)
    return [list(flush) for flush in (starts + torch.arange(TOKENS + 1)) % VOCABULARY]


def weights_of(route_stages: RouteStages, without_head: bool) -> dict[str, Tensor]:
    """Every parameter by name; a frozen head that is tied is a copy of the embedding."""
    found: dict[str, Tensor] = {}
    for model in route_stages.models:
        found |= {name: view.clone() for name, view in model.trained_layout.views(model.weights_E)}
        found |= {name: view.clone() for name, view in model.frozen_layout.views(model.frozen_E)}
    if without_head:
        assert torch.equal(found.pop("lm_head.weight"), found[f"{route_stages.models[0].span_definition.embedding}"])
    return found


CASES = [(family, tied, adapted) for family in FAMILIES for tied in (False, True) for adapted in (False, True)]
LONG = {  # every family and every kind once: 50 steps of all of them take a minute and a half
    ("llama", False, False),
    ("llama", True, False),
    ("llama", True, True),
    ("qwen3", True, False),
    ("gpt_neox", False, False),
    ("gpt_neox", False, True),
    ("mixtral", True, False),
}
every_case = pytest.mark.parametrize(
    ("family", "tied", "adapted"),
    CASES,
    ids=[f"{family}, {'tied' if tied else 'own head'}, {'lora' if lora else 'dense'}" for family, tied, lora in CASES],
)


@every_case
def test_routes_of_1_2_and_4_stages_equal_the_unmodified_model(family: str, tied: bool, adapted: bool) -> None:
    check_equal(family, tied, adapted, 50 if (family, tied, adapted) in LONG else 4)


@pytest.mark.soak
@every_case
def test_all_routes_are_equal_after_50_steps(family: str, tied: bool, adapted: bool) -> None:
    check_equal(family, tied, adapted, 50)


def check_equal(family: str, tied: bool, adapted: bool, steps: int) -> None:
    config, lora = config_of(family, tied), lora_of(family) if adapted else None
    architecture = HuggingFaceArchitecture(config, lora)
    plain: SingleProcessReference | None = None
    losses: list[float] = []
    for stages in (4, 2, 1):
        route_stages = RouteStages(architecture, stages, SECTION, MicroBatchShape(SAMPLES, TOKENS))
        for model in route_stages.models:
            initialise_span(model, 7, 0.1)
        if plain is None:
            plain = SingleProcessReference(
                config, lora, SECTION, weights_of(route_stages, without_head=tied and adapted)
            )
            losses = [plain.step(tokens) for tokens in batches(steps)]
            assert steps < 50 or losses[-1] < losses[0]
            assert not torch.equal(plain.weights(), route_stages.weights())
        assert [route_stages.route.flush(tokens).loss for tokens in batches(steps)] == losses
        assert torch.equal(route_stages.weights(), plain.weights())
