"""`atoll data`: build a corpus from text, and show, verify and sample one."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.core.cli import local_path
from atoll.core.errors import CorpusError, UsageError
from atoll.core.output import Output, OutputOption, print_json, print_to_stderr
from atoll.core.units import bytes_text, count_text
from atoll.node.cli.data_progress import ShowProgress, progress_on_stderr

if TYPE_CHECKING:
    from atoll.node.data.build import BuildProgress, BuiltCorpus
    from atoll.node.data.build_spec import BuildSpec
    from atoll.node.data.card import CorpusCard
    from atoll.node.data.sample import SampleText

app = typer.Typer(help="Build a corpus from text; show, verify and sample a corpus.", no_args_is_help=True)
_SHOWN_PROBLEMS = 20


class Format(StrEnum):
    """Formats of input text."""

    TEXT = "text"
    JSONL = "jsonl"
    PARQUET = "parquet"
    HUGGINGFACE = "huggingface"


class Order(StrEnum):
    """Orders of documents in a corpus."""

    SHUFFLED = "shuffled"
    INPUT = "input"


Workers = Annotated[
    int | None,
    typer.Option("--workers", min=1, max=4096, help="Number of worker processes; default: one for each core."),
]
ChatTemplate = Annotated[
    str | None, typer.Option("--chat-template", help="File of a chat template; default: the tokenizer's.")
]
TokenizerName = Annotated[
    str | None, typer.Option("--tokenizer", help="bytes, or a Hugging Face tokenizer's name or path.")
]
Corpus = Annotated[Path, typer.Argument(callback=local_path, help="Directory of a corpus.", show_default=False)]


@app.callback()
def group() -> None:
    """Build a corpus from text; show, verify and sample a corpus."""


@app.command()
def build(
    what: Annotated[
        str,
        typer.Argument(
            metavar="SPEC|PATH", help="A build spec (.toml), or text: a file, directory or glob.", show_default=False
        ),
    ],
    to: Annotated[Path, typer.Option("--to", callback=local_path, help="Directory of the corpus.", show_default=False)],
    source: Annotated[Format | None, typer.Option("--source", help="Format of the text; default: text.")] = None,
    field: Annotated[str | None, typer.Option("--field", help="Column or key of the text; default: text.")] = None,
    messages: Annotated[str | None, typer.Option("--messages", help="Column or key of conversations.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Column or key of prompts.")] = None,
    completion: Annotated[str | None, typer.Option("--completion", help="Column or key of completions.")] = None,
    chat_template: ChatTemplate = None,
    tokenizer: TokenizerName = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the source; default: text.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed of the order; default: 0.")] = None,
    order: Annotated[Order | None, typer.Option("--order", help="Order of documents; default: shuffled.")] = None,
    workers: Workers = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first unusable line.")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Delete an unfinished build in the directory, and begin again.")
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Turn text into a corpus of shards. Repeat the command to continue an interrupted build."""
    from atoll.node.data.build import build_corpus
    from atoll.node.system.child_processes import treat_sigterm_as_sigint

    options = {
        "source": source,
        "field": field,
        "messages": messages,
        "prompt": prompt,
        "completion": completion,
        "chat_template": chat_template,
        "tokenizer": tokenizer,
        "name": name,
        "seed": seed,
        "order": order,
    }
    spec = _spec_of(what, {key: value for key, value in options.items() if value is not None})
    treat_sigterm_as_sigint()
    try:
        with progress_on_stderr("tokenising") as show:
            built = build_corpus(
                spec,
                to.expanduser(),
                workers=workers,
                strict=strict,
                restart=restart,
                on_progress=lambda progress: _show_build(show, progress),
            )
    except KeyboardInterrupt:
        print_to_stderr("stopped: repeat the command to go on where it stopped")
        raise
    _report_built(built, to, output)


@app.command()
def show(
    corpus: Annotated[str, typer.Argument(metavar="DIR|URL", help="Directory or URL of a corpus.", show_default=False)],
    output: OutputOption = Output.TEXT,
) -> None:
    """Show what a corpus contains."""
    from atoll.node.data.card import card_digest, summary
    from atoll.node.data.corpus_files import fetch_card

    card, data = fetch_card(corpus)
    if output is Output.JSON:
        print_json({"corpus": {"digest": card_digest(data), **summary(card)}})
    else:
        _print_card(card, card_digest(data))


