"""Commands that work on the database itself."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from nightjar.pipeline.front.cli.console import EXIT_USAGE, check_models, fail, read_settings
from nightjar.pipeline.front.cli.stored import opened_store


def vectors(
    name: Annotated[str, typer.Argument(help="What requests write in prompt_vector.")],
    file: Annotated[Path, typer.Argument(help="A safetensors file, one tensor (rows, width).")],
    model: Annotated[
        str | None, typer.Option(help="Whose width they have; needed where several are served.")
    ] = None,
) -> None:
    """Register prompt vectors (P-tuning) in the database under a name."""
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
    typer.echo(f"{registered.name}, version {registered.version}: {registered.length} vectors")


def migrate() -> None:
    """Bring the database's tables to this version; may run several times at once."""
    from nightjar.jobs.store import Store

    store = Store(read_settings().database_url.get_secret_value())
    store.migrate()
    store.close()


def shares() -> None:
    """Show the tokens that each model has computed for each tenant; charged once a second.

    A model that no planner plans for any more is shown by its fingerprint.
    """
    from nightjar.pipeline.queue.queues import short_model

    with opened_store(read_settings()) as store:
        found = store.shares.all()
        names = {one.fingerprint: one.name for one in store.models.known()}
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
