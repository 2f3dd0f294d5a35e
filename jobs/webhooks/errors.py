"""Why an event cannot be sent."""

from nightjar.jobs.errors import JobError


class SendingError(JobError):
    """An event was not sent; the message says why, without an address of the network here."""


class UnusableUrlError(SendingError):
    """The URL of a webhook cannot be used; the message says what may be written."""


class ForbiddenAddressError(SendingError):
    """The host of a webhook has an address that must not be called."""


class UnresolvedNameError(SendingError):
    """The host of a webhook has no address."""
