"""The two task files as Dagster assets, every night at two: `dagster dev -f dagster_assets.py`."""

import subprocess
from pathlib import Path

import dagster as dg
from with_client import describe

FOLDER = Path(__file__).parent
SOME_ROWS_FAILED = 3  # an exit status: the others are in the table


def nightjar_run(task_file: str) -> dg.MaterializeResult:
    """Run a task file; any other status than these fails the asset. A retry continues."""
    command = ["nightjar", "run", task_file, "--reuse-results", "answers.db"]
    status = subprocess.run(command, cwd=FOLDER, check=False).returncode
    if status not in (0, SOME_ROWS_FAILED):
        raise dg.Failure(f"nightjar run {task_file} ended with status {status}")
    return dg.MaterializeResult(metadata={"exit_status": status})


@dg.asset(retry_policy=dg.RetryPolicy(max_retries=3, delay=300))
def descriptions() -> dg.MaterializeResult:
    """A line for each product, in the table of this name."""
    return nightjar_run("describe.toml")


@dg.asset(deps=[descriptions], retry_policy=dg.RetryPolicy(max_retries=3, delay=300))
def recommendations() -> dg.MaterializeResult:
    """The candidates of each user, best first, in the table of this name."""
    return nightjar_run("rank.toml")


@dg.asset(
    partitions_def=dg.DailyPartitionsDefinition("2026-01-01", timezone="Asia/Seoul"),
    retry_policy=dg.RetryPolicy(max_retries=3, delay=300),
)
def described(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    """The same lines from the deployment of NIGHTJAR_API, by the Python client."""
    return dg.MaterializeResult(
        metadata={"without_description": describe(FOLDER / "data", context.partition_key)}
    )


defs = dg.Definitions(
    assets=[descriptions, recommendations, described],
    schedules=[
        dg.ScheduleDefinition(
            job=dg.define_asset_job("nightly", selection=[descriptions, recommendations]),
            cron_schedule="0 2 * * *",
            execution_timezone="Asia/Seoul",
        )
    ],
)
