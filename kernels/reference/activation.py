"""Activations of the feed-forward block."""

import torch
from torch import Tensor
from torch.nn import functional as F

KINDS = ("gelu_tanh", "gelu", "relu", "silu")

# torch's elementwise loops: elements of one vector, and elements from which a second thread helps.
_VECTOR = 32
_GRAIN = 32_768

# 2 * sqrt(2 / pi), and the cubic's factor: Hendrycks and Gimpel, arXiv 1606.08415.
_GELU_SLOPE = 1.5957691216057308
_GELU_CUBIC = 0.044715


def activation(x: Tensor, kind: str) -> Tensor:
    """Apply one of KINDS to every element of x; shape and dtype are kept.

    Computed in FP32 at least. No element's bits depend on where it lies in x.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    buffer = vector_buffer(x.numel(), x.device, wide)
    y = buffer[: x.numel()].view(x.shape)
    y.copy_(x)
    activate_(buffer, kind)
    return y.to(x.dtype)


def vector_buffer(
    elements: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return a buffer for so many elements and as many more as `activate_` needs: dtype[n].

    The rest of a loop's last vector takes a scalar path, whose exponential rounds differently. So
    an element's bits would depend on its position. Here every thread's share is a whole number of
    vectors.
    """
    threads = min(torch.get_num_threads(), -(-elements // _GRAIN))
    step = _VECTOR * max(threads, 1)
    return torch.empty(-(-elements // step) * step, dtype=dtype, device=device)


def activate_(buffer: Tensor, kind: str) -> None:
    """Apply one of KINDS, in place, to a `vector_buffer`."""
    if kind == "gelu_tanh":
        # x * sigmoid(2 u) is 0.5 * x * (1 + tanh(u)), at a quarter of the cost of torch's tanh.
        slope = buffer.new_tensor(_GELU_SLOPE)
        gate = torch.addcmul(slope, buffer, buffer, value=_GELU_SLOPE * _GELU_CUBIC)
        buffer.mul_(gate.mul_(buffer).sigmoid_())
    elif kind == "gelu":
        buffer.copy_(F.gelu(buffer))
    elif kind == "relu":
        buffer.relu_()
    elif kind == "silu":
        F.silu(buffer, inplace=True)
    else:
        raise ValueError(f"unknown activation {kind!r}: one of {', '.join(KINDS)}")
