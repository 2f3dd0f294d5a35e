"""Activations of the feed-forward block."""

from torch import Tensor
from torch.nn import functional as F

KINDS = ("gelu_tanh", "gelu", "relu", "silu")


def activation(x: Tensor, kind: str) -> Tensor:
    """Apply one of KINDS to every element of x; shape and dtype are kept."""
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if kind == "gelu":
        return F.gelu(x)
    if kind == "relu":
        return F.relu(x)
    if kind == "silu":
        return F.silu(x)
    raise ValueError(f"unknown activation {kind!r}: one of {', '.join(KINDS)}")
