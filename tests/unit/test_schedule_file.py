"""Schedule files: what they say, and errors with the line and the field."""

from pathlib import Path

import jsonschema_rs
import pytest
import yaml

from nightjar.jobs.schedule_records import WhenRunning
from nightjar.pipeline.schedules.schedule_file import (
    ScheduleFileError,
    json_schema,
    read_schedules,
)

A = '[schedules.a]\ncron = "0 2 * * *"\n'
EXAMPLE = Path(__file__).parents[2] / "examples" / "nightly" / "schedules.toml"


def written(folder: Path, text: str, name: str = "schedules.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_toml_and_yaml_say_the_same(tmp_path: Path) -> None:
    fields = {
        "cron": "0  2 * * *",
        "time_zone": "Asia/Seoul",
        "task": "rank.toml",
        "when_still_running": "queue",
        "jitter": "10m",
        "deadline": "6h",
        "keep_results": "7d",
    }
    text = "".join(f'{name} = "{value}"\n' for name, value in fields.items())
    toml = read_schedules(written(tmp_path, f"[schedules.rank]\n{text}"))
    told = yaml.safe_dump({"schedules": {"rank": fields}})
    assert toml.schedules == read_schedules(written(tmp_path, told, "s.yaml")).schedules
    definition = toml.schedules["rank"]
    assert definition.task_path == str(tmp_path / "rank.toml")
    assert (definition.cron, definition.task_name) == ("0 2 * * *", None)
    assert definition.when_still_running is WhenRunning.QUEUE
    assert (definition.jitter_s, definition.deadline_s) == (600, 21_600)
    assert definition.keep_results_s == 604_800


def test_the_example_is_a_schedule_file() -> None:
    read = read_schedules(EXAMPLE)
    assert set(read.schedules) == {"describe", "rank"}
    for definition in read.schedules.values():
        assert definition.task_path is not None
        assert Path(definition.task_path).is_file()


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        (
            "a.toml",
            '[schedules.a]\ncron = "0 0 2 * * *"\ntask = "t.toml"',
            "line 2, schedules.a.cron: '0 0 2 * * *' has 6 fields",
        ),
        (
            "a.toml",
            A + 'task = "t.toml"\ntime_zone = "Asia/Seul"',
            "line 4, schedules.a.time_zone: 'Asia/Seul' is no time zone; did you mean",
        ),
        ("a.toml", '[schedules.a]\ntask = "t.toml"', "line 1, schedules.a.cron: is missing"),
        (
            "a.toml",
            A + 'task = "t"\nfile = "f"',
            "line 1, schedules.a: give exactly one of task and file",
        ),
        ("a.toml", A + 'file = "f"', "file needs endpoint"),
        ("a.toml", A + 'task = "t"\nmodel = "m"', "model beside task"),
        (
            "a.toml",
            A + 'task = "t"\njiter = "1m"',
            "line 4, schedules.a.jiter: is not a field of a schedule; did you mean",
        ),
        (
            "a.toml",
            A + 'task = "t"\ndeadline = "soon"',
            "line 4, schedules.a.deadline: 'soon' is no span of time",
        ),
        (
            "a.toml",
            A + 'task = "t"\njitter = "2h"\ndeadline = "1h"',
            "jitter: must be shorter than the deadline",
        ),
        (
            "a.toml",
            '[schedules."a b"]\ncron = "0 2 * * *"\ntask = "t"',
            "'a b' cannot be a schedule's name",
        ),
        (
            "a.toml",
            '[schedules.a]\ncron = "0 2 31 4 *"\ntask = "t"',
            "never comes: its months have no day 31",
        ),
        (
            "a.toml",
            '[schedule.a]\ncron = "0 2 * * *"',
            "holds no schedules; write [schedules.NAME]",
        ),
        ("a.toml", "[schedules.a\n", "is not TOML"),
        (
            "a.yaml",
            "schedules:\n  a:\n    task: t\n    cron: 61 2 * * 1\n",
            "line 4, schedules.a.cron: the minute '61' cannot be used; give 0 to 59",
        ),
        ("a.yaml", "schedules:\n  a: [", "is not YAML"),
        ("a.yaml", "schedules:\n  a: 1\n", "line 2, schedules.a: is not a table of fields"),
    ],
)
def test_an_error_names_the_line_and_the_field(
    tmp_path: Path, name: str, text: str, told: str
) -> None:
    with pytest.raises(ScheduleFileError) as raised:
        read_schedules(written(tmp_path, text, name))
    assert told in str(raised.value)
    assert str(tmp_path / name) in str(raised.value)


def test_a_file_that_is_not_there_or_too_long(tmp_path: Path) -> None:
    with pytest.raises(ScheduleFileError, match="No such file"):
        read_schedules(tmp_path / "none.toml")
    with pytest.raises(ScheduleFileError, match="is longer than"):
        read_schedules(written(tmp_path, "#" * (1 << 20) + "\n"))


def test_the_schema_for_editors_takes_what_is_read(tmp_path: Path) -> None:
    schema = json_schema()
    fits = {"schedules": {"a": {"cron": "0 2 * * *", "task": "t.toml"}}}
    assert jsonschema_rs.is_valid(schema, fits)
    assert not jsonschema_rs.is_valid(schema, {"schedules": {"a": {"cron": "0 2 * * *", "x": 1}}})
    assert not jsonschema_rs.is_valid(schema, {"schedules": {}})
