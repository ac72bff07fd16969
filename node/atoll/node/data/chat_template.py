"""Conversations become text by a tokenizer's chat template (Jinja), with the positions of the answers in the text.

A template comes with a tokenizer, so it is untrusted code. It runs in Jinja's sandbox and within limits of time, memory
and output (`render_limits.py`). It has no clock and no random numbers: equal input gives equal text.

Answers are what stands between the tags `generation` and `endgeneration`, if the template has them. Otherwise the
answer of message i is what the render of the messages up to i has more than the render of those before i with the
prompt for an answer. Both must be beginnings of the render of the whole conversation. White space that follows the last
special token of an answer is the template's, and no part of the answer.

Noncharacters of Unicode, which input cannot contain, mark places while a template runs: the tags, and the inside of
text that spells a special token.
"""

from __future__ import annotations

import json
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from atoll.core.errors import ConfigError
from atoll.node.data.render_limits import TimeExceeded, render_limits
from atoll.node.model.tokenizer import HF_REMEDY

MAX_TEMPLATE_BYTES = 1 << 20
MAX_TEXT_CHARACTERS = 1 << 21  # of one example: its encoding takes about 165 bytes of memory a character
MAX_MESSAGES = 1024
RENDER_SECONDS = 5.0  # of the processor, to render a conversation or its beginning once
CONVERSATION_SECONDS = 60.0  # of the processor, for all renders of one conversation
MAX_RENDERED_CHARACTERS = 1 << 29  # in all renders of one conversation: each answer needs two
RENDER_BYTES = 256 << 20
ASSISTANT = "assistant"
MARKERS = "\ufdd0\ufdd1\ufdd2"
_START, _END, _CUT = tuple(MARKERS)
_MARKER = re.compile(f"[{MARKERS}]")
_MAX_FACTOR_BITS = 4096
_HARMFUL = "do not use this tokenizer's template: name one of your own with chat_template"

Message = Mapping[str, Any]


class Unusable(Exception):
    """A conversation that the template cannot render as text with answers; the message says why."""


class TooLong(Exception):
    """A conversation whose text is longer than `MAX_TEXT_CHARACTERS`."""


@dataclass(frozen=True)
class ChatFormat:
    """A chat template, and the facts about the tokenizer that rendering needs."""

    template: str
    variables: tuple[tuple[str, str], ...]  # bos_token, eos_token, …
    special: tuple[str, ...]  # spellings of all special tokens


@dataclass(frozen=True)
class Rendered:
    """A conversation as text."""

    text: str
    cuts: tuple[int, ...]  # characters inside text that spells a special token but must stay text
    answers: tuple[tuple[int, int], ...]  # characters [start, end) of each answer


