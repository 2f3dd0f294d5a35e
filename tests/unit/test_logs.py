"""Log lines: the fields of our records are written, those of libraries are not."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from celery.signals import after_setup_logger

from nightjar.logs import FieldsFormatter, JsonFormatter, about
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


def json_line(message: str = "hello", **extra: object) -> dict[str, object]:
    record = logging.getLogger("nightjar.test").makeRecord(
        "nightjar.test", logging.WARNING, "f.py", 1, message, (), None, extra=extra
    )
    text = JsonFormatter("planner").format(record)
    assert "\n" not in text
    found: dict[str, object] = json.loads(text)
    return found


def test_json_has_the_same_fields() -> None:
    said = json_line(action="lost", micro_batch=7, owner="gpu-1:7:ab", none=None)
    assert said.pop("time")
    assert said == {
        "level": "warning",
        "logger": "nightjar.test",
        "process": "planner",
        "pid": os.getpid(),
        "message": "hello",
        "action": "lost",
        "micro_batch": 7,
        "owner": "gpu-1:7:ab",
        "none": None,
    }


def test_a_field_cannot_take_the_place_of_the_records_own() -> None:
    assert json_line(action="x", level="made up")["level"] == "warning"


def test_json_of_a_library_has_no_fields() -> None:
    assert set(json_line(data={"args": "a prompt"})) == {
        *("time", "level", "logger", "process", "pid", "message")
    }


def test_json_cuts_long_values_and_stays_on_one_line() -> None:
    said = json_line("two\nlines\x1b[31m", action="x", text="y" * 10_000, many=["z" * 900])
    assert len(str(said["text"])) == 200
    assert len(str(said["many"])) < 300
    assert said["message"] == "two\nlines\x1b[31m"


def test_what_a_thread_works_on_goes_with_its_records() -> None:
    with about(job_id="job_1", micro_batch=3):
        assert json_line(action="x")["job_id"] == "job_1"
        assert json_line(action="x", micro_batch=4)["micro_batch"] == 4
        assert "micro_batch=3" in line(action="x")
        assert "job_id" not in json_line()
    assert "job_id" not in json_line(action="x")


@pytest.mark.parametrize(("level", "written"), [("debug", True), ("info", False), ("", False)])
def test_the_level_is_that_of_our_own_records(level: str, written: bool) -> None:
    program = (
        "import logging; from nightjar import logs; logs.configure('p');"
        "logging.getLogger('nightjar.x').debug('ours', extra={'action': 'a'});"
        "logging.getLogger('library').debug('theirs')"
    )
    environment = os.environ | {"NIGHTJAR_LOG_FORMAT": "json", "NIGHTJAR_LOG_LEVEL": level}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = [json.loads(one)["message"] for one in done.stderr.splitlines()]
    assert lines == (["ours"] if written else [])
