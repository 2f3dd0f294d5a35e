"""The result as a page of Markdown."""

from __future__ import annotations

from typing import Any

from .targets import BY_NAME, TARGETS, Target

TRIAL = (
    "**A trial of the harness at tiny sizes or without a GPU: none of these numbers is a figure.**"
)


def table(result: dict[str, Any]) -> str:
    """The whole page: what was measured on what, every target's line, what failed and why."""
    machine, figures = result["machine"], result["figures"]
    lines = [f"# GPU figures, {result['date']}", ""]
    if result["trial"]:
        lines += [TRIAL, ""]
    versions = ", ".join(f"{k} {v}" for k, v in machine.get("versions", {}).items() if v)
    lines += [
        f"`{result['command']}` at {result['version']}, {result['took_s']:.0f} s.",
        f"{machine.get('name', 'no device')}, {machine.get('capability', '')} {versions}.",
        "",
        "| figure | at least | aim | measured | reached | spread |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in figures.items():
        for target in BY_NAME[name].targets:
            lines.append(_line(target, one, result["trial"]))
    lines += ["", *_details(figures), *_failures(figures)]
    return "\n".join(lines).rstrip() + "\n"


def _line(target: Target, one: dict[str, Any], trial: bool) -> str:
    """One target's line; empty cells where nothing was measured."""
    value = one.get("points", {}).get(target.point)
    note = one.get("notes", {}).get(target.point)
    cells = [
        f"{target.title}, {note}" if note else target.title,
        _bound(target, target.least),
        _bound(target, target.aim),
        target.write(value) if value is not None else one["status"],
        "" if value is None or trial else target.met(value),
        _spread(one),
    ]
    return f"| {' | '.join(cells)} |"


def _bound(target: Target, value: float | None) -> str:
    if value is None:
        return ""
    return f"{'<= ' if target.lower else ''}{target.write(value)}"


def _spread(one: dict[str, Any]) -> str:
    """The widest spread of the timings behind a figure."""
    found = sorted(_spreads(one.get("details", {})))
    return f"{100 * found[-1]:.1f}%" if found else ""


def _spreads(details: dict[str, Any]) -> list[float]:
    """Of a timing, or of a dictionary of timings."""
    if "spread" in details:
        return [details["spread"]]
    return [d["spread"] for d in details.values() if isinstance(d, dict) and "spread" in d]


def _details(figures: dict[str, Any]) -> list[str]:
    """Kernels and shapes that have a share of their own."""
    rows = [
        f"| {name} {part} | {1e6 * found['median_s']:.1f} us | {100 * found['share']:.1f}% |"
        for name, one in figures.items()
        for part, found in one.get("details", {}).items()
        if isinstance(found, dict) and "share" in found
    ]
    head = ["| kernel | time | share of a copy |", "|---|---|---|"]
    return [*head, *rows, ""] if rows else []


def _failures(figures: dict[str, Any]) -> list[str]:
    """What could not be measured, in its own words; what the engine complained of meanwhile, and
    what must be known of a figure."""
    lines = []
    for name, one in figures.items():
        lines += [f"{name}, the engine: {line}\n" for line in one.get("said", [])]
        details = one.get("details", {})
        lines += [f"{name}: {details[word]}\n" for word in ("warning", "note") if word in details]
        if "reason" in one:
            lines += [f"{name}, {one['status']}:", "", "```", one["reason"], "```", ""]
    return lines


def values(result: dict[str, Any]) -> dict[str, str]:
    """Every measured point, written as in the table, with what must be known of it."""
    found = {}
    for one in result["figures"].values():
        for point, value in one.get("points", {}).items():
            note = one.get("notes", {}).get(point)
            written = TARGETS[point].write(value)
            found[point] = f"{written} ({note})" if note else written
    return found
