"""One HTML file without scripts from a template: what all reports have in common."""

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from nightjar import __version__
from nightjar.jobs.report.charts import duration, number
from nightjar.visible import visible

_FOLDER = Path(__file__).parent


def render_page(template: str, **values: Any) -> str:
    """Return the page; a value becomes markup only if it is Markup."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "visible": visible,
        "number": number,
        "duration": duration,
        "bytes": bytes_text,
        "moment": moment_text,
    }
    style = (_FOLDER / "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.get_template(template).render(
        style=Markup(style),  # noqa: S704 - a file of ours
        style_hash=Markup(f"sha256-{digest}"),  # noqa: S704 - a digest
        version=__version__,
        **values,
    )


def write_page(path: Path, text: str) -> None:
    """Write a page; who reads `path` meanwhile sees the old or the new whole. Raises OSError."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def bytes_text(value: float) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} bytes"


def moment_text(moment: Any) -> str:  # noqa: ANN401 - a filter of templates
    """A moment, in UTC, for people."""
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"
