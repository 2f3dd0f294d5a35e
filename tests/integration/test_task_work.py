"""What a task's work says of its sink after the answers were written."""

from pathlib import Path

from nightjar.jobs.records import ResultRecord
from nightjar.pipeline.front.task_work import TaskWork
from nightjar.pipeline.tasks.task_file import read_task
from tests.tasks import write_rows, write_task

SINK = '[sink]\nsql = {url = "sqlite:///own.db", table = "answers", mirror = true}'


def answered(index: int, key: int) -> ResultRecord:
    body = {"choices": [{"text": "a", "finish_reason": "stop"}], "model": "tiny"}
    return ResultRecord(index, index, index + 1, f"[{key}]", 200, body, None, 1, 1, 1, 0, "stop")


def test_rows_that_leave_a_mirrored_table_are_told(tmp_path: Path) -> None:
    write_rows(tmp_path, {"id": [1], "review": ["a"]})
    work = TaskWork(read_task(write_task(tmp_path, more=SINK)), None, {})
    work.prepare(None)
    assert work.write_results([answered(n, n) for n in range(3)], "night 1").deleted == 0
    assert "left it" not in work.results
    assert work.write_results([answered(0, 1)], "night 2").deleted == 2
    assert work.results.endswith("own.db; 2 rows of earlier runs left it")
