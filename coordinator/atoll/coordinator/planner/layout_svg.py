"""Draws a layout as SVG: routes from top to bottom, layers from left to right, one colour per region. Pure.

Each stage is a box over its layers. Its fill height is the share of time that the machine computes; the bottleneck of a
route has a strong frame. Tooltips and the notes below have the other figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from xml.sax.saxutils import escape, quoteattr

from atoll.coordinator.planner.explain import Explanation, StagePlacement
from atoll.coordinator.planner.solve import Solution
from atoll.coordinator.sanitize import clean
from atoll.core.units import count_text

_WIDTH, _LEFT, _RIGHT = 960, 110, 16
_HEAD, _ROW, _GAP, _LINE = 58, 46, 10, 18
_CHARACTER = 6.6  # average width of a character at 12 pixels
_MOST_TICKS = 16
_MOST_NAMED = 12  # machines that were left out
_MOST_SHOWN = 7  # regions in the legend
_COLOURS = ("#3b7dd8", "#d9822b", "#2f9e6e", "#b4508c", "#7a6bd1", "#8a8f3c", "#c25450", "#4c9aa8")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1c2733}.small{font-size:11px;fill:#5a6773}"
    ".title{font-size:15px;font-weight:600}.axis{stroke:#e3e7eb}"
)


def layout_svg(found: Solution, why: Explanation) -> str:
    """Return a complete SVG document."""
    layers = len(found.problem.layers)
    routes = [list(places) for _, places in groupby(why.places, key=lambda place: place.route)]
    floor = _HEAD + len(routes) * (_ROW + _GAP)
    notes = list(_notes(why))
    height = floor + _LINE * (len(notes) + 1)
    count = f"{len(routes)} route" + ("" if len(routes) == 1 else "s")
    title = f"{count_text(found.evaluation.tokens_per_second)} tokens/s in {count}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label={quoteattr(title)}><style>{_STYLE}</style>',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        _text(16, 24, title, "title"),
        *_axis(layers, floor),
        *_legend(sorted({place.region for place in why.places})),
    ]
    for number, (places, cost) in enumerate(zip(routes, found.evaluation.routes, strict=True)):
        top = _HEAD + number * (_ROW + _GAP)
        parts.append(_text(16, top + 19, f"route {number + 1}"))
        parts.append(_text(16, top + 35, f"{count_text(cost.tokens_per_second)} tok/s", "small"))
        parts += [_box(place, layers, top) for place in places]
    parts += [_text(16, floor + _LINE * (row + 1), note, "small") for row, note in enumerate(notes)]
    return "\n".join((*parts, "</svg>")) + "\n"


def _axis(layers: int, floor: int) -> Iterator[str]:
    step = -(-layers // _MOST_TICKS)
    for layer in range(0, layers, step):
        x = _x(layer, layers)
        yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{_HEAD - 6}" y2="{floor - _GAP}"/>'
        yield _text(x + 2, _HEAD - 8, str(layer), "small")


def _legend(regions: Sequence[int]) -> Iterator[str]:
    shown = regions[:_MOST_SHOWN]
    x = _WIDTH - _RIGHT - 84 * len(shown)
    for place, region in enumerate(shown):
        at = x + 84 * place
        yield f'<rect x="{at}" y="14" width="11" height="11" rx="2" fill="{_colour(region)}"/>'
        yield _text(at + 16, 24, f"region {region + 1}", "small")


def _box(place: StagePlacement, layers: int, top: int) -> str:
    x, right, colour = _x(place.first, layers), _x(place.last + 1, layers), _colour(place.region)
    width, filled = max(1.0, right - x - 3), min(1.0, place.computing) * _ROW
    frame = f'stroke="{colour}" stroke-width="{2.5 if place.sets_pace else 1}"'
    span = f"{place.first}–{place.last}" if place.first < place.last else str(place.first)
    tooltip = (
        f"{clean(place.machine)}: layers {span}; computes {place.computing:.0%} of the time; "
        f"{place.memory_bytes / 1e9:.1f} of {place.memory_lent_bytes / 1e9:.1f} GB; "
        f"sends {place.bytes_per_day / 1e9:.0f} GB a day; "
        f"waits for {clean(place.waits_for)}"
    )
    return "".join(
        (
            f"<g><title>{escape(tooltip)}</title>",
            f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_ROW}" rx="4" fill="#f7f9fb" {frame}/>',
            f'<rect x="{x:.1f}" y="{top + _ROW - filled:.1f}" width="{width:.1f}" height="{filled:.1f}" rx="4" '
            f'fill="{colour}" fill-opacity="0.30"/>',
            _text(x + 6, top + 19, _short(clean(place.machine), width - 10)),
            _text(x + 6, top + 35, _first_that_fits((f"{span} · {place.computing:.0%}", span), width - 10), "small"),
            "</g>",
        )
    )


def _notes(why: Explanation) -> Iterator[str]:
    yield f"bottleneck: {why.bottleneck}"
    names = [item.machine for item in why.left_out]
    if names:
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        yield f"left out: {', '.join(names[:_MOST_NAMED])}{more}"


def _x(layer: int, layers: int) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * layer / layers


def _colour(region: int) -> str:
    return _COLOURS[region % len(_COLOURS)]


def _short(text: str, width: float) -> str:
    """Shorten text to a width, with an ellipsis; empty if fewer than two letters would fit."""
    most = int(width / _CHARACTER)
    if len(text) <= most:
        return text
    return f"{text[: most - 1]}…" if most > 2 else ""


def _first_that_fits(texts: Sequence[str], width: float) -> str:
    return next((text for text in texts if len(text) * _CHARACTER <= width), "")


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    words = escape(clean(text, 200))
    return f'<text x="{x:.1f}" y="{y}"{f" class={quoteattr(kind)}" if kind else ""}>{words}</text>' if words else ""
