"""Figures of lm-evaluation-harness are those that the model itself gives, computed by hand."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.eval_tasks import write_answers, write_choices, write_texts
from support.exports import MODELS, trained
from support.small_state import stored

from atoll.core.errors import AtollError, NotFound, TaskUnusable, Unreachable
from atoll.node.evaluation.exported_model import open_export
from atoll.node.evaluation.report import Evaluation
from atoll.node.export.huggingface_export import export_huggingface

pytest.importorskip("lm_eval", reason="the extra `eval` is not installed: no figure of lm-evaluation-harness is tested")
pytestmark = pytest.mark.filterwarnings("ignore")  # of some forty libraries

TEXTS = ["Lagune, 礁, 🪸", "a reef is a ring of islands; " * 9]  # the second exceeds the context of 128
QUESTIONS = [("a reef is", [" a ring", " x"]), ("the lagoon", [" is blue", ";", " of sand"]), ("", ["coral", "sand"])]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import datasets

    patch = pytest.MonkeyPatch()
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def reef(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A decoder of Atoll, and its export."""
    torch.manual_seed(3)
    decoder, spec, state = trained(MODELS["tied"])
    directory = tmp_path_factory.mktemp("export") / "out"
    with stored(spec, state) as model:
        export_huggingface(model, directory)
    return decoder, directory


def evaluate(directory: Path, tasks: Path, *names: str, base: Path | None = None, **options: Any) -> Evaluation:
    from atoll.node.evaluation.harness import EvaluationOptions, evaluate_export

    options = {"include": (tasks,), "device": "cpu", "batch_size": 4, **options}
    return evaluate_export(open_export(directory, base), EvaluationOptions(names, **options))


def refusal(directory: Path, tasks: Path, name: str, **options: Any) -> AtollError:
    with pytest.raises(AtollError) as caught:
        evaluate(directory, tasks, name, **options)
    return caught.value


def figures(evaluation: Evaluation) -> dict[str, float | None]:
    return {one.metric: one.value for result in evaluation.results for one in result.metrics}


@torch.no_grad()
def log_likelihood(decoder: Any, context: list[int], continuation: list[int]) -> float:
    """Sum of ln p(continuation | context); logits come from anything that maps tokens [1, T] to [1, T, V]."""
    logits_TV = decoder(torch.tensor([context + continuation]))[0].double().log_softmax(-1)
    places = range(len(context) - 1, len(context) + len(continuation) - 1)
    return sum(float(logits_TV[place, token]) for place, token in zip(places, continuation, strict=True))


def rolling(decoder: Any, tokens: list[int], window: int) -> float:
    """ln p of a whole text after a document's end. Later windows end at the text's end, and score what is new."""
    total = log_likelihood(decoder, [0], tokens[:window])
    for start in range(window, len(tokens), window):
        end = min(start + window, len(tokens))
        first = max(0, end - window - 1)
        total += log_likelihood(decoder, tokens[first:start], tokens[start:end])
    return total


