"""How a micro-batch is computed: the Celery task, the launcher and the compute process."""
