"""`nightjar verify`: finds a wrongly converted or damaged model before it serves."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from nightjar.pipeline.front.cli.console import (
    EXIT_ROWS_FAILED,
    EXIT_RUN,
    EXIT_USAGE,
    AsJson,
    fail,
    print_json,
    say,
)


def verify(  # noqa: PLR0913, PLR0917 - one for each option
    model: Annotated[Path, typer.Argument(metavar="DIR", help="The model's directory.")],
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text of yours: paragraphs with an empty line between."),
    ] = None,
    logits: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Logits of the source framework: .safetensors or .npz."),
    ] = None,
    precisions: Annotated[
        str, typer.Option(metavar="LIST", help="Precisions to compare with fp32; '' for none.")
    ] = "bf16,int8",
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the report as an HTML page.")
    ] = None,
    write_plan: Annotated[
        bool,
        typer.Option("--write-plan", help="Write the precision plan into the model's directory."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace another plan that is there.")
    ] = False,
    results: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Instead: compute answers of this file again."),
    ] = None,
    requests: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The lines that --results answers.")
    ] = None,
    sample: Annotated[
        str, typer.Option(metavar="SHARE", help="Share of --results; 1,000 rows at most.")
    ] = "1%",
    as_json: AsJson = False,
) -> None:
    """Check a model: order of its weights, loss on text, FP16's range, agreement of precisions.

    With --results it computes a sample of earlier answers again, alone and in company.

    Exit status: 0 the model is sound, 1 it cannot be opened, 3 a check failed or answers differ.

    Example: nightjar verify models/gpt --text sample.txt --report gpt.html
    """
    if results is not None:
        _recompute(model, results, requests, sample, as_json=as_json)
    command = [sys.executable, "-m", "nightjar.gpu_worker.verify", str(model)]
    command += ["--precisions", precisions]
    command += ["--text", str(text)] if text is not None else []
    command += ["--logits", str(logits)] if logits is not None else []
    command += ["--write-plan"] if write_plan else []
    command += ["--overwrite"] if overwrite else []
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE)
    if not done.stdout:
        raise typer.Exit(done.returncode or EXIT_RUN)
    found = json.loads(done.stdout)
    if report is not None:
        from nightjar.jobs.report.model_page import write_model_page

        try:
            write_model_page(report, found)
        except OSError as error:
            fail(f"{report}: the report cannot be written: {error.strerror}", EXIT_RUN)
        say(f"report: {report}")
    if as_json:
        print_json(found, as_json=True)
    else:
        typer.echo("\n".join(found["lines"]))
    raise typer.Exit(done.returncode)


def _recompute(
    model: Path, results: Path, requests: Path | None, share: str, *, as_json: bool
) -> NoReturn:
    """Compute answers of a file again, print what differs, and end the command."""
    from nightjar.pipeline.embedded.recomputing import recompute
    from nightjar.pipeline.embedded.sampling_results import sample_rows, sample_share
    from nightjar.pipeline.embedded.work import RunError
    from nightjar.pipeline.embedded.workdir import UsageError

    if requests is None:
        fail("--results needs --requests FILE: the lines that were answered", EXIT_USAGE)
    try:
        sampled = sample_rows(results, requests, sample_share(share))
        found = recompute(model, sampled, lambda what: say(f"{what} ..."))
    except UsageError as error:
        fail(str(error), EXIT_USAGE)
    except RunError as error:
        fail(str(error), EXIT_RUN)
    if as_json:
        print_json(found.as_json(), as_json=True)
    else:
        typer.echo("\n".join(found.lines()))
    raise typer.Exit(0 if found.is_same else EXIT_ROWS_FAILED)
