"""The options that `nightjar tenants create` and `set` share."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from nightjar.pipeline.front.cli.console import EXIT_USAGE, fail
from nightjar.pipeline.front.cli.spans import parse_span

_NO_LIMIT = "none"
_COUNTS = ("requests_a_minute", "tokens_a_day", "rows_waiting", "bytes_stored")


def _most(what: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(metavar="N", help=f"Most {what}, or none.")
    return option


@dataclass(frozen=True, slots=True)
class TenantOptions:
    """What was given on the command line; None for an option that was not."""

    weight: Annotated[
        float | None,
        typer.Option(help="Its share of the computed tokens beside others (1 unless given)."),
    ] = None
    requests_a_minute: Annotated[str | None, _most("requests a minute")] = None
    tokens_a_day: Annotated[str | None, _most("tokens a day")] = None
    rows_waiting: Annotated[str | None, _most("rows that wait")] = None
    bytes_stored: Annotated[str | None, _most("bytes of files")] = None
    keep_results: Annotated[
        str | None,
        typer.Option(
            metavar="30d",
            help="How long after a job's end its results are kept; none: as the deployment says.",
        ),
    ] = None

    def limits(self) -> dict[str, int | None]:
        """The limits that were given; None for `none`. Ends the command where one is no number."""
        limits: dict[str, int | None] = {}
        for name in _COUNTS:
            text = getattr(self, name)
            if text is None:
                continue
            if text != _NO_LIMIT and not (text.isascii() and text.isdecimal() and len(text) < 20):
                option = name.replace("_", "-")
                fail(f"--{option} {text!r}: write a whole number, or none for no limit", EXIT_USAGE)
            limits[name] = None if text == _NO_LIMIT else int(text)
        if (kept := self.keep_results) is not None:
            span = None if kept == _NO_LIMIT else parse_span(kept)
            limits["keep_results_s"] = None if span is None else int(span.total_seconds())
        return limits


def takes_tenant_options(
    command: Callable[[str, TenantOptions, bool], None],
) -> Callable[..., None]:
    """Give a command an option for each field of TenantOptions; it gets them as one record.

    Typer reads options from a function's signature, so the signature is made of both.
    """

    def run(**given: Any) -> None:
        own = {one.name: given.pop(one.name) for one in fields(TenantOptions)}
        command(given["name"], TenantOptions(**own), given["as_json"])

    parameters: list[inspect.Parameter] = []
    for one in inspect.signature(command).parameters.values():
        added = inspect.signature(TenantOptions).parameters.values()
        parameters += added if one.annotation is TenantOptions else [one]
    keywords = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]  # read by typer
    run.__doc__ = command.__doc__
    return run
