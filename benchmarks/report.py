"""Put the committed figures into the documents: `python -m benchmarks.report`.

docs/performance.md has blocks between `<!-- figures: NAME -->` and `<!-- end of figures -->`; each
is written from the newest `peers-*.json` that has the model or the newest `scaling-*.json`, so that
page and figures cannot differ.

Each table of docs/reference/measurements.md stands below `<!-- file: NAME-DATE.json -->`. It takes
its cells from the newest file of that name that has all of its figures, and then names that file.
"""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from .contest import COMPARED
from .harness import RESULTS, ROOT, table

PAGE = ROOT / "docs" / "performance.md"
MEASUREMENTS = ROOT / "docs" / "reference" / "measurements.md"
TABLE = re.compile(r"<!-- file: ([\w-]+)-(\d{4}-\d\d-\d\d)\.json -->\n\n((?:\|.*\n)+)")
BLOCK = re.compile(r"(<!-- figures: ([\w.-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
FIRST_MODEL = "gpt2-small"
RANKING = ("rank", "rank_long", "catalogue")

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


def number(value: float | None, suffix: str = "") -> str:
    """Three digits, or a dash where there is no figure."""
    if value is None:
        return "-"
    return f"{value:,.0f}{suffix}" if value >= 100 else f"{value:.3g}{suffix}"


def at(record: Record, *path: str) -> Any:  # noqa: ANN401
    """What a record holds at a path; None where it has no such place."""
    for key in path:
        record = record.get(key, {})
    return None if record == {} else record


def about(model: Record) -> str:
    """Where and how the figures were measured."""
    machine, done, asked = model["machine"], model["rounds_done"], model["options"]["rounds"]
    rounds = f"{done} round{'s' * (done != 1)}"
    if done != asked:
        rounds = f"cut short after {done} of {asked} rounds"
    file = f"peers-{model['date']}.json"
    return (
        f"`{model['command']}`, {model['date']}, {model['minutes']} minutes; "
        f"[{file}](../benchmarks/results/{file}).\n"
        f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['flags'])}), "
        f"{machine['memory_gib']} GiB; "
        f"torch {machine['torch']}, {machine['threads']} threads; {rounds}, medians.\n"
    )


def rates(model: Record) -> str:
    """Every system's speed in every workload; what could not be measured, and why."""
    rows, failures = [], []
    for label, system in model["systems"].items():
        if "failed" in system:
            failures.append(f"- {label}: {system['failed']}")
            continue
        cells = []
        for one in (at(system, "workloads", name) for name in COMPARED):
            part = f" ({one['units']})" if one and one["units"] != one["of"] else ""
            cells.append(number(one and one["rate"]) + part)
        rows.append([label, *cells, number(at(system, "first_token", "speedup"), "x")])
        for name, reason in system.get("workload_failures", {}).items():
            failures.append(f"- {label}, {name}: {reason}")
    heads = [f"{name}, {'document' if name in RANKING else 'request'}s/s" for name in COMPARED]
    heads.append("time to first token, 80% repeated")
    said = ["Not measured, with the system's own reason:\n", "\n".join(failures) + "\n"]
    return "\n".join([table(["system", *heads], rows), *(said if failures else [""])])


def settings(model: Record) -> str:
    """How each system was set, and its version."""
    rows = {}
    for system in model["systems"].values():
        if "failed" not in system:
            versions = ", ".join(f"{k} {v}" for k, v in system["versions"].items())
            rows[system["system"]] = [system["system"], versions, system["settings"]]
    return table(["system", "versions", "settings"], rows.values())


def ratio_table(model: Record) -> str:
    """The same precision against the same, and each of ours against the fastest peer; the same of
    generated tokens, where there are any."""
    found, tokens = model["ratios_of"], model["ratios_by_token"]
    rows = []
    for name in COMPARED:
        for precision, over in found["over_fastest_peer"].items():
            if name in over:
                same = at(found, "by_precision", precision, name)
                by_token = at(tokens, "over_fastest_peer", precision, name)
                ratios = (
                    f"{number(one['ratio'], 'x')} ({one['peer']})" if one else "-"
                    for one in (same, over[name], by_token)
                )
                rows.append([name, precision, *ratios])
    heads = ["over the fastest peer of it", "over any peer", "over any peer, by generated token"]
    return table(["workload", "ours in", *heads], rows)


def agreements(model: Record) -> str:
    """Texts and scores held against transformers fp32."""
    heads = ["system", "texts equal", "of texts", "tokens a text", "ended by their stop"]
    heads += ["generated tokens/s", "largest relative difference of a score", "of scores"]
    keys = ("texts_equal", "texts_compared", "tokens_a_text", "ended_by_stop", "tokens_per_s")
    share, forms = "{:.1%}".format, list[Callable[[Any], str]]()
    forms += [share, str, str, share, number, "{:.1e}".format, str]
    rows = []
    for label, system in model["systems"].items():
        texts, scores = (system.get("workloads", {}).get(n, {}) for n in ("generate", "rank"))
        found = [texts.get(key) for key in keys]
        found += [scores.get(key) for key in ("max_relative_score_difference", "scores_compared")]
        if found[0] is not None or found[-1] is not None:
            pairs = zip(forms, found, strict=True)
            rows.append([label, *("-" if v is None else form(v) for form, v in pairs)])
    return table(heads, rows)


