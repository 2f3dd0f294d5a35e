"""The reference of the metrics is made from their declarations; where metrics are served."""

from pathlib import Path

import pytest

from nightjar.pipeline.metrics import declarations as declared
from nightjar.pipeline.metrics.recording import Recorder
from nightjar.pipeline.metrics.reference import reference_page
from nightjar.pipeline.settings import Settings, SettingsError
from nightjar.pipeline.settings.monitoring import read_address

ROOT = Path(__file__).parents[2]


def test_the_page_is_that_of_the_declarations() -> None:
    page = ROOT / "docs" / "reference" / "metrics.md"
    assert page.read_text(encoding="utf-8") == reference_page()


def test_names_are_distinct_and_have_their_unit() -> None:
    names = [metric.name for metric in declared.ALL]
    assert len(set(names)) == len(names)
    assert all(name.startswith("nightjar_") and not name.endswith("_total") for name in names)
    assert all(m.name.endswith("_seconds") for m in declared.ALL if m.kind == "histogram")


def test_no_label_is_an_id_or_a_tenant() -> None:
    labels = {label for metric in declared.ALL for label in metric.labels}
    assert labels.isdisjoint({"job_id", "tenant", "custom_id", "worker", "owner", "micro_batch"})


def test_nothing_is_recorded_before_a_process_asks_for_it() -> None:
    recorder = Recorder()
    recorder.count(declared.TICKS)
    with recorder.operation("claim") as timing:
        assert timing.found(None) is None
    assert recorder.registry is None


def test_a_time_that_found_nothing_is_not_recorded() -> None:
    recorder = Recorder()
    registry = recorder.open(declared.PLANNER)
    for found in (0, 3):
        with recorder.operation("dispatch") as timing:
            timing.found(found)
    counted = registry.get_sample_value(
        "nightjar_operation_seconds_count", {"operation": "dispatch"}
    )
    assert counted == 1


def test_a_process_does_not_record_metrics_of_another() -> None:
    recorder = Recorder()
    registry = recorder.open(declared.BEAT)
    recorder.count(declared.TAKEN_BACK)
    recorder.count(declared.TICKS)
    assert registry.get_sample_value("nightjar_ticks_total") == 1
    assert registry.get_sample_value("nightjar_leases_taken_back_total") is None


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("", None),
        ("9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:9464", ("0.0.0.0", 9464)),  # noqa: S104
        ("[::1]:9464", ("::1", 9464)),
    ],
)
def test_a_port_alone_means_loopback(text: str, address: tuple[str, int] | None) -> None:
    assert read_address(text) == address


@pytest.mark.parametrize("text", ["0", "65536", "x", "host:9464", ":9464", "127.0.0.1:", "９４"])
def test_other_addresses_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTJAR_METRICS_ADDRESS", text)
    with pytest.raises(SettingsError, match=r"NIGHTJAR_METRICS_ADDRESS: .*ADDRESS:PORT"):
        Settings.read()
