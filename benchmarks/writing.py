"""Result files: where they lie, how they are dated and written."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def today() -> str:
    """The date that names a result."""
    return datetime.now(UTC).date().isoformat()


def write_whole(path: Path, text: str) -> None:
    """The file holds its old text or the new one, whole, whenever this process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """One result."""
    write_whole(path, json.dumps(content, indent=2) + "\n")
