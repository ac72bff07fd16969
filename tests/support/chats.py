"""Small tokenizers with chat templates in the shape of ChatML, Llama 3 and Mistral, and their conversations."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

Message = dict[str, Any]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
MISTRAL = (
    "{{ bos_token }}"
    "{% if messages and messages[0].role == 'system' %}"
    "{% set system = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if message.role == 'user' %}{{ '[INST] ' + (system if loop.first else '') + message.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content + eos_token }}{% endif %}"
    "{% endfor %}"
)
GENERATION = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}\n"
    "{% else %}{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
KINDS: dict[str, tuple[str, dict[str, str], list[str]]] = {  # template, named special tokens, others
    "chatml": (CHATML, {"eos_token": "<|im_end|>"}, ["<|im_start|>"]),
    "llama3": (
        LLAMA3,
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        ["<|start_header_id|>", "<|end_header_id|>"],
    ),
    "mistral": (MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"}, ["[INST]", "[/INST]"]),
    "generation": (GENERATION, {"eos_token": "<|im_end|>"}, ["<|im_start|>"]),
}
END_OF_TURN = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>", "generation": "<|im_end|>"}
WORDS = "the user asks and the assistant answers a question about tides, coral and lagoons in plain words. yes no "


@cache
def _trained(special: tuple[str, ...], size: int) -> str:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([WORDS, *WORDS.split()] * 20, trainer)
    return str(made.to_str())


def library(kind: str, template: str | None = "own", size: int = 420, bos: bool = True) -> Any:
    """A tokenizer of `transformers`. With `bos` its post-processor would write one, too, as Llama's does."""
    own, named, others = KINDS[kind]
    special = (*named.values(), *others)
    made = tokenizers.Tokenizer.from_str(_trained(special, size))
    if bos and "bos_token" in named:
        first = named["bos_token"]
        made.post_processor = processors.TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 0)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **named)
    fast.add_special_tokens({"additional_special_tokens": others})
    fast.chat_template = own if template == "own" else template
    return fast


def save(kind: str, directory: Path, **options: Any) -> Path:
    """Write the tokenizer's files."""
    library(kind, **options).save_pretrained(directory)
    return directory


def talk(*turns: str, system: str = "") -> list[Message]:
    """A conversation of user and assistant in turn."""
    roles = ("user", "assistant")
    spoken = [{"role": roles[number % 2], "content": text} for number, text in enumerate(turns)]
    return [{"role": "system", "content": system}, *spoken] if system else spoken
