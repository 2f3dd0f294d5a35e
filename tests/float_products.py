"""Products in float32 for the tests of the CPU kernels."""

import torch


def case(rows, features, outputs, seed=0):
    """Random inputs, weight and bias."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=generator)
    weight = torch.randn(outputs, features, generator=generator)
    return x, weight, torch.randn(outputs, generator=generator)
