"""Tests share modules of helpers, and ask the product by its public names."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.combinations import mark_all_but_one, sample
from tools.measure_tree import Module, private_reaches

TESTS = Path(__file__).resolve().parents[1]
IMPORT = re.compile(r"^from tests\.(?:\w+\.)*test_\w+ import|^from tests\.\w+ import test_", re.M)

PLANTED_BUGS = "kernels_cuda/test_planted_bugs.py"
"""Runs other tests on planted bugs: each must fail."""

MOST_REACHES = 13
"""Reads of `object._name` in all tests, half of them of the standard library and of torch.

The number may only become smaller.
"""


def test_no_test_imports_from_another_test():
    files = TESTS.rglob("*.py")
    found = {str(path.relative_to(TESTS)) for path in files if IMPORT.search(path.read_text())}
    assert found == {PLANTED_BUGS}


def test_tests_hardly_reach_into_private_names():
    """A test asks through the public interface, or a class has a small public reading for it."""
    found = {}
    for path in TESTS.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        reaches = private_reaches(Module(path, path.stem, text, ast.parse(text)))
        if reaches:
            found[str(path.relative_to(TESTS))] = reaches
    assert sum(found.values()) <= MOST_REACHES, found


class Case:
    """What pytest knows of a test with parameters."""

    def __init__(self, marks, **params):
        self.callspec = SimpleNamespace(params=params)
        self._marks = [pytest.mark.parametrize(names, []).mark for names in marks]

    def iter_markers(self, name):
        return [mark for mark in self._marks if mark.name == name]


def test_a_sample_has_every_value_and_every_case_that_is_listed():
    """Of 3 times 2 combinations three; of pairs that one list names all."""
    product = [Case(("size", "dtype"), size=n, dtype=t) for n in (1, 2, 3) for t in "ab"]
    assert [case.callspec.params for case in sample(product)] == [
        {"size": 1, "dtype": "a"},
        {"size": 2, "dtype": "b"},
        {"size": 3, "dtype": "a"},
    ]
    pairs = [Case(("size, dtype",), size=n, dtype=t) for n in (1, 2) for t in "ab"]
    assert sample(pairs) == pairs


def test_a_test_keeps_one_database_and_tests_keep_different_ones():
    class Item(Case):
        def __init__(self, name, **params):
            super().__init__([], **params)
            self.nodeid, self.added = name, []
            self.callspec.id = "-".join(map(str, params.values()))

        def get_closest_marker(self, name):
            return name == "every_database" and self.nodeid == "kept"

        def add_marker(self, mark):
            self.added.append(mark.name)

    def left(name, *others):
        cases = [Item(name, url=kind, n=n) for n in others or (0,) for kind in ("a", "b")]
        mark_all_but_one(cases, ("a", "b"))
        return [case.callspec.params for case in cases if case.added != ["slow"]]

    assert len(left("kept")) == 2
    assert left("one", 1, 2, 3) == left("one", 1, 2, 3)
    assert [one["n"] for one in left("one", 1, 2, 3)] == [1, 2, 3]
    assert {left(f"test {n}")[0]["url"] for n in range(9)} == {"a", "b"}
