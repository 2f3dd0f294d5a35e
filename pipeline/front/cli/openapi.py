"""The command that prints the OpenAPI document."""

import json

import typer


def openapi() -> None:
    """Print the OpenAPI document of the HTTP API, as GET /openapi.json answers it.

    Example: nightjar openapi > openapi.json
    """
    from nightjar.jobs.api import create_app
    from nightjar.jobs.api.openapi import openapi_document
    from nightjar.jobs.store import Store

    # Neither the database nor the broker is opened.
    app = create_app(Store("sqlite:///nightjar.db"), lambda job_id: None)
    typer.echo(json.dumps(openapi_document(app), indent=2, ensure_ascii=False))
