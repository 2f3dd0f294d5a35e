"""Weights and norms of a block, for the tests of the CPU kernels."""

import torch

from nightjar import kernels
from nightjar.kernels import Norm


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def a_norm(size, layer_norm):
    bias = normal(size, seed=2) if layer_norm else None
    return Norm(1 + 0.1 * normal(size, seed=1), bias, 1e-5)


def pack(out_features, in_features, precision, seed=3):
    weight = normal(out_features, in_features, seed=seed) / in_features**0.5
    return kernels.pack_linear(weight, normal(out_features, seed=seed + 1), precision)


def pack_up(kind, inner, size, precision):
    if kind == "plain":
        return pack(inner, size, precision)
    parts = [(normal(inner, size, seed=s) / size**0.5, normal(inner, seed=s + 1)) for s in (3, 5)]
    return kernels.pack_gated(*parts, precision)
