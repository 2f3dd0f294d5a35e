"""A key that two rows have is found, whatever the number of rows."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightjar.pipeline.tables import repeats
from nightjar.pipeline.tables.repeats import Repeat, Repeats


def expected(ids: Sequence[str]) -> Repeat | None:
    seen: dict[str, int] = {}
    for row, id_ in enumerate(ids):
        if id_ in seen:
            return Repeat(seen[id_], row)
        seen[id_] = row
    return None


@given(st.lists(st.text("ab\x00", max_size=3), max_size=12), st.integers(0, 12))
def test_the_first_repeat_is_found(ids: list[str], cut: int) -> None:
    with Repeats() as found:
        found.add(ids[:cut])
        found.add(ids[cut:])
        assert found.first() == expected(ids)


def test_many_keys_are_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "MEMORY_BYTES", 64 * repeats.BUCKETS)
    ids = [f"user-{number}" for number in range(20_000)]
    with Repeats() as found:
        found.add(ids)
        assert found.first() is None
        found.add(["user-17"])
        found.add(["user-3"])
        assert found.first() == Repeat(17, 20_000)
