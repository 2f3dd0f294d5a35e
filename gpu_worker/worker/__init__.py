"""The Celery side of a GPU worker: claims, the compute process's launcher, answers."""
