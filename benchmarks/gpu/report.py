"""The result as a page of Markdown."""

from typing import Any

from benchmarks.writing import table

from .targets import TARGETS, Target

TRIAL = (
    "**A trial of the harness at tiny sizes or without a GPU: none of these numbers is a figure.**"
)
HEAD = ["figure", "at least", "aim", "measured", "reached", "spread"]


def page(result: dict[str, Any]) -> str:
    """What was measured on what, every target's line, what failed and why."""
    machine, figures = result["machine"], result["figures"]
    versions = ", ".join(f"{k} {v}" for k, v in machine.get("versions", {}).items() if v)
    rows = [
        _row(target, figures[target.figure], result["trial"])
        for target in TARGETS
        if target.figure in figures
    ]
    # Kernels and shapes that have a share of their own.
    kernels = [
        [f"{name} {part}", f"{1e6 * found['median_s']:.1f} us", f"{100 * found['share']:.1f}%"]
        for name, one in figures.items()
        for part, found in one.get("details", {}).items()
        if isinstance(found, dict) and "share" in found
    ]
    parts = [
        f"# GPU figures, {result['date']}\n",
        f"{TRIAL}\n" if result["trial"] else "",
        f"`{result['command']}` at {result['version']}, {result['took_s']:.0f} s.\n"
        f"{machine.get('name', 'no device')}, {machine.get('capability', '')} {versions}.\n",
        table(HEAD, rows),
        table(["kernel", "time", "share of a copy"], kernels) if kernels else "",
        *_notes(figures),
    ]
    return "\n".join(part for part in parts if part)


def _row(target: Target, one: dict[str, Any], trial: bool) -> list[str]:
    """One target's line; empty cells where nothing was measured."""
    value = one.get("points", {}).get(target.point)
    note = one.get("notes", {}).get(target.point)
    sign = "<= " if target.lower else ""
    return [
        f"{target.title}, {note}" if note else target.title,
        *("" if b is None else sign + target.write(b) for b in (target.least, target.aim)),
        target.write(value) if value is not None else one["status"],
        "" if value is None or trial else target.met(value),
        _spread(one.get("details", {})),
    ]


def _spread(details: dict[str, Any]) -> str:
    """The widest spread of the timings behind a figure."""
    timings = [details, *(one for one in details.values() if isinstance(one, dict))]
    found = [timing["spread"] for timing in timings if "spread" in timing]
    return f"{100 * max(found):.1f}%" if found else ""


def _notes(figures: dict[str, Any]) -> list[str]:
    """What could not be measured, in its own words; what the engine complained of meanwhile, and
    what must be known of a figure."""
    lines = []
    for name, one in figures.items():
        lines += [f"{name}, the engine: {line}\n" for line in one.get("said", [])]
        details = one.get("details", {})
        lines += [f"{name}: {details[word]}\n" for word in ("warning", "note") if word in details]
        if "reason" in one:
            lines.append(f"{name}, {one['status']}:\n\n```\n{one['reason']}\n```\n")
    return lines
