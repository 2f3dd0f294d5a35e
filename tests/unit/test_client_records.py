"""What the client reads of the API's answers."""

from typing import Any

import pytest

from nightjar import RowError, UnreachableError
from nightjar.jobs.api import examples, schedule_examples
from nightjar.pipeline.client.records import (
    JobTokens,
    Usage,
    read_jobs,
    read_result,
    read_results,
    read_status,
)
from nightjar.pipeline.client.schedule_records import (
    read_changes,
    read_check,
    read_run,
    read_runs,
    read_schedule,
    read_schedules,
)


def line(body: dict[str, Any] | None, status: int = 200) -> dict[str, Any]:
    response = {"status_code": status, "request_id": "req_1", "body": body}
    return {"id": "batch_req_1", "custom_id": "a", "response": response, "error": None}


def test_a_job_is_read_as_the_api_documents_it() -> None:
    found = read_status(examples.JOB_DETAIL)
    assert (found.id, found.state) == (examples.JOB_DETAIL["id"], examples.JOB_DETAIL["state"])
    assert found.counts.total == examples.JOB_DETAIL["counts"]["total"]
    assert isinstance(found.usage, JobTokens)
    assert found.raw == examples.JOB_DETAIL
    assert [one.id for one in read_jobs(examples.JOB_LIST)] == [
        one["id"] for one in examples.JOB_LIST["data"]
    ]


def test_texts_of_completions_and_chats() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    choices = [{"text": "hi", "finish_reason": "stop"}, {"text": "ho", "finish_reason": "length"}]
    found = read_result(line({"choices": choices, "usage": usage}))
    assert (found.text, found.finish_reason, found.texts) == ("hi", "stop", ("hi", "ho"))
    assert (found.usage, found.error, found.scores) == (Usage(3, 2, 5), None, None)
    chat = read_result(line({"choices": [{"message": {"content": "hey"}}]}))
    assert (chat.text, chat.finish_reason, chat.usage) == ("hey", None, None)


def test_scores_stand_in_the_order_of_the_documents() -> None:
    results = [{"index": 2, "relevance_score": 0.5}, {"index": 0, "relevance_score": 0.25}]
    found = read_result(line({"results": results}))
    assert (found.ranking, found.scores) == ((2, 0), (0.25, None, 0.5))
    assert found.text is None


def test_errors_of_both_places() -> None:
    error = {"code": "missing_field", "message": "no", "param": "prompt", "line": 3, "type": "x"}
    found = read_result(line({"error": error}, 400))
    assert found.error == RowError("missing_field", "no", "prompt", 3)
    assert found.text is None
    cancelled = {
        **line(None),
        "response": None,
        "error": {"code": "batch_cancelled", "message": "c"},
    }
    assert read_result(cancelled).error == RowError("batch_cancelled", "c")


@pytest.mark.parametrize("bad", [{}, {"custom_id": 1}, line({"choices": [{}]}), line(None)])
def test_a_line_of_another_kind_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UnreachableError, match="not one of Nightjar's API"):
        read_results({"data": [bad], "next_after": 1, "has_more": False, "complete": True})


def test_a_page_says_how_to_go_on() -> None:
    page = {"data": [line({"choices": []})], "next_after": 7, "has_more": True, "complete": False}
    found = read_results(page)
    assert [one.custom_id for one in found.results] == ["a"]
    assert (found.next_after, found.has_more, found.complete) == (7, True, False)
    with pytest.raises(UnreachableError, match="not one of Nightjar's API"):
        read_results({"data": []})


def test_schedules_are_read_as_the_api_documents_them() -> None:
    found = read_schedule(schedule_examples.SCHEDULE)
    assert {**vars_of(found), "last_run": None} == {**schedule_examples.SCHEDULE, "last_run": None}
    assert found.last_run is not None
    assert vars_of(found.last_run) | {"counts": None} == {**schedule_examples.RUN, "counts": None}
    assert (found.last_run.counts.total, found.last_run.counts.failed) == (20_000, 2)
    assert (found.last_run.is_over, found.last_run.succeeded) == (True, True)
    assert read_run({**schedule_examples.RUN, "ended_at": None}).is_over is False
    (change,) = read_changes(schedule_examples.CHANGE_LIST)
    assert vars_of(change) == schedule_examples.CHANGE_LIST["data"][0]
    check = read_check(schedule_examples.CHECK)
    assert (check.ok, check.troubles[0].name) == (False, "rank")
    assert read_schedules(schedule_examples.SCHEDULE_LIST) == [found]
    assert read_runs(schedule_examples.RUN_LIST) == [found.last_run]


def vars_of(record: Any) -> dict[str, Any]:
    """The fields of a record as the API names them: none of them is in `raw` alone."""
    kind = record.raw["object"]
    return {name: getattr(record, name) for name in record.raw if name != "object"} | {
        "object": kind
    }


@pytest.mark.parametrize("bad", [{}, {"data": [1]}, {"data": [{}]}, {"data": [{"id": 1}]}])
def test_lists_of_another_kind_are_refused(bad: dict[str, Any]) -> None:
    for read in (read_schedules, read_runs, read_changes, read_check, read_jobs):
        with pytest.raises(UnreachableError, match="not one of Nightjar's API"):
            read(bad)
    with pytest.raises(UnreachableError, match="not one of Nightjar's API"):
        read_check({"data": []})
    with pytest.raises(UnreachableError, match="not one of Nightjar's API"):
        read_schedule({**schedule_examples.SCHEDULE, "last_run": 5})
