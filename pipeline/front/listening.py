"""Why an address cannot be listened on, in a sentence with what to do."""

import errno
import socket

_REASONS = {
    errno.EADDRINUSE: "is taken: end what listens there, or give another --port",
    errno.EACCES: "may not be listened on by this user: give a --port above 1023",
    errno.EADDRNOTAVAIL: "is no address of this machine: give another one",
}


def reason(error: OSError) -> str | None:
    """What to do about a socket that could not be bound; None for any other error."""
    if isinstance(error, socket.gaierror):
        return "is no address that this machine can resolve: give another one"
    return _REASONS.get(error.errno or 0)


def trouble(host: str, port: int) -> str | None:
    """Why nobody could listen there now; None if it is free."""
    try:
        for family, _, _, _, where in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            socket.create_server(where[:2], family=family).close()
    except OSError as error:
        return reason(error)
    return None
