"""What the engine and its kernels reach on a GPU: `make bench-gpu`, see docs/guides/gpu.md."""
