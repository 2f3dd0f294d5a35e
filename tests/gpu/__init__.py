"""The engine and the kernels on a GPU: `pytest -m gpu`, see docs/guides/gpu.md."""
