"""The first hour on a GPU, in five stages of at most nine minutes: see docs/guides/gpu.md."""
