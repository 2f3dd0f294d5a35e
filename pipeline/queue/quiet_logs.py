"""Drops the log lines of ticks and sweeps that did nothing, of which there are some a second."""

import logging
import re
from collections.abc import Mapping

# A field of the task's result that is not zero. A task left to the leader did nothing here.
_DID_SOMETHING = re.compile(r"'(?!handed_on')\w+': [1-9]")
_RECEIVED, _SUCCEEDED, _BEAT = "celery.worker.strategy", "celery.app.trace", "celery.beat"


class QuietTicks(logging.Filter):
    """Drops Celery's INFO records of the `regular` tasks, except of those that did something."""

    def __init__(self, regular: frozenset[str]) -> None:
        super().__init__()
        self._regular = regular

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        if record.levelno != logging.INFO:
            return True
        match record.name, record.args:
            case (_, None | ()):
                return True
            case (name, Mapping() as said) if name in (_RECEIVED, _SUCCEEDED):
                if said.get("name") not in self._regular:
                    return True
                did = _DID_SOMETHING.search(str(said.get("return_value", "")))
                return name == _SUCCEEDED and did is not None
            case (name, (_, task)) if name == _BEAT:
                return task not in self._regular
        return True
