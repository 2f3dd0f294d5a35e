"""The two task files every night at two, as an Airflow DAG. A retry continues where a try stopped.

A second DAG has a deployment describe the products, by the Python client. The file belongs into
Airflow's folder of DAGs with `with_client.py`, on a machine that has `nightjar` and the task files.
"""

import subprocess
from datetime import timedelta
from pathlib import Path

import pendulum
from airflow.sdk import dag, task
from with_client import describe

FOLDER = "/srv/nightly"
SOME_ROWS_FAILED = 3  # an exit status: the others are in the table


NIGHTLY = {
    "schedule": "0 2 * * *",
    "start_date": pendulum.datetime(2026, 1, 1, tz="Asia/Seoul"),
    "catchup": False,
    "max_active_runs": 1,
    "default_args": {"retries": 3, "retry_delay": timedelta(minutes=5)},
}


@dag(**NIGHTLY)
def recommendations() -> None:
    """Describe the products, then rank them for each user."""

    @task
    def nightjar_run(task_file: str) -> int:
        """Run a task file; return its exit status. Any other status than these fails the task."""
        command = ["nightjar", "run", task_file, "--reuse-results", "answers.db"]
        status = subprocess.run(command, cwd=FOLDER, check=False).returncode
        if status not in (0, SOME_ROWS_FAILED):
            raise RuntimeError(f"nightjar run {task_file} ended with status {status}")
        return status

    nightjar_run("describe.toml") >> nightjar_run("rank.toml")


recommendations()


@dag(**NIGHTLY)
def descriptions_by_a_deployment() -> None:
    """Describe the products with the deployment of NIGHTJAR_API."""

    @task
    def described(ds: str = "") -> int:
        """Submit the products of the night, wait, and store the answers; `ds` is Airflow's date."""
        missing: int = describe(Path(FOLDER) / "data", ds)
        return missing

    described()


descriptions_by_a_deployment()
