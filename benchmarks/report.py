"""Put the committed figures into docs/performance.md: `python -m benchmarks.report [--check]`.

The page has blocks between `<!-- figures: NAME -->` and `<!-- end of figures -->`; each is written
from the newest `peers-*.json` that has the model or the newest `scaling-*.json`, so that page and
figures cannot differ.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .contest import COMPARED
from .writing import RESULTS, ROOT

PAGE = ROOT / "docs" / "performance.md"
BLOCK = re.compile(r"(<!-- figures: ([\w.-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
NOT_YET = "Not measured yet.\n"
FIRST_MODEL = "gpt2-small"

UNITS = {
    "generate": "requests/s",
    "rank": "documents/s",
    "rank_long": "documents/s",
    "catalogue": "documents/s",
    "multi_turn": "requests/s",
    "long_prompts": "requests/s",
}
Record = dict[str, Any]


def results(folder: Path, kind: str) -> list[Record]:
    """Results of a kind, oldest first; dates in the names sort."""
    files = sorted(folder.glob(f"{kind}-????-??-??.json"))
    return [json.loads(path.read_text(encoding="utf-8")) | {"file": path.name} for path in files]


def newest_models(folder: Path) -> dict[str, Record]:
    """By name, each model's newest run beside the peers."""
    found: dict[str, Record] = {}
    for record in results(folder, "peers"):
        found |= record["models"]
    return found


def newest_scaling(folder: Path) -> Record | None:
    """The newest curves."""
    found = results(folder, "scaling")
    return found[-1] if found else None


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def number(value: float | None, suffix: str = "") -> str:
    """Three digits, or a dash where there is no figure."""
    if value is None:
        return "-"
    return f"{value:,.0f}{suffix}" if value >= 100 else f"{value:.3g}{suffix}"


def about(model: Record) -> str:
    """Where and how the figures were measured."""
    machine, options = model["machine"], model["options"]
    flags = ", ".join(machine["flags"])
    done, asked = model["rounds_done"], options["rounds"]
    rounds = f"{done} round{'s' * (done != 1)}"
    if done != asked:
        rounds = f"cut short after {done} of {asked} rounds"
    file = f"peers-{model['date']}.json"
    return (
        f"`{model['command']}`, {model['date']}, {model['minutes']} minutes; "
        f"[{file}](../benchmarks/results/{file}).\n"
        f"{machine['cpu']}, {machine['cores']} cores ({flags}), {machine['memory_gib']} GiB; "
        f"torch {machine['torch']}, {machine['threads']} threads; {rounds}, medians.\n"
    )


def rates(model: Record) -> str:
    """Every system's speed in every workload."""
    rows = []
    for label, system in model["systems"].items():
        measured = system.get("workloads", {})
        cells = [_rate(measured.get(name)) for name in COMPARED]
        cells.append(number(system.get("first_token", {}).get("speedup"), "x"))
        if "failed" not in system:
            rows.append([label, *cells])
    heads = [f"{name}, {UNITS[name]}" for name in COMPARED]
    heads.append("time to first token, 80% repeated")
    return table(["system", *heads], rows) + "\n" + failures(model)


def _rate(measured: Record | None) -> str:
    if measured is None:
        return "-"
    part = "" if measured["units"] == measured["of"] else f" ({measured['units']})"
    return f"{number(measured['rate'])}{part}"


def failures(model: Record) -> str:
    """What could not be measured, and why."""
    lines = []
    for label, system in model["systems"].items():
        if "failed" in system:
            lines.append(f"- {label}: {system['failed']}")
        lines += [
            f"- {label}, {name}: {reason}"
            for name, reason in system.get("workload_failures", {}).items()
        ]
    return (
        "Not measured, with the system's own reason:\n\n" + "\n".join(lines) + "\n" if lines else ""
    )


def settings(model: Record) -> str:
    """How each system was set, and its version."""
    rows = {}
    for system in model["systems"].values():
        if "failed" not in system:
            versions = ", ".join(f"{k} {v}" for k, v in system["versions"].items())
            rows[system["system"]] = [system["system"], versions, system["settings"]]
    return table(["system", "versions", "settings"], list(rows.values()))


def ratio_table(model: Record) -> str:
    """The same precision against the same, and each of ours against the fastest peer; the same of
    generated tokens, where there are any."""
    found, tokens, rows = model["ratios_of"], model["ratios_by_token"], []
    for name in COMPARED:
        same, over = found["by_precision"], found["over_fastest_peer"]
        for precision in over:
            if (best := over[precision].get(name)) is not None:
                equal = same.get(precision, {}).get(name)
                by_token = tokens["over_fastest_peer"].get(precision, {}).get(name)
                ratios = (_ratio(one) for one in (equal, best, by_token))
                rows.append([name, precision, *ratios])
    heads = ["over the fastest peer of it", "over any peer", "over any peer, by generated token"]
    return table(["workload", "ours in", *heads], rows)


def _ratio(found: Record | None) -> str:
    return f"{number(found['ratio'], 'x')} ({found['peer']})" if found else "-"


