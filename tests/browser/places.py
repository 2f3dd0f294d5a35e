"""Every page of the site, by a name for tests and screenshots."""

from collections.abc import Callable, Mapping

from tests.shown_deployment import Shown

# The paths below `/ui` of all pages, in the states that look different.
PLACES: Mapping[str, Callable[[Shown], str]] = {
    "jobs": lambda jobs: "/",
    "nothing-found": lambda jobs: "/?q=no-job-is-called-this",
    "running": lambda jobs: f"/jobs/{jobs.running}",
    "with-failures": lambda jobs: f"/jobs/{jobs.failed}",
    "queued": lambda jobs: f"/jobs/{jobs.queued}",
    "failures": lambda jobs: f"/jobs/{jobs.failed}/failures",
    "no-failures": lambda jobs: f"/jobs/{jobs.ranked}/failures",
    "texts": lambda jobs: f"/jobs/{jobs.running}/results",
    "rankings": lambda jobs: f"/jobs/{jobs.ranked}/results",
    "tables": lambda jobs: f"/jobs/{jobs.judged}/results",
    "failed-rows": lambda jobs: f"/jobs/{jobs.failed}/results?outcome=failed",
    "no-results": lambda jobs: f"/jobs/{jobs.queued}/results",
    "question": lambda jobs: f"/jobs/{jobs.running}/confirm/cancel",
    "workers": lambda jobs: "/workers",
    "queues": lambda jobs: "/queues",
    "schedules": lambda jobs: "/schedules",
    "schedule": lambda jobs: f"/schedules/{jobs.schedule}",
    "failing-schedule": lambda jobs: f"/schedules/{jobs.failing_schedule}",
    "tenants": lambda jobs: "/tenants",
    "not-found": lambda jobs: "/jobs/nope",
}
