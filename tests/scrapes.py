"""Reads what a process answers to Prometheus."""

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


def scrape(text: bytes | str) -> dict[str, dict[Labels, float]]:
    """Every series of a scrape, by name and labels."""
    if isinstance(text, bytes):
        text = text.decode()
    found: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def labels(**given: str) -> Labels:
    return frozenset(given.items())
