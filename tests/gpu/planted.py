"""Kernels that are wrong on purpose, for compute-sanitizer: `python -m tests.gpu.planted NAME`."""

import sys

import torch

SOURCES = {
    "memcheck": 'extern "C" __global__ void planted(int* x) { x[64 + threadIdx.x] = 1; }',
    "racecheck": """extern "C" __global__ void planted(int* x) {
      __shared__ int shared[64];
      shared[threadIdx.x] = x[threadIdx.x];
      x[threadIdx.x] = shared[63 - threadIdx.x];
    }""",
    "initcheck": 'extern "C" __global__ void planted(int* x) { x[threadIdx.x] += 1; }',
    "nothing": 'extern "C" __global__ void planted(int* x) { x[threadIdx.x] = threadIdx.x; }',
}


def main(name: str) -> None:
    """Start one kernel over 64 integers; only initcheck's may find them not written."""
    import cupy  # noqa: PLC0415 (only on a GPU machine)

    make = torch.empty if name == "initcheck" else torch.zeros
    memory = make(64, dtype=torch.int32, device="cuda")
    kernel = cupy.RawKernel(SOURCES[name], "planted")
    with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
        kernel((1,), (64,), (memory.data_ptr(),))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
