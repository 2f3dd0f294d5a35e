"""How work travels: the Celery application, its queues and messages, who leads, who is alive."""
