"""What a CUDA graph does to a step, without a GPU.

A graph plays back what one run of a step launched: the same operations, on the same addresses, with
the numbers that Python had at that time, in memory that other graphs have used since.  A tape does
the same on the CPU. A step that recorded something which must not stay as it was then writes other
texts than one that runs anew each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from nightjar.gpu_worker.models.graphs import WARM_UPS, Step
from nightjar.kernels.cuda import launch
from nightjar.kernels.cuda.kernel import Kernel
from nightjar.kernels.cuda.launch import Backend

WAITS = (
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave",
    "aten::unique_dim",
    "aten::_unique2",
)
"""What needs a number from the device: no graph can be recorded of it."""

COPIES = ("aten::lift_fresh", "aten::lift_fresh_copy")
"""What brings Python's numbers to the device, from memory that a graph cannot keep."""

_running: ContextVar[Tape | None] = ContextVar("running", default=None)
"""The tape that keeps what this thread does."""


class Tapes:
    """A Recorder of models/graphs.py for tensors on the CPU; all its tapes share their memory."""

    def __init__(self, backend: Backend) -> None:
        """backend: where kernels run."""
        self._backend = backend
        self.tapes: list[Tape] = []

    @property
    def of_windows(self) -> list[Tape]:
        """The tapes of decode steps in windows; the others are of steps that the host packs."""
        return [tape for tape in self.tapes if "step_update" in tape.launches]

    def __call__(self, step: Step) -> Step:
        """Record the step, as CudaGraphs does: warm it up, then run it once under observation."""
        for _ in range(WARM_UPS - 1):  # on a GPU the recording itself computes nothing
            step()
        tape = Tape(self._backend)
        token = _running.set(tape)
        try:
            with tape, launch.using(tape.launch):
                step()
        finally:
            _running.reset(token)
        self.tapes.append(tape)

        def replay() -> None:
            for one in self.tapes:
                one.spoil()
            tape.replay()

        return replay

    @staticmethod
    def exchange(name: str, exchange: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
        """Exchange a tensor with other ranks; where a tape runs, keep that on it.

        As NCCL in a CUDA graph: a replay exchanges what is in the tensor's memory then.
        """
        tape = _running.get()
        if tape is None:
            return exchange(given)
        return tape.exchange(name, exchange, given)


class Tape(TorchDispatchMode):
    """The operations of torch and the kernels of one step.

    launches: their names, views and allocations left out; replays: how often it was played back.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend
        self._calls: list[Callable[[], None]] = []
        self._made: list[Tensor] = []
        self.launches: list[str] = []
        self.replays = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation of torch, and keep it."""
        kwargs = kwargs or {}
        name = function._schema.name
        if name in WAITS or name in COPIES:
            raise RuntimeError(f"{name}: not while a graph is recorded")
        found = function(*args, **kwargs)
        given = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        results = list(_tensors(found))
        made = [tensor for tensor in results if _memory(tensor) not in given]
        self._made.extend(made)
        if function._schema.is_mutable:
            self._keep(name, lambda: function(*args, **kwargs))
        elif made and not name.startswith("aten::empty") and name != "aten::new_empty":
            self._keep(name, lambda: _again(results, function(*args, **kwargs)))
        return found

    def launch(
        self,
        kernel: Kernel,
        grid: launch.Size,
        block: launch.Size,
        args: tuple[launch.Argument, ...],
        shared_bytes: int,
    ) -> None:
        """A backend of `nightjar.kernels.cuda.launch`: run a kernel, and keep it."""
        self._backend(kernel, grid, block, args, shared_bytes)
        self._keep(kernel.entry, lambda: self._backend(kernel, grid, block, args, shared_bytes))

    def exchange(self, name: str, exchange: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
        """Exchange a tensor with other ranks, and keep that; its own operations are not kept."""
        with _disable_current_modes():
            found = exchange(given)
        self._made.append(found)
        self._keep(f"exchange {name}", lambda: _again([found], exchange(given)))
        return found

    def spoil(self) -> None:
        """Let nothing remain of what a run had in memory of its own."""
        for tensor in self._made:
            value = float("nan") if tensor.is_floating_point() else 0x55
            tensor.untyped_storage().fill_(0)
            tensor.fill_(value)

    def replay(self) -> None:
        """Do the same again."""
        self.replays += 1
        for call in self._calls:
            call()

    def _keep(self, name: str, call: Callable[[], Any]) -> None:
        self.launches.append(name)
        self._calls.append(call)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _again(results: list[Tensor], fresh: Any) -> None:
    """Put what an operation gives now to where it gave it when it was recorded."""
    for result, tensor in zip(results, _tensors(fresh), strict=True):
        result.copy_(tensor)
