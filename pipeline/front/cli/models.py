"""`nightjar models`: which models a running deployment has, and who serves them."""

import json
from typing import Annotated, Any

import typer

from nightjar.pipeline.front.cli.console import say
from nightjar.pipeline.front.cli.jobs import DEFAULT_API, ApiUrl, connect


def models(
    api_url: ApiUrl = DEFAULT_API,
    as_json: Annotated[bool, typer.Option("--json", help="Print the API's answer.")] = False,
) -> None:
    """List the models that jobs may name, and how many GPU workers serve each."""
    with connect(api_url) as client:
        found = client.models()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for one in found:
        typer.echo(f"{one['id']}\t{_served_by(one)}\tcontext {one['context_length']}")
    if not found:
        say("no planner has said yet what it plans for; start `nightjar worker plan`")


def _served_by(model: dict[str, Any]) -> str:
    count = model["workers"]
    return f"served by {count} GPU worker{'s' * (count != 1)}" if count else "not served now"
