"""Examples for the OpenAPI document; mypy compares them with the types of the answers."""

import json

from nightjar.jobs.api.report_schemas import JobReportPayload
from nightjar.jobs.api.schemas import (
    AppendedRows,
    DeletedWebhook,
    DeliveryList,
    DeliveryPayload,
    Health,
    JobDetail,
    JobList,
    JobPayload,
    NewWebhookPayload,
    ResultsPage,
    SubmittedJob,
    WebhookList,
    WebhookPayload,
)
from nightjar.jobs.events import DeliveryState, EventPayload, EventType
from nightjar.jobs.lines.line_shapes import OutputLine
from nightjar.jobs.states import JobState

_BODY = {"model": "tiny", "prompt": "Owls hunt", "max_tokens": 16, "temperature": 0}
_LINE = {"custom_id": "row-1", "method": "POST", "url": "/v1/completions", "body": _BODY}
UPLOAD = json.dumps(_LINE) + "\n"

JOB: JobPayload = {
    "id": "job_019a8f0e6c1b2d",
    "object": "job",
    "state": JobState.RUNNING,
    "model": "tiny",
    "priority": 0,
    "counts": {"total": 3, "completed": 1, "failed": 0, "cancelled": 0, "reused": 0},
    "usage": {
        "prompt_tokens": 3,
        "requested_tokens": 16,
        "generated_tokens": 9,
        "saved_tokens": 7,
        "reused_tokens": 0,
    },
    "requests_per_second": 1.5,
    "created_at": 1795474162.0,
    "started_at": 1795474162.5,
    "finished_at": None,
    "expires_at": None,
    "keep_results_s": None,
    "purged_at": None,
    "open": False,
    "cancel_requested": False,
    "metadata": {"team": "search"},
}
OPEN_JOB: JobPayload = {**JOB, "open": True}
APPENDED: AppendedRows = {
    "job_id": "job_019a8f0e6c1b2d",
    "total": 1000,
    "rejected": 0,
    "existing": False,
    "warning": None,
}
SUBMITTED_JOB: SubmittedJob = {**JOB, "accepted": 3, "rejected": 0, "warning": None}
JOB_DETAIL: JobDetail = {
    **JOB,
    "waits_for": [],
    "waiting": None,
    "micro_batches": {"ready": 0, "dispatched": 0, "leased": 1, "done": 1},
}
JOB_REPORT: JobReportPayload = {
    "object": "job.report",
    "made_at": "2026-11-23T02:00:00+00:00",
    "complete": True,
    "job": {
        "id": JOB["id"],
        "model": "demo_model",
        "tenant": "default",
        "priority": 0,
        "total": 3,
        "completed": 3,
        "failed": 0,
        "cancelled": 0,
        "state": "completed",
        "reused": 0,
        "metadata": {},
        "created_at": "2026-11-23T01:00:00.000+00:00",
        "started_at": "2026-11-23T01:00:01.000+00:00",
        "finished_at": "2026-11-23T01:01:00.000+00:00",
    },
    "timeline": {
        "begins_at": "2026-11-23T01:00:00.000+00:00",
        "bin_s": 30.0,
        "queued": [3.0, 0.0],
        "planned": [0.0, 0.0],
        "computing": [0.5, 2.0],
        "landed": [1.0, 3.0],
        "rates": {
            "begins_at": "2026-11-23T01:00:01.000+00:00",
            "bin_s": 30.0,
            "rows": [1, 2],
            "tokens": [9, 18],
        },
        "lanes": [
            {
                "kind": "generate",
                "bucket": 32,
                "micro_batches": 1,
                "rows": 3,
                "computing": [0.5, 2.0],
            }
        ],
        "micro_batches_without_moments": 0,
    },
    "lengths": {
        "edges": [0, 1, 2, 3, 4],
        "prompts": [0, 0, 0, 0, 3],
        "requested": [0, 0, 0, 0, 3],
        "generated": [0, 0, 0, 3, 0],
        "buckets": [32],
    },
    "bill": {
        "tenant": "default",
        "schedule": None,
        "rows_computed": 3,
        "rows_not_computed": 0,
        "prompt_tokens": 96,
        "prefilled_tokens": 96,
        "cached_tokens": 0,
        "decoded_tokens": 27,
        "requested_tokens": 48,
        "saved_by_stops_tokens": 21,
        "saved_by_pruning_tokens": 0,
        "pruned_documents": 0,
        "reused_rows": 0,
        "reused_tokens": 0,
        "padding_avoided_tokens": 12,
        "engine_s": 0.5,
        "engine_steps": 9,
        "lease_s": 0.6,
    },
    "finish_reasons": {"stop": 3},
    "failures": {"reasons": [], "counted": 0, "complete": True},
    "recomputed": {
        "leases_taken_back": 0,
        "claims_again": 0,
        "crashes": 0,
        "worker_deaths": 0,
        "split": 0,
        "suspects": 0,
        "replanned": 0,
        "retried": 0,
        "in_higher_precision": {},
    },
    "versions": {
        "nightjar": {"0.1.0": 3},
        "precisions": {"fp32": 3},
        "model_fingerprints": {"0f3a9c": 1},
    },
    "limit": None,
}
JOB_LIST: JobList = {
    "object": "list",
    "data": [JOB],
    "has_more": False,
    "next_after": JOB["id"],
}

