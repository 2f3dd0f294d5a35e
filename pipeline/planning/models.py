"""The models that a planner plans for: for each its encoder, and the answers that are kept."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from nightjar.checkpoints import CheckpointError, ModelDirectory
from nightjar.checkpoints.adapters import not_served
from nightjar.jobs.models import PlannedModel
from nightjar.jobs.records import QueuedRequest, RequestError
from nightjar.jobs.store import Store
from nightjar.jobs.store.models import Models
from nightjar.pipeline.planning.encode import Encoder
from nightjar.pipeline.planning.reuse import open_cache
from nightjar.pipeline.settings import Settings, SettingsError
from nightjar.pipeline.settings.distinct import check_distinct

WRITE_EVERY_S = 60.0


class PlanningModel:
    """One model as the planner uses it.

    Args:
        settings: What is reused of earlier answers.
        store: Holds the prompt vectors and the kept answers.
        name: The model's name in requests and answers.
        directory: Its files; they are read once, for the fingerprint.
    """

    def __init__(
        self, settings: Settings, store: Store, name: str, directory: ModelDirectory
    ) -> None:
        self.name = name
        self.fingerprint = directory.fingerprint
        self.context_length = directory.config.context_length
        self.cache = open_cache(settings, store, directory, name)
        self.encoder = Encoder(
            directory.config,
            directory.tokenizer(),
            find_vectors=store.vectors.resolve,
            chat_template=directory.chat_template(),
            fingerprint=directory.fingerprint,
            no_adapters=not_served(directory, settings.dtype, settings.shard_count),
        )


class PlanningModels:
    """All models of the deployment, by name.

    Args:
        models: At least one.
        accepts_any: A request may name any model; there is one then, which computes it.

    Raises:
        SettingsError: Two of them have the same files.
    """

    def __init__(self, models: Sequence[PlanningModel], *, accepts_any: bool = False) -> None:
        self._by_name = {model.name: model for model in models}
        self.accepts_any = accepts_any
        for model in models:
            check_distinct(model.name, model.fingerprint, self._by_name)
        self.fingerprints = [model.fingerprint for model in models]

    @classmethod
    def open(cls, settings: Settings, store: Store) -> Self:
        """Open every model of the settings.

        Raises:
            SettingsError: The settings name none, or one twice.
            CheckpointError: A directory cannot be used; the message says which.
        """
        paths = settings.model_paths
        if not paths:
            raise SettingsError(
                "no model is set: name its directory in NIGHTJAR_MODEL, or several in "
                "NIGHTJAR_MODELS"
            )
        models = []
        for name, path in paths.items():
            try:
                models.append(PlanningModel(settings, store, name, ModelDirectory.open(path)))
            except CheckpointError as error:
                raise CheckpointError(f"the model {name!r}: {error}") from error
        return cls(models, accepts_any=settings.accept_any_model)

    def __iter__(self) -> Iterator[PlanningModel]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def sort(
        self, job_model: str, requests: Sequence[QueuedRequest]
    ) -> tuple[list[tuple[PlanningModel, list[QueuedRequest]]], list[tuple[int, RequestError]]]:
        """Return the requests of each model, and `(request id, error)` of those of no model.

        A request that names no model belongs to that of its job. Where there is one model only, it
        computes whatever names none.
        """
        only = next(iter(self)) if len(self) == 1 else None
        if only is not None and self.accepts_any:
            return [(only, list(requests))], []
        groups: dict[str, list[QueuedRequest]] = {}
        refused: list[tuple[int, RequestError]] = []
        unnamed = job_model if only is None else only.name
        for request in requests:
            name = request.body.get("model") or unnamed
            if name in self._by_name:
                groups.setdefault(name, []).append(request)
            else:
                refused.append((request.id, self._not_found(name)))
        return [(self._by_name[name], group) for name, group in groups.items()], refused

    def _not_found(self, name: object) -> RequestError:
        served = ", ".join(map(repr, self._by_name))
        many = len(self._by_name) > 1
        rest = (
            "name one of them"
            if many
            else "leave `model` out or name the served one; --accept-any-model (in a queue "
            "NIGHTJAR_ACCEPT_ANY_MODEL) computes whatever name is given"
        )
        what = "the models served here are" if many else "the model served here is"
        message = f"{what} {served}, not {str(name)[:80]!r}; {rest}"
        return RequestError("model_not_found", message, "body.model")


class KnownModels:
    """Writes which models are planned for, so that jobs may name them.

    Args:
        store: Where the models are written.
        models: All models of this planner.
        clock: Monotonic seconds.
    """

    def __init__(
        self, store: Models, models: PlanningModels, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._models = [
            PlannedModel(one.name, one.fingerprint, one.context_length) for one in models
        ]
        self._clock = clock
        self._due_s: float | None = None

    def write(self, *, leads: bool) -> None:
        """Write them when this planner begins to lead, and again every minute."""
        if not leads:
            self._due_s = None
            return
        if self._due_s is not None and self._clock() < self._due_s:
            return
        self._store.plan_for(self._models)
        self._due_s = self._clock() + WRITE_EVERY_S
