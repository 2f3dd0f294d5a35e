"""Lists of the API, page after page."""

from collections.abc import Callable
from typing import Generic, TypeVar

from nightjar.jobs.records import JsonObject
from nightjar.pipeline.client.steps import Asking, Call, Steps

Item = TypeVar("Item")

PAGE = 100


class Pages(Generic[Item]):
    """A list of the API, newest first.

    Args:
        asking: How calls are sent.
        path: Of the list.
        read: Makes records of a page.
        query: What the list is asked for, beside its pages.
    """

    def __init__(
        self,
        asking: Asking,
        path: str,
        read: Callable[[JsonObject], list[Item]],
        query: dict[str, str] | None = None,
    ) -> None:
        self._asking = asking
        self._path = path
        self._read = read
        self._query: dict[str, str | int] = {"limit": PAGE, **(query or {})}
        self._has_ended = False

    def following(self) -> Steps[list[Item] | None]:
        """Return the items of the next page; None at the end."""
        if self._has_ended:
            return None
        page = yield from self._asking.ask(Call("GET", self._path, dict(self._query)))
        found = self._read(page)
        after = page.get("next_after")
        self._has_ended = not page.get("has_more") or after is None
        if after is not None:
            self._query["after"] = after
        return found
