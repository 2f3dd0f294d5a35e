"""Flower with /metrics protected: `python -m nightjar.pipeline.front.flower_command -A APP flower`.

Flower asks for its password on every page but /metrics, which names workers and tasks.
"""

import sys

from celery.bin.celery import main as celery_main
from flower.views.monitor import Metrics
from tornado.web import authenticated

from nightjar import logs
from nightjar.pipeline.front.listening import reason


def protect_metrics() -> None:
    """Ask for the password on /metrics as on every other page."""
    Metrics.get = authenticated(Metrics.get)


def main(arguments: list[str]) -> None:
    """Run Flower until the process is told to end."""
    protect_metrics()
    logs.configure("flower")
    sys.argv[1:] = arguments
    try:
        celery_main()
    except OSError as error:
        if (told := reason(error)) is None:
            raise
        where = " ".join(word for word in arguments if word.startswith(("--address", "--port")))
        sys.exit(f"nightjar: Flower cannot start: {where} {told}")


if __name__ == "__main__":
    main(sys.argv[1:])
