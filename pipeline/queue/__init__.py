"""The Celery application, its queues and messages, leadership of planners, liveness of workers."""
