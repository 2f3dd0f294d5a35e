"""`nightjar convert`: a checkpoint of a training framework becomes a directory that is served."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nightjar.pipeline.front.cli.console import (
    EXIT_RUN,
    EXIT_USAGE,
    AsJson,
    errors,
    fail,
    print_json,
)

if TYPE_CHECKING:
    from nightjar.checkpoints.convert.writing import Progress


def convert(  # noqa: PLR0913, PLR0917 - options of a command
    source: Annotated[
        Path,
        typer.Argument(help="A Megatron-LM checkpoint, or a folder of FasterTransformer's files."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The new model directory.")],
    tokenizer: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Folder with tokenizer.json, or with vocab.json and merges.txt."
        ),
    ],
    dtype: Annotated[
        str | None, typer.Option(help="fp32, fp16 or bf16 (default: as the weights are stored).")
    ] = None,
    eos: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="The token that ends a text.")
    ] = None,
    argument: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A training argument that the checkpoint lacks."),
    ] = None,
    checkpoint_version: Annotated[
        float | None,
        typer.Option(help="0, 1, 2 or 3: the order of the fused rows, if the checkpoint is wrong."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a checkpoint into a directory that Nightjar serves.

    Nothing that a checkpoint contains is executed. After an interruption, the same command
    continues. Afterwards, `nightjar verify DIR` tells whether the weights are in order.

    Exit status: 0 converted, 1 the checkpoint or the folder cannot be used, 2 wrong options.

    Example: nightjar convert checkpoints/gpt --tokenizer tokenizer/ --out models/gpt
    """
    from nightjar.checkpoints import CheckpointError
    from nightjar.checkpoints.convert import DTYPES, Conversion
    from nightjar.checkpoints.convert import convert as convert_checkpoint

    if dtype is not None and dtype not in DTYPES:
        fail(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}", EXIT_USAGE)
    arguments = _arguments(argument or [])
    job = Conversion(source, out, tokenizer, eos, dtype, arguments, checkpoint_version)
    try:
        with _progress() as progress:
            done = convert_checkpoint(job, progress)
    except CheckpointError as error:
        fail(str(error), EXIT_RUN)
    if as_json:
        print_json({**asdict(done), "target": str(done.target)}, as_json=True)
        return
    typer.echo(f"{done.description}: {done.family}, {done.size_bytes / 2**30:.2f} GiB in {out}")
    if done.padding_rows:
        typer.echo(f"{done.padding_rows} rows that padded the vocabulary were left out")
    if not done.end_ids:
        typer.echo("no token ends a text; name one with --eos")


def _arguments(values: list[str]) -> dict[str, Any]:
    """Read NAME=VALUE options: numbers, true and false, else words."""
    found: dict[str, Any] = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not (name and equals and text):
            fail(f"--argument {value!r}: write NAME=VALUE", EXIT_USAGE)
        try:
            found[name] = json.loads(text.lower() if text in ("True", "False") else text)
        except ValueError:
            found[name] = text
    return found


@contextmanager
def _progress() -> Iterator["Progress"]:
    """Show a bar on a terminal, and nothing elsewhere."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, disable=not errors.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield show
