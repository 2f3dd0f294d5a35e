"""Serves the metrics of a process that has no HTTP server of its own.

Anybody who reaches the address reads them, so a port alone means the loopback interface.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from prometheus_client import start_http_server

from nightjar.pipeline.metrics.recording import landed, recorder

if TYPE_CHECKING:  # beat has no store, and starts in half the time without its modules
    from nightjar.jobs.store import Store
    from nightjar.pipeline.settings import Settings

logger = logging.getLogger(__name__)


def open_metrics(settings: Settings, process: str, store: Store | None = None) -> None:
    """Record and serve until the process ends, where NIGHTJAR_METRICS_ADDRESS is set.

    An address that cannot be used is logged: the work goes on without metrics.

    Args:
        settings: Say where.
        process: The kind of process, as the declarations name it.
        store: What this process lands is counted there.
    """
    if settings.metrics_listen is None:
        return
    host, port = settings.metrics_listen
    registry = recorder.open(process)
    if store is not None:
        tally = store.database.tally
        recorder.add_readings(lambda: landed(tally.read()))
    try:
        start_http_server(port, host, registry)
    except OSError as error:
        logger.error(  # noqa: TRY400 - one line says it all
            "metrics are not served on %s port %d: %s; give each process an address of its own",
            host,
            port,
            error.strerror,
            extra={"action": "metrics_not_served", "port": port},
        )
    else:
        extra = {"action": "metrics_served", "port": port}
        logger.info("metrics on %s port %d", host, port, extra=extra)
