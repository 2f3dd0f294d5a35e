"""Which modules are mutated, and which test files belong to each.

A module that is new has no entry yet: tests/unit/test_mutants.py names it.
"""

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
GLOBS = (
    "nightjar/children.py",
    "jobs/lifecycle.py",
    "jobs/store/*.py",
    "pipeline/**/*.py",
    *(
        f"gpu_worker/worker/{name}.py"
        for name in (
            "worker",
            "computing",
            "heartbeat",
            "tasks",
            "exclusive",
            "launcher",
            "ticker",
            "known_scores",
            "landing",
            "flights",
            "served",
            "starting",
            "status",
            "resident_vectors",
        )
    ),
)
# They hold a docstring.
LEFT_OUT = {
    "pipeline/__init__.py",
    *(
        f"pipeline/{room}/__init__.py"
        for room in (
            "client",
            "embedded",
            "exports",
            "files",
            "front",
            "planning",
            "queue",
            "tables",
        )
    ),
    *(f"pipeline/{room}/__init__.py" for room in ("tables/sinks", "tables/sources", "tasks")),
}


def _unit(*names: str) -> list[str]:
    return [f"tests/unit/test_{name}.py" for name in names]


def _integration(*names: str) -> list[str]:
    return [f"tests/integration/test_{name}.py" for name in names]


def _store(*names: str) -> list[str]:
    return _integration(*(f"store_{name}" for name in names))


def _acceptance(*names: str) -> list[str]:
    return [f"tests/acceptance/test_{name}.py" for name in names]


_PROTOCOL = _store("leases", "suspects", "stopping", "races", "protocol")
_FAIR = _integration("fair_shares", "fair_planning")
_TASKS = _unit("tasks_file", "tasks_rendering")
_FILE_SINKS = _unit("tables_file_sinks", "tables_file_places")
_SQL_SINK = _integration("tables_sql_sink", "tables_sql_checks", "tables_killed")
_RUN = _acceptance("run_fake", "bad_input", "bad_requests")

