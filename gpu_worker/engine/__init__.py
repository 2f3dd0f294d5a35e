"""The engine: generation and ranking requests in, results out, one step at a time."""

from nightjar.gpu_worker.engine.config import EngineConfig
from nightjar.gpu_worker.engine.loop import Engine
from nightjar.gpu_worker.engine.requests import (
    BeamSearch,
    GenerateOutput,
    GenerateRequest,
    GenerateResult,
    RankRequest,
    RankResult,
    Request,
    RequestFailed,
    Result,
    SamplingParams,
    TokenLogprobs,
)

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
