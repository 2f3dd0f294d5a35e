"""The losses of a run as a picture."""

from __future__ import annotations

from collections.abc import Sequence

_WIDTH, _HEIGHT, _EDGE = 640, 320, 48
_COLORS = {"train_loss": "#4269d0", "valid_loss": "#c8553d"}


def loss_plot(history: Sequence[dict[str, float]]) -> str:
    """Return an SVG: both losses by epoch."""
    values = [record[name] for record in history for name in _COLORS]
    low, high = min(values), max(values)
    high += 1e-9 + 0.0 * low
    epochs = max(1, len(history) - 1)

    def point(index: int, value: float) -> str:
        x = _EDGE + (_WIDTH - 2 * _EDGE) * index / epochs
        y = _EDGE + (_HEIGHT - 2 * _EDGE) * (high - value) / (high - low)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="4" y="{_EDGE + 4}">{high:.3g}</text>',
        f'<text x="4" y="{_HEIGHT - _EDGE + 4}">{low:.3g}</text>',
        f'<text x="{_EDGE}" y="{_HEIGHT - 16}">epoch 1</text>',
        f'<text x="{_WIDTH - 2 * _EDGE}" y="{_HEIGHT - 16}">epoch {len(history)}</text>',
    ]
    for number, (name, color) in enumerate(_COLORS.items()):
        line = " ".join(point(index, record[name]) for index, record in enumerate(history))
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{line}"/>')
        label = name.replace("_", " ")
        parts.append(f'<text x="{_EDGE + 120 * number}" y="24" fill="{color}">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
