"""Values as TOML text that parses to the same values. The standard library can only read TOML."""

from __future__ import annotations

import json


def toml_value(value: str | int | float | bool) -> str:
    """Return a plain value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON allows it, TOML does not
    return repr(value)
