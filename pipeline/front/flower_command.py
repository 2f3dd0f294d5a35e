"""Flower with /metrics protected: `python -m nightjar.pipeline.front.flower_command -A APP flower`.

Flower asks for its password on every page but /metrics, which names workers and tasks.
"""

import errno
import sys

from celery.bin.celery import main as celery_main
from flower.views.monitor import Metrics
from tornado.web import authenticated

from nightjar import logs

# Errors of a socket that cannot be bound; any other error is shown with its traceback.
_CANNOT_LISTEN = {
    errno.EADDRINUSE: "is taken: end what listens there, or give another --port",
    errno.EACCES: "may not be listened on by this user: give a --port above 1023",
    errno.EADDRNOTAVAIL: "is no address of this machine: give another --address",
}


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
        if error.errno not in _CANNOT_LISTEN:
            raise
        where = " ".join(word for word in arguments if word.startswith(("--address", "--port")))
        sys.exit(f"nightjar: Flower cannot start: {where} {_CANNOT_LISTEN[error.errno]}")


if __name__ == "__main__":
    main(sys.argv[1:])
