"""docker-compose.yml as `docker compose config` shows it: anchors and variables resolved."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

COMPOSE_FILE = Path(__file__).resolve().parents[1] / "docker-compose.yml"

# ${NAME}, ${NAME:?why it must be set}, ${NAME:-default}; $$ is a dollar sign.
_VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>\w+)(?::(?P<operator>[?-])(?P<text>[^}]*))?\})")


class ComposeError(Exception):
    """A variable that the file requires is not set."""


@dataclass(frozen=True, slots=True)
class ComposeService:
    """What the tests need of a service."""

    name: str
    command: list[str]
    environment: dict[str, str]
    depends_on: dict[str, str]  # service -> condition
    raw: dict[str, Any]


def read_compose(variables: Mapping[str, str]) -> dict[str, ComposeService]:
    """The services of the file, in its order."""
    data = _interpolate(yaml.safe_load(COMPOSE_FILE.read_text(encoding="utf-8")), variables)
    return {name: _service(name, raw) for name, raw in data["services"].items()}


def required_variables() -> set[str]:
    """The variables without which the file is refused."""
    found = _VARIABLE.finditer(COMPOSE_FILE.read_text(encoding="utf-8"))
    return {match["name"] for match in found if match["operator"] == "?"}


def _service(name: str, raw: dict[str, Any]) -> ComposeService:
    conditions = raw.get("depends_on", {})
    return ComposeService(
        name=name,
        command=raw.get("command", []),
        environment=raw.get("environment", {}),
        depends_on={other: how["condition"] for other, how in conditions.items()},
        raw=raw,
    )


def _interpolate(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _interpolate(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [_interpolate(item, variables) for item in value]
    if isinstance(value, str):
        return _VARIABLE.sub(lambda match: _resolve(match, variables), value)
    return value


def _resolve(match: re.Match[str], variables: Mapping[str, str]) -> str:
    if match["name"] is None:
        return "$"
    if set_to := variables.get(match["name"]):
        return set_to
    if match["operator"] == "?":
        raise ComposeError(f"{match['name']}: {match['text']}")
    return match["text"] or ""
