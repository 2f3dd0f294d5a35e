"""The CUDA kernels: each against its torch reference, on the CPU through tests/cuda_host and, with
`pytest -m gpu`, on a GPU."""
