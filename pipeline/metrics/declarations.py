"""Every metric of Nightjar, once: its name, its labels, and the processes that expose it.

`docs/reference/metrics.md` is generated from this list (`python -m nightjar.pipeline.metrics`).
Labels have few values: models that are served, kinds, buckets, and words that stand in the code.
No label holds an id or a tenant, because each value is kept for ever.
"""

from dataclasses import dataclass, field
from typing import Literal

API, UPLOADS, PLANNER, BEAT, GPU_WORKER = "api", "uploads", "planner", "beat", "gpu-worker"
PROCESSES = (API, UPLOADS, PLANNER, BEAT, GPU_WORKER)
_STORES = (API, PLANNER, GPU_WORKER)
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the buckets of every histogram, in seconds."""

MODEL = {"model": "name of a served model"}
BATCH = {"kind": "generate or rank", "bucket": "tokens of the longest sequence, a power of two"}


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    name: Without the ending `_total` that a counter has in a scrape.
    labels: The meaning of each label.
    processes: Who exposes it.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    processes: tuple[str, ...]
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def series(self) -> str:
        """The name of its main series in a scrape."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


BUILD = Metric(
    "nightjar_build_info",
    "gauge",
    "1; the labels name the version and the process",
    PROCESSES,
    {"version": "Nightjar's version", "process": "api, uploads, planner, beat or gpu-worker"},
)
ROWS = Metric(
    "nightjar_rows",
    "counter",
    "Rows that got their outcome from this process. Each row is counted once",
    _STORES,
    {"outcome": "completed, failed or cancelled"},
)
LANDED_TOKENS = Metric(
    "nightjar_landed_tokens",
    "counter",
    "Tokens of the results that this process landed",
    _STORES,
    {
        "kind": "prompt, completion, requested (the most that was asked for), saved (what of it "
        "early stops left uncomputed) or reused (of answers that were kept)"
    },
)
OPERATION = Metric(
    "nightjar_operation_seconds",
    "histogram",
    "Time of the control plane's work, of what found something to do",
    (PLANNER, GPU_WORKER),
    {
        "operation": "of a planner: plan_chunk, dispatch, ingest, finalize or sweep; of a "
        "GPU worker: claim, compute or finish"
    },
)
HTTP = Metric(
    "nightjar_http_request_seconds",
    "histogram",
    "Time from a request to the beginning of its answer. The API counts uploads, too",
    (API,),
    {
        "method": "the HTTP method, or other",
        "route": "the template of the route, such as /v1/jobs/{job_id}, or none",
        "status": "2xx, 3xx, 4xx or 5xx",
    },
)
UPLOAD = Metric(
    "nightjar_upload_seconds",
    "histogram",
    "Time from the begin of an upload to its answer, with reading and storing its rows",
    (UPLOADS,),
    {"route": "/v1/jobs or /v1/files", "status": "2xx, 4xx or 5xx"},
)
QUEUE_DEPTH = Metric(
    "nightjar_queue_micro_batches",
    "gauge",
    "Micro-batches that wait or are computed, in the whole deployment",
    (API,),
    MODEL | BATCH | {"state": "ready (waits in SQL), dispatched (in the broker) or leased"},
)
QUEUE_AGE = Metric(
    "nightjar_queue_oldest_seconds",
    "gauge",
    "Age of the oldest job that has a micro-batch there and waits",
    (API,),
    MODEL | BATCH,
)
QUEUE_CUT = Metric(
    "nightjar_queue_reading_cut",
    "gauge",
    "1 where more micro-batches wait than a reading counts, so that depths are at least so large",
    (API,),
)
OPEN_JOBS = Metric(
    "nightjar_open_jobs", "gauge", "Jobs that are not over; counted up to a bound", (API,)
)
OPEN_ROWS = Metric(
    "nightjar_open_rows", "gauge", "Rows of these jobs that have no outcome yet", (API,)
)
WORKERS = Metric(
    "nightjar_gpu_workers", "gauge", "GPU workers that gave a sign of life lately", (API,)
)
PART_UP = Metric(
    "nightjar_part_up",
    "gauge",
    "1 where a part of the deployment works, as GET /health says",
    (API,),
    {"part": "database, uploads, broker, planner, beat, gpu_workers or task_runners"},
)
LEADS = Metric("nightjar_planner_leads", "gauge", "1 where this planner leads", (PLANNER,))
TAKEN_BACK = Metric(
    "nightjar_leases_taken_back", "counter", "Leases taken back from dead GPU workers", (PLANNER,)
)
RESENT = Metric(
    "nightjar_messages_resent",
    "counter",
    "Micro-batches whose message was lost, so that it was sent again",
    (PLANNER,),
)
PLANNED = Metric(
    "nightjar_planned_requests", "counter", "Requests that were planned or ended", (PLANNER,)
)
DISPATCHED = Metric(
    "nightjar_dispatched_micro_batches", "counter", "Micro-batches sent to the broker", (PLANNER,)
)
TICKS = Metric("nightjar_ticks", "counter", "Ticks that the clock has sent or left out", (BEAT,))
MICRO_BATCHES = Metric(
    "nightjar_micro_batches",
    "counter",
    "Messages that a GPU worker has taken, by what became of them",
    (GPU_WORKER,),
    {"outcome": "done, skipped, lease_lost, crashed, given_back, not_begun or error"},
)
COMPUTED = Metric(
    "nightjar_computed_micro_batches",
    "counter",
    "Micro-batches that were computed and landed",
    (GPU_WORKER,),
    MODEL | BATCH,
)
RETRIED = Metric(
    "nightjar_retried_micro_batches",
    "counter",
    "Claimed micro-batches that a worker had held before",
    (GPU_WORKER,),
)
SUSPECTS = Metric(
    "nightjar_suspect_requests",
    "counter",
    "Requests that became suspects when a compute process died",
    (GPU_WORKER,),
)
COMPUTE_ENDS = Metric(
    "nightjar_compute_process_ends",
    "counter",
    "Compute processes that ended and were started again",
    (GPU_WORKER,),
    MODEL,
)
ENGINE_SECONDS = Metric(
    "nightjar_engine_seconds", "counter", "Seconds in steps of the engine", (GPU_WORKER,), MODEL
)
LOAD_SECONDS = Metric(
    "nightjar_model_load_seconds", "counter", "Seconds of loading the model", (GPU_WORKER,), MODEL
)
PHASE_SECONDS = Metric(
    "nightjar_engine_phase_seconds",
    "counter",
    "Seconds of steps by phase",
    (GPU_WORKER,),
    MODEL
    | {
        "phase": "receive, schedule, process or recompute; of forward passes: prefill, decode, "
        "rank or mixed"
    },
)
STEPS = Metric(
    "nightjar_engine_steps",
    "counter",
    "Forward passes by what they compute",
    (GPU_WORKER,),
    MODEL | {"content": "prefill, decode, rank or mixed"},
)
ENGINE_COUNTERS = {
    "prefill_tokens": Metric(
        "nightjar_prefill_tokens", "counter", "Prompt tokens computed", (GPU_WORKER,), MODEL
    ),
    "rank_tokens": Metric(
        "nightjar_rank_tokens",
        "counter",
        "Tokens of queries and documents computed",
        (GPU_WORKER,),
        MODEL,
    ),
    "decode_tokens": Metric(
        "nightjar_decode_tokens", "counter", "Tokens generated", (GPU_WORKER,), MODEL
    ),
    "prefix_tokens": Metric(
        "nightjar_prefix_tokens",
        "counter",
        "Tokens of the prompts and queries that were started",
        (GPU_WORKER,),
        MODEL,
    ),
    "cached_tokens": Metric(
        "nightjar_prefix_cached_tokens",
        "counter",
        "Those of them that the prefix cache held",
        (GPU_WORKER,),
        MODEL,
    ),
    "sequence_steps": Metric(
        "nightjar_batch_sequence_steps",
        "counter",
        "Sequences that got a token, summed over steps",
        (GPU_WORKER,),
        MODEL,
    ),
    "slot_steps": Metric(
        "nightjar_batch_slot_steps",
        "counter",
        "Slots, summed over the same steps; the quotient is the occupancy of the batch",
        (GPU_WORKER,),
        MODEL,
    ),
    "padded_rows": Metric(
        "nightjar_padded_rows",
        "counter",
        "Rows computed for nobody: empty slots of a GPU's window, padding of documents",
        (GPU_WORKER,),
        MODEL,
    ),
    "documents": Metric(
        "nightjar_documents", "counter", "Documents of ended rankings", (GPU_WORKER,), MODEL
    ),
    "pruned_documents": Metric(
        "nightjar_pruned_documents",
        "counter",
        "Those of them that could not be among the best, and were left",
        (GPU_WORKER,),
        MODEL,
    ),
    "recomputed": Metric(
        "nightjar_recomputed_requests",
        "counter",
        "Requests computed again in a higher precision",
        (GPU_WORKER,),
        MODEL,
    ),
}
"""Metrics by the fields of the engine's counters."""

