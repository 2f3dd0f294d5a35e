"""`nightjar models`: which models a running deployment has, and who serves them."""

from typing import TYPE_CHECKING

import typer

from nightjar.pipeline.front.cli.console import AsJson, print_json, say
from nightjar.pipeline.front.cli.deployment import DEFAULT_API, ApiUrl, connect

if TYPE_CHECKING:
    from nightjar.pipeline.client.records import Model


def models(api_url: ApiUrl = DEFAULT_API, as_json: AsJson = False) -> None:
    """List the models that jobs may name, and how many GPU workers serve each.

    Exit status: 0 the list was printed, 1 the API cannot say. With --json, each model is a line.

    Example: nightjar models --json
    """
    with connect(api_url) as client:
        found = client.models()
    for one in found:
        if as_json:
            print_json(one.raw, as_json=True)
        else:
            typer.echo(f"{one.id}\t{_served_by(one)}\tcontext {one.context_length}")
    if not found:
        say("no planner has said yet what it plans for; start `nightjar worker plan`")


def _served_by(model: "Model") -> str:
    count = model.workers
    return f"served by {count} GPU worker{'s' * (count != 1)}" if count else "not served now"