def test_perplexity_is_that_of_atolls_own_decoder(reef, tmp_path):
    decoder, directory = reef
    write_texts(tmp_path, "texts", TEXTS)
    found = evaluate(directory, tmp_path, "texts")
    total = sum(rolling(decoder, list(text.encode()), 128) for text in TEXTS)
    bits = -total / math.log(2) / sum(len(text.encode()) for text in TEXTS)
    assert figures(found)["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert found.truncated_requests == 0, "windows are no loss of context that the task asked for"


def test_choices_are_ranked_as_atolls_own_decoder_ranks_them(reef, tmp_path):
    decoder, directory = reef
    rows = []
    for question, choices in QUESTIONS:
        context = list(question.encode()) or [0]
        likely = [log_likelihood(decoder, context, list(choice.encode())) for choice in choices]
        rows.append({"question": question, "choices": choices, "answer": likely.index(max(likely))})
    rows[1]["answer"] = (rows[1]["answer"] + 1) % 3
    write_choices(tmp_path, "choices", rows, "metadata: {version: 3}")
    (result,) = evaluate(directory, tmp_path, "choices").results
    assert (result.version, result.samples, result.samples_in_all, result.few_shot) == ("3", 3, 3, 0)
    accuracy = result.metrics[0]
    assert (accuracy.metric, accuracy.value) == ("acc", pytest.approx(2 / 3))
    assert accuracy.stderr == pytest.approx(1 / 3)  # sqrt(2/9 · 3/2 / 3)
    (limited,) = evaluate(directory, tmp_path, "choices", limit=1).results
    assert (limited.samples, limited.samples_in_all, limited.metrics[0].value) == (1, 3, 1.0)


def test_text_is_generated_as_by_atolls_own_decoder(reef, tmp_path):
    decoder, directory = reef
    rows = []
    for question in ("a reef is", "the lagoon of"):  # of two lengths, in one batch
        tokens = list(question.encode())
        for _ in range(6):
            with torch.no_grad():
                tokens.append(int(decoder(torch.tensor([tokens]))[0, -1].argmax()))
        answer = bytes(tokens[len(question) :]).split(b"\0")[0].decode("utf-8", errors="replace")
        rows.append({"question": question, "answer": answer})
    write_answers(tmp_path, "answers", [*rows, {"question": "sand", "answer": "no such answer"}], 6)
    assert figures(evaluate(directory, tmp_path, "answers"))["exact_match"] == pytest.approx(2 / 3)


def test_examples_can_be_put_into_prompts(reef, tmp_path):
    _, directory = reef
    rows = [{"question": f"{number}?", "choices": ["a", "b"], "answer": 0} for number in range(4)]
    write_choices(tmp_path, "choices", rows, "fewshot_split: train")
    results = [evaluate(directory, tmp_path, "choices", few_shot=count).results[0] for count in (0, 2)]
    assert [result.few_shot for result in results] == [0, 2]


def test_prompts_that_do_not_fit_are_counted_and_answers_that_do_not_are_refused(reef, tmp_path):
    _, directory = reef
    long = {"question": "a" * 127, "choices": ["yy", "y" * 3], "answer": 0}  # 128 tokens go in, the last only comes out
    write_choices(tmp_path, "prompts", [long])
    assert evaluate(directory, tmp_path, "prompts").truncated_requests == 1
    write_choices(tmp_path, "replies", [{**long, "choices": ["y", "y" * 129]}])
    assert "129 tokens" in str(refusal(directory, tmp_path, "replies"))
    write_answers(tmp_path, "answers", [{"question": "a" * 125, "answer": ""}, {"question": "a", "answer": ""}], 4)
    assert evaluate(directory, tmp_path, "answers").truncated_requests == 1
    write_answers(tmp_path, "novels", [{"question": "a", "answer": ""}], 128)
    assert "maximum sequence length" in str(refusal(directory, tmp_path, "novels"))


def llama(directory: Path, vocabulary: int, **more: object) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=vocabulary, max_position_embeddings=32, initializer_range=0.3, **sizes, **more)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(directory)
    return model


def save_words(directory: Path) -> None:
    """Save a tokenizer of words that begins every text with <s>, as Llama's does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {"</s>": 0, "<s>": 1, "reef": 2, "lagoon": 3}
    made = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(directory)


ORIGIN = {"run": "reef", "round": 7, "manifest": "00", "committed_tokens": 1}


@pytest.mark.parametrize(("origin", "before"), [({"atoll": ORIGIN}, [0]), ({}, [1, 1])])
def test_text_has_the_special_tokens_that_it_had_in_training(tmp_path, origin, before):
    """Nodes add none to a document. Models of others are read as the library reads them: <s> by their tokenizer."""
    torch.manual_seed(4)
    model = llama(tmp_path / "model", 4, **origin)
    save_words(tmp_path / "model")
    write_texts(tmp_path / "tasks", "texts", ["reef lagoon lagoon"])
    found = evaluate(tmp_path / "model", tmp_path / "tasks", "texts")
    context, rest = (before, []) if origin else (before[:1], before[1:])
    expected = log_likelihood(lambda tokens: model(tokens).logits, context, [*rest, 2, 3, 3])
    assert figures(found)["word_perplexity"] == pytest.approx(math.exp(-expected / 3), rel=1e-4)
    assert found.settings["special_tokens"] is not bool(origin)


@pytest.mark.parametrize("ours", [True, False])
def test_adapters_are_evaluated_on_their_base_as_they_were_trained(tmp_path, ours):
    """Adapters of others are read as the library reads them: <s> by their tokenizer."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    model = llama(tmp_path / "base", 4)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.eval().save_pretrained(tmp_path / "adapters")
    save_words(tmp_path / "adapters")
    if ours:
        (tmp_path / "adapters/atoll.json").write_text(json.dumps(ORIGIN))
    context, rest = ([0], []) if ours else ([1], [1])
    write_texts(tmp_path / "tasks", "texts", ["reef lagoon lagoon"])
    found = evaluate(tmp_path / "adapters", tmp_path / "tasks", "texts", base=tmp_path / "base")
    expected = log_likelihood(lambda tokens: adapted(tokens).logits, context, [*rest, 2, 3, 3])
    with adapted.disable_adapter():
        alone = log_likelihood(lambda tokens: adapted(tokens).logits, context, [*rest, 2, 3, 3])
    assert abs(expected - alone) > 0.01
    assert figures(found)["word_perplexity"] == pytest.approx(math.exp(-expected / 3), rel=1e-4)
    assert found.settings["special_tokens"] is not ours


