"""Examples of schedules for the OpenAPI document; mypy compares them with the types."""

from nightjar.jobs.api.schedule_schemas import (
    DeletedSchedule,
    ScheduleChangeList,
    ScheduleCheck,
    ScheduleList,
    SchedulePayload,
    ScheduleRunList,
    ScheduleRunPayload,
)
from nightjar.jobs.schedule_records import ChangeAction, RunState, Trigger, WhenRunning

FIELDS = {"cron": "0 2 * * *", "time_zone": "Asia/Seoul", "task": "nightly/rank.toml"}
CHANGE = {"cron": "30 2 * * *", "when_still_running": "queue"}

RUN: ScheduleRunPayload = {
    "id": "run_019a8f0e6c1b2d",
    "object": "schedule.run",
    "schedule_id": "sch_019a8f0e6c1b2d",
    "planned_at": 1795453200.0,
    "begin_at": 1795453200.0,
    "deadline_at": 1795539600.0,
    "trigger": Trigger.PLANNED,
    "state": RunState.SUCCEEDED,
    "missed": 0,
    "attempts": 1,
    "reason": None,
    "job_id": "job_019a8f0e6c1b2d",
    "counts": {"total": 20000, "completed": 19998, "failed": 2},
    "created_at": 1795453200.4,
    "started_at": 1795453201.0,
    "ended_at": 1795453890.0,
}
SCHEDULE: SchedulePayload = {
    "id": "sch_019a8f0e6c1b2d",
    "object": "schedule",
    "name": "rank",
    "cron": "0 2 * * *",
    "time_zone": "Asia/Seoul",
    "task": "nightly/rank.toml",
    "task_of_operator": False,
    "file": None,
    "endpoint": None,
    "model": None,
    "when_still_running": WhenRunning.SKIP,
    "catch_up": True,
    "jitter": "0s",
    "deadline": "1d",
    "priority": 0,
    "keep_results": None,
    "paused": False,
    "failing": False,
    "failures": 0,
    "next_at": 1795539600.0,
    "last_run": RUN,
    "created_at": 1795400000.0,
    "changed_at": 1795400000.0,
}
SCHEDULE_LIST: ScheduleList = {
    "object": "list",
    "data": [SCHEDULE],
    "has_more": False,
    "next_after": SCHEDULE["id"],
}
RUN_LIST: ScheduleRunList = {
    "object": "list",
    "data": [RUN],
    "has_more": False,
    "next_after": RUN["id"],
}
DELETED: DeletedSchedule = {"id": SCHEDULE["id"], "object": "schedule", "deleted": True}
CHECK: ScheduleCheck = {
    "object": "schedule.check",
    "ok": False,
    "data": [
        {
            "schedule_id": SCHEDULE["id"],
            "name": "rank",
            "trouble": "its last 3 runs have failed (from 3 on); the last: no row succeeded",
        }
    ],
}
CHANGE_LIST: ScheduleChangeList = {
    "object": "list",
    "data": [
        {
            "id": "chg_019a8f0e6c1b2d",
            "object": "schedule.change",
            "schedule_id": SCHEDULE["id"],
            "name": "rank",
            "at": 1795400100.0,
            "actor": "key nj_a1b2c3d4",
            "action": ChangeAction.UPDATED,
            "before": {"cron": "0 2 * * *"},
            "after": {"cron": "30 2 * * *"},
        }
    ],
    "has_more": False,
    "next_after": "chg_019a8f0e6c1b2d",
}
