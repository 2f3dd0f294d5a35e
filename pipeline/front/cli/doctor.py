"""`nightjar doctor`: what keeps the deployment from working, and how to mend it."""

from dataclasses import asdict
from typing import Annotated

import typer

from nightjar.pipeline.front.cli.console import EXIT_RUN, AsJson, print_json, read_settings

_MARKS = {"ok": "ok     ", "warning": "WARNING", "fault": "FAULT  "}


def doctor(
    strict: Annotated[
        bool, typer.Option("--strict", help="Let a warning count as a fault.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check database, broker, models, kernels, clock, disk, ports, and settings that fight.

    Nothing is changed. Each finding names its mend.

    Exit status: 0 no fault, 1 a fault (with --strict also a warning), 2 unusable settings.

    Example: nightjar doctor --strict
    """
    settings = read_settings()
    from nightjar.pipeline.front.doctor.examining import examine
    from nightjar.pipeline.front.doctor.findings import Level

    found = examine(settings)
    bad = [one for one in found if one.level is Level.FAULT or (strict and one.level != Level.OK)]
    if as_json:
        print_json({"ok": not bad, "findings": [asdict(one) for one in found]}, as_json=True)
    else:
        for one in found:
            typer.echo(f"{_MARKS[one.level]}  {one.check:<9}  {one.message}")
            if one.mend:
                typer.echo(f"{'':>20}mend: {one.mend}")
        typer.echo(f"{len(found)} findings, {len(bad)} of them to be mended")
    if bad:
        raise typer.Exit(EXIT_RUN)
