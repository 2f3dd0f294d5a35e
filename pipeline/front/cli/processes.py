"""Commands that start the processes of a deployment or check their health."""

import os
from contextlib import closing
from typing import Annotated

import typer

from nightjar.pipeline.front.cli.console import (
    EXIT_RUN,
    EXIT_USAGE,
    Device,
    Devices,
    Shards,
    Verify,
    become,
    check_driver,
    check_models,
    check_tables,
    fail,
    read_settings,
    require_one_device_option,
)
from nightjar.pipeline.queue.commands import (
    WorkerRole,
    beat_command,
    flower_command,
    worker_command,
)
from nightjar.pipeline.settings import Settings
from nightjar.process import without_collections


def worker(
    role: Annotated[
        WorkerRole,
        typer.Argument(help="plan: planner; compute: GPU worker; tasks: runs of schedules."),
    ],
    engine: Annotated[
        str | None,
        typer.Option(help="model, or fake: answers are made up without a model."),
    ] = None,
    device: Device = None,
    shards: Shards = None,
    devices: Devices = None,
    verify: Verify = None,
) -> None:
    """Start a worker; settings come from NIGHTJAR_* variables.

    Example: NIGHTJAR_MODEL=models/demo nightjar worker compute
    """
    require_one_device_option(device, devices)
    given = {"ENGINE": engine, "DEVICE": device, "SHARDS": shards, "DEVICES": devices}
    given["VERIFY"] = verify
    os.environ.update({f"NIGHTJAR_{k}": str(v) for k, v in given.items() if v is not None})
    settings = read_settings()
    check_driver(settings)
    check_models(settings)
    if role is WorkerRole.TASKS:
        check_tables()
    become(worker_command(role, settings))


def beat() -> None:
    """Start beat, Celery's clock; exactly one per deployment.

    Example: nightjar beat
    """
    read_settings()
    become(beat_command())


def flower(
    address: Annotated[str, typer.Option(help="Interface to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 5555,
) -> None:
    """Start Flower, read-only; NIGHTJAR_FLOWER_AUTH=user:password protects it.

    Example: nightjar flower --port 5555
    """
    read_settings()
    auth = os.environ.get("NIGHTJAR_FLOWER_AUTH") or None
    if auth is None and address not in ("127.0.0.1", "localhost", "::1"):
        fail(
            f"--address {address} opens Flower to others: set NIGHTJAR_FLOWER_AUTH=user:password",
            EXIT_USAGE,
        )
    if auth is not None:
        os.environ["FLOWER_BASIC_AUTH"] = auth
    become(flower_command(address, port))


def api(
    host: Annotated[str, typer.Option(help="Interface to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
) -> None:
    """Start the HTTP API: submit jobs, poll them, page through results.

    Beyond loopback it needs a key: one of `nightjar keys create`, or NIGHTJAR_API_KEY.

    Example: NIGHTJAR_MODEL=models/demo nightjar api --port 8000
    """
    with without_collections():
        from nightjar.pipeline.front.api_server import is_loopback, serve
        from nightjar.pipeline.front.listening import trouble

    settings = read_settings()
    if not is_loopback(host):
        _require_key(settings, host)
    if found := trouble(host, port):
        fail(f"the API cannot start: --host={host} --port={port} {found}", EXIT_RUN)
    serve(settings, host, port)


def _require_key(settings: Settings, host: str) -> None:
    """End the command where nobody could prove who they are."""
    from nightjar.jobs.accounts import is_key
    from nightjar.pipeline.queue.opening import open_store

    secret = settings.api_key
    if secret is not None and not is_key(secret.get_secret_value()):
        return
    with closing(open_store(settings)) as store:
        has_key = store.accounts.has_usable_key()
    if not has_key:
        fail(
            f"--host {host} opens the API to others, and no key protects it: make one by "
            "`nightjar keys create --scope admin`, or set NIGHTJAR_API_KEY to a secret of at "
            "least 32 characters (openssl rand -hex 24)",
            EXIT_USAGE,
        )


def health(
    part: Annotated[
        str, typer.Argument(metavar="planner|worker|beat|tasks", help="The process to check.")
    ],
) -> None:
    """Exit with 0 if this machine's planner, GPU worker, beat or task runner works, else with 1.

    Example: nightjar health planner
    """
    from nightjar.pipeline.front.health import Part, trouble

    if part not in list(Part):
        fail(f"{part!r}: use one of {', '.join(Part)}", EXIT_USAGE)
    if (found := trouble(Part(part), read_settings())) is not None:
        fail(found, EXIT_RUN)
    typer.echo("ok")
