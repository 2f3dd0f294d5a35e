"""Commands that work on the database itself."""

from collections import Counter

import typer

from nightjar.pipeline.front.cli.console import AsJson, print_json, read_settings
from nightjar.pipeline.front.cli.stored import opened_store


def migrate() -> None:
    """Bring the database's tables to this version; may run several times at once.

    Example: nightjar migrate
    """
    from nightjar.pipeline.queue.opening import open_store

    store = open_store(read_settings())
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
