"""What can be wrong with a task, and with one row of its source."""


class TaskError(Exception):
    """The task cannot be used; the message names the file and the field, and says how to mend it.

    Nothing was computed or written.
    """


class RowFaultError(ValueError):
    """One row cannot become a request; `column` is at fault, if one is."""

    def __init__(self, column: str | None, reason: str) -> None:
        super().__init__(reason)
        self.column = column
        self.reason = reason


MISSING_EXTRA = "task files need more packages: pip install 'nightjar-batch[tables]'"
