"""Which of the combinations that a test is parametrised with `make test` runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from zlib import crc32

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


def mark_all_but_one(
    items: Iterable[pytest.Item], kinds: Sequence[str], parameter: str | None = None
) -> None:
    """Of a test that runs once for each of these kinds, mark all but one `slow`.

    Half of the tests keep one kind and half the other, and each keeps its own in every run. A test
    with the mark `every_database` keeps all.

    parameter: what is given the kind; None: anything.
    """
    families = defaultdict(dict)
    for item in items:
        if item.get_closest_marker("slow") or item.get_closest_marker("every_database"):
            continue
        for name, value in getattr(getattr(item, "callspec", None), "params", {}).items():
            if parameter in (None, name) and isinstance(value, str) and value in kinds:
                families[family_of(item, value)][value] = item
    for family, cases in families.items():
        if len(cases) == len(kinds):
            kept = kinds[crc32(repr(family).encode()) % len(kinds)]
            for kind in set(kinds) - {kept}:
                cases[kind].add_marker(pytest.mark.slow)


def family_of(item: pytest.Item, kind: str) -> tuple[str, ...]:
    """A test and what it is given besides the kind, by the names that pytest has for it.

    What is written of a function holds its address, which differs between processes.
    """
    parts = item.callspec.id.split("-")
    if kind in parts:
        parts.remove(kind)
    return (item.nodeid.partition("[")[0], *parts)
