"""`nightjar tune`: learns prompt vectors for a model, and registers them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from nightjar.pipeline.front.cli.console import (
    EXIT_RUN,
    EXIT_USAGE,
    AsJson,
    fail,
    print_json,
    read_settings,
)
from nightjar.pipeline.front.cli.stored import opened_store

_FILES = ("checkpoint.safetensors", "adapter_config.json", "adapter_model.safetensors")


def tune(  # noqa: PLR0913, PLR0917 - one for each option
    model: Annotated[Path, typer.Argument(metavar="DIR", help="The model's directory.")],
    train: Annotated[Path, typer.Argument(metavar="ROWS", help="Rows: .jsonl or .parquet.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the vectors are written.")],
    valid: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rows that only measure.")
    ] = None,
    valid_share: Annotated[
        float, typer.Option(min=0, max=0.5, help="Rows held out where --valid is not given.")
    ] = 0.1,
    name: Annotated[
        str | None,
        typer.Option(help="Register the vectors under this name (NIGHTJAR_DATABASE_URL)."),
    ] = None,
    vectors: Annotated[int, typer.Option(min=1, max=1024, help="How many to learn.")] = 16,
    encoder: Annotated[
        Literal["none", "mlp"], typer.Option(help="mlp: learn them through P-tuning's network.")
    ] = "none",
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    batch: Annotated[int, typer.Option(min=1, help="Rows of one pass.")] = 16,
    accumulate: Annotated[int, typer.Option(min=1, help="Passes of one update.")] = 1,
    learning_rate: Annotated[float, typer.Option(min=1e-9, max=10)] = 0.01,
    patience: Annotated[
        int, typer.Option(min=1, help="Epochs without a better loss, after which it ends.")
    ] = 3,
    seed: Annotated[int, typer.Option(min=0, max=2**31)] = 0,
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Of the products.")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:<number>.")] = "cpu",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin again, in place of what --out holds.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Learn prompt vectors on frozen weights, and compare them with the untuned model.

    The same command goes on where it was interrupted. The files are those of PEFT.

    Exit status: 0 they are written, 1 the process ended, 2 unusable rows or arguments.

    Example: nightjar tune models/gpt rows.jsonl --out tuned --name reviews
    """
    if overwrite:
        for file in _FILES:
            (out / file).unlink(missing_ok=True)
    options = {
        **{"vectors": vectors, "encoder": encoder, "epochs": epochs, "batch": batch},
        **{"accumulate": accumulate, "learning_rate": learning_rate, "patience": patience},
        **{"valid_share": valid_share, "seed": seed, "dtype": dtype, "device": device},
    }
    given = {
        **{"model": str(model), "train": str(train), "out": str(out), "options": options},
        "valid": None if valid is None else str(valid),
    }
    done = subprocess.run(
        [sys.executable, "-m", "nightjar.gpu_worker.tuning"],
        check=False,
        input=json.dumps(given),
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode or not done.stdout:
        raise typer.Exit(done.returncode if done.returncode > 0 else EXIT_RUN)
    report = json.loads(done.stdout)
    if name is not None:
        report["registered"] = _register(name, out, model)
    if as_json:
        print_json(report, as_json=True)
    else:
        _tell(report, out)


def _register(name: str, out: Path, model: Path) -> str:
    """Register the vectors; return their version."""
    from nightjar.checkpoints import ModelDirectory
    from nightjar.pipeline.files.vectors import VectorsError, register_vectors

    with opened_store(read_settings()) as store:
        try:
            return register_vectors(store.vectors, name, out, ModelDirectory.open(model)).key
        except VectorsError as error:
            fail(str(error), EXIT_USAGE)


def _tell(report: dict[str, Any], out: Path) -> None:
    untuned, tuned = report["untuned"], report["tuned"]
    told = [
        f"{report['vectors']} vectors, {report['numbers']} numbers: "
        f"{report['share_of_weights']:.3%} of the weights",
        f"loss on {report['valid_rows']} rows: {tuned['loss']:.4f}; untuned {untuned['loss']:.4f}",
    ]
    if tuned["accuracy"] is not None:
        told.append(f"right: {tuned['accuracy']:.1%}; untuned {untuned['accuracy']:.1%}")
    told.append(f"written to {out}; write <|PROMPT|> where the rows had it, else at the beginning")
    if "registered" in report:
        told.append(f"registered as {report['registered']}")
    typer.echo("\n".join(told))
