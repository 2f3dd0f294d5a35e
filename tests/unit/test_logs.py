"""Log lines: the fields of our records are written, those of libraries are not."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from celery.signals import after_setup_logger

from nightjar.logs import FieldsFormatter
from nightjar.pipeline.queue.celery_app import create_celery_app
from nightjar.pipeline.settings import Settings


def line(message: str = "hello", *, process: str | None = None, **extra: object) -> str:
    record = logging.getLogger("nightjar.test").makeRecord(
        "nightjar.test", logging.WARNING, "f.py", 1, message, (), None, extra=extra
    )
    return FieldsFormatter(process).format(record)


def test_a_line_ends_with_the_action_and_its_fields() -> None:
    shown = line(micro_batch=7, owner="gpu-1:7:ab", action="lost", alone=True, ratio=0.5, none=None)
    assert shown.endswith(
        " WARNING nightjar.test: hello action=lost micro_batch=7 "
        'owner="gpu-1:7:ab" alone=true ratio=0.5 none=null'
    )


def test_a_record_of_a_library_is_written_without_its_fields() -> None:
    assert line(data={"args": "a prompt"}).endswith("WARNING nightjar.test: hello")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain-word_1.5", "plain-word_1.5"),
        ("", '""'),
        ("two words", '"two words"'),
        ("two\nlines\x1b[31m", r'"two\nlines\u001b[31m"'),
        ("밤", '"밤"'),
        (["job_1", "job_2"], '["job_1", "job_2"]'),
        (Path("/x"), '"/x"'),
    ],
)
def test_values_stay_on_one_line(value: object, shown: str) -> None:
    assert line(action="x", value=value).endswith(f"action=x value={shown}")


def test_a_long_value_is_cut() -> None:
    assert len(line(action="x", value="y" * 10_000)) < 400


def test_a_traceback_stands_behind_the_fields() -> None:
    try:
        int("x")
    except ValueError:
        record = logging.getLogger("n").makeRecord(
            "n", logging.ERROR, "f.py", 1, "failed", (), sys.exc_info(), extra={"action": "x"}
        )
    first, *rest = FieldsFormatter().format(record).splitlines()
    assert first.endswith("failed action=x")
    assert rest[-1].startswith("ValueError")


def test_the_process_is_named_where_it_is_asked_for() -> None:
    assert " compute WARNING nightjar.test: hello" in line(process="compute")


def test_celerys_handlers_write_the_fields() -> None:
    create_celery_app(Settings.read())
    logger = logging.Logger("celery's root")
    handler = logging.StreamHandler()
    logger.addHandler(handler)
    after_setup_logger.send(None, logger=logger)
    assert isinstance(handler.formatter, FieldsFormatter)


def test_a_configured_process_writes_fields_to_standard_error() -> None:
    code = (
        "import logging; from nightjar import logs; logs.configure('compute');"
        "logging.getLogger('a').info('said', extra={'action': 'model_loaded', 'dtype': 'fp32'})"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=root,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.stderr.endswith(" compute INFO a: said action=model_loaded dtype=fp32\n")
