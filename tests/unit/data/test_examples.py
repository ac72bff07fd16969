"""Of instruction data, the answers and their ends of turn are trained, token by token, and nothing else."""

from __future__ import annotations

import time
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from support.chats import CHATML, END_OF_TURN, KINDS, library, save, talk  # noqa: E402

from atoll.core.errors import ConfigError, CorpusError  # noqa: E402
from atoll.node.data import chat_template  # noqa: E402
from atoll.node.data.chat_template import ChatFormat, ChatTemplate, TooLong, Unusable  # noqa: E402
from atoll.node.data.corpus_tokenizer import TokenizerUse, save_tokenizer  # noqa: E402
from atoll.node.data.examples import Encoded, ExampleEncoder, ExampleLength, example_parts  # noqa: E402
from atoll.node.data.row_values import Conversation, Pair  # noqa: E402
from atoll.node.data.source_report import SourceReport  # noqa: E402
from atoll.node.model.tokenizer import ByteTokenizer, HuggingFaceTokenizer  # noqa: E402

CHAT = TokenizerUse(answers=True, chat=True)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0\ufdd0\ufdd1\ufdd2", exclude_categories=["Cs"]))
WORD = st.one_of(
    TEXT, st.sampled_from(["yes", "a question", " about tides ", "<|im_end|>", "</s>", "a<|eot_id|>b", "\n"])
)
TURNS = st.lists(WORD, min_size=2, max_size=7)


def place() -> str:
    return "line 7 of talks.jsonl"


@cache
def encoder(kind: str) -> ExampleEncoder:
    tokenizer = HuggingFaceTokenizer.__new__(HuggingFaceTokenizer)
    tokenizer._tokenizer, tokenizer.name = library(kind), kind
    tokenizer.vocabulary, tokenizer.separator = len(tokenizer.library), (tokenizer.library.eos_token_id,)
    return ExampleEncoder(tokenizer, format_of(kind))


@cache
def format_of(kind: str) -> ChatFormat:
    template, named, others = KINDS[kind]
    return ChatFormat(template, tuple(sorted(named.items())), tuple(sorted({*named.values(), *others})))


def encode(kind: str, messages: list[dict[str, Any]]) -> Encoded:
    return encoder(kind).encode(Conversation(tuple(messages), place))


def trained(kind: str, found: Encoded) -> list[str]:
    """The text of each run of targets."""
    runs = groupby(zip(found.tokens.tolist(), found.is_target.tolist(), strict=True), key=lambda each: each[1])
    return [encoder(kind).tokenizer.decode([token for token, _ in run]) for target, run in runs if target]


def spelt(kind: str, found: Encoded) -> list[str]:
    """How each token is spelt, targets in brackets."""
    words = encoder(kind).tokenizer.library.convert_ids_to_tokens(found.tokens.tolist())
    return [f"[{word}]" if target else word for word, target in zip(words, found.is_target, strict=True)]


def test_chatml_token_by_token() -> None:
    found = encode("chatml", talk("yes", "no", "a", "the", system="the"))
    assert spelt("chatml", found) == [
        *("<|im_start|>", "s", "y", "s", "t", "e", "m", "Ċ", "the", "<|im_end|>", "Ċ"),
        *("<|im_start|>", "user", "Ċ", "yes", "<|im_end|>", "Ċ"),
        *("<|im_start|>", "assistant", "Ċ", "[no]", "[<|im_end|>]", "Ċ"),
        *("<|im_start|>", "user", "Ċ", "a", "<|im_end|>", "Ċ"),
        *("<|im_start|>", "assistant", "Ċ", "[the]", "[<|im_end|>]", "Ċ"),
    ]


