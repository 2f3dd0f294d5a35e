"""That a deployment names each model once."""

from collections.abc import Mapping
from typing import Protocol

from nightjar.pipeline.settings import SettingsError


class _HasFingerprint(Protocol):
    @property
    def fingerprint(self) -> str: ...


def check_distinct(name: str, fingerprint: str, others: Mapping[str, _HasFingerprint]) -> None:
    """Raise SettingsError where a model of another name has the same files."""
    for other, model in others.items():
        if other != name and model.fingerprint == fingerprint:
            both = " and ".join(map(repr, sorted((name, other))))
            raise SettingsError(
                f"NIGHTJAR_MODELS: {both} are the same model; leave one of them out"
            )
