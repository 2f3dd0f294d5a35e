"""Settings that can each be used, and fight each other."""

import os
from collections.abc import Iterator
from urllib.parse import urlsplit

from nightjar.pipeline.front.api_server import is_loopback
from nightjar.pipeline.front.doctor.findings import Finding, fault, ok, warning
from nightjar.pipeline.settings import Settings

CHECK = "settings"
_LEAST_KEPT_DAYS = 1.0  # the window of a batch
_BEATS_OF_GRACE = 3


def check_settings(settings: Settings) -> Iterator[Finding]:
    """Compare settings with each other."""
    found = [
        *_times(settings),
        *_kept(settings),
        *_opened(settings),
        *_sizes(settings),
    ]
    yield from found
    if not found:
        yield ok(CHECK, "no settings fight each other")


def is_remote(url: str) -> bool:
    """Whether a broker's URL names another machine."""
    parts = urlsplit(url)
    return parts.scheme in ("redis", "rediss", "sentinel") and not is_loopback(
        parts.hostname or "localhost"
    )


def _times(settings: Settings) -> Iterator[Finding]:
    beat, dead = settings.heartbeat_s, settings.worker_dead_after_s
    if dead <= beat:
        yield fault(
            CHECK,
            f"a worker counts as dead after {dead:g} s, and beats each {beat:g} s: every lease is "
            "taken back while it is computed",
            f"set NIGHTJAR_WORKER_DEAD_AFTER_S to {_BEATS_OF_GRACE * beat + 4:g} or more",
        )
    elif dead < _BEATS_OF_GRACE * beat:
        yield warning(
            CHECK,
            f"a worker counts as dead after {dead:g} s, fewer than {_BEATS_OF_GRACE} heartbeats of "
            f"{beat:g} s: a pause of the machine takes its leases",
            f"set NIGHTJAR_WORKER_DEAD_AFTER_S to {_BEATS_OF_GRACE * beat:g} or more",
        )
    if settings.sweep_every_s > dead:
        yield warning(
            CHECK,
            f"sweeps are {settings.sweep_every_s:g} s apart: a dead worker is found that late",
            f"set NIGHTJAR_SWEEP_EVERY_S below NIGHTJAR_WORKER_DEAD_AFTER_S ({dead:g})",
        )
    if settings.redispatch_after_s <= settings.sweep_every_s:
        yield warning(
            CHECK,
            "NIGHTJAR_REDISPATCH_AFTER_S is not above NIGHTJAR_SWEEP_EVERY_S: messages that wait "
            "their turn are sent again and again",
            "set NIGHTJAR_REDISPATCH_AFTER_S to 20 or more",
        )
    if settings.shard_count > 1 and settings.compute_stalled_after_s <= settings.rank_late_after_s:
        yield warning(
            CHECK,
            "NIGHTJAR_COMPUTE_STALLED_AFTER_S is not above NIGHTJAR_RANK_LATE_AFTER_S: the whole "
            "group is ended before the late shard is named",
            "set NIGHTJAR_COMPUTE_STALLED_AFTER_S to 120",
        )
    if settings.live_timeout_s > settings.live_keep_s:
        yield fault(
            CHECK,
            f"a single call waits up to {settings.live_timeout_s:g} s, and is deleted after "
            f"{settings.live_keep_s:g} s: its answer may be gone before it is read",
            "set NIGHTJAR_LIVE_KEEP_S above NIGHTJAR_LIVE_TIMEOUT_S",
        )


def _kept(settings: Settings) -> Iterator[Finding]:
    days = settings.keep_results_days
    if days is not None and days < _LEAST_KEPT_DAYS:
        yield warning(
            CHECK,
            f"results are deleted {days:g} days after the end of a job, sooner than the window of "
            "24 hours that clients of batches plan with",
            "set NIGHTJAR_KEEP_RESULTS_DAYS to 1 or more",
        )
    if days is not None and days * 86_400 > settings.file_lifetime_s:
        yield warning(
            CHECK,
            "uploaded files are deleted before the results of their jobs",
            "set NIGHTJAR_FILE_LIFETIME_S to the seconds of NIGHTJAR_KEEP_RESULTS_DAYS or more",
        )
    if settings.result_cache_url is not None and not settings.reuse_results:
        yield warning(
            CHECK,
            "NIGHTJAR_RESULT_CACHE_URL is set, and NIGHTJAR_REUSE_RESULTS is off: nothing uses it",
            "set NIGHTJAR_REUSE_RESULTS=true, or unset the URL",
        )


def _opened(settings: Settings) -> Iterator[Finding]:
    broker = settings.broker_url.get_secret_value()
    if is_remote(broker):
        if settings.message_key is None:
            yield fault(
                CHECK,
                "the broker is on another machine, and messages are not signed: whoever reaches it "
                "may send work",
                "set NIGHTJAR_MESSAGE_KEY to the same secret for all processes "
                "(openssl rand -hex 24)",
            )
        if not urlsplit(broker).password:
            yield warning(
                CHECK,
                "the broker is on another machine, and its URL holds no password",
                "set a password in the broker, and write it into NIGHTJAR_BROKER_URL",
            )
        if settings.database_url.get_secret_value().startswith("sqlite"):
            yield warning(
                CHECK,
                "the broker is on another machine, and the database is a file: processes of other "
                "machines cannot reach it",
                "use PostgreSQL, or a broker of this machine",
            )
    if "*" in settings.trusted_host_list:
        yield warning(
            CHECK,
            "NIGHTJAR_TRUSTED_HOSTS is *: a page of any site may name this API as its own",
            "list the names under which the API is reached",
        )
    if settings.webhook_allow_private:
        yield warning(
            CHECK,
            "webhooks may reach private addresses: a tenant may send requests into your network",
            "unset NIGHTJAR_WEBHOOK_ALLOW_PRIVATE unless every tenant is trusted",
        )


def _sizes(settings: Settings) -> Iterator[Finding]:
    if settings.micro_batch_tokens > settings.plan_chunk_tokens:
        yield warning(
            CHECK,
            "NIGHTJAR_MICRO_BATCH_TOKENS is above NIGHTJAR_PLAN_CHUNK_TOKENS: no micro-batch fills",
            "raise NIGHTJAR_PLAN_CHUNK_TOKENS above it",
        )
    if settings.engine == "fake":
        yield warning(
            CHECK,
            "NIGHTJAR_ENGINE is fake: answers are made up",
            "unset NIGHTJAR_ENGINE to compute with the model",
        )
    cores = len(os.sched_getaffinity(0))
    if settings.compute_threads is not None and settings.compute_threads > cores:
        yield warning(
            CHECK,
            f"NIGHTJAR_COMPUTE_THREADS is {settings.compute_threads} on {cores} cores: threads "
            "wait for each other",
            f"set it to {cores} or fewer",
        )
