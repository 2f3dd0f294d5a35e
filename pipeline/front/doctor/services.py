"""Checks of the database and the broker, and of their clocks."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel
from sqlalchemy.engine import make_url

from nightjar.jobs.errors import JobError
from nightjar.jobs.store import Store
from nightjar.jobs.store.diagnosis import found_revision, head_revision, moment_of
from nightjar.pipeline.front.doctor.findings import Finding, fault, ok, warning
from nightjar.pipeline.settings import Settings
from nightjar.visible import visible

_ANSWER_S = 3.0
_CLOCKS_DIFFER_S = 5.0
_CLOCKS_BREAK_S = 60.0
_FULL = 0.8
_SENTINEL_PORT = 26379


def check_database(settings: Settings) -> Iterator[Finding]:
    """Whether it answers, and has the tables of this version."""
    url = settings.database_url.get_secret_value()
    if url.startswith("sqlite") and not Path(make_url(url).database or "").is_file():
        yield fault("database", f"{make_url(url).database} is not there", "run `nightjar migrate`")
        return
    with closing(Store(url)) as store:
        found, head = found_revision(store.database), head_revision()
        if found == head:
            yield ok("database", f"it answers, and its tables are at revision {head}")
        elif found is None:
            yield fault("database", "it holds no tables of Nightjar", "run `nightjar migrate`")
        elif found < head:
            yield fault(
                "database",
                f"its tables are at revision {found}, and this version needs {head}",
                "run `nightjar migrate`; it may run while others work",
            )
        else:
            yield warning(
                "database",
                f"its tables are at revision {visible(found, 40)}, newer than {head}",
                "upgrade Nightjar on this machine",
            )
        yield from _keys(settings, store)
        moment = moment_of(store.database)
        if moment is not None:
            yield _clock("the database", moment.timestamp() - time.time())


def check_broker(settings: Settings) -> Iterator[Finding]:
    """Whether it answers, keeps its messages under pressure, and over a restart."""
    try:
        with closing(_broker(settings)) as client:
            info: dict[str, Any] = client.info()
            seconds, micros = client.time()
    except (redis.RedisError, OSError, ValueError) as error:
        # Not the URL: it may hold a password.
        yield fault(
            "broker",
            f"it does not answer: {visible(error)}",
            "start it, or correct NIGHTJAR_BROKER_URL; jobs wait in SQL meanwhile",
        )
        return
    yield ok(
        "broker",
        f"it answers: {visible(info.get('server_name', 'redis'))} "
        f"{visible(info.get('valkey_version', info.get('redis_version', '')))}",
    )
    yield from _memory(info)
    if not info.get("aof_enabled") and not int(info.get("rdb_last_save_time", 0)):
        persists = False
    else:
        persists = bool(info.get("aof_enabled")) or info.get("rdb_last_bgsave_status") == "ok"
    if persists:
        yield ok("broker", "it writes its messages to the disk")
    else:
        yield warning(
            "broker",
            "it does not write its messages to the disk: after a restart they are sent again from "
            "SQL, which takes up to NIGHTJAR_REDISPATCH_AFTER_S",
            "start it with `appendonly yes`, unless that pause is fine",
        )
    yield _clock("the broker", seconds + micros / 1e6 - time.time())


def _broker(settings: Settings) -> redis.Redis:
    """A client of the broker; with Sentinel of the server that is the master now."""
    url = settings.broker_url.get_secret_value()
    limits: dict[str, Any] = {
        "socket_timeout": _ANSWER_S,
        "socket_connect_timeout": _ANSWER_S,
        "retry": Retry(NoBackoff(), 0),
    }
    if not url.startswith("sentinel://"):
        return redis.Redis.from_url(url.replace("redis+socket://", "unix://", 1), **limits)
    parts = [urlsplit(part) for part in url.split(";")]
    secret = settings.broker_sentinel_password
    sentinels: Any = Sentinel(  # type: ignore[no-untyped-call]
        [(part.hostname, part.port or _SENTINEL_PORT) for part in parts],
        sentinel_kwargs=limits | {"password": secret.get_secret_value() if secret else None},
        username=unquote(parts[0].username or "") or None,
        password=unquote(parts[0].password or "") or None,
        **limits,
    )
    master: redis.Redis = sentinels.master_for(settings.broker_master_name)
    return master


def _memory(info: dict[str, Any]) -> Iterator[Finding]:
    policy, most = info.get("maxmemory_policy", "noeviction"), int(info.get("maxmemory", 0))
    if policy != "noeviction":
        yield fault(
            "broker",
            f"its memory policy is {visible(policy)}: when it is full it drops messages, unseen",
            "set `maxmemory-policy noeviction`",
        )
    else:
        yield ok("broker", "its memory policy is noeviction")
    if most and int(info.get("used_memory", 0)) > _FULL * most:
        yield warning(
            "broker",
            f"{int(info['used_memory']) >> 20} MiB of {most >> 20} MiB of its memory are used",
            "raise maxmemory, or lower NIGHTJAR_DISPATCH_WINDOW",
        )


def _keys(settings: Settings, store: Store) -> Iterator[Finding]:
    try:
        has_key = settings.api_key is not None or store.accounts.has_usable_key()
    except JobError:
        return  # without tables, which is a finding of its own
    if has_key:
        yield ok("keys", "the API asks for a key")
    elif settings.trusted_hosts:
        yield fault(
            "keys",
            "NIGHTJAR_TRUSTED_HOSTS says that the API is reached from elsewhere, and no key "
            "protects it",
            "run `nightjar keys create --scope admin`",
        )
    else:
        yield ok("keys", "there is no key: the API opens on loopback alone")


def _clock(whose: str, ahead_s: float) -> Finding:
    if abs(ahead_s) < _CLOCKS_DIFFER_S:
        return ok("clock", f"the clocks of {whose} and of this machine agree")
    message = f"the clock of {whose} is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}"
    mend = "run an NTP service on each machine"
    if abs(ahead_s) < _CLOCKS_BREAK_S:
        return warning("clock", message, mend)
    return fault("clock", f"{message}: deadlines and schedules are wrong by as much", mend)
