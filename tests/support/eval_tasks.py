"""Tasks of lm-evaluation-harness on local data, as a user would write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_task(folder: Path, name: str, rows: Sequence[Mapping[str, object]], kind: str, *lines: str) -> None:
    """Write NAME.yaml and its data; `rows` are documents, `lines` what is particular to the task."""
    folder.mkdir(exist_ok=True)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = [f"task: {name}", "dataset_path: json", f"dataset_kwargs: {{data_files: {data}}}", "test_split: train"]
    (folder / f"{name}.yaml").write_text("\n".join([*head, f"output_type: {kind}", *lines]) + "\n")


def write_choices(folder: Path, name: str, rows: Sequence[Mapping[str, object]], *lines: str) -> None:
    """Write a multiple-choice task; rows have `question`, `choices` and the number of the `answer`."""
    described = ('doc_to_text: "{{question}}"', "doc_to_target: answer", "doc_to_choice: choices")
    write_task(folder, name, rows, "multiple_choice", *described, 'target_delimiter: ""', *lines)


def write_texts(folder: Path, name: str, texts: Sequence[str]) -> None:
    """Write a task that measures the perplexity of texts."""
    rows = [{"text": text} for text in texts]
    write_task(folder, name, rows, "loglikelihood_rolling", 'doc_to_text: ""', 'doc_to_target: "{{text}}"')


def write_answers(folder: Path, name: str, rows: Sequence[Mapping[str, object]], tokens: int) -> None:
    """Write a task that generates text; rows have `question` and `answer`."""
    described = ('doc_to_text: "{{question}}"', 'doc_to_target: "{{answer}}"')
    generation = (f"generation_kwargs: {{max_gen_toks: {tokens}, until: []}}", "metric_list: [{metric: exact_match}]")
    write_task(folder, name, rows, "generate_until", *described, *generation)
