"""An op of several backends, as one callable."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Concatenate, Generic, ParamSpec, TypeVar

from torch import Tensor

from nightjar.kernels.cuda.launch import serves

P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """One op: torch's implementation, and those of the backends that have a faster one.

    The first argument of a call, a tensor, decides: on a GPU `cuda` computes, elsewhere `native`.
    All implementations take the same arguments, which `reference` documents.
    """

    def __init__(
        self,
        reference: Callable[Concatenate[Tensor, P], R],
        native: Callable[Concatenate[Tensor, P], R] | None = None,
        cuda: Callable[Concatenate[Tensor, P], R] | None = None,
    ) -> None:
        update_wrapper(self, reference)
        self.reference = reference
        self._on_cpu = native or reference
        self._on_gpu = cuda or reference

    def native(self, function: Callable[Concatenate[Tensor, P], R]) -> Op[P, R]:
        """Return the op with an implementation for the CPU.

        The implementation calls the reference for arguments that its compiled kernel does not take.
        """
        return Op(self.reference, function, self._on_gpu)

    def cuda(self, function: Callable[Concatenate[Tensor, P], R]) -> Op[P, R]:
        """Return the op with an implementation for the GPU."""
        return Op(self.reference, self._on_cpu, function)

    def __call__(self, first: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Compute the op on the device of the first argument."""
        chosen = self._on_gpu if serves(first) else self._on_cpu
        return chosen(first, *args, **kwargs)
