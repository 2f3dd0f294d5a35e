"""Outcomes of verifications, remembered in the user's cache folder by the model's fingerprint.

The fingerprint changes with any byte of the model. It is itself remembered by the size, times and
inode of the files (`digest_cache.py`). Where the folder cannot be written, the model is verified at
every start.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from nightjar.checkpoints.digest_cache import cache_folder

CHECKS = 1
"""Raised with the checks of a first start, so that models are verified by the new ones."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification found.

    is_sound: whether no check failed.  text: the checks that failed, in a sentence each.
    """

    is_sound: bool
    text: str

    def refusal(self, directory: Path) -> str:
        """Return why a damaged model does not serve, and what to do."""
        return (
            f"{directory} is not in order: {self.text}. Its files are damaged, or were converted "
            f"wrongly: `nightjar verify {directory}` checks all of it. To serve it all the same, "
            "set NIGHTJAR_VERIFY=off or give --verify off"
        )


def recall_verdict(fingerprint: str) -> Verdict | None:
    """Return the outcome for a model's fingerprint, if it is remembered."""
    entry = _entry(fingerprint)
    try:
        noted = json.loads(entry.read_bytes()) if entry is not None else None
        if isinstance(noted, dict) and noted.get("checks") == CHECKS:
            return Verdict(bool(noted["is_sound"]), str(noted["text"]))
    except (OSError, ValueError, KeyError):
        pass
    return None


def remember_verdict(fingerprint: str, verdict: Verdict) -> None:
    """Keep the outcome; a folder that cannot be written is no error."""
    entry = _entry(fingerprint)
    if entry is None:
        return
    try:
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=entry.parent, delete=False) as file:
            json.dump({"checks": CHECKS, **asdict(verdict)}, file)
        os.replace(file.name, entry)  # noqa: PTH105 - atomic
    except OSError:
        pass


def _entry(fingerprint: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder.parent / "verified" / f"{fingerprint[:64]}.json"
