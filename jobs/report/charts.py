"""Charts as SVG: numbers in, markup out; colours and fonts come from the page's style sheet.

No text of others goes into a chart, only numbers and words of Nightjar.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 860, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 12, 30
_PLOT_W, _PLOT_H = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
_TICKS = 4
_LANE_H = 22
_LANE_LABEL = 128


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one name; `style` is the class that colours it."""

    name: str
    style: str
    values: Sequence[float]


def areas(series: Sequence[Series], seconds: float, label: str) -> Markup:
    """Areas on top of each other over time; the first is at the bottom."""
    count = len(series[0].values)
    top = _nice(max(sum(column) for column in zip(*(s.values for s in series), strict=True)))
    floor = [0.0] * count
    parts = []
    for one in series:
        roof = [low + more for low, more in zip(floor, one.values, strict=True)]
        points = [_point(n / max(count - 1, 1), v / top) for n, v in enumerate(roof)]
        points += [_point(n / max(count - 1, 1), v / top) for n, v in enumerate(floor)][::-1]
        title = f"<title>{escape(one.name)}</title>"
        parts.append(f'<polygon class="{one.style}" points="{" ".join(points)}">{title}</polygon>')
        floor = roof
    return _svg(label, [*_grid(top), *parts, *_time_axis(seconds)])


def bars(values: Sequence[float], style: str, seconds: float, label: str, unit: str) -> Markup:
    """A bar for each bin of time."""
    top = _nice(max(values, default=0))
    width = _PLOT_W / max(len(values), 1)
    parts = [
        _bar(_LEFT + n * width, width - 0.6, value / top, style, f"{number(value)} {unit}")
        for n, value in enumerate(values)
        if value > 0
    ]
    return _svg(label, [*_grid(top), *parts, *_time_axis(seconds)])


def columns(
    values: Sequence[float], names: Sequence[str], label: str, limit: float | None = None
) -> Markup:
    """A column for each name, shown where the pointer rests; negative values as 0.

    limit: a dashed line across.
    """
    if not values:
        return Markup("")
    top = _nice(max(*values, limit or 0.0, 0.0))
    width = _PLOT_W / len(values)
    parts = [
        _bar(_LEFT + n * width + width * 0.1, width * 0.8, value / top, "main", name)
        for n, (value, name) in enumerate(zip(values, names, strict=True))
        if value > 0
    ]
    if limit is not None:
        y = _TOP + _PLOT_H * (1 - limit / top)
        parts.append(
            f'<line class="mark" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
    every = max(1, math.ceil(len(values) / 16))
    for n in range(0, len(values), every):
        parts.append(_text(_LEFT + n * width + width * 0.3, HEIGHT - 10, str(n), "tick"))
    return _svg(label, [*_grid(top), *parts])


def histogram(
    edges: Sequence[int], series: Sequence[Series], label: str, marks: Sequence[int] = ()
) -> Markup:
    """Counts by length: bars of several series side by side; `marks` are lines at lengths."""
    filled = [n for one in series for n, value in enumerate(one.values) if value]
    if not filled:
        return Markup("")
    first, last = min(filled), max(filled)
    bins = range(first, last + 1)
    top = _nice(max(max(one.values) for one in series))
    step = _PLOT_W / len(bins)
    width = step * 0.86 / len(series)
    parts = []
    for place, n in enumerate(bins):
        high = f"{edges[n + 1] - 1:,}" if n + 1 < len(edges) else "and more"
        span = f"{edges[n]:,} to {high} tokens"
        for order, one in enumerate(series):
            if value := one.values[n]:
                x = _LEFT + place * step + step * 0.07 + order * width
                title = f"{one.name}: {number(value)} rows of {span}"
                parts.append(_bar(x, width, value / top, one.style, title))
    parts += [
        _mark(_LEFT + (edges.index(mark) - first) * step, f"bucket to {mark}")
        for mark in marks
        if mark in edges and first <= edges.index(mark) <= last + 1
    ]
    every = max(1, math.ceil(len(bins) / 14))
    for place, n in enumerate(bins):
        if place % every == 0:
            parts.append(_text(_LEFT + place * step, HEIGHT - 10, f"{edges[n]:,}", "tick"))
    return _svg(label, [*_grid(top), *parts])


def lanes(rows: Sequence[tuple[str, Sequence[float]]], seconds: float, label: str) -> Markup:
    """A strip for each name: the darker, the more of its own greatest value."""
    height = _TOP + len(rows) * _LANE_H + _BOTTOM
    parts = []
    left, plot = _LANE_LABEL, WIDTH - _LANE_LABEL - _RIGHT
    for order, (name, values) in enumerate(rows):
        y = _TOP + order * _LANE_H
        parts.append(_text(left - 8, y + 14, name, "lane"))
        parts.append(f'<rect class="track" x="{left}" y="{y}" width="{plot}" height="16"/>')
        most, width = max(values, default=0) or 1, plot / max(len(values), 1)
        for n, value in enumerate(values):
            if value > 0:
                title = f"<title>{number(value)} rows</title>"
                parts.append(
                    f'<rect class="computing" opacity="{0.2 + 0.8 * value / most:.2f}" '
                    f'x="{left + n * width:.1f}" y="{y}" width="{width + 0.3:.1f}" '
                    f'height="16">{title}</rect>'
                )
    return _svg(label, [*parts, *_time_axis(seconds, left=left, height=height)], height)


def number(value: float) -> str:
    """A number for people: three digits, thousands apart."""
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"


def _nice(most: float) -> float:
    """A round number that is not less."""
    if most <= 0:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(most))
    return next(step * scale for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * scale >= most)


def _point(x: float, y: float) -> str:
    return f"{_LEFT + x * _PLOT_W:.1f},{_TOP + (1 - y) * _PLOT_H:.1f}"


def _bar(x: float, width: float, share: float, style: str, title: str) -> str:
    height = max(1.0, share * _PLOT_H)
    return (
        f'<rect class="{style}" x="{x:.1f}" y="{_TOP + _PLOT_H - height:.1f}" '
        f'width="{max(width, 0.8):.1f}" height="{height:.1f}"><title>{escape(title)}</title></rect>'
    )


def _mark(x: float, title: str) -> str:
    return (
        f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_TOP + _PLOT_H}">'
        f"<title>{escape(title)}</title></line>"
    )


def _grid(top: float) -> list[str]:
    parts = []
    for n in range(_TICKS + 1):
        y = _TOP + _PLOT_H * (1 - n / _TICKS)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_text(_LEFT - 8, y + 4, number(top * n / _TICKS), "value"))
    return parts


def _time_axis(seconds: float, *, left: int = _LEFT, height: int = HEIGHT) -> list[str]:
    plot = WIDTH - left - _RIGHT
    return [
        _text(
            left + plot * n / _TICKS,
            height - 10,
            "0" if n == 0 else duration(seconds * n / _TICKS),
            "tick" if n < _TICKS else "tick last",
        )
        for n in range(_TICKS + 1)
    ]


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _svg(label: str, parts: Sequence[str], height: int = HEIGHT) -> Markup:
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">'
    return Markup(head + "".join(parts) + "</svg>")  # noqa: S704 - every text in it was escaped
