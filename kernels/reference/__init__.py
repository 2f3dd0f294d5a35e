"""The op list in torch: the CPU path, and the oracle of the CUDA kernels."""