def agreements(model: Record) -> str:
    """Texts and scores held against transformers fp32."""
    rows = []
    for label, system in model["systems"].items():
        texts, scores = (system.get("workloads", {}).get(n, {}) for n in ("generate", "rank"))
        if "texts_equal" in texts or "max_relative_score_difference" in scores:
            difference = scores.get("max_relative_score_difference")
            rows.append(
                [
                    label,
                    f"{texts['texts_equal']:.1%}" if "texts_equal" in texts else "-",
                    str(texts.get("texts_compared", "-")),
                    str(texts.get("tokens_a_text", "-")),
                    f"{texts['ended_by_stop']:.1%}" if "ended_by_stop" in texts else "-",
                    number(texts.get("tokens_per_s")),
                    "-" if difference is None else f"{difference:.1e}",
                    str(scores.get("scores_compared", "-")),
                ]
            )
    heads = ["system", "texts equal", "of texts", "tokens a text", "ended by their stop"]
    heads.append("generated tokens/s")
    return table([*heads, "largest relative difference of a score", "of scores"], rows)


def targets(model: Record) -> str:
    """The figures that were set as goals, with what was reached."""
    over, engine = model["ratios_of"]["over_fastest_peer"], model["engine"]
    precisions = list(engine)

    def row(name: str, least: str, aim: str, values: Callable[[str], str]) -> list[str]:
        return [name, least, aim, *(values(precision) for precision in precisions)]

    def ratio(workload: str) -> Callable[[str], str]:
        def value(precision: str) -> str:
            return number(over.get(precision, {}).get(workload, {}).get("ratio"), "x")

        return value

    def own(*path: str, suffix: str = "x") -> Callable[[str], str]:
        def value(precision: str) -> str:
            found = engine[precision]
            for key in path:
                found = found.get(key, {}) if isinstance(found, dict) else {}
            return number(found if isinstance(found, float) else None, suffix)

        return value

    def percent(key: str) -> Callable[[str], str]:
        def value(precision: str) -> str:
            share = engine[precision].get(key)
            return "-" if share is None else f"{share:.0%}"

        return value

    def memory(precision: str) -> str:
        return f"{engine[precision]['memory']['peak_over_budget'] - 1:+.0%}"

    rows = [
        row("generation with stops, over the fastest peer", "2.5x", "4x", ratio("generate")),
        row("ranking, over the fastest peer", "12x", "20x", ratio("rank")),
        row("prefill, share of the bare forward", "80%", "95%", percent("prefill_share")),
        row("decode, share of the bare forward", "80%", "95%", percent("decode_share")),
        row("mixed lengths over even lengths", "0.9x", "1x", own("mixed_over_even")),
        row("answer 10x shorter: time saved", "8x", "10x", own("full_over_short_time")),
        row("80% repeated: time to first token", "3x", "5x", own("first_token", "speedup")),
        row("peak memory over weights + KV budget", "+20%", "+10%", memory),
    ]
    return table(["figure", "at least", "aim", *precisions], rows)


def plots(scaling: Record) -> str:
    """Each curve: its plot, its figures, what it shows."""
    stem = scaling["file"].removesuffix(".json")
    machine = scaling["machine"]
    parts = [
        f"`{scaling['command']}`, {scaling['date']}, {machine['cpu']}, {machine['threads']} "
        f"threads; [{scaling['file']}](../benchmarks/results/{scaling['file']}).\n"
    ]
    for name, by_precision in scaling["curves"].items():
        first = next(iter(by_precision.values()))
        parts.append(f"![{name}](../benchmarks/results/{stem}-{name}.svg)\n")
        parts.append(f"{first['explained']}\n")
        heads = [first["x_label"], *(str(point["x"]) for point in first["points"])]
        rows = [
            [f"{first['y_label']}, {precision}", *(number(p["median"]) for p in curve["points"])]
            for precision, curve in by_precision.items()
        ]
        parts.append(table(heads, rows))
    return "\n".join(parts)


MODEL_BLOCKS: dict[str, Callable[[Record], str]] = {
    "about": about,
    "targets": targets,
    "ratios": ratio_table,
    "rates": rates,
    "agreement": agreements,
    "settings": settings,
}


def block(name: str, models: dict[str, Record], scaling: Record | None) -> str:
    """The text of a block: `NAME`, or `NAME-MODEL` for a model other than the first."""
    if name == "plots":
        return plots(scaling) if scaling else NOT_YET
    kind, _, model = name.partition("-")
    if kind not in MODEL_BLOCKS:
        raise ValueError(f"block {name!r}: known are plots, {', '.join(MODEL_BLOCKS)}")
    found = models.get(model or FIRST_MODEL)
    return MODEL_BLOCKS[kind](found) if found else NOT_YET


def fill(page: str, models: dict[str, Record], scaling: Record | None) -> str:
    """The page with every block written anew."""
    return BLOCK.sub(
        lambda match: f"{match[1]}\n{block(match[2], models, scaling)}\n{match[3]}", page
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say whether the page is current")
    args = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    filled = fill(page, newest_models(RESULTS), newest_scaling(RESULTS))
    if args.check:
        sys.exit(f"{PAGE.name} is not what the figures say: make report" if filled != page else 0)
    PAGE.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
