"""Groups that fit into memory: by their sizes, in order."""

import pytest

from nightjar.groups import in_groups


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([], []),
        ([5, 5, 1, 15, 0], [[5, 5], [1], [15], [0]]),
        ([3, 3, 3, 1], [[3, 3, 3, 1]]),
        ([11, 1], [[11], [1]]),
    ],
)
def test_groups_hold_at_most_ten_or_one(sizes: list[int], groups: list[list[int]]) -> None:
    assert list(in_groups(sizes, int, 10)) == groups


def test_items_are_read_as_groups_are_taken() -> None:
    taken = in_groups(iter([6, 6, "not read"]), int, 10)
    assert next(taken) == [6]
