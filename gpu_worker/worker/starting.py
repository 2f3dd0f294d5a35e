"""Starts the compute processes of a worker. Imports neither Celery nor SQL, which take a second."""

import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from nightjar.checkpoints import CheckpointError, ModelDirectory
from nightjar.checkpoints.verdicts import recall_verdict
from nightjar.gpu_worker.worker.configuration import compute_config
from nightjar.gpu_worker.worker.flights import LauncherError
from nightjar.gpu_worker.worker.launcher import Launcher
from nightjar.pipeline.settings import Settings, SettingsError
from nightjar.pipeline.settings.distinct import check_distinct
from nightjar.process import step_back


@dataclass(frozen=True, slots=True)
class Started:
    """The models of this process, by their names; their launchers load them.

    serving: set when the worker takes messages.
    """

    directories: Mapping[str, ModelDirectory]
    launchers: Mapping[str, Launcher]
    serving: threading.Event = field(default_factory=threading.Event)


_started: list[Started] = []


def start(settings: Settings) -> Started:
    """Start the models of this process, unless they are; return them before they are loaded.

    Raises:
        CheckpointError, LauncherError, SettingsError: A model cannot be started.
    """
    if not _started:
        step_back(settings.worker_niceness)  # before the compute processes, which inherit this
        directories = open_directories(settings)
        launchers = start_launchers(settings, directories, on_failure=_leave)
        _started.append(Started(directories, launchers))
    return _started[0]


def end() -> None:
    """End the compute processes, and the threads that read them: these outlive a failed start."""
    for started in _started:
        for launcher in started.launchers.values():
            launcher.close()


def _leave(_: str) -> None:
    """Drain and end the worker where no compute process can be started; its supervisor sees it."""
    # Before it serves, the worker ends by itself with the reason.
    if any(one.serving.is_set() for one in _started):
        os.kill(os.getpid(), signal.SIGTERM)


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


def start_launchers(
    settings: Settings,
    directories: Mapping[str, ModelDirectory],
    on_failure: Callable[[str], None],
) -> dict[str, Launcher]:
    """Begin to load every model, each in a compute process of its own, all at once.

    Args:
        settings: How models are computed; memory and threads are divided evenly.
        directories: By the models' names.
        on_failure: Called when no compute process of a model can be started any more.

    Raises:
        LauncherError: A model is damaged; the message says which and why.
        SettingsError: The memory of a GPU cannot be divided.
    """
    with ExitStack() as started:
        launchers = {}
        for name, directory in directories.items():
            config = compute_config(
                settings,
                directory.path,
                directory.stamp,
                len(directories),
                unverified(settings, directory),
            )
            launchers[name] = launcher = Launcher(config, on_failure)
            started.callback(launcher.close)
        started.pop_all()
        return launchers


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