GOALS = (
    ("generation with stops, over the fastest peer", "2.5x", "4x", "generate", "x"),
    ("ranking, over the fastest peer", "12x", "20x", "rank", "x"),
    ("prefill, share of the bare forward", "80%", "95%", "prefill_share", ".0%"),
    ("decode, share of the bare forward", "80%", "95%", "decode_share", ".0%"),
    ("mixed lengths over even lengths", "0.9x", "1x", "mixed_over_even", "x"),
    ("answer 10x shorter: time saved", "8x", "10x", "full_over_short_time", "x"),
    ("80% repeated: time to first token", "3x", "5x", "first_token.speedup", "x"),
    ("peak memory over weights + KV budget", "+20%", "+10%", "memory.peak_over_budget", "+.0%"),
)
"""A figure, what is asked at least, the aim, where it stands, and how it is written."""


def targets(model: Record) -> str:
    """The figures that were set as goals, with what was reached."""

    def cell(precision: str, path: str, form: str) -> str:
        if path in COMPARED:
            value = at(model["ratios_of"], "over_fastest_peer", precision, path, "ratio")
        else:
            value = at(model["engine"][precision], *path.split("."))
        if value is None or form == "x":
            return number(value, "x")
        return format(value - 1 if form.startswith("+") else value, form)

    rows = [
        [*words, *(cell(precision, path, form) for precision in model["engine"])]
        for *words, path, form in GOALS
    ]
    return table(["figure", "at least", "aim", *model["engine"]], rows)


def scaling_about(scaling: Record) -> str:
    """How the curves were measured."""
    machine, file = scaling["machine"], scaling["file"]
    return (
        f"`{scaling['command']}`, {scaling['date']}, {machine['cpu']}, {machine['threads']} "
        f"threads; [{file}](../benchmarks/results/{file}).\n"
    )


def curve(scaling: Record, name: str) -> str:
    """A curve's plot and its figures."""
    by_precision = scaling["curves"][name]
    first = next(iter(by_precision.values()))
    heads = [first["x_label"], *(str(point["x"]) for point in first["points"])]
    rows = [
        [f"{first['y_label']}, {precision}", *(number(p["median"]) for p in one["points"])]
        for precision, one in by_precision.items()
    ]
    stem = scaling["file"].removesuffix(".json")
    return f"![{name}](../benchmarks/results/{stem}-{name}.svg)\n\n{table(heads, rows)}"


MODEL_BLOCKS: dict[str, Callable[[Record], str]] = {
    "about": about,
    "targets": targets,
    "ratios": ratio_table,
    "rates": rates,
    "agreement": agreements,
    "settings": settings,
}


def block(name: str, models: dict[str, Record], scaling: Record) -> str:
    """The text of a block: `NAME`, `NAME-MODEL` for a model other than the first, `curve-NAME`."""
    kind, _, of = name.partition("-")
    if kind == "scaling":
        return scaling_about(scaling)
    if kind == "curve":
        return curve(scaling, of)
    return MODEL_BLOCKS[kind](models[of or FIRST_MODEL])


def fill(page: str, models: dict[str, Record], scaling: Record) -> str:
    """The page with every block written anew."""
    return BLOCK.sub(
        lambda match: f"{match[1]}\n{block(match[2], models, scaling)}\n{match[3]}", page
    )


def filled(text: str, folder: Path) -> str:
    """The page of measurements with the newest figures.

    Raises:
        LookupError: No file has a table's figures.
    """
    return TABLE.sub(lambda found: _filled_table(found, folder), text)


def _filled_table(found: re.Match[str], folder: Path) -> str:
    name, lines = found[1], found[3].splitlines()
    columns = _cells(lines[0])[1:-1]
    for record in reversed(results(folder, name)):
        with suppress(KeyError):  # an older kind of measurement, or another one of the same name
            rows = [_filled_row(line, columns, record) for line in lines[2:]]
            return "\n".join([f"<!-- file: {record['file']} -->", "", *lines[:2], *rows, ""])
    raise LookupError(f"no {name}-DATE.json in {folder} has all figures of its table")


def _filled_row(line: str, columns: list[str], record: Record) -> str:
    what, *_, key = _cells(line)
    path = key.strip("`").split(".")
    values: list[Any] = [reduce(getitem, path, _part(record, column)) for column in columns]
    return f"| {what} | {' | '.join(f'{value:,}' for value in values)} | {key} |"


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _part(record: Record, column: str) -> Record:
    """The part of a file that a column shows; all of it if the table has one column of values."""
    if column in ("SQLite", "PostgreSQL"):
        return dict(record[column.lower()])
    if "demo_model" in record:
        return dict(record["demo_model"]["by_precision"][column])
    return record


def main() -> None:
    figures = newest_models(RESULTS), results(RESULTS, "scaling")[-1]
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), *figures), encoding="utf-8")
    text = filled(MEASUREMENTS.read_text(encoding="utf-8"), RESULTS)
    MEASUREMENTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