def test_unknown_tasks_and_directories_are_named_with_their_neighbours(reef, tmp_path):
    write_texts(tmp_path, "texts", TEXTS)
    unknown = refusal(reef[1], tmp_path, "text")
    assert isinstance(unknown, NotFound)
    assert "texts" in unknown.remedy
    assert isinstance(refusal(reef[1], tmp_path / "nowhere", "texts"), NotFound)


def test_a_data_set_that_cannot_be_downloaded_is_no_traceback(reef, tmp_path, monkeypatch):
    import datasets

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'reef/texts' on the Hub")

    write_texts(tmp_path, "texts", TEXTS)
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    found = refusal(reef[1], tmp_path, "texts")
    assert isinstance(found, Unreachable)
    assert "reef/texts" in str(found)
    assert "HF_HOME" in found.remedy


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("unsafe_code: true", "code that the model writes"),
        ("metric_list: [{metric: rouge, hf_evaluate: true}]", "the metric 'rouge' is code on the Hugging Face Hub"),
        ("doc_to_texts: x", "doc_to_texts"),
        ("process_docs: !function own.prepare", "KeyError: 'nothing' (own.py, line 2)"),
        ("process_docs: !function own.missing", "own.py"),
        ("process_docs: !function needy.prepare", "needs the package no_such_package"),
    ],
)
def test_a_task_that_cannot_or_must_not_run_says_why(reef, tmp_path, line, told):
    write_choices(tmp_path, "choices", [{"question": "a", "choices": ["b", "c"], "answer": 0}], line)
    (tmp_path / "own.py").write_text("def prepare(documents):\n    return documents[0]['nothing']\n")
    (tmp_path / "needy.py").write_text("import no_such_package\n")
    found = refusal(reef[1], tmp_path, "choices")
    assert isinstance(found, TaskUnusable)
    assert told in str(found)
    assert found.remedy


def test_a_group_counts_the_samples_that_its_figure_is_of(reef, tmp_path):
    for name, answer, count in (("one", 0, 2), ("two", 1, 1)):
        write_choices(tmp_path, name, [{"question": "a", "choices": ["b", "b c"], "answer": answer}] * count)
    write_answers(tmp_path, "text", [{"question": "a", "answer": ""}], 4)
    group = "group: all\ntask: [one, two, text]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    (tmp_path / "all.yaml").write_text(group)
    found = {result.task: result for result in evaluate(reef[1], tmp_path, "all").results}
    assert found.keys() == {"one", "two", "text", "all"}
    assert (found["all"].samples, found["all"].samples_in_all) == (3, None)
    parts = [found[name].metrics[0].value for name in ("one", "two")]
    assert found["all"].metrics[0].value == pytest.approx((2 * parts[0] + parts[1]) / 3)


def test_the_task_in_the_guide_can_be_run(reef, tmp_path):
    guide = (Path(__file__).parents[3] / "docs/guide/checkpoints.md").read_text()
    yaml = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)[0]
    quiz = tmp_path / "quiz.jsonl"
    (tmp_path / "reef_quiz.yaml").write_text(yaml.replace("/srv/quiz.jsonl", str(quiz)))
    quiz.write_text('{"question": "a reef is", "choices": [" a ring", " a fish"], "answer": 0}\n')
    (result,) = evaluate(reef[1], tmp_path, "reef_quiz").results
    assert (result.version, result.samples) == ("1", 1)


def test_data_that_is_missing_is_named(reef, tmp_path):
    write_texts(tmp_path, "texts", TEXTS)
    (tmp_path / "texts.jsonl").unlink()
    assert "texts.jsonl" in str(refusal(reef[1], tmp_path, "texts"))
