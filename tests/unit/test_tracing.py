"""Traces: off by default, and then nothing is imported; what a traceparent may be."""

import subprocess
import sys
from contextvars import copy_context

import pytest

from nightjar.jobs.records import NewJob
from nightjar.jobs.tracing import current_traceparent, in_trace, is_traceparent
from nightjar.pipeline.settings import Settings, SettingsError
from nightjar.pipeline.tracing.tracer import Traces

GOOD = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_without_a_share_nothing_is_imported_and_no_span_is_made() -> None:
    program = (
        "import sys\n"
        "from nightjar.pipeline.settings import Settings\n"
        "from nightjar.pipeline.tracing.tracer import traces\n"
        "traces.open(Settings(), 'api')\n"
        f"with traces.root('x', '{GOOD}') as span, traces.span('y', '{GOOD}'):\n"
        "    assert span is None\n"
        "print(sorted(name for name in sys.modules if name.startswith('opentelemetry')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_without_the_extra_the_setting_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"nightjar-batch\[traces\]"):
        Traces().open(Settings(trace_share=0.5), "api")


@pytest.mark.parametrize(
    ("value", "valid"),
    [
        (GOOD, True),
        (GOOD.replace("-01", "-00"), True),
        (GOOD.upper(), False),
        (GOOD + "-more", False),
        ("00-" + "0" * 32 + "-00f067aa0ba902b7-01", False),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01", False),
        ("ff" + GOOD[2:], False),
        (GOOD + "\n", False),
        ("", False),
        (None, False),
        (7, False),
    ],
)
def test_a_traceparent_is_checked(value: object, valid: bool) -> None:
    assert is_traceparent(value) is valid


def test_a_new_job_belongs_to_the_trace_of_its_thread() -> None:
    with in_trace(GOOD):
        assert NewJob("m").traceparent == GOOD
        assert copy_context().run(current_traceparent) == GOOD
    assert NewJob("m").traceparent is None
