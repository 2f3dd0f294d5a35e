"""The mutants themselves; the library that makes them is in the extra `mutants`."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="in the extra `mutants`")

from tests.mutants.making import draw, standing
from tests.mutants.mutant import Fate
from tests.mutants.planted import MODULE, SOURCE, plant
from tests.mutants.trials import try_all

ALL = 1_000
BIG = Path(__file__).parents[2] / "jobs" / "store" / "leases.py"


def made(source: str) -> set[str]:
    """The changed lines of every mutant."""
    return {mutant.after for mutant in draw("module.py", source + "\n", ALL, 0)}


@pytest.mark.parametrize(
    ("source", "after"),
    [
        ("ok = a < b", {"ok = a <= b", "ok = a >= b"}),
        ("ok = a == b", {"ok = a != b"}),
        ("ok = a is None", {"ok = a is not None"}),
        ("ok = a in b", {"ok = a not in b"}),
        ("ok = a not in b", {"ok = a in b"}),
        ("ok = a and b and c", {"ok = b and c", "ok = a and c", "ok = a and b"}),
        ("left = a + 1", {"left = a - 1", "left = a + 2", "left = a + 0"}),
        ("a += b", {"a -= b", "pass"}),
        ("a.b = c", {"pass"}),
        ("f(a)", {"pass"}),
        ("raise E(1 + 2)", {"pass"}),
        ("best = min(a, b)", {"best = max(a, b)"}),
        ("q = c.in_(a)", {"q = c.not_in(a)"}),
        ("q = s.where(a, b)", {"q = s", "q = s.where(b)", "q = s.where(a)"}),
        ("q = s.where(a).limit(b)", {"q = s.limit(b)", "q = s.where(a)"}),
        ("q = u.values(a=b, c=d)", {"q = u.values(c=d)", "q = u.values(a=b)"}),
        ("s = {a, b}", {"s = {b}", "s = {a}"}),
        ("s = [a, *b]", {"s = [*b]", "s = [a]"}),
        ("if a:\n    b = c", {"if not a:"}),
        ("try:\n    a = b\nexcept (x.E, F):\n    a = c", {"except ():"}),
        ("while a:\n    break", {"while not a:", "continue"}),
        ("for a in b:\n    c = a", {"for a in []:"}),
        ("ok = not a", {"ok =  a"}),
        ("f = g(durable=True)", {"f = g(durable=False)"}),
    ],
)
def test_each_kind_of_fault(source: str, after: set[str]) -> None:
    assert made(source) == after


@pytest.mark.parametrize(
    "source",
    [
        '"""At most 3 < 4."""',
        "def f(*, a: int | None = 500) -> int | str: ...",
        "class A:\n    b: int | None = None",
        "@cache(maxsize=1 + 1)\ndef f(*args, **kwargs): ...",
        'logger.info("%d", 1 + a, extra={"n": a < 2})',
        "from . import a",
        "_ROWS_AT_ONCE = 500",
        "a: int = Field(64, le=4096)",
        'c = sa.Column("kind", sa.String(32))',
        'place = folder / "name"',
        'told = f"{a + 1}"',
        "d = {a: b, c: d}; e = [f for f in g]; h = (i, j)",
        "class A:\n    def __init__(self, b):\n        self.b = b",
        'if __name__ == "__main__":\n    main(1)',
    ],
)
def test_what_is_left_alone(source: str) -> None:
    assert made(source) == set()


def test_the_sample_is_the_same_for_the_same_source() -> None:
    source = BIG.read_text()
    few, again = (draw("leases.py", source, 8, 5) for _ in range(2))
    assert len(few) == 8
    assert few == again
    assert draw("leases.py", source, 12, 5)[:8] == few
    assert {m.key for m in draw("leases.py", source, 8, 6)} != {m.key for m in few}


def test_a_change_elsewhere_leaves_the_sample_where_it_is() -> None:
    source = BIG.read_text()
    longer = source + "\n\ndef added(name: str) -> str:\n    return name\n"
    moved = source.replace("class Leases", "# A line more.\n\n\nclass Leases")
    keys = [mutant.key for mutant in draw("leases.py", source, 12, 0)]
    for other in (longer, moved):
        assert [mutant.key for mutant in draw("leases.py", other, 12, 0)] == keys


def test_a_mutant_is_named_by_its_function() -> None:
    source = "class A:\n    def b(self):\n        def c():\n            return d < e\n"
    assert {mutant.where for mutant in draw("m.py", source, ALL, 0)} == {"A.b.c"}
    assert {mutant.where for mutant in draw("m.py", "a = b < c", ALL, 0)} == {"module"}


def test_faults_of_a_planted_module_from_making_to_fate(tmp_path: Path) -> None:
    of_free = [mutant for mutant in draw(MODULE, SOURCE, ALL, 0) if mutant.where == "free"]
    trials = try_all(plant(tmp_path), of_free, lambda _: None)
    assert {trial.mutant.after: trial.fate for trial in trials} == {
        "return taken <= most": Fate.SURVIVED,
        "return taken >= most": Fate.CAUGHT,
    }


def test_survivors_of_a_page_are_found_again(tmp_path: Path) -> None:
    root = plant(tmp_path).root
    drawn = draw(MODULE, SOURCE, ALL, 0)
    listed = [replace(mutant, line=0, source="") for mutant in drawn]
    assert {mutant.key for mutant in standing(listed, root)} == {mutant.key for mutant in drawn}
    assert all(mutant.source for mutant in standing(listed, root))
    (root / MODULE).write_text(SOURCE.replace("taken < most", "most > taken"))
    gone = {mutant.before for mutant in drawn} - {each.before for each in standing(listed, root)}
    assert gone == {"return taken < most"}
    (root / MODULE).unlink()
    assert standing(listed, root) == []
