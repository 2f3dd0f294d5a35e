"""The models that a GPU worker serves: for each its launcher, and the answers that are kept."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from nightjar.checkpoints import CheckpointError, ModelDirectory
from nightjar.checkpoints.verdicts import recall_verdict
from nightjar.gpu_worker.worker.configuration import compute_config
from nightjar.gpu_worker.worker.flights import LauncherError
from nightjar.gpu_worker.worker.launcher import Launcher
from nightjar.gpu_worker.worker.receipts import Receipts
from nightjar.jobs.store import Store
from nightjar.pipeline.planning.models import check_distinct
from nightjar.pipeline.planning.reuse import ResultCache, open_cache
from nightjar.pipeline.settings import Settings, SettingsError


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of a GPU worker.

    name: in answers.
    fingerprint: of its files; micro-batches of other fingerprints are not claimed.
    launcher: owns its compute process.
    cache: keeps answers for later jobs; None where results are not reused.
    receipts: writes what answers were computed with; None where nobody asks for it.
    """

    name: str
    fingerprint: str
    launcher: Launcher
    cache: ResultCache | None = None
    receipts: Receipts | None = None


def open_directories(settings: Settings) -> dict[str, ModelDirectory]:
    """Open the directory of each model that the settings name.

    Raises:
        SettingsError: None is named, or one twice.
        CheckpointError: A directory cannot be used; the message says of which model.
    """
    paths = settings.model_paths
    if not paths:
        raise SettingsError(
            "no model is set: name its directory in NIGHTJAR_MODEL, or several in NIGHTJAR_MODELS"
        )
    opened: dict[str, ModelDirectory] = {}
    for name, path in paths.items():
        try:
            opened[name] = ModelDirectory.open(path)
            check_distinct(name, opened[name].fingerprint, opened)
        except CheckpointError as error:
            raise CheckpointError(f"the model {name!r}: {error}") from error
    return opened


def start_models(
    settings: Settings,
    store: Store,
    directories: dict[str, ModelDirectory],
    on_failure: Callable[[str], None],
) -> list[ServedModel]:
    """Load every model, each in a compute process of its own, all at once.

    A worker that can serve some of them only does not start: its supervisor sees that at once, and
    nobody has to notice that a model is missing.

    Args:
        settings: How models are computed; memory and threads are divided evenly.
        store: Holds the kept answers, unless the settings name another database.
        directories: By the models' names.
        on_failure: Called when no compute process of a model can be started any more.

    Raises:
        LauncherError: A model cannot be loaded, or is damaged; the message says which and why.
        SettingsError: The memory of a GPU cannot be divided.
    """
    with ExitStack() as started:
        served = []
        for name, directory in directories.items():
            config = compute_config(
                settings,
                directory.path,
                directory.stamp,
                len(directories),
                unverified(settings, directory),
            )
            cache = open_cache(settings, store, directory, name)
            launcher = Launcher(config, on_failure)
            started.callback(launcher.close)
            receipts = Receipts.of(directory) if settings.receipts else None
            served.append(ServedModel(name, directory.fingerprint, launcher, cache, receipts))
        for model in served:
            _wait(model)
        started.pop_all()
        return served


def unverified(settings: Settings, directory: ModelDirectory) -> str:
    """Return the fingerprint of a model that is to be verified; empty if it is not.

    Raises:
        LauncherError: The model was verified and is damaged.
    """
    if settings.verify == "off" or settings.engine == "fake":
        return ""
    known = recall_verdict(directory.fingerprint)
    if known is not None and not known.is_sound:  # before anything is loaded
        raise LauncherError(known.refusal(directory.path))
    return directory.fingerprint if known is None else ""


def _wait(model: ServedModel) -> None:
    try:
        model.launcher.wait_ready()
    except LauncherError as error:
        raise LauncherError(f"the model {model.name!r}: {error}") from error
