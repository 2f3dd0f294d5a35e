"""What all operands of ops share: they keep what a backend derives from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

Plan = TypeVar("Plan")


@dataclass(frozen=True, eq=False)
class Operand:
    """An operand that keeps what backends derive from it."""

    _plans: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def plan(self, derive: Callable[[Self], Plan]) -> Plan:
        """Return derive(self), computed once; `derive` must be a function of a module or class."""
        try:
            found: Plan = self._plans[derive]
        except KeyError:
            found = self._plans[derive] = derive(self)
        return found