def test_llama_3_token_by_token_with_one_bos() -> None:
    found = encode("llama3", talk("yes", "no", "a", " the ", system="the"))
    header = ("<|start_header_id|>", "assistant", "<|end_header_id|>", "Ċ", "Ċ")
    user = ("<|start_header_id|>", "user", "<|end_header_id|>", "Ċ", "Ċ")
    words = spelt("llama3", found)
    assert words == [
        *("<|begin_of_text|>", "<|start_header_id|>", "s", "y", "s", "t", "e", "m", "<|end_header_id|>", "Ċ", "Ċ"),
        *("the", "<|eot_id|>", *user, "yes", "<|eot_id|>", *header, "[no]", "[<|eot_id|>]"),
        *(*user, "a", "<|eot_id|>", *header, "[the]", "[<|eot_id|>]"),
    ]


def test_mistral_token_by_token_with_one_bos() -> None:
    found = encode("mistral", talk("yes", "no", "a", "the", system="the"))
    assert spelt("mistral", found) == [
        *("<s>", "[INST]", "Ġthe", "Ċ", "Ċ", "yes", "Ġ", "[/INST]", "[Ġno]", "[</s>]"),
        *("[INST]", "Ġa", "Ġ", "[/INST]", "[Ġthe]", "[</s>]"),
    ]


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(sorted(KINDS)), TURNS, st.booleans())
def test_what_is_trained_are_the_answers_and_their_ends_of_turn(kind: str, turns: list[str], system: bool) -> None:
    messages = talk(*turns, system="be <|im_end|> brief" if system else "")
    found = encode(kind, messages)
    answers = [each["content"] for each in messages if each["role"] == "assistant"]
    if kind == "llama3":
        answers = [answer.strip() for answer in answers]
    lead = " " if kind == "mistral" else ""
    # an answer of nothing but white space and spellings of special tokens teaches nothing
    special = format_of(kind).special
    expected = [f"{lead}{each}{END_OF_TURN[kind]}" for each in answers if blank_without(special, each).strip()]
    assert "".join(trained(kind, found)) == "".join(expected)
    text = encoder(kind)._template.render(messages, place).text  # type: ignore[union-attr]
    assert encoder(kind).tokenizer.decode(found.tokens.tolist()) == text


def blank_without(special: tuple[str, ...], text: str) -> str:
    for each in special:
        text = text.replace(each, "")
    return text


def test_special_tokens_that_messages_spell_are_text() -> None:
    found = encode("chatml", talk("a<|im_end|>b", "no<|im_end|><|im_start|>yes"))
    end = encoder("chatml").tokenizer.library.convert_tokens_to_ids("<|im_end|>")
    assert found.tokens.tolist().count(end) == 2
    assert trained("chatml", found) == ["no<|im_end|><|im_start|>yes<|im_end|>"]


def test_special_tokens_that_a_template_joins_from_parts_or_keys_are_text() -> None:
    joins = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {% for part in m.content %}{{ part.text }}{% endfor %}"
        "{{ m.call | tojson }}{{ m.call | tojson(ensure_ascii=true) }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    own = encoder("chatml")
    special = {own.tokenizer.library.convert_tokens_to_ids(each) for each in ("<|im_end|>", "<|im_start|>")}
    changed = ExampleEncoder(own.tokenizer, ChatFormat(joins, (), format_of("chatml").special))
    for first, second in (
        ("a<|im_", "end|>b"),
        ("a<", "|im_end|>"),
        ("<|im_end|", ">"),
        ("<", "b"),
        ("", "<|im_start|>"),
    ):
        parts = [{"text": first}, {"text": second}]
        messages = [
            {"role": role, "content": parts, "call": {"<|im_end|>": "<|im_start|>"}} for role in ("user", "assistant")
        ]
        found = changed.encode(Conversation(tuple(messages), place))
        assert sum(token in special for token in found.tokens.tolist()) == 4, (first, second)
        text = own.tokenizer.decode(found.tokens.tolist())
        assert "ufdd" not in text
        assert text.count(first + second) >= 2


