"""Cosines and sines of rotary embeddings, one row a position."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nightjar.checkpoints.rope import Llama3Scaling, RopeConfig, YarnScaling
from nightjar.kernels import Rotation

SLICE_POSITIONS = 4096


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cosines, sines: float32[positions, dims / 2]."""

    cosines: Tensor
    sines: Tensor

    @staticmethod
    def build(rope: RopeConfig, positions: int, device: str) -> RopeTable:
        """Compute the table of a model's whole context.

        Angles are FP32 products as in transformers.  Cosines are computed in FP64 and rounded once,
        so that no bit depends on the vector path that computed an element.
        """
        frequencies = inverse_frequencies(rope)
        scale = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
        cosines = torch.empty(positions, rope.dims // 2)
        sines = torch.empty_like(cosines)
        for start in range(0, positions, SLICE_POSITIONS):
            end = min(positions, start + SLICE_POSITIONS)
            angles = torch.arange(start, end).float().unsqueeze(1) * frequencies
            cosines[start:end] = angles.double().cos()
            sines[start:end] = angles.double().sin()
        return RopeTable(cosines.mul_(scale).to(device), sines.mul_(scale).to(device))

    def at(self, positions: Tensor) -> Rotation:
        """Return the rotations of rows at positions int64[T]."""
        return Rotation(self.cosines, self.sines, positions)


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Return radians a position of each pair of channels, after scaling: float32[dims / 2].

    In FP32 and in the order of operations of transformers' modeling_rope_utils, so that angles
    far along the context are the same.
    """
    powers = rope.base ** (torch.arange(0, rope.dims, 2).float() / rope.dims)
    plain = 1.0 / powers
    scaling = rope.scaling
    if scaling is None:
        return plain
    if isinstance(scaling, Llama3Scaling):
        return _llama3(plain, scaling)
    if isinstance(scaling, YarnScaling):
        kept = 1 - _yarn_ramp(rope, scaling)
        return 1.0 / (scaling.factor * powers) * (1 - kept) + plain * kept
    return plain / scaling.factor


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Stretch long waves, keep short ones, and blend those between."""
    waves = 2 * math.pi / plain
    context, low, high = scaling.original_context, scaling.low_frequency, scaling.high_frequency
    stretched = torch.where(waves > context / low, plain / scaling.factor, plain)
    share = (context / waves - low) / (high - low)
    blended = (1 - share) * stretched / scaling.factor + share * stretched
    between = (waves >= context / high) & (waves <= context / low)
    return torch.where(between, blended, stretched)


def _yarn_ramp(rope: RopeConfig, scaling: YarnScaling) -> Tensor:
    """Return the stretched share of each pair's frequency, from 0 to 1: float32[dims / 2]."""

    def channel(turns: float) -> float:
        """Return the channel that rotates so many times within the original context."""
        ratio = scaling.original_context / (turns * 2 * math.pi)
        return rope.dims * math.log(ratio) / (2 * math.log(rope.base))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(rope.dims // 2, dtype=torch.float32) - low) / (high - low)
    return ramp.clamp(0, 1)
