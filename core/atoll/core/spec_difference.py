"""Differences between run specs, key by key. Pure.

Resolved specs are compared: a default that is written out equals one that is not.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence

from atoll.core.run_spec import parse_run_spec

_NAME = "run.name"  # always differs


def spec_differences(specs: Sequence[str]) -> dict[str, tuple[object, ...]]:
    """Return the keys that differ, each with its value in each of `specs` (TOML); None if a spec lacks the key.

    The values are in the order of the specs. Raises `RunSpecError`.
    """
    found = [dict(_leaves(tomllib.loads(parse_run_spec(text).resolved_toml()))) for text in specs]
    keys = dict.fromkeys(key for leaves in found for key in leaves if key != _NAME)
    told = {key: tuple(leaves.get(key) for leaves in found) for key in keys}
    return {key: values for key, values in told.items() if any(value != values[0] for value in values[1:])}


def _leaves(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield dotted keys and values; a list is one value."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