ENGINE_GAUGES = {
    "running": Metric(
        "nightjar_batch_running", "gauge", "Sequences that decode now", (GPU_WORKER,), MODEL
    ),
    "slots": Metric(
        "nightjar_batch_slots", "gauge", "Sequences that may decode at once", (GPU_WORKER,), MODEL
    ),
    "waiting": Metric(
        "nightjar_engine_waiting",
        "gauge",
        "Requests in the engine that have not started",
        (GPU_WORKER,),
        MODEL,
    ),
}
"""Metrics by the fields of the engine's gauges."""

KV_BLOCKS = Metric(
    "nightjar_kv_blocks",
    "gauge",
    "Blocks of the cache of keys and values",
    (GPU_WORKER,),
    MODEL | {"state": "held (by running requests), cached (prefixes alone) or free"},
)

ALL = (
    BUILD,
    ROWS,
    LANDED_TOKENS,
    OPERATION,
    HTTP,
    UPLOAD,
    QUEUE_DEPTH,
    QUEUE_AGE,
    QUEUE_CUT,
    OPEN_JOBS,
    OPEN_ROWS,
    WORKERS,
    PART_UP,
    LEADS,
    TAKEN_BACK,
    RESENT,
    PLANNED,
    DISPATCHED,
    TICKS,
    MICRO_BATCHES,
    COMPUTED,
    RETRIED,
    SUSPECTS,
    COMPUTE_ENDS,
    ENGINE_SECONDS,
    LOAD_SECONDS,
    PHASE_SECONDS,
    STEPS,
    *ENGINE_COUNTERS.values(),
    *ENGINE_GAUGES.values(),
    KV_BLOCKS,
)

RECORDED = (
    TAKEN_BACK,
    RESENT,
    PLANNED,
    DISPATCHED,
    TICKS,
    MICRO_BATCHES,
    COMPUTED,
    RETRIED,
    SUSPECTS,
)
"""Counters that are raised where something happens. The other ones are read at each scrape."""
