"""Commands for prompt vectors and LoRA adapters; they work on the database itself."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nightjar.pipeline.front.cli.console import (
    EXIT_USAGE,
    AsJson,
    check_models,
    fail,
    print_json,
    read_settings,
)
from nightjar.pipeline.front.cli.stored import opened_store, print_table

if TYPE_CHECKING:
    from nightjar.jobs.store import Store
    from nightjar.jobs.vector_records import PromptVector
    from nightjar.pipeline.settings import Settings

vectors = typer.Typer(
    name="vectors",
    help="Register prompt vectors (P-tuning) and LoRA adapters, name their versions, go back.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(help="What requests write in prompt_vector or adapter.")]
Version = Annotated[int | None, typer.Option(min=1, help="One of its versions.")]
_LISTED = 1000
_COLUMNS = ("name", "version", "aliases", "kind", "length", "width", "sha256")


@vectors.command("add", epilog="Example: nightjar vectors add tuned prompt.safetensors")
def add_vectors(
    name: Name,
    file: Annotated[
        Path,
        typer.Argument(
            help="A safetensors file, one tensor (rows, width), or a directory of PEFT: prompt "
            "tuning, P-tuning, LoRA."
        ),
    ],
    model: Annotated[
        str | None, typer.Option(help="Which model they fit; needed where several are served.")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="An alias to give to this version.")] = None,
    as_json: AsJson = False,
) -> None:
    """Register prompt vectors or a LoRA adapter under a name, as its latest version.

    The same file again is no new version.
    Exit status: 0 they are registered, 1 the database cannot be used, 2 unusable arguments.

    Example: nightjar vectors add tuned prompt.safetensors --model small
    """
    from nightjar.checkpoints import ModelDirectory
    from nightjar.checkpoints.adapters import not_served
    from nightjar.jobs.vector_records import LORA
    from nightjar.pipeline.files.vectors import VectorsError, register_vectors

    settings = read_settings()
    directory = served_model(settings, model)
    opened = ModelDirectory.open(directory)
    no_adapters = not_served(opened, settings.dtype, settings.shard_count)
    with opened_store(settings) as store:
        try:
            added = register_vectors(store.vectors, name, file, opened, no_adapters)
        except VectorsError as error:
            fail(str(error), EXIT_USAGE)
        if tag is not None:
            store.vectors.tag(name, tag, added.version)
    if as_json:
        told = {name: getattr(added, name) for name in ("name", "version", "length", "kind")}
        print_json(told, as_json=True)
        return
    what = (
        f"a LoRA adapter of rank {added.length}"
        if added.kind == LORA
        else f"{added.length} vectors"
    )
    typer.echo(f"{added.name}, version {added.version}: {what}")


@vectors.command("list", epilog="Example: nightjar vectors list tuned")
def list_vectors(
    name: Annotated[str | None, typer.Argument(help="Show all versions of this name.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the latest version of each name, or all versions of one; at most 1000.

    Example: nightjar vectors list tuned
    """
    with opened_store(read_settings()) as store:
        rows = _rows(store, store.vectors.versions(name, _LISTED))
    if as_json:
        print_json(rows, as_json=True)
    else:
        print_table(rows, _COLUMNS)


@vectors.command("tag", epilog="Example: nightjar vectors tag tuned production --version 3")
def tag_version(
    name: Name,
    alias: Annotated[str, typer.Argument(help="Requests may then write NAME@ALIAS.")],
    version: Version = None,
    as_json: AsJson = False,
) -> None:
    """Let an alias name a version, by default the latest; it may move to another later.

    Example: nightjar vectors tag tuned production --version 3
    """
    with opened_store(read_settings()) as store:
        made = store.vectors.tag(name, alias, version)
    _tell_alias(made.name, made.alias, made.version, as_json)


@vectors.command("rollback", epilog="Example: nightjar vectors rollback tuned")
def roll_back(name: Name, version: Version = None, as_json: AsJson = False) -> None:
    """Let the name mean an earlier version again, by default the one before the latest.

    Nothing is deleted. Jobs that have begun keep their version.

    Example: nightjar vectors rollback tuned --version 2
    """
    with opened_store(read_settings()) as store:
        made = store.vectors.roll_back(name, version)
    _tell_alias(made.name, made.alias, made.version, as_json)


def served_model(settings: "Settings", name: str | None) -> Path:
    """Return the directory of the served model of this name; none where there is only one."""
    paths = check_models(settings)
    if name is None and len(paths) == 1:
        name = next(iter(paths))
    if name not in paths:
        fail(f"--model: name one of {', '.join(map(repr, paths))}", EXIT_USAGE)
    return paths[name]


def _tell_alias(name: str, alias: str, version: int, as_json: bool) -> None:
    if as_json:
        print_json({"name": name, "alias": alias, "version": version}, as_json=True)
    else:
        typer.echo(f"{name}@{alias} is version {version}")


def _rows(store: "Store", found: "list[PromptVector]") -> list[dict[str, Any]]:
    aliases: dict[tuple[str, int], list[str]] = {}
    for one in store.vectors.aliases({vectors.name for vectors in found}):
        aliases.setdefault((one.name, one.version), []).append(one.alias)
    return [
        {
            **{name: getattr(one, name) for name in ("name", "version", "kind", "length", "width")},
            "sha256": one.sha256,
            "aliases": aliases.get((one.name, one.version), []),
        }
        for one in found
    ]
