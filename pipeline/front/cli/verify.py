"""`nightjar verify`: finds a wrongly converted or damaged model before it serves."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from nightjar.pipeline.front.cli.console import AsJson


def verify(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="The model's directory.")],
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text of yours: paragraphs with an empty line between."),
    ] = None,
    precisions: Annotated[
        str, typer.Option(metavar="LIST", help="Precisions to compare with fp32; '' for none.")
    ] = "bf16,int8",
    as_json: AsJson = False,
) -> None:
    """Check a model: order of its weights, loss on text, FP16's range, agreement of precisions.

    Exit status: 0 the model is sound, 1 it cannot be opened, 3 a check failed.

    Example: nightjar verify models/gpt --text sample.txt
    """
    command = [sys.executable, "-m", "nightjar.gpu_worker.verify", str(model)]
    command += ["--precisions", precisions]
    command += ["--text", str(text)] if text is not None else []
    command += ["--json"] if as_json else []
    raise typer.Exit(subprocess.run(command, check=False).returncode)