TESTS: dict[str, list[str]] = {
    "nightjar/children.py": _unit("children"),
    "jobs/lifecycle.py": [
        *_unit("jobs_lifecycle", "jobs_batch_status"),
        *_store("leases", "stopping", "retrying"),
    ],
    "jobs/store/__init__.py": [
        "tests/migration/test_migrations.py",
        *_store("troubles", "submission"),
    ],
    "jobs/store/appending.py": _store("appending"),
    "jobs/store/tally.py": _store("tally"),
    "jobs/store/announcing.py": [*_store("webhooks"), *_integration("announced_batches")],
    "jobs/store/deliveries.py": [*_store("deliveries"), *_integration("delivering")],
    "jobs/store/webhook_tables.py": ["tests/migration/test_migrations.py", *_store("webhooks")],
    "jobs/store/webhooks.py": [*_store("webhooks"), *_integration("api_webhooks")],
    "jobs/store/account_tables.py": ["tests/migration/test_migrations.py"],
    "jobs/store/accounts.py": [*_store("accounts"), *_integration("key_ring")],
    "jobs/store/all_tables.py": ["tests/migration/test_migrations.py"],
    "jobs/store/cache_tables.py": ["tests/migration/test_migrations.py", *_store("result_cache")],
    "jobs/store/columns.py": ["tests/migration/test_migrations.py", *_store("reading")],
    "jobs/store/backlog.py": [
        *_store("planning", "known_models"),
        *_integration("plan_budgets", "dispatcher", "fair_planning"),
    ],
    "jobs/store/batch_rows.py": _integration("ingest", "finalize", "api_batches"),
    "jobs/store/batch_tables.py": ["tests/migration/test_migrations.py", *_integration("ingest")],
    "jobs/store/batch_work.py": _integration("ingest", "finalize", "announced_batches"),
    "jobs/store/batches.py": _integration("ingest", "api_batches", "batch_keys"),
    "jobs/store/bodies.py": _unit("store_bodies"),
    "jobs/store/answer_packs.py": _store("packs", "retention"),
    "jobs/store/body_rows.py": _store("packs", "token_ids", "submission", "retention"),
    "jobs/store/packs.py": ["tests/unit/test_packs.py", *_store("packs")],
    "jobs/store/bulk.py": _store("bulk", "submission", "stopping"),
    "jobs/store/common.py": [
        *_store("planning", "waiting", "retrying"),
        *_integration("dispatcher"),
    ],
    "jobs/store/database.py": [
        *_store("troubles", "races", "submission", "connections"),
        *_unit("settings"),
    ],
    "jobs/store/fair_order.py": _FAIR,
    "jobs/store/file_sweeping.py": [*_store("files"), *_integration("sweeper")],
    "jobs/store/file_tables.py": ["tests/migration/test_migrations.py"],
    "jobs/store/files.py": [*_store("files"), *_integration("api_files", "openai_files")],
    "jobs/store/following.py": [*_store("following"), *_integration("following_property")],
    "jobs/store/heartbeats.py": [
        *_store("leases", "suspects", "waiting"),
        *_integration("sweeper"),
    ],
    "jobs/store/holding.py": [*_PROTOCOL, *_integration("fair_shares")],
    "jobs/store/idempotency.py": [*_unit("jobs_accounts"), *_store("accounts")],
    "jobs/store/job_rows.py": [*_store("reading", "retrying"), *_integration("api")],
    "jobs/store/jobs.py": [*_store("reading", "submission", "waiting"), *_integration("api")],
    "jobs/store/json_text.py": [*_unit("store_bodies"), *_store("bulk")],
    "jobs/store/landings.py": _store("paging", "retrying"),
    "jobs/store/leading.py": _integration("leadership"),
    "jobs/store/leases.py": _PROTOCOL,
    "jobs/store/live.py": [*_store("live"), *_integration("api_calls")],
    "jobs/store/model_tables.py": ["tests/migration/test_migrations.py", *_store("known_models")],
    "jobs/store/models.py": [*_store("known_models"), *_integration("api_models")],
    "jobs/store/newest_rows.py": _store("live", "retention"),
    "jobs/store/orphans.py": [*_store("following", "stopping", "bulk"), *_integration("sweeper")],
    "jobs/store/outcomes.py": [
        *_PROTOCOL,
        *_store("planning", "bulk", "following", "retrying", "bounds", "quotas", "result_cache"),
    ],
    "jobs/store/planners.py": _integration("several_planners"),
    "jobs/store/planning.py": [
        *_store("planning", "plans", "stopping", "models"),
        *_integration("planner", "dispatcher", "sweeper", "fair_shares"),
    ],
    "jobs/store/plans.py": [*_store("planning", "plans"), *_integration("planner")],
    "jobs/store/postgres.py": _store("frozen", "pooled"),
    "jobs/store/partitions.py": [*_store("partitions", "retention"), *_integration("sweeper")],
    "jobs/store/parts.py": _store("partitions", "submission"),
    "jobs/store/purging.py": [*_store("retention"), *_integration("purge_command", "sweeper")],
    "jobs/store/quotas.py": [*_store("quotas"), *_integration("api_keys")],
    "jobs/store/precedence.py": [*_FAIR, *_store("planning")],
    "jobs/store/ready.py": [*_store("planning", "suspects", "models", "live"), *_FAIR],
    "jobs/store/replanning.py": _store("models"),
    "jobs/store/result_cache.py": _store("result_cache"),
    "jobs/store/result_lengths.py": _integration("finalize"),
    "jobs/store/result_rows.py": [*_store("paging", "reading"), *_integration("api")],
    "jobs/store/results.py": [*_store("paging", "reading", "leases"), *_integration("api")],
    "jobs/store/retention.py": [*_store("retention"), *_integration("sweeper", "api_retention")],
    "jobs/store/retrying.py": _store("retrying", "retention"),
    "jobs/store/schema.py": ["tests/migration/test_migrations.py"],
    "jobs/store/segmented.py": _store("segmented"),
    "jobs/store/segments.py": [*_unit("jobs_segments"), *_store("planning")],
    "jobs/store/token_ids.py": [*_unit("jobs_token_ids"), *_store("token_ids")],
    "jobs/store/share_tables.py": ["tests/migration/test_migrations.py"],
    "jobs/store/shares.py": _FAIR,
    "jobs/store/staged_rows.py": [
        *_store("submission", "segmented", "paging"),
        *_integration("api"),
    ],
    "jobs/store/staging.py": _store("submission", "segmented", "packs"),
    "jobs/store/stop_reasons.py": [*_store("stopping", "leases"), *_integration("sweeper")],
    "jobs/store/stopping.py": [*_store("stopping", "bounds"), *_integration("sweeper")],
    "jobs/store/submission.py": [
        *_store("submission", "segmented", "bulk", "following"),
        *_integration("api"),
    ],
    "jobs/store/suspects.py": [*_store("suspects", "protocol"), *_integration("poison")],
    "jobs/store/tables.py": ["tests/migration/test_migrations.py", *_store("submission")],
    "jobs/store/turns.py": _store("segmented", "stopping", "bounds"),
    "jobs/store/vector_tables.py": ["tests/migration/test_migrations.py"],
    "jobs/store/vectors.py": _integration("vectors"),
    "jobs/store/storage.py": ["tests/migration/test_migrations.py"],
    "jobs/store/priority_turns.py": _unit("store_priority_turns"),
    "jobs/store/write_lock.py": _unit("store_write_lock"),
    "jobs/store/waiting.py": [
        *_store("waiting", "known_models"),
        *_integration("fair_planning"),
    ],
    "pipeline/front/api_server.py": _integration(
        "api_server", "api_upload_process", "api_access", "api_real_keys"
    ),
    "pipeline/front/http_protocol.py": [
        *_unit("http_protocol"),
        *_integration("api_strangers"),
    ],
    "pipeline/queue/celery_app.py": [
        *_unit("pipeline_transport", "pipeline_events", "logs"),
        *_integration("broker_lost", "dispatcher", "two_planners"),
    ],
    "pipeline/queue/celery_command.py": [*_unit("pipeline_events"), *_integration("two_planners")],
    "pipeline/front/cli/__init__.py": _acceptance("cli"),
    "pipeline/front/cli/accounts.py": _acceptance("cli_keys"),
    "pipeline/front/cli/console.py": [*_acceptance("cli"), *_unit("settings")],
    "pipeline/front/cli/convert.py": _acceptance("convert"),
    "pipeline/front/cli/tune.py": _acceptance("tune"),
    "pipeline/front/cli/vectors.py": _acceptance("cli"),
    "pipeline/front/cli/verify.py": _unit("verify"),
    "pipeline/front/cli/deployment.py": [*_acceptance("cli"), *_integration("submit_task")],
    "pipeline/front/cli/task_jobs.py": _integration("submit_task"),
    "pipeline/front/task_submit.py": _integration("submit_task"),
    "pipeline/front/cli/database.py": [
        *_acceptance("cli"),
        *_integration("vectors", "fair_shares"),
    ],
    "pipeline/front/cli/jobs.py": _acceptance("cli", "compose"),
    "pipeline/front/cli/models.py": _integration("api_models"),
    "pipeline/front/cli/processes.py": [*_acceptance("cli", "cli_keys"), *_unit("settings")],
    "pipeline/front/cli/openapi.py": _integration("openapi"),
    "pipeline/front/cli/stored.py": _acceptance("cli_keys", "cli_webhooks"),
    "pipeline/front/cli/tenant_options.py": _acceptance("cli_keys"),
    "pipeline/front/cli/webhooks.py": _acceptance("cli_webhooks"),
    "pipeline/front/cli/run.py": [*_acceptance("cli"), *_RUN],
    "pipeline/front/cli/export.py": _acceptance("documented_commands"),
    "pipeline/front/cli/purge.py": _integration("purge_command"),
    "pipeline/front/cli/spans.py": [*_integration("purge_command"), *_acceptance("cli_keys")],
    "pipeline/client/asynchronous.py": _integration("client_jobs"),
    **dict.fromkeys(
        (
            "pipeline/client/asynchronous_schedules.py",
            "pipeline/client/schedule_operations.py",
            "pipeline/client/schedule_records.py",
            "pipeline/client/schedules.py",
        ),
        _integration("client_schedules"),
    ),
    "pipeline/client/pages.py": _integration("client_jobs"),
    "pipeline/client/polling.py": _integration("client_jobs"),
    "pipeline/tasks/content.py": _TASKS,
    "pipeline/client/blocking.py": [*_unit("client"), *_integration("client_jobs")],
    "pipeline/client/connecting.py": [*_unit("client"), *_integration("client_jobs")],
    "pipeline/client/errors.py": _unit("client"),
    "pipeline/client/frames.py": _unit("client_frames"),
    "pipeline/client/operations.py": _integration("client_jobs"),
    "pipeline/client/options.py": [*_unit("client"), *_integration("client_retries")],
    "pipeline/client/parts.py": _integration("client_open_jobs"),
    "pipeline/client/progress.py": _integration("client_jobs"),
    "pipeline/client/records.py": _unit("client_records"),
    "pipeline/client/requests.py": _unit("client_requests"),
    "pipeline/client/sources.py": _unit("client_requests", "client_frames"),
    "pipeline/client/steps.py": [*_unit("client"), *_integration("client_retries")],
    "pipeline/client/template.py": _unit("client_frames"),
    "pipeline/client/uploads.py": _integration("client_retries"),
    "pipeline/planning/calls.py": [
        *_integration("api_calls_server", "call_planner"),
        *_acceptance("single_calls"),
    ],
    "pipeline/queue/clock.py": _integration("dispatcher", "two_planners"),
    "pipeline/queue/commands.py": [*_unit("pipeline_commands"), *_integration("two_planners")],
    "pipeline/queue/delivering.py": _integration("delivering", "webhook_system"),
    "pipeline/queue/dispatcher.py": _integration("dispatcher", "two_planners"),
    "pipeline/planning/context_limit.py": _unit("pipeline_encode"),
    "pipeline/planning/encode.py": [*_unit("pipeline_encode"), *_integration("planner")],
    "pipeline/queue/events.py": _unit("pipeline_events"),
    "pipeline/front/flower_command.py": _acceptance("cli"),
    "pipeline/front/listening.py": _acceptance("cli"),
    "pipeline/files/formats.py": _unit("pipeline_formats"),
    "pipeline/planning/finalize.py": _integration("finalize"),
    "pipeline/planning/ingest.py": _integration("ingest"),
    "pipeline/planning/reading.py": _integration("ingest"),
    "pipeline/front/health.py": _integration("health"),
    "pipeline/queue/leadership.py": _integration("leadership", "two_planners"),
    "pipeline/queue/liveness.py": [*_unit("pipeline_liveness"), *_integration("sweeper")],
    "pipeline/queue/live_lane.py": [*_unit("pipeline_taking"), *_acceptance("single_calls")],
    "pipeline/queue/message_fields.py": _unit("pipeline_message_shape"),
    "pipeline/queue/message_shape.py": _unit("pipeline_message_shape"),
    **dict.fromkeys(
        (
            "pipeline/tables/sources/csv_files.py",
            "pipeline/tables/sources/json_lines.py",
            "pipeline/tables/sources/parquet.py",
            "pipeline/tables/sources/piece.py",
            "pipeline/tables/sources/values.py",
        ),
        _unit("tables_sources"),
    ),
    **dict.fromkeys(
        (
            "pipeline/tables/sources/database_urls.py",
            "pipeline/tables/sources/databases.py",
            "pipeline/tables/sources/postgres.py",
            "pipeline/tables/sources/sql.py",
            "pipeline/tables/sources/sqlite.py",
        ),
        _integration("tables_sql_source"),
    ),
    "pipeline/tables/sources/postgres_arrow.py": _integration("tables_sql_arrow"),
    "pipeline/tables/sources/places.py": [
        *_unit("tables_sources"),
        *_integration("tables_s3_source"),
    ],
    "pipeline/tasks/errors.py": _TASKS,
    "pipeline/tasks/fields.py": _TASKS,
    "pipeline/tasks/task_file.py": _TASKS,
    **dict.fromkeys(
        (
            "pipeline/tasks/checking.py",
            "pipeline/tasks/fitting.py",
            "pipeline/tasks/opening.py",
            "pipeline/tasks/preparing.py",
            "pipeline/tasks/rendering.py",
            "pipeline/tasks/requests.py",
            "pipeline/tasks/templates.py",
        ),
        _unit("tasks_rendering"),
    ),
    "pipeline/tasks/sinks.py": [*_unit("tasks_sinks"), *_acceptance("run_task")],
    "pipeline/front/task_work.py": _acceptance("run_task"),
    "pipeline/front/task_plan.py": _acceptance("plan_task"),
    "pipeline/front/cli/tasks.py": [*_acceptance("cli", "plan_task"), *_acceptance("run_task")],
    "pipeline/tables/databases.py": _SQL_SINK,
    "pipeline/tables/keys.py": [*_unit("tables_keys"), *_FILE_SINKS],
    "pipeline/tables/repeats.py": _unit("tables_repeats"),
    "pipeline/tables/sinks/batches.py": [*_FILE_SINKS, *_SQL_SINK],
    "pipeline/tables/sinks/columns.py": [*_FILE_SINKS, *_SQL_SINK],
    "pipeline/tables/sinks/config.py": [*_unit("tables_sink_config"), *_FILE_SINKS],
    "pipeline/tables/sinks/files.py": [*_FILE_SINKS, *_integration("tables_full_disk")],
    "pipeline/tables/sinks/jsonl.py": _FILE_SINKS,
    "pipeline/tables/sinks/making.py": [*_FILE_SINKS, *_SQL_SINK],
    "pipeline/tables/sinks/parquet.py": _FILE_SINKS,
    "pipeline/tables/sinks/places.py": [*_FILE_SINKS, *_integration("tables_object_store")],
    "pipeline/tables/sinks/sink.py": _FILE_SINKS,
    "pipeline/tables/sinks/sql.py": _SQL_SINK,
    "pipeline/tables/sinks/sql_merging.py": _SQL_SINK,
    "pipeline/tables/sinks/sql_staging.py": _SQL_SINK,
    "pipeline/tables/sinks/sql_tables.py": _SQL_SINK,
    "pipeline/tables/sinks/sql_types.py": _SQL_SINK,
    "pipeline/tables/sinks/swapping.py": [*_FILE_SINKS, *_integration("tables_killed")],
    "pipeline/planning/fair_turns.py": _integration("fair_planning"),
    "pipeline/planning/model_change.py": [*_store("models"), *_integration("two_models")],
    "pipeline/planning/models.py": [
        *_unit("pipeline_models"),
        *_store("known_models"),
        *_integration("planner"),
    ],
    "pipeline/planning/pack.py": [*_unit("pipeline_pack"), *_integration("planner")],
    "pipeline/queue/opening.py": _integration("planning_tasks", "health"),
    "pipeline/queue/passes.py": _unit("pipeline_passes"),
    "pipeline/planning/placeholders.py": _unit("pipeline_encode"),
    "pipeline/planning/agreement.py": _integration("several_planners"),
    "pipeline/planning/planner.py": _integration(
        "planner", "plan_budgets", "two_planners", "several_models", "fair_planning"
    ),
    "pipeline/planning/turns.py": _integration("planner", "fair_planning", "several_models"),
    "pipeline/front/progress.py": _unit("pipeline_progress"),
    "pipeline/queue/queues.py": [*_unit("pipeline_pack"), *_integration("dispatcher", "planner")],
    "pipeline/queue/quiet_logs.py": _unit("pipeline_quiet_logs"),
    "pipeline/planning/reuse.py": [
        *_unit("pipeline_reuse", "worker_known_scores"),
        *_integration("reuse"),
        *_acceptance("run_reuse"),
    ],
    "pipeline/settings/api.py": [*_unit("settings"), *_integration("api_server")],
    "pipeline/settings/distinct.py": _integration("several_models"),
    "pipeline/settings/models.py": [*_unit("settings"), *_store("known_models")],
    "pipeline/settings/__init__.py": _unit("settings", "gpu_device", "pipeline_transport"),
    "pipeline/queue/signing.py": [*_unit("pipeline_message_shape"), *_integration("taking")],
    "pipeline/front/signs.py": _integration("signs"),
    "pipeline/queue/sweeper.py": _integration(
        "sweeper", "leadership", "poison", "store_segmented", "store_following"
    ),
    "pipeline/queue/taking.py": [*_unit("pipeline_taking"), *_integration("taking")],
    "pipeline/planning/tasks.py": _integration("planning_tasks", "two_planners", "dispatcher"),
    "pipeline/front/upload_process.py": _integration("api_upload_process"),
    "pipeline/queue/transport.py": [*_unit("pipeline_transport"), *_integration("broker_lost")],
    "pipeline/settings/variables.py": _unit("settings"),
    **{
        f"pipeline/exports/{name}.py": _integration("export")
        for name in ("exporting", "objects", "parquet", "plan", "target", "writing")
    },
    "pipeline/files/vectors.py": _integration("vectors"),
    "pipeline/queue/waking.py": _integration("dispatcher", "health"),
    "pipeline/queue/watched_time.py": [
        *_unit("watched_time"),
        *_integration("sweeper", "leadership"),
    ],
    "pipeline/embedded/patience.py": _store("waiting"),
    "pipeline/embedded/broker.py": _integration("embedded_broker", "broker_lost", "dispatcher"),
    "pipeline/embedded/processes.py": [*_integration("broker_lost", "dispatcher"), *_RUN],
    "pipeline/embedded/line_files.py": [*_unit("pipeline_workdir"), *_RUN],
    "pipeline/embedded/work.py": [*_RUN],
    "pipeline/embedded/run.py": [*_integration("vectors"), *_RUN],
    "pipeline/embedded/summary.py": _RUN,
    "pipeline/embedded/system.py": [*_integration("embedded_broker"), *_RUN],
    "pipeline/embedded/recomputing.py": _unit("receipts"),
    "pipeline/embedded/sampling_results.py": _unit("receipts"),
    "pipeline/embedded/workdir.py": [*_unit("pipeline_workdir"), *_RUN],
    "gpu_worker/worker/computing.py": _integration("worker", "poison"),
    "gpu_worker/worker/heartbeat.py": _unit("heartbeat"),
    "gpu_worker/worker/exclusive.py": _unit("exclusive"),
    "gpu_worker/worker/known_scores.py": [*_unit("worker_known_scores"), *_integration("worker")],
    "gpu_worker/worker/flights.py": _integration("launcher", "worker", "poison"),
    "gpu_worker/worker/landing.py": [*_unit("landing"), *_integration("worker")],
    "gpu_worker/worker/launcher.py": _integration("launcher", "poison"),
    "gpu_worker/worker/resident_vectors.py": [
        *_unit("resident_vectors"),
        *_integration("launcher"),
    ],
    "gpu_worker/worker/served.py": _integration("worker", "several_models"),
    "gpu_worker/worker/starting.py": [*_integration("several_models"), *_RUN],
    "gpu_worker/worker/status.py": _integration("worker"),
    "gpu_worker/worker/tasks.py": [*_integration("worker", "two_models", "several_models"), *_RUN],
    "gpu_worker/worker/ticker.py": _unit("ticker"),
    "gpu_worker/worker/worker.py": _integration("worker", "poison"),
    "jobs/store/depths.py": _integration("metrics"),
    "jobs/store/diagnosis.py": _integration("doctor"),
    "jobs/store/reports.py": _store("reports", "tally"),
    "jobs/store/schedule_rows.py": _integration("schedules"),
    "jobs/store/schedule_runs.py": _integration("schedules", "task_runner"),
    "jobs/store/schedule_tables.py": _integration("schedules"),
    "jobs/store/schedule_work.py": _integration("schedules", "task_runner"),
    "jobs/store/schedules.py": _integration("schedules"),
    "jobs/store/task_runners.py": _integration("signs"),
    "jobs/store/traces.py": _acceptance("monitoring"),
    "pipeline/front/api_metrics.py": [*_integration("metrics"), *_acceptance("monitoring")],
    "pipeline/front/api_traces.py": [*_unit("tracing"), *_acceptance("monitoring")],
    "pipeline/front/cli/doctor.py": _integration("doctor"),
    "pipeline/front/cli/report.py": _store("reports"),
    "pipeline/front/cli/schedule_rows.py": _acceptance("cli_schedules"),
    "pipeline/front/cli/schedules.py": _acceptance("cli_schedules"),
    "pipeline/front/cli/bill.py": _integration("bill"),
    "pipeline/front/cli/top.py": _integration("top"),
    "pipeline/front/top/__init__.py": _integration("top"),
    "pipeline/front/top/reading.py": [*_unit("top_screen"), *_integration("top")],
    "pipeline/front/top/screen.py": _unit("top_screen"),
    "pipeline/front/top/table.py": _unit("top_screen"),
    "pipeline/front/doctor/__init__.py": _integration("doctor"),
    "pipeline/front/doctor/examining.py": _integration("doctor"),
    "pipeline/front/doctor/fights.py": _integration("doctor"),
    "pipeline/front/doctor/findings.py": _integration("doctor"),
    "pipeline/front/doctor/machine.py": _integration("doctor"),
    "pipeline/front/doctor/services.py": _integration("doctor"),
    "pipeline/front/run_report.py": [*_unit("job_report"), *_RUN],
    "pipeline/front/speed_limits.py": _unit("speed_limits", "report_speed"),
    "pipeline/metrics/__init__.py": _integration("metrics"),
    "pipeline/metrics/__main__.py": _unit("metrics_reference"),
    "pipeline/metrics/declarations.py": [*_unit("metrics_reference"), *_integration("metrics")],
    "pipeline/metrics/opening.py": [*_integration("metrics"), *_acceptance("monitoring")],
    "pipeline/metrics/recording.py": [*_integration("metrics"), *_acceptance("monitoring")],
    "pipeline/metrics/reference.py": _unit("metrics_reference"),
    "pipeline/settings/monitoring.py": _unit("settings"),
    "pipeline/queue/scheduling.py": _integration("schedules"),
    "pipeline/runner/__init__.py": [*_unit("runner_kept"), *_integration("task_runner")],
    "pipeline/runner/process.py": [*_unit("runner_kept"), *_integration("task_runner")],
    "pipeline/runner/steps.py": [*_unit("runner_kept"), *_integration("task_runner")],
    "pipeline/settings/schedules.py": _unit("settings"),
    "pipeline/settings/engine.py": _unit("settings"),
    "pipeline/settings/keeping.py": _unit("settings"),
    "pipeline/settings/places.py": _unit("settings"),
    "pipeline/settings/workers.py": _unit("settings"),
    "pipeline/settings/__main__.py": _unit("settings_reference"),
    "pipeline/settings/read_by.py": _unit("settings_reference"),
    "pipeline/settings/reference.py": _unit("settings_reference"),
    "pipeline/schedules/__init__.py": _unit("schedule_file"),
    "pipeline/schedules/applying.py": [*_unit("schedule_file"), *_integration("schedules")],
    "pipeline/schedules/schedule_file.py": _unit("schedule_file"),
    "pipeline/tracing/__init__.py": _unit("tracing"),
    "pipeline/tracing/tracer.py": _unit("tracing"),
    "pipeline/written_file.py": _unit("tasks_file", "schedule_file"),
    "jobs/store/deployment_view.py": _store("overview"),
    "jobs/store/failures.py": _store("overview"),
    "jobs/store/job_figures.py": _store("overview"),
    "jobs/store/job_listing.py": [*_store("overview"), *_integration("top")],
    "jobs/store/previews.py": _store("overview"),
    "jobs/store/session_tables.py": _integration("page"),
    "jobs/store/sessions.py": _integration("page"),
}


def mutated_modules(root: Path = ROOT, globs: Sequence[str] = ("*",)) -> list[str]:
    """The modules that are mutated, those alone whose path fits one of `globs`."""
    found = {str(path.relative_to(root)) for each in GLOBS for path in root.glob(each)} - LEFT_OUT
    return sorted(name for name in found if any(fnmatch(name, glob) for glob in globs))


def without_entry(modules: Sequence[str]) -> list[str]:
    """Those that the table does not name."""
    return [module for module in modules if not TESTS.get(module)]
