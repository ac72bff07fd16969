"""A hook of mkdocs: links to files outside docs/ become their text, because the site has only the pages."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]*)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Replace them in one page."""
    folder = posixpath.dirname(page.file.src_uri)

    def kept(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        return link[1] if target.startswith("../") else link[0]

    return _LINK.sub(kept, markdown)
