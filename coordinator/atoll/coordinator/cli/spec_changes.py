"""`--set` and `--unset`: a copy of a run's spec with changed keys."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from atoll.core.errors import UsageError

_EXAMPLE = "for example: --set optimizer.weight_decay=0.1"


def changed_spec(
    spec_toml: str,
    name: str,
    changes: Sequence[str],
    defaults: Sequence[str],
    fork: Mapping[str, str | int] | None = None,
) -> str:
    """The spec under another name: `changes` set, `defaults` not given; with `fork`, a fork of that round.

    Raises `UsageError`, `RunSpecError`.
    """
    from atoll.core.run_spec import check_run_spec  # imports pydantic

    document = tomllib.loads(spec_toml)
    document["run"]["name"] = name
    if fork is not None:
        document["fork"] = dict(fork)
    for path in defaults:
        if path.strip() == "fork" and fork is None:
            if document.pop("fork", None) is None:
                raise UsageError("that run is no fork: it begins with new weights", "leave out --unset fork")
            continue
        section, key = _section(document, path), path.strip().rpartition(".")[2]
        if key not in section:
            raise UsageError(f"the spec has no key {path.strip()!r}", "see `atollctl run show`")
        del section[key]
    for change in changes:
        if change.partition("=")[0].strip().split(".") == ["run", "name"]:
            raise UsageError("the name of the new run is the second argument", "leave out --set run.name")
        if fork is not None and change.strip().partition(".")[0] == "fork":
            told = change.partition("=")[0].strip()
            raise UsageError("where the new run begins is named by RUN and --from", f"leave out --set {told}")
        set_key(document, change)
    return check_run_spec(document, "the changed spec").resolved_toml()


def set_key(document: dict[str, Any], change: str) -> None:
    """Set a key of a spec: `SECTION.KEY=VALUE`. Raises `UsageError`."""
    path, equals, value = change.partition("=")
    if not (equals and value.strip()):
        raise UsageError(f"{change!r} is not SECTION.KEY=VALUE", _EXAMPLE)
    _section(document, path)[path.strip().rpartition(".")[2]] = _value(value.strip())


def _section(document: dict[str, Any], path: str) -> dict[str, Any]:
    """The table of a dotted key; created if it is missing."""
    *names, key = path.strip().split(".")
    table: Any = document
    for name in names:
        table = table.setdefault(name, {}) if isinstance(table, dict) else None
    if not (names and key and all(names) and isinstance(table, dict)):
        raise UsageError(f"{path!r} does not name a key of a section", _EXAMPLE)
    return table


def _value(text: str) -> object:
    try:
        read = tomllib.loads(f"value = {text}")
        return read["value"] if len(read) == 1 else text
    except tomllib.TOMLDecodeError:
        return text  # a word without quotes
