"""What a GPU worker does now, in a small record that travels with its heartbeat."""

import os
import socket
from collections.abc import Sequence

import nightjar
from nightjar.gpu_worker.worker.served import ServedModel
from nightjar.jobs.records import ClaimedMicroBatch, JsonObject

MOST_MICRO_BATCHES = 32
"""A status names no more of them; `micro_batch_count` counts all."""


def worker_status(
    models: Sequence[ServedModel], running: Sequence[ClaimedMicroBatch]
) -> JsonObject:
    """Return the status: no text of a request, and a bounded number of values.

    running: the micro-batches that the worker holds.
    """
    return {
        "version": nightjar.__version__,
        "host": socket.gethostname()[:255],
        "pid": os.getpid(),
        "models": [_model(model) for model in models],
        "micro_batch_count": len(running),
        "micro_batches": [_micro_batch(one) for one in running[:MOST_MICRO_BATCHES]],
    }


def _model(model: ServedModel) -> JsonObject:
    statistics = model.launcher.totals.statistics
    now, counted = statistics.gauges, statistics.counters
    return {
        "name": model.name,
        "fingerprint": model.fingerprint,
        "device": model.launcher.device,
        "precision": model.launcher.precision,
        "compute_pid": model.launcher.pid,
        "requests": model.launcher.in_flight,
        "running": now.running,
        "slots": now.slots,
        "waiting": now.waiting,
        "kv_blocks": now.blocks,
        "kv_held": now.held_blocks,
        "kv_cached": now.resting_blocks,
        "prefill_tokens": counted.prefill_tokens + counted.rank_tokens,
        "cached_tokens": counted.cached_tokens,
        "decode_tokens": counted.decode_tokens,
        "engine_s": round(model.launcher.totals.seconds.engine_s, 3),
    }


def _micro_batch(batch: ClaimedMicroBatch) -> JsonObject:
    return {
        "id": batch.id,
        "job_id": batch.job_id,
        "kind": batch.kind.value,
        "bucket": batch.bucket,
        "requests": len(batch.requests),
        "live": batch.live,
        "alone": batch.isolated,
    }
