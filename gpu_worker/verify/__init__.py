"""Finds a wrongly converted or damaged model: `python -m nightjar.gpu_worker.verify DIR`."""