def test_spaces_around_answers_count_where_a_tokenizer_trims_what_it_tells() -> None:
    from tokenizers import processors

    own = encoder("chatml").tokenizer
    trimming = HuggingFaceTokenizer.__new__(HuggingFaceTokenizer)
    trimming.__dict__.update(own.__dict__)
    trimming._tokenizer = library.__wrapped__("chatml") if hasattr(library, "__wrapped__") else library("chatml")
    trimming._tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trims = ExampleEncoder(trimming, None)
    for prompt, completion in (("Q:", "ok  "), ("def f():\n    ", "   return"), ("a ", " b ")):
        found = trims.encode(Pair(prompt, completion, place))
        plain = encoder("chatml").encode(Pair(prompt, completion, place))
        assert found.is_target.tolist() == plain.is_target.tolist()
        assert found.tokens.tolist() == plain.tokens.tolist()


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in messages %}" * 25 + "{% endfor %}" * 25,
        "{% macro f(a, a) %}{% endmacro %}",
        "{% break %}",
        "{{ cycler() }}",
        "{{ messages[0].content | truncate(1) }}",
        "{{ raise_exception }}",
        "{{ messages[0].items }}",
    ],
)
def test_a_template_that_fails_in_any_way_is_unusable(source: str) -> None:
    with pytest.raises((Unusable, ConfigError)):
        ChatTemplate(ChatFormat(source, (), ())).render(talk("a", "b"), place)


def test_a_comment_about_generation_tags_is_none() -> None:
    commented = "{# {% generation %} #}" + CHATML
    found = ChatTemplate(ChatFormat(commented, (), format_of("chatml").special)).render(talk("a", "b"), place)
    assert [found.text[start:end] for start, end in found.answers] == ["b<|im_end|>"]


def test_a_template_that_takes_a_little_too_long_many_times_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CONVERSATION_SECONDS", -1.0)
    with pytest.raises(ConfigError, match="processor time for line 7"):
        ChatTemplate(format_of("chatml")).render(talk("a", "b"), place)


def test_a_conversation_that_takes_many_long_renders_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARACTERS", 10_000)
    template = ChatTemplate(format_of("chatml"))
    template.render(talk(*["a", "b"] * 5), place)
    with pytest.raises(TooLong):
        template.render(talk(*["a", "b"] * 50), place)


def test_other_roles_are_the_templates_business() -> None:
    tool = {"role": "tool", "content": "the tide is high"}
    messages = [*talk("the tide?", "I look"), tool, {"role": "assistant", "content": "high"}]
    assert trained("chatml", encode("chatml", messages)) == ["I look<|im_end|>", "high<|im_end|>"]
    with pytest.raises(Unusable, match="roles must alternate"):
        encode("mistral", messages)


def test_an_empty_answer_is_not_trained() -> None:
    for kind in KINDS:
        assert trained(kind, encode(kind, talk("a", "", "b", "yes")))[-1].strip() == f"yes{END_OF_TURN[kind]}"
        assert len(trained(kind, encode(kind, talk("a", "", "b", "yes")))) == 1
        assert not encode(kind, talk("a", " ")).is_target.any()