class ChatTemplate:
    """A compiled template."""

    def __init__(self, chat: ChatFormat) -> None:
        """Raises `ConfigError` for a template that does not compile, or accesses private attributes."""
        self._chat = chat
        spelt = sorted((each for each in chat.special if len(each) > 1), key=len, reverse=True)
        begun = {each[:length] for each in spelt for length in range(1, len(each))}
        endings = "|".join(map(re.escape, sorted(begun, key=len, reverse=True)))
        self._spelt = re.compile("|".join([*map(re.escape, spelt), rf"(?:{endings})\Z"]) if spelt else "(?!)")
        self._special = re.compile("|".join(map(re.escape, sorted(chat.special, key=len, reverse=True))) or "(?!)")
        try:
            compiled = self._guarded(lambda: _compile(chat.template), lambda: "while it was compiled")
            self._template, self._marks = compiled
        except Unusable as error:
            raise ConfigError(f"the chat template does not compile: {error}", "repair the template") from error

    def render(self, messages: Sequence[Message], place: Callable[[], str]) -> Rendered:
        """Render a conversation. Error messages name it by `place`.

        Raises `Unusable`, `TooLong`, and `ConfigError` for a template that is harmful.
        """
        if len(messages) > MAX_MESSAGES:
            raise Unusable(f"has more than {MAX_MESSAGES} messages")
        protected = [self._protected(message) for message in messages]
        return self._render(_Renders(partial(self._rendered, place), protected, place))

    def _guarded(self, run: Callable[[], Any], when: Callable[[], str]) -> Any:
        """Run a template's code within the limits."""
        try:
            from jinja2.exceptions import SecurityError
        except ImportError as error:
            raise ConfigError("chat templates need the jinja2 library", HF_REMEDY) from error
        try:
            with render_limits(RENDER_SECONDS, RENDER_BYTES):
                return run()
        except TimeExceeded:
            why = f"takes more than {RENDER_SECONDS:.0f} s of processor time"
        except MemoryError:
            why = f"takes more than {RENDER_BYTES >> 20} MiB of memory"
        except SecurityError as error:
            why = f"does what the sandbox forbids ({error})"
        except (Unusable, TooLong, ConfigError):
            raise
        except Exception as error:  # a template's code can raise any exception
            raise Unusable(f"cannot be rendered by the chat template: {_sentence(error)}") from error
        raise ConfigError(f"the chat template {why} {when()}", _HARMFUL)

    def _protected(self, value: Any) -> Any:
        """Mark text that spells a special token, or ends with the beginning of one, so that no encoder finds it."""
        if isinstance(value, str):
            return self._spelt.sub(lambda found: found[0][0] + _CUT + found[0][1:], value)
        if isinstance(value, Mapping):
            return {self._protected(key): self._protected(each) for key, each in value.items()}
        return [self._protected(each) for each in value] if isinstance(value, list) else value

    def _rendered(self, place: Callable[[], str], messages: Sequence[Message], prompt: bool = False) -> str:
        text: str = self._guarded(lambda: self._text(messages, prompt), lambda: f"for {place()}")
        return text

    def _text(self, messages: Sequence[Message], prompt: bool) -> str:
        blocks, size = list[str](), 0
        for block in self._template.generate(
            messages=list(messages),
            add_generation_prompt=prompt,
            tools=None,
            documents=None,
            **dict(self._chat.variables),
        ):
            blocks.append(block)
            size += len(block)
            if size > MAX_TEXT_CHARACTERS:
                raise TooLong
        return "".join(blocks)

    def _render(self, renders: _Renders) -> Rendered:
        marked = _Marked(renders.until(len(renders.messages)))
        if self._marks:
            answers = marked.generated()
        else:
            answers = [self._trimmed(marked.text, *span) for span in self._spans(renders, marked)]
        answered = [span for span in answers if self._special.sub("", marked.text[slice(*span)]).strip()]
        return Rendered(marked.text, tuple(self._cuts(marked)), tuple(answered))

    def _cuts(self, marked: _Marked) -> Iterator[int]:
        """Yield the marked positions inside text that spells a special token; the beginning of one alone is not cut."""
        places = marked.places(_CUT)
        for found in self._special.finditer(marked.text) if places else ():
            first = bisect_left(places, found.start() + 1)
            if first < len(places) and places[first] < found.end():
                yield places[first]

    def _spans(self, renders: _Renders, whole: _Marked) -> Iterator[tuple[int, int]]:
        """Yield the positions of answers, found by rendering the beginnings of the conversation."""
        for number, message in enumerate(renders.messages):
            if message["role"] != ASSISTANT:
                continue
            before = renders.until(number, prompt=True)
            until = whole.marked if number + 1 == len(renders.messages) else renders.until(number + 1)
            if not until.startswith(before):
                raise Unusable(f"gives no prompt for an answer that its answer follows (message {number + 1})")
            if not whole.marked.startswith(until):
                raise Unusable(f"is rendered differently once more messages follow message {number + 1}")
            yield whole.place(len(before)), whole.place(len(until))

    def _trimmed(self, text: str, start: int, end: int) -> tuple[int, int]:
        answer = text[start:end].rstrip()
        ends_turn = any(answer.endswith(special) for special in self._chat.special)
        return start, start + len(answer) if ends_turn else end


