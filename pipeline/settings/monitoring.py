"""Settings that say what a deployment tells of itself; a part of `Settings`."""

from ipaddress import ip_address
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings

from nightjar.pipeline.settings.read_by import (
    API,
    BEAT,
    EVERY_PROCESS,
    GPU_WORKER,
    PLANNER,
    UPLOADS,
    read_by,
)

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning"]
LOOPBACK = "127.0.0.1"
_PORTS = range(1, 65536)


class MonitoringSettings(BaseSettings):
    """Monitoring."""

    metrics_address: Annotated[
        str, read_by(PLANNER, GPU_WORKER, BEAT, page="guides/monitoring.md")
    ] = Field(
        "",
        description="where a planner, a GPU worker or beat serves its metrics: `PORT` for loopback "
        "alone, or `ADDRESS:PORT`; each process needs its own. Nothing is served unless it is set. "
        "The API serves its own under `/metrics`",
    )
    log_format: Annotated[LogFormat, EVERY_PROCESS] = Field(
        "text", description="`text` for people, or `json`: one object a line"
    )
    log_level: Annotated[LogLevel, EVERY_PROCESS] = Field(
        "info", description="the least level of Nightjar's own records that is written"
    )
    trace_share: Annotated[
        float, read_by(API, UPLOADS, PLANNER, GPU_WORKER, page="guides/monitoring.md#traces")
    ] = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the calls that are traced; 0 switches traces off. The variables "
        "`OTEL_EXPORTER_OTLP_*` of OpenTelemetry say where traces are sent",
    )

    @field_validator("metrics_address")
    @classmethod
    def _is_an_address(cls, text: str) -> str:
        read_address(text)
        return text

    @property
    def metrics_listen(self) -> tuple[str, int] | None:
        """Host and port of the metrics; None where none are served."""
        return read_address(self.metrics_address)


def read_address(text: str) -> tuple[str, int] | None:
    """Return host and port of `PORT` or `ADDRESS:PORT`; None of an empty text.

    Raises:
        ValueError: It is neither.
    """
    if not text:
        return None
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if colon else LOOPBACK
    if not port.isascii() or not port.isdigit() or int(port) not in _PORTS:
        raise ValueError(f"{text!r}: write PORT, or ADDRESS:PORT such as 0.0.0.0:9464")
    try:
        ip_address(host)
    except ValueError:
        raise ValueError(
            f"{host!r} is no address of an interface: write PORT for loopback alone, or "
            "ADDRESS:PORT such as 0.0.0.0:9464"
        ) from None
    return host, int(port)