@app.command()
def verify(corpus: Corpus, workers: Workers = None, output: OutputOption = Output.TEXT) -> None:
    """Check every file of a corpus against its card. The command exits with 78 if a file is wrong."""
    from atoll.node.data.card import card_digest
    from atoll.node.data.corpus_files import read_card
    from atoll.node.data.verify import verify_corpus

    directory = corpus.expanduser()
    card, data = read_card(directory)
    with progress_on_stderr("verifying") as show_progress:
        wrong = verify_corpus(directory, card, workers, lambda done, everything: show_progress(done, everything, ""))
    if output is Output.JSON:
        print_json({"verify": {"digest": card_digest(data), "wrong": wrong}})
    if wrong:
        for problem in wrong[1:_SHOWN_PROBLEMS]:
            print_to_stderr(f"{directory}/{problem}")
        raise CorpusError(
            f"{directory}/{wrong[0]}" + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""),
            "copy the named files again, or build the corpus again",
        )
    if output is Output.TEXT:
        print_to_stderr("all files are as the card says:")
        typer.echo(card_digest(data))


@app.command()
def sample(
    corpus: Corpus,
    source: Annotated[str | None, typer.Option("--source", help="Sample only from this source.")] = None,
    count: Annotated[int, typer.Option("-n", "--count", min=1, max=10_000, help="Number of windows to print.")] = 3,
    tokens: Annotated[int, typer.Option("--tokens", min=1, max=1 << 20, help="Number of tokens in a window.")] = 256,
    seed: Annotated[int, typer.Option("--seed", help="Another seed shows other windows.")] = 0,
    output: OutputOption = Output.TEXT,
) -> None:
    """Print the text of random windows."""
    from atoll.node.data.corpus_files import read_card
    from atoll.node.data.sample import sample_texts

    directory = corpus.expanduser()
    card, _ = read_card(directory)
    found = list(sample_texts(directory, card, source, count, tokens, seed))
    if output is Output.JSON:
        print_json({"samples": [_sample_values(one) for one in found]})
        return
    for one in found:
        typer.echo(f"--- {one.source}, shard {one.shard}, token {one.token:,}")
        typer.echo("".join(_shown(text) if trained else text for trained, text in one.parts) or one.text)


def _shown(trained: str) -> str:
    """Show text that is trained in brackets, and bold on a terminal."""
    return typer.style(f"⟦{trained}⟧", bold=True)


def _sample_values(sample: SampleText) -> dict[str, object]:
    values = vars(sample) | {"parts": [{"trained": trained, "text": text} for trained, text in sample.parts]}
    return values if sample.parts else {key: value for key, value in values.items() if key != "parts"}


def _spec_of(what: str, given: dict[str, Any]) -> BuildSpec:
    """Read a build spec, or return that of a corpus with one source. Raises `BuildSpecError`, `UsageError`."""
    from atoll.node.data.build_spec import read_build_spec, spec_of_one_source

    if what.endswith(".toml"):
        if given:
            raise UsageError(
                f"--{next(iter(given)).replace('_', '-')} cannot be combined with a build spec",
                "set it in the spec, or name the text itself",
            )
        return read_build_spec(Path(what).expanduser())
    values = {key: str(value) if isinstance(value, StrEnum) else value for key, value in given.items()}
    path = what if values.get("source") == Format.HUGGINGFACE else str(Path(what).expanduser())
    return spec_of_one_source(path, values)


def _show_build(show: ShowProgress, progress: BuildProgress) -> None:
    if progress.phase == "plan":
        return
    told = f"{count_text(progress.tokens)} tokens, {progress.shards} shard{'' if progress.shards == 1 else 's'}"
    show(progress.bytes_done, progress.bytes_all, told)


def _report_built(built: BuiltCorpus, to: Path, output: Output) -> None:
    for name, report in built.reports.items():
        if left_out := report.left_out():
            print_to_stderr(f"{name}: {left_out}")
    if output is Output.JSON:
        from atoll.node.data.card import summary

        print_json({"corpus": {"directory": str(to), "digest": built.digest, **summary(built.card)}})
        return
    print_to_stderr(f"{count_text(built.card.tokens)} tokens in {count_text(built.card.documents)} documents; digest:")
    typer.echo(built.digest)


def _print_card(card: CorpusCard, digest: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("source")
    for column in ("tokens", *(["targets"] if card.marks else []), "documents", "shards", "bytes"):
        table.add_column(column, justify="right")
    for source in card.sources:
        size = bytes_text(source.tokens * card.token_bytes)
        counts = [source.tokens, *([source.targets] if card.marks else []), source.documents, len(source.shards)]
        table.add_row(source.name, *(f"{count:,}" for count in counts), size)
    console = Console()
    console.print(f"corpus {digest}", highlight=False, soft_wrap=True)
    console.print(table)
    console.print(
        f"tokenizer {card.tokenizer.name}: {card.tokenizer.vocabulary:,} tokens, digest {card.tokenizer.digest}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    if card.left_out:
        told = ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in card.left_out.items())
        console.print(f"left out: {told}", markup=False, highlight=False, soft_wrap=True)
