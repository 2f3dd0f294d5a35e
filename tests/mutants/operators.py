"""Faults that cosmic-ray does not know: conditions, clauses and statements that are left out."""

from collections.abc import Iterator
from typing import Any

from cosmic_ray.operators.operator import Operator

# Parts of a statement in SQLAlchemy without which it still runs.
_CLAUSES = {"where", "limit", "offset", "order_by", "distinct", "having", "with_for_update"}
# Calls of which each argument is a condition or a value of its own.
_LISTS = {"where", "and_", "or_", "having", "order_by", "values"}
_OPPOSITES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "in_": "not_in",
    "not_in": "in_",
    "is_": "is_not",
    "is_not": "is_",
    "asc": "desc",
    "desc": "asc",
}

# Other operators turn these round.
_CHANGED_OTHERWISE = {"comparison", "not_test", "and_test", "or_test", "namedexpr_test", "atom"}

Node = Any  # parso is untyped
Position = tuple[tuple[int, int], tuple[int, int]]


class _Ours(Operator):
    """An operator that names the nodes at which it changes its node."""

    def places(self, node: Node) -> list[Node]:
        """What may be changed in `node` itself, its children aside."""
        raise NotImplementedError

    def mutation_positions(self, node: Node) -> Iterator[Position]:
        """Where those are; all found before any is changed."""
        for place in self.places(node):
            yield place.start_pos, place.end_pos

    @classmethod
    def examples(cls) -> tuple[()]:
        """None: tests/mutants/checks_of_making.py shows each."""
        return ()


class DropStatement(_Ours):
    """Put `pass` in the place of a call, an assignment to an attribute or item, a raise."""

    def places(self, node: Node) -> list[Node]:
        """The statement's first part."""
        if node.type != "simple_stmt":
            return []
        first = node.children[0]
        return [first] if _acts(first) else []

    def mutate(self, node: Node, index: int) -> Node:
        """Replace it."""
        _replace(node, self.places(node)[index], "pass")
        return node


def _acts(statement: Node) -> bool:
    if statement.type in {"raise_stmt", "del_stmt", "await_expr"}:
        return True
    if statement.type in {"atom_expr", "power"}:
        return bool(_is_call(statement.children[-1]))
    if statement.type != "expr_stmt":
        return False
    target, sign = statement.children[:2]
    if _is_sign(sign, "=") and _is_in_init(statement):
        return False  # whoever reads the attribute fails
    return target.type in {"atom_expr", "power"} or (
        sign.type == "operator" and sign.value not in {"=", ":"}
    )


def _is_in_init(node: Node) -> bool:
    function = node.search_ancestor("funcdef")
    return function is not None and function.name.value == "__init__"


class DropCondition(_Ours):
    """Leave out one of several arguments of `where`, `and_`, `values` and the like."""

    def places(self, node: Node) -> list[Node]:
        """The arguments."""
        if node.type != "arglist" or node.parent is None or _called(node.parent) not in _LISTS:
            return []
        arguments = [child for child in node.children if not _is_sign(child, ",")]
        return arguments if len(arguments) > 1 else []

    def mutate(self, node: Node, index: int) -> Node:
        """Take the argument away, and the comma that goes with it."""
        _remove(node, self.places(node)[index])
        return node


class DropClause(_Ours):
    """Leave out `.where(...)`, `.limit(...)` and the like from a statement."""

    def places(self, node: Node) -> list[Node]:
        """The trailers that name a clause."""
        if node.type not in {"atom_expr", "power"}:
            return []
        return [
            name
            for name, call in zip(node.children, node.children[1:], strict=False)
            if name.type == "trailer" and _is_call(call) and _called(call) in _CLAUSES
        ]

    def mutate(self, node: Node, index: int) -> Node:
        """Take away the name and its brackets."""
        at = node.children.index(self.places(node)[index])
        node.children = [*node.children[:at], *node.children[at + 2 :]]
        return node


class DropElement(_Ours):
    """Leave out one element of a list or a set that is written out."""

    def places(self, node: Node) -> list[Node]:
        """The elements."""
        if node.type not in {"testlist_comp", "dictorsetmaker"} or node.parent.type != "atom":
            return []
        written_out = all(_is_sign(comma, ",") for comma in node.children[1::2])
        if _is_sign(node.parent.children[0], "(") or not written_out:
            return []
        elements = node.children[::2]
        return elements if len(elements) > 1 else []

    def mutate(self, node: Node, index: int) -> Node:
        """Take it away with its comma."""
        _remove(node, self.places(node)[index])
        return node


