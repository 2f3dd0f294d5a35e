"""Commands that work on the database itself."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from nightjar.pipeline.front.cli.console import (
    EXIT_USAGE,
    AsJson,
    check_models,
    fail,
    print_json,
    read_settings,
)
from nightjar.pipeline.front.cli.stored import opened_store


def vectors(
    name: Annotated[str, typer.Argument(help="What requests write in prompt_vector.")],
    file: Annotated[Path, typer.Argument(help="A safetensors file, one tensor (rows, width).")],
    model: Annotated[
        str | None, typer.Option(help="Whose width they have; needed where several are served.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Register prompt vectors (P-tuning) in the database under a name.

    Exit status: 0 they are registered, 1 the database cannot be used, 2 unusable arguments.

    Example: nightjar vectors tuned prompt.safetensors --model small
    """
    from nightjar.checkpoints import ModelDirectory
    from nightjar.jobs.store import Store
    from nightjar.pipeline.files.vectors import VectorsError, register_vectors

    settings = read_settings()
    paths = check_models(settings)
    if model is None and len(paths) == 1:
        model = next(iter(paths))
    if model not in paths:
        fail(f"--model: name one of {', '.join(map(repr, paths))}", EXIT_USAGE)
    store = Store(settings.database_url.get_secret_value())
    try:
        width = ModelDirectory.open(paths[model]).config.hidden_size
        registered = register_vectors(store.vectors, name, file, width)
    except VectorsError as error:
        fail(str(error), EXIT_USAGE)
    finally:
        store.close()
    if as_json:
        told = {name: getattr(registered, name) for name in ("name", "version", "length")}
        print_json(told, as_json=True)
        return
    typer.echo(f"{registered.name}, version {registered.version}: {registered.length} vectors")


def migrate() -> None:
    """Bring the database's tables to this version; may run several times at once.

    Example: nightjar migrate
    """
    from nightjar.jobs.store import Store

    store = Store(read_settings().database_url.get_secret_value())
    store.migrate()
    store.close()


def shares(as_json: AsJson = False) -> None:
    """Show the tokens that each model has computed for each tenant; charged once a second.

    A model that no planner plans for any more is shown by its fingerprint. With --json, each model
    and tenant is a line.

    Example: nightjar shares --json
    """
    from nightjar.pipeline.queue.queues import short_model

    with opened_store(read_settings()) as store:
        found = store.shares.all()
        names = {one.fingerprint: one.name for one in store.models.known()}
    if as_json:
        for one in found:
            print_json(
                {
                    "model": names.get(one.fingerprint),
                    "fingerprint": one.fingerprint,
                    "tenant": one.tenant,
                    "weight": one.weight,
                    "computed_tokens": one.computed_tokens,
                },
                as_json=True,
            )
        return
    totals = Counter[str]()
    for one in found:
        totals[one.fingerprint] += one.computed_tokens
    typer.echo(
        f"{'model':<24}  {'tenant':<24}  {'weight':>6}  {'computed tokens':>16}  {'of all':>6}"
    )
    for one in found:
        part = one.computed_tokens / max(1, totals[one.fingerprint])
        typer.echo(
            f"{names.get(one.fingerprint, short_model(one.fingerprint)):<24}  "
            f"{one.tenant:<24}  {one.weight:>6g}  "
            f"{one.computed_tokens:>16,}  {part:>6.1%}"
        )
