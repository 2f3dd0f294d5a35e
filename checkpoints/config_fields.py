"""Reads config.json with types: every value is checked, and an error names file and key."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nightjar.checkpoints.errors import CheckpointError

# Far above any decoder; a larger size means a damaged file.
MAX_VOCAB = 10_000_000
MAX_POSITIONS = 10_000_000
MAX_HIDDEN = (
    32_767  # torch sums a longer row with several threads, and bits would depend on the batch
)
MAX_LAYERS = 10_000
MAX_HEADS = 100_000
MAX_INNER = 10_000_000


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """A JSON object of a model directory.  An absent or null key takes its default, if any."""

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""

    def error(self, what: str) -> CheckpointError:
        """Make an error about this file."""
        return CheckpointError(f"{self.path}: {what}")

    def size(self, key: str, limit: int) -> int:
        """Read a whole number from 1 to limit, which must be there.

        With a family's usual number instead, a model might fit its weights and compute something
        else.
        """
        expected = f"a whole number from 1 to {limit}"
        if key not in self.values:
            raise self.error(f"{self.prefix}{key} is missing: expected {expected}")
        value = self.values[key]
        if type(value) is not int or not 1 <= value <= limit:
            raise self._wrong(key, value, expected)
        return value

    def optional_size(self, key: str, limit: int) -> int | None:
        """Read a whole number from 1 to limit, or None where the key is absent or null."""
        return None if self.values.get(key) is None else self.size(key, limit)

    def number(
        self, key: str, default: float | None, low: float, high: float = sys.float_info.max
    ) -> float:
        """Read a finite number above low and at most high."""
        value = self.values.get(key)
        value = default if value is None else value
        if type(value) is bool or not isinstance(value, int | float) or not low < value <= high:
            bounds = f"above {low:g}" + (f" and at most {high:g}" if high < 1e300 else "")
            raise self._wrong(key, value, f"a number {bounds}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Read true or false."""
        value = self.values.get(key)
        value = default if value is None else value
        if type(value) is not bool:
            raise self._wrong(key, value, "true or false")
        return value

    def word(self, key: str, default: str, known: Mapping[str, str]) -> str:
        """Read a known word and return its meaning."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, str) or value not in known:
            words = ", ".join(known)
            raise self.error(f"{self.prefix}{key} {value!r} is not supported: {words}")
        return known[value]

    def inner(self, key: str) -> ConfigFields | None:
        """Read the object under a key, or None where it is absent, null or empty."""
        value = self.values.get(key) or None
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return ConfigFields(self.path, value, f"{self.prefix}{key}.")

    def _wrong(self, key: str, value: object, expected: str) -> CheckpointError:
        """Make the error for a value of the wrong kind."""
        return self.error(f"{self.prefix}{key} is {value!r}: expected {expected}")
