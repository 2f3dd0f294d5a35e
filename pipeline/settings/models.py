"""Settings that say which models a deployment serves; a part of `Settings`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings

from nightjar.pipeline.settings.read_by import API, GPU_WORKER, PLANNER, TASK_RUNNER, read_by

OnModelChange = Literal["replan", "finish"]

MOST_MODELS = 32
"""A planner holds a tokenizer for each model, and a worker listens on 32 queues of each."""
MOST_CHARACTERS = 255
_HOW = "write NAME=DIRECTORY for each model, with commas between them"
OF_ALL = read_by(API, PLANNER, GPU_WORKER, TASK_RUNNER)


class ModelSettings(BaseSettings):
    """The model.

    `models` is checked against the fields before it.
    """

    model: Annotated[Path | None, OF_ALL] = Field(
        None, description="directory of the model that is served"
    )
    model_name: Annotated[str | None, OF_ALL] = Field(
        None, description="name that requests and answers carry; the directory's unless given"
    )
    accept_any_model: Annotated[bool, read_by(API, PLANNER)] = Field(
        False, description="compute requests whatever model name their body gives"
    )
    on_model_change: Annotated[OnModelChange, read_by(PLANNER)] = Field(
        "replan",
        description="what was planned for another version of a model than the one that is served "
        "now and is not being computed: planned again, or left to the workers of that version",
    )
    models: Annotated[
        str, read_by(API, PLANNER, GPU_WORKER, TASK_RUNNER, page="guides/several-models.md")
    ] = Field(
        "",
        description="several models, as `NAME=DIRECTORY` with commas between them, in place of "
        "`NIGHTJAR_MODEL`; of a planner all models of the deployment, of a GPU worker those that "
        "it serves",
    )

    @field_validator("models")
    @classmethod
    def _names_models(cls, models: str, info: ValidationInfo) -> str:
        if not models:
            return models
        for name in ("model", "model_name"):
            if info.data.get(name) is not None:
                raise ValueError(f"set beside NIGHTJAR_{name.upper()}: set one of them")
        found = _pairs(models)
        if len(found) > MOST_MODELS:
            raise ValueError(f"names {len(found)} models; at most {MOST_MODELS} are served")
        for given in ([name for name, _ in found], [path for _, path in found]):
            if len(set(given)) < len(given):
                twice = next(one for one in given if given.count(one) > 1)
                raise ValueError(f"{twice!r} comes twice; {_HOW}")
        if info.data.get("accept_any_model") and len(found) > 1:
            raise ValueError(
                "several models beside NIGHTJAR_ACCEPT_ANY_MODEL: the name in a request says which "
                "of them computes it; unset one of the two"
            )
        return models

    @property
    def model_paths(self) -> dict[str, Path]:
        """The directory of each model, by its name; empty where none is set."""
        if self.model is not None:
            return {self.model_name or self.model.resolve().name: self.model}
        return {name: Path(path) for name, path in _pairs(self.models)} if self.models else {}


def _pairs(models: str) -> list[tuple[str, str]]:
    """Return names and directories.

    Raises:
        ValueError: An entry is not NAME=DIRECTORY, or the name cannot be one.
    """
    found = []
    for entry in models.split(","):
        name, equals, path = (part.strip() for part in entry.partition("="))
        if not (name and equals and path):
            raise ValueError(f"{entry.strip()!r} is not NAME=DIRECTORY; {_HOW}")
        if len(name) > MOST_CHARACTERS or not name.isprintable():
            raise ValueError(
                f"{name[:80]!r} cannot be a name: it has more than {MOST_CHARACTERS} characters, "
                "or one that cannot be printed"
            )
        found.append((name, path))
    return found
