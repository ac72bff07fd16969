"""Documents in samples: where they start, positions, masks and targets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.documents import document_spec
from support.families import config_of
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention

from atoll.core.built_in_shape import ModelShape
from atoll.core.errors import ConfigError, CorpusError, UnsupportedModel
from atoll.node.data.documents import check_separated, document_separator, mark_starts, starts_after
from atoll.node.model import llama
from atoll.node.model.built_in import BuiltInArchitecture
from atoll.node.model.document_masks import (
    Documents,
    attends,
    block_mask,
    document_positions,
    documents_of,
    flex_attention_of,
)
from atoll.node.model.huggingface import HuggingFaceArchitecture
from atoll.node.model.span import Span
from atoll.node.model.span_model import SpanModel
from atoll.node.model.tokenizer import ByteTokenizer
from atoll.node.training.targets import IGNORED, document_starts, inputs_and_targets

SEPARATOR = 7


@st.composite
def windows(draw: st.DrawFn) -> np.ndarray:
    """Windows [B, T+1] with many separators."""
    rows, length = draw(st.integers(1, 4)), draw(st.integers(2, 12))
    token = st.one_of(st.just(SEPARATOR), st.integers(0, 9))
    return np.array(draw(st.lists(st.lists(token, min_size=length, max_size=length), min_size=rows, max_size=rows)))


def marked(windows_BT: np.ndarray, tokens_BT: np.ndarray | None = None) -> np.ndarray:
    """Windows of which some are marked already. `tokens_BT`: without marks, if they differ."""
    return mark_starts(windows_BT, starts_after(windows_BT if tokens_BT is None else tokens_BT, SEPARATOR))


def starts_of(inputs_BT: torch.Tensor) -> torch.Tensor:
    """What trainers read from marked windows, whose last token is no input."""
    tokens_BT = torch.nn.functional.pad(inputs_BT, (0, 1))
    return document_starts(torch.from_numpy(marked(tokens_BT.numpy())))


@given(windows())
def test_a_place_counts_unless_it_is_a_document_s_last_token(tokens_BT: np.ndarray) -> None:
    coded_BT = marked(tokens_BT)
    inputs_BT, targets_BT = (each.numpy() for each in inputs_and_targets(torch.from_numpy(coded_BT)))
    assert (inputs_BT == tokens_BT[:, :-1]).all()
    last_BT = inputs_BT == SEPARATOR
    assert (targets_BT[last_BT] == IGNORED).all()
    assert (targets_BT[~last_BT] == tokens_BT[:, 1:][~last_BT]).all()
    assert (marked(coded_BT, tokens_BT) == coded_BT).all()


@given(windows(), st.data())
def test_tokens_that_were_no_targets_before_are_none_afterwards(tokens_BT: np.ndarray, data: st.DataObject) -> None:
    before_BT = np.where(data.draw(st.booleans()), ~tokens_BT, tokens_BT)
    after_BT = marked(before_BT, tokens_BT)
    assert (after_BT[before_BT < 0] < 0).all()
    inputs_BT, _ = inputs_and_targets(torch.from_numpy(after_BT))
    assert (inputs_BT.numpy() == tokens_BT[:, :-1]).all()


@given(windows())
def test_positions_and_masks_are_those_of_each_document_alone(tokens_BT: np.ndarray) -> None:
    starts_BT = starts_of(torch.from_numpy(tokens_BT))
    positions_BT, mask_B1TT = document_positions(starts_BT), attends(starts_BT)
    for row, tokens in enumerate(tokens_BT.tolist()):
        begin = 0
        for place, token in enumerate(tokens):
            assert positions_BT[row, place] == place - begin
            assert mask_B1TT[row, 0, place].tolist() == [begin <= other <= place for other in range(len(tokens))]
            begin = place + 1 if token == SEPARATOR else begin


@given(windows())
def test_flex_attention_gets_the_same_mask(tokens_BT: np.ndarray) -> None:
    starts_BT = starts_of(torch.from_numpy(tokens_BT))
    mask = block_mask(starts_BT)
    samples, length = starts_BT.shape
    places = torch.arange(length)
    for sample in range(samples):
        found_TT = mask.mask_mod(torch.tensor(sample), torch.tensor(0), places[:, None], places[None, :])
        assert torch.equal(found_TT, attends(starts_BT)[sample, 0])


@pytest.mark.filterwarnings("ignore")  # flex attention warns where it is not compiled
def test_flex_attention_computes_the_same() -> None:
    starts_BT = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) < 0.2
    starts_BT[:, 0] = True
    drawn = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(2, heads, 40, 16, generator=drawn) for heads in (4, 2, 2))
    documents = documents_of(starts_BT)
    assert isinstance(documents.mask, torch.Tensor)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=documents.mask, enable_gqa=True
    )
    found = flex_attention_of(query, key, value, block_mask(starts_BT), grouped=True)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_compiled_model_gets_a_block_mask_in_one_graph(monkeypatch: pytest.MonkeyPatch, checkpointing: bool) -> None:
    """As on CUDA: torch traces the whole of it, and refuses only to run its backward on a CPU."""
    torch._dynamo.reset()
    counters.clear()

    def documents(starts_BT: torch.Tensor) -> Documents:
        if not torch.compiler.is_compiling():
            return documents_of(starts_BT)
        return Documents(document_positions(starts_BT), block_mask(starts_BT))

    monkeypatch.setattr(llama, "documents_of", documents)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    shape = ModelShape(64, 64, 2, 4, 2, 96)
    model = SpanModel(BuiltInArchitecture(shape).span_definition(Span(0, 3), checkpointing), torch.device("cpu"))
    model.weights_E.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(model.run, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        tokens_BT = torch.randint(0, 64, (2, 160), generator=torch.Generator().manual_seed(seed))
        starts_BT = starts_of(tokens_BT)
        gradients = []
        for run in (model.run, compiled):
            model.zero_gradients()
            logits_BTV = run(tokens_BT, starts_BT)
            logits_BTV.square().mean().backward()
            gradients.append((logits_BTV.detach(), model.gradients_E.clone()))
        torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1  # for all micro-batches


# --- what is refused --------------------------------------------------------------------------------------


class _Tokenizer(ByteTokenizer):
    def __init__(self, *separator: int) -> None:
        self.separator = separator  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("separator", "words"), [((), "has no separator"), ((1, 2), "has a separator of 2 tokens")], ids=["none", "two"]
)
def test_a_tokenizer_must_end_documents_with_one_token(separator: tuple[int, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        document_separator(document_spec().data, _Tokenizer(*separator))
    assert document_separator(document_spec(masks=False).data, _Tokenizer(*separator)) is None
    assert document_separator(document_spec().data, ByteTokenizer()) == 0


def test_a_file_of_tokens_must_have_separators() -> None:
    check_separated(np.array([1, 2, 0]), 0, "file")
    with pytest.raises(CorpusError, match="file does not contain the token 0"):
        check_separated(np.array([1, 2]), 0, "file")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "mixtral", "qwen3_moe"])
def test_families_whose_blocks_keep_documents_apart_are_accepted(family: str) -> None:
    HuggingFaceArchitecture(config_of(family)).check_document_masks()


def test_families_whose_blocks_carry_a_state_across_documents_are_refused() -> None:
    import transformers

    shape = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    for config in (
        transformers.MambaConfig(**shape),  # no attention at all
        transformers.Lfm2Config(**shape, **heads, layer_types=["conv", "full_attention"]),
        transformers.GptOssConfig(**shape, **heads, head_dim=8),  # its body does not look at positions
    ):
        with pytest.raises(UnsupportedModel, match="cannot be trained with document_masks"):
            HuggingFaceArchitecture(config).check_document_masks()