class DropOperand(_Ours):
    """Leave out one side of `and` or `or`."""

    def places(self, node: Node) -> list[Node]:
        """The sides."""
        return node.children[::2] if node.type in {"and_test", "or_test"} else []

    def mutate(self, node: Node, index: int) -> Node:
        """Take it away with its keyword."""
        _remove(node, self.places(node)[index])
        return node


class SwapName(_Ours):
    """Call the opposite: `max` for `min`, `not_in` for `in_`."""

    def places(self, node: Node) -> list[Node]:
        """The name, where it is called."""
        if node.type != "name" or node.value not in _OPPOSITES:
            return []
        owner = node if node.parent.type in {"atom_expr", "power"} else node.parent
        if owner.parent is None or owner.type not in {"name", "trailer"}:
            return []
        after = owner.get_next_sibling()
        return [node] if after is not None and _is_call(after) else []

    def mutate(self, node: Node, index: int) -> Node:
        """Rename it."""
        del index
        node.value = _OPPOSITES[node.value]
        return node


class SwapAugmented(_Ours):
    """Subtract in the place of adding, and the other way round."""

    def places(self, node: Node) -> list[Node]:
        """The sign."""
        return [node] if _is_sign(node, "+=") or _is_sign(node, "-=") else []

    def mutate(self, node: Node, index: int) -> Node:
        """Change it."""
        del index
        node.value = "-=" if node.value == "+=" else "+="
        return node


class SwapMembership(_Ours):
    """`not in` in the place of `in`, and the other way round."""

    def places(self, node: Node) -> list[Node]:
        """The words between two operands."""
        if node.type != "comparison":
            return []
        return [
            word
            for word in node.children[1::2]
            if word.get_code().split() in (["in"], ["not", "in"])
        ]

    def mutate(self, node: Node, index: int) -> Node:
        """Change it."""
        word = self.places(node)[index]
        _replace(node, word, "not in" if word.get_code().split() == ["in"] else "in")
        return node


class CatchNothing(_Ours):
    """`except ():` lets every exception through."""

    def places(self, node: Node) -> list[Node]:
        """The exceptions that are named."""
        return [node.children[1]] if node.type == "except_clause" else []

    def mutate(self, node: Node, index: int) -> Node:
        """Name none."""
        _replace(node, self.places(node)[index], "()")
        return node


class Negate(_Ours):
    """`not` before a condition that is neither a comparison nor made of several."""

    def places(self, node: Node) -> list[Node]:
        """The condition of `if`, `while`, a conditional expression or a comprehension."""
        if node.type in {"if_stmt", "while_stmt"}:
            found = [
                after
                for word, after in zip(node.children, node.children[1:], strict=False)
                if word.type == "keyword" and word.value in {"if", "elif", "while"}
            ]
        elif node.type in {"comp_if", "ternary", "test"}:
            found = [node.children[2] if len(node.children) > 2 else node.children[1]]
        else:
            return []
        return [each for each in found if each.type not in _CHANGED_OTHERWISE]

    def mutate(self, node: Node, index: int) -> Node:
        """Write it."""
        condition = self.places(node)[index]
        leaf = condition.get_first_leaf()
        leaf.prefix += "not "
        return node


OPERATORS = (
    DropStatement,
    DropCondition,
    DropClause,
    DropElement,
    DropOperand,
    SwapName,
    SwapAugmented,
    SwapMembership,
    CatchNothing,
    Negate,
)


def _is_sign(node: Node, sign: str) -> bool:
    return node.type == "operator" and node.value == sign


def _is_call(node: Node) -> bool:
    return node.type == "trailer" and node.children[0].value == "("


def _called(trailer: Node) -> str | None:
    """The name that stands before a call's brackets."""
    before = trailer.get_previous_sibling()
    if before is not None and before.type == "trailer" and before.children[0].value == ".":
        before = before.children[1]
    return before.value if before is not None and before.type == "name" else None


def _remove(parent: Node, child: Node) -> None:
    """Take a child away with what separates it from the next, or from the one before."""
    at = parent.children.index(child)
    first = at == 0
    cut = slice(at, at + 2) if at + 1 < len(parent.children) else slice(at - 1, at + 1)
    prefix = child.get_first_leaf().prefix
    parent.children = [*parent.children[: cut.start], *parent.children[cut.stop :]]
    if first:
        parent.children[0].get_first_leaf().prefix = prefix


def _replace(parent: Node, child: Node, code: str) -> None:
    """Put words in the place of a child; what stands before it stays."""
    leaf = child.get_first_leaf()
    word = type(leaf)(code, leaf.start_pos, leaf.prefix)
    word.parent = parent
    parent.children = [word if each is child else each for each in parent.children]
