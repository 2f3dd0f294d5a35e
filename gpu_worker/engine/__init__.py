"""The engine: generation and ranking requests in, results out, one step at a time."""

from typing import TYPE_CHECKING, Any

from nightjar.gpu_worker.engine.config import EngineConfig
from nightjar.gpu_worker.engine.requests import (
    GenerateOutput,
    GenerateResult,
    RankResult,
    RequestFailed,
    Result,
    TokenLogprobs,
)
from nightjar.requests import BeamSearch, GenerateRequest, RankRequest, Request, SamplingParams

if TYPE_CHECKING:
    from nightjar.gpu_worker.engine.loop import Engine

__all__ = [
    "BeamSearch",
    "Engine",
    "EngineConfig",
    "GenerateOutput",
    "GenerateRequest",
    "GenerateResult",
    "RankRequest",
    "RankResult",
    "Request",
    "RequestFailed",
    "Result",
    "SamplingParams",
    "TokenLogprobs",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """The engine brings torch with it: loaded when it is asked for, not with what is said to it."""
    if name != "Engine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nightjar.gpu_worker.engine.loop import Engine

    return Engine
