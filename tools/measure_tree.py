"""Measure how readable a checkout is: `python -m tools.measure_tree [DIR] [--json]`.

It reads files only, so it measures any version of the tree: give the folder of a git worktree.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

NO_SOURCE = {"tests", "benchmarks", "tools", "examples", "docs", "nightjar"}
"""`nightjar/` links the other folders into one package."""
SAMPLING = {
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "bad_words", "logprobs"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "stop_token_ids"),
    *("ignore_eos", "min_tokens", "max_tokens"),
}
SPELLED = 8
"""A file that holds so many of these names counts as a copy of the record."""
LONG = 30
"""Words of a long sentence."""


@dataclass(frozen=True)
class Module:
    """One Python file. name: with dots, as it is imported."""

    path: Path
    name: str
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """The first folder of the path."""
        return self.name.partition(".")[0]

    @property
    def lines(self) -> int:
        """The number of lines."""
        return self.text.count("\n")


def modules(root: Path) -> list[Module]:
    """Every Python file of the folders of `root`, except hidden, built and linked ones."""
    found = []
    for folder in sorted(root.iterdir()):
        if not folder.is_dir() or folder.is_symlink() or folder.name.startswith("."):
            continue
        if folder.name in {"build", "dist", "shared", "demo-output"}:
            continue
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(root)
            if any(root.joinpath(one).is_symlink() for one in inside.parents):
                continue
            text = path.read_text(encoding="utf-8")
            parts = inside.with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append(Module(path, name, text, ast.parse(text)))
    return found


def imports(module: Module, names: set[str]) -> set[str]:
    """The checkout's modules that a file imports, inside functions and for types too."""
    package = module.name.split(".")
    if module.path.name != "__init__.py":
        package = package[:-1]
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("nightjar.") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            whole = whole.removeprefix("nightjar.")
            for alias in node.names:
                inner = f"{whole}.{alias.name}"
                found.add(inner if inner in names else whole)
    return (found & names) - {module.name}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that reach each other, the largest first."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for one in graph[waiting.pop()] - seen:
                seen.add(one)
                waiting.append(one)
        return seen

    reach = {name: reached(name) for name in graph}
    groups = {
        tuple(sorted(one for one in reach[name] if name in reach[one]))
        for name in graph
        if name in reach[name]
    }
    return sorted((list(group) for group in groups), key=lambda group: (-len(group), group))


def functions(module: Module) -> list[int]:
    """Lines of each function, from its `def` on."""
    return [
        node.end_lineno - node.lineno + 1
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    ]


def spelled(module: Module) -> int:
    """How many names of sampling parameters stand in a file, as an identifier or a key."""
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        for field in ("id", "attr", "arg"):
            if isinstance(value := getattr(node, field, None), str):
                found.add(value)
    return len(found & SAMPLING)


def private_reaches(module: Module) -> int:
    """Reads of `object._name` where this file does not define `_name` itself."""
    defined: set[str] = set()
    reached: list[str] = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
            if isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}:
                defined.add(node.attr)
            else:
                reached.append(node.attr)
    return sum(name not in defined for name in reached)


def paragraphs_of_page(text: str) -> Iterator[str]:
    """The prose of a Markdown page: no code, no tables, no headings."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^ *([-*]|\d+\.) +", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"^ *[|#].*$", "\n", text, flags=re.MULTILINE)
    yield from re.split(r"\n\s*\n", text)


def paragraphs_of_code(module: Module) -> Iterator[str]:
    """Docstrings, those below a constant included, and comments; lines in a row are one."""
    for node in ast.walk(module.tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield from re.split(r"\n\s*\n", node.value.value)
    said, last = "", -1
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type != tokenize.COMMENT:
            continue
        words = "" if "noqa" in token.string or "type:" in token.string else token.string[1:]
        row, alone = token.start[0], token.line.lstrip().startswith("#")
        if alone and row == last + 1:
            said += words
        else:
            yield said
            said = words
        last = row if alone else -1
    yield said


def sentences(paragraph: str) -> list[int]:
    """Words of each sentence; a colon and a semicolon end one, code in backticks is one word."""
    plain = re.sub(r"`+[^`]*`+", "code", paragraph)
    parts = re.split(r"[.!?:;]+(?:\s+|$)", plain)
    return [len(words) for part in parts if (words := re.findall(r"\w[\w'/.,-]*", part))]


def percentile(values: list[int], percent: int) -> int:
    """The smallest value that `percent` of the values do not pass; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else 0