def test_templates_that_rewrite_earlier_turns_are_unusable_without_generation_tags() -> None:
    last_only = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% else %}{{ m.content.split('#')[-1] }}{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    template = ChatTemplate(ChatFormat(last_only, (), ("<|im_end|>", "<|im_start|>")))
    assert template.render(talk("a", "think#b"), place).answers
    with pytest.raises(Unusable, match="rendered differently once more messages follow message 2"):
        template.render(talk("a", "think#b", "c", "d"), place)


def test_tokens_that_reach_into_an_answer_or_beyond_it_are_trained() -> None:
    asks = "{% if add_generation_prompt %}assistant:{% endif %}"
    plain = "{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}" + asks
    answer = "{% if m.role == 'assistant' %}th{% generation %}{{ m.content }}{% endgeneration %}d no{% endif %}"
    marks = "{% for m in messages %}" + answer + "{% endfor %}"
    tokenizer = encoder("chatml").tokenizer
    straddles = ExampleEncoder(tokenizer, ChatFormat(marks, (), ()))
    found = straddles.encode(Conversation(tuple(talk("x", "e an")), place))
    words = tokenizer.library.convert_ids_to_tokens(found.tokens.tolist())  # type: ignore[attr-defined]
    assert list(zip(words, found.is_target.tolist(), strict=True)) == [("the", True), ("Ġand", True), ("Ġno", False)]
    whole = ExampleEncoder(tokenizer, ChatFormat(plain, (), ())).encode(Conversation(tuple(talk("x", "no")), place))
    assert tokenizer.decode(whole.tokens[whole.is_target].tolist()) == "no;"


HOSTILE = {
    "dunder": "{{ messages.__class__ }}",
    "dunder by item": "{{ ''['__class__'].__mro__ }}",
    "dunder by filter": "{{ (messages|attr('__class__')).mro() }}",
    "set on a namespace": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "a power": "{{ 10 ** 10 ** 10 }}",
    "a huge string": "{{ 'a' * 10000000000 }}",
    "a wide field": "{{ 'a' | center(10000000000) }}",
    "a format": "{{ '%09999999999d' % 1 }}",
    "a growing text": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_hostile_templates_are_refused(source: str) -> None:
    begun = time.process_time()
    with pytest.raises((ConfigError, Unusable)):
        ChatTemplate(ChatFormat(source, (), ())).render(talk("a", "b"), place)
    assert time.process_time() - begun < chat_template.RENDER_SECONDS


def test_attributes_of_python_are_refused_before_any_text_is_read() -> None:
    with pytest.raises(ConfigError, match="sandbox forbids"):
        ChatTemplate(ChatFormat("{{ messages.__class__ }}", (), ()))


def test_an_endless_loop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.3)
    loops = "{% for a in range(99999) %}" * 9 + "{% endfor %}" * 9
    begun = time.process_time()
    with pytest.raises(ConfigError, match=r"takes more than .* of processor time for line 7 of talks\.jsonl"):
        ChatTemplate(ChatFormat(loops, (), ())).render(talk("a", "b"), place)
    assert time.process_time() - begun < 3


def test_endless_output_ends() -> None:
    with pytest.raises(TooLong):
        ChatTemplate(ChatFormat("{% for a in range(99999) %}" * 2 + "abcdefgh" + "{% endfor %}" * 2, (), ())).render(
            talk("a", "b"), place
        )


def test_equal_input_gives_equal_text() -> None:
    for source in ("{{ strftime_now('%d') }}", "{{ lipsum() }}"):
        with pytest.raises(Unusable, match="undefined"):
            ChatTemplate(ChatFormat(source, (), ())).render(talk("a", "b"), place)
    with pytest.raises(ConfigError, match="no Jinja template"):
        ChatTemplate(ChatFormat("{{ [1, 2] | random }}", (), ()))


def parts(
    examples: list[Pair | Conversation], kind: str, length: ExampleLength, strict: bool = False
) -> tuple[Any, ...]:
    report = SourceReport()
    found = [array for array, _ in example_parts(examples, encoder(kind), length, report, strict)]
    return found, report


def test_what_is_left_out_is_counted_by_kind_and_named() -> None:
    talks = [
        talk("a", "yes"),
        talk("a", ""),
        talk("a"),
        talk("a " * 99, "yes"),
        talk("x", "yes " * 99),
        talk("a", "no"),
    ]
    examples = [Conversation(tuple(each), lambda n=n: f"line {n}") for n, each in enumerate(talks, 1)]  # type: ignore[misc]
    found, report = parts(examples, "chatml", ExampleLength(60))
    assert len(found) == report.documents == 2
    assert (report.unanswered_examples, report.long_examples, report.cut_examples) == (2, 2, 0)
    assert report.left_out() == (
        "2 examples without an answer left out (the first is line 2); "
        "2 examples left out as too long (the first is line 4)"
    )
    found, report = parts(examples, "chatml", ExampleLength(60, cuts=True))
    assert (len(found), max(map(len, found))) == (3, 60)
    assert (report.unanswered_examples, report.long_examples, report.cut_examples) == (2, 1, 1)
    assert SourceReport.from_dict(report.to_dict()) == report


def test_an_unusable_conversation_is_named_or_stops_the_build() -> None:
    examples = [Conversation(tuple(talk("a", "yes")[::-1]), place), Conversation(tuple(talk("a", "yes")), place)]
    found, report = parts(examples, "mistral", ExampleLength())
    assert (len(found), report.bad_lines) == (1, 1)
    assert "line 7 of talks.jsonl: cannot be rendered by the chat template: roles must" in report.left_out()
    with pytest.raises(CorpusError, match=r"line 7 of talks\.jsonl cannot be rendered"):
        parts(examples, "mistral", ExampleLength(), strict=True)


@pytest.mark.parametrize("kind", ["chatml", "bytes"])
def test_completions_are_trained_with_the_separator(kind: str) -> None:
    tokenizer: Any = ByteTokenizer() if kind == "bytes" else encoder(kind).tokenizer
    made = ExampleEncoder(tokenizer, None)
    found = made.encode(Pair("naïve? ", "yes 🙂 <|im_end|>", place))
    end = len(found.tokens) - 1
    assert tokenizer.decode(found.tokens[found.is_target][:-1].tolist()).strip() == "yes 🙂 <|im_end|>"
    assert tokenizer.decode(found.tokens[:end].tolist()) == "naïve? yes 🙂 <|im_end|>"
    assert found.tokens[end] == tokenizer.separator[0]
    assert not (found.tokens[:end] == tokenizer.separator[0]).any()
    assert not made.encode(Pair("a", " \n", place)).is_target.any()


def test_bytes_need_a_template_of_ones_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'bytes' has no chat template") as refused:
        save_tokenizer("bytes", tmp_path, use=CHAT)
    assert "chat_template" in refused.value.remedy
    asks = "{% if add_generation_prompt %}assistant: {% endif %}"
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}" + asks
    saved = save_tokenizer("bytes", tmp_path, use=TokenizerUse(answers=True, chat=True, template=template))
    found = ExampleEncoder(ByteTokenizer(), saved.chat).encode(Conversation(tuple(talk("é", "ü")), place))
    assert bytes(found.tokens[found.is_target].astype("u1")) == "ü\0".encode()


def test_a_template_of_ones_own_replaces_the_tokenizers_and_goes_with_the_corpus(tmp_path: Path) -> None:
    name = str(save("mistral", tmp_path / "plain", template=None))
    with pytest.raises(ConfigError, match="has no chat template"):
        save_tokenizer(name, tmp_path / "a", use=CHAT)
    saved = save_tokenizer(name, tmp_path / "b", use=TokenizerUse(answers=True, chat=True, template=CHATML))
    assert saved.chat is not None
    assert saved.chat.template == CHATML
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "b").chat_template == CHATML
    assert {"<s>", "</s>", "[INST]", "[/INST]"} == set(saved.chat.special)


def test_a_tokenizer_without_an_end_of_sequence_takes_no_completions(tmp_path: Path) -> None:
    fast = library("chatml")
    fast.eos_token = None
    fast.save_pretrained(tmp_path / "t")
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        save_tokenizer(str(tmp_path / "t"), tmp_path / "a", use=TokenizerUse(answers=True, pairs=True))
    saved = save_tokenizer(str(tmp_path / "t"), tmp_path / "b", use=CHAT)  # the template writes ends of turns
    assert saved.card.separator == ()
