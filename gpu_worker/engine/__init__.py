"""The engine: generation and ranking requests in, results out, one step at a time."""

from nightjar.gpu_worker.engine.config import EngineConfig
from nightjar.gpu_worker.engine.loop import Engine
from nightjar.gpu_worker.engine.requests import (
    GenerateRequest,
    GenerateResult,
    RankRequest,
    RankResult,
    Request,
    RequestFailed,
    Result,
    SamplingParams,
)

__all__ = [
    "Engine",
    "EngineConfig",
    "GenerateRequest",
    "GenerateResult",
    "RankRequest",
    "RankResult",
    "Request",
    "RequestFailed",
    "Result",
    "SamplingParams",
]