def prose(words: list[int]) -> dict[str, float]:
    """The figures of sentences, from the words of each."""
    return {
        "sentences": len(words),
        "words_mean": round(mean(words or [0]), 1),
        "words_p90": percentile(words, 90),
        "over_30_percent": round(100 * sum(n > LONG for n in words) / max(1, len(words)), 1),
        "words_max": max(words, default=0),
    }


def measure(root: Path) -> dict[str, Any]:
    """Every figure of a checkout; files without a line count for nothing."""
    every = [one for one in modules(root) if one.lines]
    source = [one for one in every if one.room not in NO_SOURCE]
    names = {one.name for one in source}
    graph = {one.name: imports(one, names) for one in source}
    lengths = [length for one in source for length in functions(one)]
    reaches = {one.name: private_reaches(one) for one in every if one.room == "tests"}
    copies = [one.name for one in source if spelled(one) >= SPELLED]
    pages = sorted((root / "docs").rglob("*.md")) + sorted(root.glob("README.md"))
    of_pages = [
        length
        for page in pages
        for paragraph in paragraphs_of_page(page.read_text(encoding="utf-8"))
        for length in sentences(paragraph)
    ]
    of_code = {
        kind: [n for one in chosen for said in paragraphs_of_code(one) for n in sentences(said)]
        for kind, chosen in (
            ("source", source),
            ("others", [one for one in every if one.room in NO_SOURCE]),
        )
    }
    return {
        "file_lines_median": median([one.lines for one in source] or [0]),
        "file_lines_max": max((one.lines for one in source), default=0),
        "function_lines_p50": percentile(lengths, 50),
        "function_lines_p90": percentile(lengths, 90),
        "function_lines_max": max(lengths, default=0),
        "imports_a_module": round(mean([len(ours) for ours in graph.values()] or [0]), 2),
        "circles": circles(graph),
        "sampling_copies": copies,
        "private_reaches": sum(reaches.values()),
        "private_reach_files": sum(map(bool, reaches.values())),
        "prose_docs": prose(of_pages),
        "prose_source": prose(of_code["source"]),
        "prose_others": prose(of_code["others"]),
        "source_files": len(source),
        "source_lines": sum(one.lines for one in source),
        "lines": {
            room: sum(one.lines for one in every if one.room == room)
            for room in ("tests", "benchmarks", "tools", "examples")
        },
    }


def table(found: dict[str, Any]) -> str:
    """The figures as lines of text."""
    rows = []
    for name, value in found.items():
        if name == "circles":
            told = [f"{len(circle)}: {' '.join(circle)}" for circle in value]
            value = told or ["none"]  # noqa: PLW2901
        elif name == "sampling_copies":
            value = [f"{len(value)} files", *value]  # noqa: PLW2901
        elif isinstance(value, dict):
            value = [", ".join(f"{inner} {number}" for inner, number in value.items())]  # noqa: PLW2901
        first, *others = value if isinstance(value, list) else [value]
        rows += [f"{name:22}{first}", *(f"{'':22}{other}" for other in others)]
    return "\n".join(rows)


def main(given: list[str] | None = None) -> int:
    """Print the figures of a folder as lines, or as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tools.measure_tree", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), metavar="DIR")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(given)
    found = measure(options.folder.resolve())
    print(json.dumps(found, indent=1) if options.json else table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
