"""A Hugging Face decoder trained by a plain loop in one process: what every other way must equal bit for bit."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.run_spec import OptimizerSection


class SingleProcessReference:
    """A plain training loop over the whole model as `transformers` and `peft` make it."""

    def __init__(self, config: Any, lora: Any, section: OptimizerSection, weights: dict[str, Tensor]) -> None:
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
        self.section, self.lora, self.layers = section, lora, self._by_layer()
        plain = [each for each in self.trained if each.dim() < 2 or each is self.embedding]
        decayed = [each for each in self.trained if not any(each is other for other in plain)]
        groups = [{"params": decayed, "weight_decay": section.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        rate, betas, epsilon = section.learning_rate, section.betas, section.epsilon
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
            each.grad.mul_(min(1.0, self.section.clip_norm / (norm + 1e-6)))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(total)

    def weights(self) -> Tensor:
        return torch.cat([each.detach().flatten() for layer in self.layers for each in layer])
