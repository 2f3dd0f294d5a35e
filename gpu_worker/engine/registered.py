"""What requests may name by a key: prompt vectors and adapters, or why they cannot be used."""

from __future__ import annotations

from typing import Generic, TypeVar

Item = TypeVar("Item")


class Registered(Generic[Item]):
    """Items by key. A refused item fails each request that names it, with the reason.

    kind: what messages call an item, such as "prompt vectors".
    """

    kind = "item"

    def __init__(self) -> None:
        self._items: dict[str, Item] = {}
        self._refused: dict[str, str] = {}

    def keep(self, key: str, item: Item) -> None:
        """Keep an item under a key, in place of an earlier one, which running requests keep."""
        self.forget(key)
        self._items[key] = item

    def refuse(self, key: str, reason: str) -> None:
        """Note why the item of a key cannot be used."""
        self.forget(key)
        self._refused[key] = f"{self.kind} {key!r}: {reason}"

    def forget(self, key: str) -> None:
        """Drop a key; requests that run keep its item until they end."""
        self._items.pop(key, None)
        self._refused.pop(key, None)

    def find(self, key: str | None) -> Item | None:
        """Return the item under a key; None for no key.

        Raises KeyError, with the reason as its message, for a key that is unknown or refused.
        """
        if key is None:
            return None
        if key in self._refused:
            raise KeyError(self._refused[key])
        if key not in self._items:
            raise KeyError(f"{self.kind} {key!r}: not registered")
        return self._items[key]
