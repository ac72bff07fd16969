"""A process that tokenises units for `unit_workers.py`.

Standard input has one JSON object a line: first the tokenizer (a file that `SavedTokenizer` wrote, or a name), then one
unit after the other with the file for its tokens. Standard output has the answers. The process ends with its parent
(`system/child_processes.py`) and at the end of its input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.core.errors import AtollError
from atoll.core.files import data_dir_unusable
from atoll.node.data.encoders import SavedTokenizer
from atoll.node.data.inputs import InputSpec, SourceReport, Unit, read_unit
from atoll.node.data.readers import Piece
from atoll.node.data.tokenise import token_parts
from atoll.node.model.tokenizer import Tokenizer, load_tokenizer

PROGRESS_SECONDS = 1.0
Answer = Callable[..., None]


def unit_from_dict(values: dict[str, Any]) -> Unit:
    """Rebuild a unit from `dataclasses.asdict`."""
    pieces = tuple(Piece(**piece) for piece in values["pieces"])
    return Unit(**values | {"spec": InputSpec(**values["spec"]), "pieces": pieces})


def tokenise_unit(unit: Unit, tokenizer: Tokenizer | SavedTokenizer, path: Path, answer: Answer) -> None:
    """Write the tokens of a unit to a file. Raises the readers' errors, and `DataDirUnusable` for the file."""
    report, told, done = SourceReport(), time.monotonic(), 0

    def tell(tokens: int) -> None:
        nonlocal told, done
        done = tokens
        if time.monotonic() - told > PROGRESS_SECONDS:
            told = time.monotonic()
            answer(tokens=tokens)

    try:
        with path.open("wb") as file:
            for part, _ in token_parts(read_unit(unit, report), tokenizer, tell):
                file.write(part.data)
    except OSError as error:  # the readers convert theirs
        raise data_dir_unusable(path.parent, error) from error
    answer(tokens=done, report=report.to_dict())


def main() -> int:
    """Tokenise until the end of the input."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what libraries print is no answer

        def answer(**values: Any) -> None:
            answers.write(json.dumps(values) + "\n")
            answers.flush()

        try:
            first = json.loads(sys.stdin.readline())
            saved = first["saved_tokenizer"]
            tokenizer = SavedTokenizer.load(Path(saved)) if saved else load_tokenizer(first["tokenizer"])
            answer(ready=True)
            for line in sys.stdin:
                job = json.loads(line)
                tokenise_unit(unit_from_dict(job["unit"]), tokenizer, Path(job["path"]), answer)
        except AtollError as error:
            answer(error=error.reason, message=str(error), remedy=error.remedy)
            return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
