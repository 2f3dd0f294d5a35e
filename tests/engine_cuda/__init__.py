"""The engine on the CUDA kernels: on the CPU through tests/cuda_host and, with `pytest -m gpu`, on
a GPU.  Models are tiny: what is shown is that the parts fit; the kernels have their own tests."""
