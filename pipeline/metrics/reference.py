"""The page docs/reference/metrics.md, made from the declarations."""

from nightjar.pipeline.metrics import declarations as declared

_HEAD = """\
# Metrics

This page is generated from `pipeline/metrics/declarations.py`, and
`python -m nightjar.pipeline.metrics` prints it. [Monitoring](../guides/monitoring.md) says how each
process is scraped.

A number that several processes expose is counted by each of them for itself: add the processes up.
Numbers of the whole deployment come from the API alone. If several API processes run, each of them
exposes the same numbers: take the largest, and do not add them.

Each process also exposes `process_*` (CPU seconds, resident memory, open files) of its own.
A counter ends in `_total`. A histogram has `_bucket`, `_sum` and `_count`.
"""
_TITLES = {
    declared.API: "The API",
    declared.UPLOADS: "The upload process",
    declared.PLANNER: "Planners",
    declared.BEAT: "Beat",
    declared.GPU_WORKER: "GPU workers",
}


def reference_page() -> str:
    """Return the page in Markdown."""
    parts = [_HEAD]
    for process, title in _TITLES.items():
        rows = [_row(metric) for metric in declared.ALL if process in metric.processes]
        head = "| metric | kind | labels | meaning |\n|---|---|---|---|\n"
        parts.append(f"\n## {title}\n\n{head}" + "".join(rows))
    labels = {name: text for metric in declared.ALL for name, text in metric.labels.items()}
    shown = "".join(f"| `{name}` | {_meanings(name)} |\n" for name in sorted(labels))
    parts.append(f"\n## Labels\n\n| label | values |\n|---|---|\n{shown}")
    return "".join(parts)


def _row(metric: declared.Metric) -> str:
    labels = ", ".join(f"`{name}`" for name in metric.labels)
    return f"| `{metric.series}` | {metric.kind} | {labels} | {metric.help} |\n"


def _meanings(label: str) -> str:
    found = [metric for metric in declared.ALL if label in metric.labels]
    texts = dict.fromkeys(metric.labels[label] for metric in found)
    if len(texts) == 1:
        return next(iter(texts))
    named = [f"of `{metric.series}`: {metric.labels[label]}" for metric in found]
    return "; ".join(named)
