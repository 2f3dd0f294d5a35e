"""What is not mutated: places at which a fault changes nothing that anyone relies on."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

Position = tuple[int, int]  # line from 1, column in characters from 0

_LOGGERS = {"logger", "logging", "log"}
_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")
_ALIAS = re.compile(r"_?[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*")
# A size one more or one less is as good a choice, from here on.
_SIZE = 10


@dataclass(frozen=True, slots=True)
class Spared:
    """Stretches of a module's text.

    Attributes:
        always: No fault begins in these.
        numbers: No number is changed in these.
    """

    always: list[tuple[Position, Position]]
    numbers: list[tuple[Position, Position]]

    def spares(self, position: Position, *, number: bool) -> bool:
        """Whether what begins here is left alone."""
        stretches = [*self.always, *self.numbers] if number else self.always
        return any(start <= position < end for start, end in stretches)


def find_spared(source: str) -> Spared:
    """Annotations, decorators, imports, logging, texts, what errors say, and sizes.

    Raises:
        SyntaxError: The source is no Python.
    """
    tree = ast.parse(source)
    lines = source.splitlines()
    nodes = list(ast.walk(tree))
    always = [place for node in nodes for place in _always(node)]
    numbers = [place for node in nodes for place in _sizes(node)]
    return Spared([_stretch(n, lines) for n in always], [_stretch(n, lines) for n in numbers])


def _stretch(node: ast.AST, lines: list[str]) -> tuple[Position, Position]:
    return (
        (node.lineno, _characters(lines, node.lineno, node.col_offset)),
        (node.end_lineno, _characters(lines, node.end_lineno, node.end_col_offset)),
    )


def _characters(lines: list[str], line: int, offset: int) -> int:
    """ast counts the bytes of a line, parso its characters."""
    return len(lines[line - 1].encode()[:offset].decode())


def _always(node: ast.AST) -> Iterator[ast.AST]:  # noqa: C901  # one kind after the other
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield from node.decorator_list
            if isinstance(returns := getattr(node, "returns", None), ast.AST):
                yield returns
        case ast.arg(annotation=ast.AST() as annotation):
            yield annotation
        case ast.AnnAssign():
            yield node.annotation
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp() | ast.Subscript()):
            if _ALIAS.fullmatch(name):
                yield node.value
        case ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            yield node
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name))) if name in _LOGGERS:
            yield node
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass" | "TypeVar"), args=args):
            yield from args[1:]
        case ast.Raise(exc=ast.Call(args=args, keywords=keywords)):
            yield from args
            yield from keywords
        case ast.If(test=test) if _is_of_tools(test):
            yield node


def _is_of_tools(test: ast.expr) -> bool:
    """`if TYPE_CHECKING` and `if __name__ == "__main__"`."""
    return any(
        isinstance(node, ast.Name) and node.id in {"TYPE_CHECKING", "__name__"}
        for node in ast.walk(test)
    )


def _sizes(node: ast.AST) -> Iterator[ast.AST]:
    """Values that a constant, a default, a setting or a text column has by choice."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if _CONSTANT.fullmatch(name):
            yield from _large(value)
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            if _CONSTANT.fullmatch(name) or isinstance(value, ast.Constant):
                yield from _large(value)
        case ast.arguments():
            for default in [*node.defaults, *node.kw_defaults]:
                if default is not None:
                    yield from _large(default)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="sa"), attr="String"), args=args):
            yield from (place for arg in args for place in _large(arg))
        case ast.Call(func=ast.Name(id="Field" | "field"), args=args, keywords=keywords):
            yield from (place for arg in args for place in _large(arg))
            yield from (k.value for k in keywords if k.arg == "default")
            yield from (place for k in keywords for place in _large(k.value))


def _large(value: ast.expr) -> Iterator[ast.expr]:
    for node in ast.walk(value):
        if not isinstance(node, ast.Constant) or isinstance(node.value, bool):
            continue
        if isinstance(node.value, float) or (
            isinstance(node.value, int) and abs(node.value) >= _SIZE
        ):
            yield node
