"""The models that a GPU worker serves: for each its launcher, and the answers that are kept."""

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from nightjar.checkpoints import ModelDirectory
from nightjar.checkpoints.adapters import not_served
from nightjar.gpu_worker.worker.flights import LauncherError
from nightjar.gpu_worker.worker.launcher import Launcher
from nightjar.gpu_worker.worker.receipts import Receipts
from nightjar.gpu_worker.worker.starting import start_launchers
from nightjar.jobs.store import Store
from nightjar.pipeline.planning.reuse import ResultCache, open_cache
from nightjar.pipeline.settings import Settings

logger = logging.getLogger(__name__)


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


def start_models(
    settings: Settings,
    store: Store,
    directories: Mapping[str, ModelDirectory],
    on_failure: Callable[[str], None],
) -> list[ServedModel]:
    """Load every model; see `start_launchers` and `serve` for arguments and errors."""
    launchers = start_launchers(settings, directories, on_failure)
    return serve(settings, store, directories, launchers)


def serve(
    settings: Settings,
    store: Store,
    directories: Mapping[str, ModelDirectory],
    launchers: Mapping[str, Launcher],
) -> list[ServedModel]:
    """Wait until every model is loaded; end all launchers where one cannot be.

    A worker that can serve some of them only does not start: its supervisor sees that at once, and
    nobody has to notice that a model is missing.

    Args:
        settings: How answers are kept.
        store: Holds the kept answers, unless the settings name another database.
        directories: By the models' names.
        launchers: By the models' names.

    Raises:
        LauncherError: A model cannot be loaded, or is damaged; the message says which and why.
    """
    with ExitStack() as started:
        for launcher in launchers.values():
            started.callback(launcher.close)
        served = []
        for name, directory in directories.items():
            cache = open_cache(settings, store, directory, name)
            receipts = Receipts.of(directory) if settings.receipts else None
            served.append(
                ServedModel(name, directory.fingerprint, launchers[name], cache, receipts)
            )
        warn_of_adapters(settings, store, directories)
        for model in served:
            _wait(model)
        started.pop_all()
        return served


def warn_of_adapters(
    settings: Settings, store: Store, directories: Mapping[str, ModelDirectory]
) -> None:
    """Log each model that has registered LoRA adapters and is served so that it takes none."""
    for name, directory in directories.items():
        reason = not_served(directory, settings.dtype, settings.shard_count)
        if reason is not None and store.vectors.has_adapters(directory.fingerprint):
            logger.warning(
                "the model %r has LoRA adapters, and every request that names one fails: %s",
                name,
                reason,
                extra={"action": "adapters_not_served", "model": name},
            )


def _wait(model: ServedModel) -> None:
    try:
        model.launcher.wait_ready()
    except LauncherError as error:
        raise LauncherError(f"the model {model.name!r}: {error}") from error
