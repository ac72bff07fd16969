"""Routes of spans of Hugging Face decoders compute, bit for bit, what the whole, unmodified model computes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from support.families import FAMILIES, VOCABULARY, config_of, lora_of
from support.routes import Reef
from torch import Tensor, nn

from atoll.core.run_spec import OptimizerSection
from atoll.node.pipeline.huggingface import HuggingFace
from atoll.node.pipeline.initial import initialise_span
from atoll.node.pipeline.stage import Room

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SAMPLES, TOKENS = 2, 8
SECTION = OptimizerSection(learning_rate=0.01, clip_norm=0.5)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batches(steps: int) -> list[list[Tensor]]:
    """Two micro-batches a step, counting from a random start: there is something to learn."""
    generator = torch.Generator().manual_seed(3)
    starts = torch.randint(0, VOCABULARY, (steps, 2, SAMPLES, 1), generator=generator)
    return [list(flush) for flush in (starts + torch.arange(TOKENS + 1)) % VOCABULARY]


class OneProcess:
    """A plain training loop over the whole model as `transformers` and `peft` make it."""

    def __init__(self, config, lora, weights: dict[str, Tensor]) -> None:
        from peft import inject_adapter_in_model
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        self.tied = head.weight is embedding.weight
        assert self.tied == config.tie_word_embeddings
        if lora is not None:
            inject_adapter_in_model(lora, self.model)
            for name, each in self.model.named_parameters():
                each.requires_grad_("lora_" in name)
        named = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, values in weights.items():
                named.pop(name).copy_(values)
        assert not named
        if self.tied and lora is None:  # the rule of docs/explain/pipelines.md: the head's share is added last
            head.weight = nn.Parameter(embedding.weight.data)
        self.head, self.embedding = head.weight, embedding.weight
        self.trained = [
            each
            for each in self.model.parameters()
            if each.requires_grad and not (self.tied and lora is None and each is self.head)
        ]
        self.lora, self.layers = lora, self._by_layer()
        plain = [each for each in self.trained if each.dim() < 2 or each is self.embedding]
        decayed = [each for each in self.trained if not any(each is other for other in plain)]
        groups = [{"params": decayed, "weight_decay": SECTION.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        rate, betas, epsilon = SECTION.learning_rate, SECTION.betas, SECTION.epsilon
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=betas, eps=epsilon, fused=True)

    def _by_layer(self) -> list[list[Tensor]]:
        body = getattr(self.model, self.model.base_model_prefix)
        blocks = next(child for child in body.children() if isinstance(child, nn.ModuleList))
        inside = [[each for each in block.parameters() if any(each is one for one in self.trained)] for block in blocks]
        flat = [each for block in inside for each in block]
        outside = [each for each in self.trained if not any(each is one for one in flat)]
        first = [each for each in outside if each is self.embedding]
        return [first, *inside, [each for each in outside if each is not self.embedding]]

    def step(self, micro_batches: list[Tensor]) -> float:
        total = torch.zeros(())
        for tokens_BT in micro_batches:
            logits_BTV = self.model(input_ids=tokens_BT[:, :-1], use_cache=False).logits
            loss = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())
            (loss / len(micro_batches)).backward()
            total += loss.detach() / len(micro_batches)
        if self.tied and self.lora is None:
            self.embedding.grad.add_(self.head.grad)
            self.head.grad = None
        norms = [torch.cat([each.grad.flatten() for each in layer] or [torch.zeros(0)]).norm() for layer in self.layers]
        norm = math.sqrt(sum(float(each) ** 2 for each in norms))
        for each in self.trained:
            each.grad.mul_(min(1.0, SECTION.clip_norm / (norm + 1e-6)))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(total)

    def weights(self) -> Tensor:
        return torch.cat([each.detach().flatten() for layer in self.layers for each in layer])


def weights_of(reef: Reef, without_head: bool) -> dict[str, Tensor]:
    """Every parameter by name; a frozen head that is tied is a copy of the embedding."""
    found: dict[str, Tensor] = {}
    for model in reef.models:
        found |= {name: view.clone() for name, view in model.trained.views(model.weights_E)}
        found |= {name: view.clone() for name, view in model.frozen.views(model.frozen_E)}
    if without_head:
        assert torch.equal(found.pop("lm_head.weight"), found[f"{reef.models[0].cut.embedding}"])
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
def test_all_are_equal_after_50_steps(family: str, tied: bool, adapted: bool) -> None:
    check_equal(family, tied, adapted, 50)


def check_equal(family: str, tied: bool, adapted: bool, steps: int) -> None:
    config, lora = config_of(family, tied), lora_of(family) if adapted else None
    architecture = HuggingFace(config, lora)
    plain: OneProcess | None = None
    losses: list[float] = []
    for stages in (4, 2, 1):
        reef = Reef(architecture, stages, SECTION, Room(SAMPLES, TOKENS))
        for model in reef.models:
            initialise_span(model, 7, 0.1)
        if plain is None:
            plain = OneProcess(config, lora, weights_of(reef, without_head=tied and adapted))
            losses = [plain.step(tokens) for tokens in batches(steps)]
            assert steps < 50 or losses[-1] < losses[0]
            assert not torch.equal(plain.weights(), reef.weights())
        assert [reef.route.flush(tokens).loss for tokens in batches(steps)] == losses
        assert torch.equal(reef.weights(), plain.weights())
