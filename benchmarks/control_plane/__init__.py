"""How fast requests travel when computing costs nothing: Nightjar beside plain Celery."""