_SUCCESS: OutputLine = {
    "id": "batch_req_000000000001",
    "custom_id": "row-1",
    "response": {
        "status_code": 200,
        "request_id": "req_000000000001",
        "body": {"object": "text_completion", "choices": [{"index": 0, "text": " at night."}]},
    },
    "error": None,
}
_FAILURE: OutputLine = {
    "id": "batch_req_000000000002",
    "custom_id": "row-2",
    "response": {
        "status_code": 400,
        "request_id": "req_000000000002",
        "body": {
            "error": {
                "message": "line 2: max_tokens must be at least 1",
                "type": "invalid_request_error",
                "param": "body.max_tokens",
                "code": "invalid_value",
                "line": 2,
            }
        },
    },
    "error": None,
}
OUTPUT = json.dumps(_SUCCESS) + "\n"
ERRORS = json.dumps(_FAILURE) + "\n"
RESULTS_PAGE: ResultsPage = {
    "object": "list",
    "data": [_SUCCESS, _FAILURE],
    "has_more": False,
    "next_after": 1,
    "complete": False,
    "waits_for_row": 2,
}

HEALTH: Health = {
    "status": "ok",
    "version": "0.1.0",
    "parts": {"database": "ok", "uploads": "ok", "planner": "ok"},
}
NO_HEALTH: Health = {
    "status": "unavailable",
    "version": "0.1.0",
    "message": "the database is not available; the API's log says why",
    "parts": {"database": "the database is not available; the API's log says why"},
}

WEBHOOK: WebhookPayload = {
    "id": "wh_019a8f0e6c1b2d",
    "object": "webhook",
    "url": "https://example.org/nightjar",
    "events": [EventType.JOB_COMPLETED, EventType.JOB_FAILED],
    "enabled": True,
    "disabled_reason": None,
    "created_at": 1795474162.0,
}
NEW_WEBHOOK: NewWebhookPayload = {
    **WEBHOOK,
    "secret": "whsec_bmlnaHRqYXIgbmlnaHRqYXIgbmlnaHRqYXIgb3dsIQ==",
}
WEBHOOK_LIST: WebhookList = {
    "object": "list",
    "data": [WEBHOOK],
    "has_more": False,
    "next_after": WEBHOOK["id"],
}
DELETED_WEBHOOK: DeletedWebhook = {"id": WEBHOOK["id"], "object": "webhook", "deleted": True}
DELIVERY: DeliveryPayload = {
    "id": "whd_019a8f0e6c1b2d",
    "object": "webhook.delivery",
    "webhook_id": WEBHOOK["id"],
    "event_id": "evt_019a8f0e6c1b2d",
    "type": EventType.JOB_COMPLETED,
    "job_id": JOB["id"],
    "state": DeliveryState.WAITING,
    "attempts": 1,
    "next_at": 1795474172.0,
    "last_status": 500,
    "last_reason": "answered 500",
    "created_at": 1795474166.0,
    "attempted_at": 1795474167.0,
    "ended_at": None,
}
DELIVERY_LIST: DeliveryList = {
    "object": "list",
    "data": [DELIVERY],
    "has_more": False,
    "next_after": DELIVERY["id"],
}
EVENT: EventPayload = {
    "id": DELIVERY["event_id"],
    "object": "event",
    "created_at": 1795474166,
    "type": EventType.JOB_COMPLETED,
    "data": {
        "id": JOB["id"],
        "counts": {"total": 3, "completed": 3, "failed": 0, "cancelled": 0},
    },
}
