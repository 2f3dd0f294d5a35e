"""A sample of the combinations that a test is parametrised with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest


def mark_all_but_a_sample(items: Iterable[pytest.Item]) -> None:
    """Mark tests `slow` but for a few of each function that have every value of each parameter.

    `make test` computes these few, `make test-all` the others.
    """
    functions = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    for family in functions.values():
        for item in set(family) - set(sample(family)):
            item.add_marker(pytest.mark.slow)


def sample(family: list[pytest.Item]) -> list[pytest.Item]:
    """Of one function's tests, in turn the one with the most values that no other has shown."""
    values = {item: values_of(item) for item in family}
    missing = set().union(*values.values())
    chosen = []
    while missing:
        best = max(family, key=lambda item: len(values[item] & missing))
        chosen.append(best)
        missing -= values[best]
    return chosen


def values_of(item: pytest.Item) -> set[tuple[str, ...]]:
    """What a test is given, by fixtures too.

    Parameters that one `parametrize` lists together are one value.
    """
    given = {name: repr(value) for name, value in item.callspec.params.items()}
    together = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        split = names.split(",") if isinstance(names, str) else names
        together.append([name.strip() for name in split])
    listed = {name for names in together for name in names}
    together += [[name] for name in given if name not in listed]
    return {tuple(f"{name}={given[name]}" for name in names) for names in together}
