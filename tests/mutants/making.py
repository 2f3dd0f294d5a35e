"""Mutants of a module: which there are, and a sample that is the same for the same source."""

import ast
import difflib
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators import (
    binary_operator_replacement as binary,
)
from cosmic_ray.operators import (
    boolean_replacer,
    break_continue,
    number_replacer,
    zero_iteration_for_loop,
)
from cosmic_ray.operators import (
    comparison_operator_replacement as comparison,
)
from cosmic_ray.operators import (
    unary_operator_replacement as unary,
)
from cosmic_ray.operators.operator import Operator

from tests.mutants.mutant import Mutant
from tests.mutants.operators import OPERATORS as OURS
from tests.mutants.spared import find_spared

# The edge and the opposite of each comparison; cosmic-ray has every pair, most of them alike.
_COMPARISONS = {
    *("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is"),
    *("Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt"),
}
_BINARY = {"Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_Mul"} | {
    *("BitAnd_BitOr", "BitOr_BitAnd", "LShift_RShift", "RShift_LShift")
}
_UNARY = {"Delete_Not", "Delete_USub", "Delete_Invert"}
_BINARY_NODES = {"arith_expr", "term", "expr", "and_expr", "shift_expr"}

Position = tuple[int, int]


def _some(operators: Any, prefix: str, wanted: set[str]) -> list[type[Operator]]:
    named = {operator.__name__.removeprefix(prefix): operator for operator in operators}
    return [named[name] for name in sorted(wanted)]


OPERATORS: list[type[Operator]] = [
    *_some(binary.operators(), "ReplaceBinaryOperator_", _BINARY),
    *_some(comparison.operators(), "ReplaceComparisonOperator_", _COMPARISONS),
    *_some(unary.operators(), "ReplaceUnaryOperator_", _UNARY),
    boolean_replacer.ReplaceTrueWithFalse,
    boolean_replacer.ReplaceFalseWithTrue,
    break_continue.ReplaceBreakWithContinue,
    break_continue.ReplaceContinueWithBreak,
    number_replacer.NumberReplacer,
    zero_iteration_for_loop.ZeroIterationForLoop,
    *OURS,
]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A place and what would be done there; the text is made for those that are drawn."""

    operator: type[Operator]
    occurrence: int
    line: int
    where: str
    rank: str = field(repr=False)


def draw(module: str, source: str, count: int, seed: int) -> list[Mutant]:
    """At most `count` mutants of a module, the same ones for the same source.

    Each has a rank of its own, made of its line and its function: a change elsewhere in the
    module leaves the others of the sample where they are.
    """
    unchanged = ast.dump(ast.parse(source))
    drawn: list[Mutant] = []
    for candidate in sorted(_candidates(module, source, seed), key=lambda each: each.rank):
        if len(drawn) == count:
            break
        if mutant := _made(module, source, candidate, unchanged):
            drawn.append(mutant)
    return drawn


def standing(survivors: Sequence[Mutant], root: Path) -> list[Mutant]:
    """Those whose lines are as they were, with the texts of their modules."""
    by_module: dict[str, list[Mutant]] = {}
    for mutant in survivors:
        by_module.setdefault(mutant.module, []).append(mutant)
    found = []
    for module, wanted in by_module.items():
        if (file := root / module).is_file():
            found += _find(module, file.read_text(encoding="utf-8"), wanted)
    return found


def _find(module: str, source: str, wanted: Sequence[Mutant]) -> list[Mutant]:
    unchanged = ast.dump(ast.parse(source))
    kinds = {(mutant.where, mutant.operator) for mutant in wanted}
    keys = {mutant.key for mutant in wanted}
    found: dict[tuple[str, str, str, str], Mutant] = {}
    for candidate in _candidates(module, source, seed=0):
        if (candidate.where, candidate.operator.__name__) in kinds:
            mutant = _made(module, source, candidate, unchanged)
            if mutant is not None and mutant.key in keys:
                found.setdefault(mutant.key, mutant)
    return list(found.values())


def _made(module: str, source: str, candidate: _Candidate, unchanged: str) -> Mutant | None:
    """The mutant; None if it is no Python, or means the same."""
    text = mutate_code(source, candidate.operator(), candidate.occurrence)
    if text is None or _is_broken_or_alike(text, unchanged):
        return None
    before, after = _changed(source, text)
    return Mutant(
        module=module,
        where=candidate.where,
        before=before,
        after=after,
        line=candidate.line,
        operator=candidate.operator.__name__,
        source=text,
    )


def _candidates(module: str, source: str, seed: int) -> Iterator[_Candidate]:
    spared = find_spared(source)
    scopes = _scopes(ast.parse(source))
    lines = source.splitlines()
    nodes = list(ast_nodes(get_ast(source)))
    alike: Counter[tuple[object, ...]] = Counter()
    for kind in OPERATORS:
        operator = kind()
        places = ((node, place) for node in nodes for place in operator.mutation_positions(node))
        for occurrence, (node, (start, _)) in enumerate(places):
            number = kind is number_replacer.NumberReplacer
            if spared.spares(start, number=number) or _is_trivial(kind, node):
                continue
            line, column = start
            where = _where(scopes, line)
            text = lines[line - 1]
            indent = len(text) - len(text.lstrip())
            name = (module, where, kind.__name__, text.strip(), column - indent)
            alike[name] += 1
            told = repr((seed, *name, alike[name]))
            rank = hashlib.sha256(told.encode()).hexdigest()
            yield _Candidate(kind, occurrence, line, where, rank)


def _is_trivial(kind: type[Operator], node: Any) -> bool:
    """Whether any run would fail at once: a path divided, a text added to, `*` of parameters."""
    if not kind.__name__.startswith("ReplaceBinaryOperator"):
        return False
    if node.parent.type not in _BINARY_NODES:
        return True
    sides = [node.get_previous_sibling(), node.get_next_sibling()]
    return any(side.type in {"string", "fstring", "strings"} for side in sides if side is not None)


def _is_broken_or_alike(text: str, unchanged: str) -> bool:
    try:
        return ast.dump(ast.parse(text)) == unchanged
    except SyntaxError:
        return True


def _changed(source: str, text: str) -> tuple[str, str]:
    """The lines that differ, as they were and as they are."""
    before, after = [], []
    for line in difflib.ndiff(source.splitlines(), text.splitlines()):
        if line.startswith("- "):
            before.append(line[2:].strip())
        elif line.startswith("+ "):
            after.append(line[2:].strip())
    return " / ".join(before), " / ".join(after)


def _scopes(tree: ast.Module) -> list[tuple[int, int, str]]:
    """Every function and class: first line, last line, qualified name; inner ones last."""
    found: list[tuple[int, int, str]] = []

    def enter(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}" if prefix else child.name
                found.append((child.lineno, child.end_lineno or child.lineno, name))
            enter(child, name)

    enter(tree, "")
    return found


def _where(scopes: list[tuple[int, int, str]], line: int) -> str:
    """The innermost function or class around a line; `module` outside of all."""
    around = [name for first, last, name in scopes if first <= line <= last]
    return max(around, key=len, default="module")
