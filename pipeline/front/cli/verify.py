"""`nightjar verify`: finds a wrongly converted or damaged model before it serves."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from nightjar.pipeline.front.cli.console import EXIT_RUN, AsJson, fail, print_json, say


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
    as_json: AsJson = False,
) -> None:
    """Check a model: order of its weights, loss on text, FP16's range, agreement of precisions.

    Exit status: 0 the model is sound, 1 it cannot be opened, 3 a check failed.

    Example: nightjar verify models/gpt --text sample.txt --report gpt.html
    """
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