class _Renders:
    """Renders the beginnings of one conversation, with a limit on the sum of their time and length."""

    def __init__(
        self,
        render: Callable[[Sequence[Message], bool], str],
        messages: Sequence[Message],
        place: Callable[[], str],
    ) -> None:
        self.messages = messages
        self._render, self._place, self._characters, self._began = render, place, 0, time.process_time()

    def until(self, number: int, prompt: bool = False) -> str:
        """Render the messages before `number`. Raises `TooLong`, and `ConfigError` for a template that does not end."""
        text = self._render(self.messages[:number], prompt)
        if time.process_time() - self._began > CONVERSATION_SECONDS:
            why = (
                f"the chat template takes more than {CONVERSATION_SECONDS:.0f} s of processor time for {self._place()}"
            )
            raise ConfigError(why, _HARMFUL)
        self._characters += len(text)
        if self._characters > MAX_RENDERED_CHARACTERS:
            raise TooLong
        return text


class _Marked:
    """Rendered text, with its markers and without them."""

    def __init__(self, marked: str) -> None:
        self.marked, self.text = marked, _MARKER.sub("", marked)

    @cached_property
    def _markers(self) -> list[int]:
        return [found.start() for found in _MARKER.finditer(self.marked)]

    def place(self, position: int) -> int:
        """Convert a position in the marked text to a position in the text without markers."""
        return position - bisect_left(self._markers, position)

    def places(self, marker: str) -> list[int]:
        return [self.place(at) for at in self._markers if self.marked[at] == marker]

    def generated(self) -> list[tuple[int, int]]:
        """Return the ranges between the tags. Raises `Unusable` if the tags do not come in pairs."""
        tags = [at for at in self._markers if self.marked[at] != _CUT]
        if "".join(self.marked[at] for at in tags) != (_START + _END) * (len(tags) // 2):
            raise Unusable("is rendered with generation tags that do not come in pairs")
        places = [self.place(at) for at in tags]
        return list(zip(places[::2], places[1::2], strict=True))


def _sentence(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:200]


def _compile(source: str) -> tuple[Any, bool]:
    """Compile a template in Jinja's sandbox, with the functions that `transformers` gives templates, except the clock.

    Also return whether it has generation tags.
    """
    from jinja2 import Undefined, nodes
    from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    has_tags = False

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

        def parse(self, parser: Any) -> Any:
            nonlocal has_tags
            next(parser.stream)
            has_tags = True
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return [_written(_START), *body, _written(_END)]

    def _written(marker: str) -> Any:
        return nodes.Output([nodes.TemplateData(marker)])

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" or _is_huge(left) or _is_huge(right):
                raise SecurityError(f"{operator} with large or any numbers")
            return super().call_binop(context, operator, left, right)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def printable(value: Any) -> Any:
        if callable(value) and not isinstance(value, Undefined):  # its text has an address, which differs at each start
            raise TemplateError("writes a function")
        return value

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], finalize=printable
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    del environment.filters["random"], environment.globals["lipsum"]  # equal input must give equal text
    try:
        tree = environment.parse(source)
        for node in tree.find_all((nodes.Getattr, nodes.NSRef)):
            name = str(getattr(node, "attr"))  # noqa: B009  (Jinja's types do not say that both have it)
            if name.startswith("_"):
                raise SecurityError(f"access to the attribute {name!r}")
        return environment.from_string(source), has_tags
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template is no Jinja template: line {error.lineno}: {error.message}", "repair the template"
        ) from error
    except RecursionError as error:
        raise ConfigError("the chat template is nested too deeply", _HARMFUL) from error


def _is_huge(value: Any) -> bool:
    return isinstance(value, int) and value.bit_length() > _MAX_FACTOR_BITS


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace(json.dumps(_CUT)[1:-1], _CUT)  # a marker must stay a single character
