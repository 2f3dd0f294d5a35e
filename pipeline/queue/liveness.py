"""The name under which a worker holds leases, and whether its process is certainly gone.

The name tells in which process table a worker runs and when its process began. A process of the
same machine or container shares that table, and asks the kernel whether the worker lives. It need
not wait for missing heartbeats. Other processes, and those without `/proc`, cannot be certain.

Machines that were restored from one image may have the same boot id, and their containers the same
namespace numbers. So the table's name also holds the host's name and a random identity. The first
process writes the identity into memory that the machine or container has for itself.
"""

import hashlib
import os
import re
import secrets
import socket
import tempfile
import uuid
from contextlib import suppress
from functools import cache
from pathlib import Path

_PROC = Path("/proc")
# In memory: it does not outlive the machine's or the container's start.
_MEMORY = Path("/dev/shm")  # noqa: S108 - the file is made whole under another name
_IDENTITY = "nightjar-machine"
_ENDED = "ZX"  # states of a process that only waits to be reaped


def owner_name() -> str:
    """Return a unique name for a worker in this process: `host:pid:random:table:began`.

    `began` counts clock ticks from the machine's start; it tells processes with one id apart.
    """
    stat = _stat(os.getpid())
    began = "" if stat is None else stat[1]
    parts = [socket.gethostname(), str(os.getpid()), uuid.uuid4().hex[:8], process_table(), began]
    return ":".join(parts)


def is_gone(owner: str) -> bool:
    """Whether the kernel says that the process of this name has ended; False if it cannot say."""
    _, _, rest = owner.partition(":")
    try:
        pid, _, table, began = rest.split(":")
        if not table or not began or table != process_table():
            return False
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's process, and /proc may hide it
        pass
    except ValueError:  # a name of another version
        return False
    stat = _stat(int(pid))
    return stat is not None and (stat[0] in _ENDED or stat[1] != began)


@cache
def process_table() -> str:
    """Return a name of the process table that this process sees; "" if unknown.

    It holds the machine's boot, the namespace, the host's name, and the identity.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii")
        namespace = (_PROC / "self/ns/pid").stat().st_ino
        if not (_PROC / str(os.getpid())).exists():  # /proc is of another namespace
            return ""
        parts = (boot, str(namespace), socket.gethostname(), _identity())
    except OSError:
        return ""
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=6).hexdigest()


def _identity() -> str:
    """The machine's or container's random identity; made by the first process that asks.

    Raises:
        OSError: There is none, and none can be made.
    """
    path = _MEMORY / _IDENTITY
    if not path.exists():
        number, made = tempfile.mkstemp(prefix=f"{_IDENTITY}-", dir=_MEMORY)
        try:
            with os.fdopen(number, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(16))
            Path(made).chmod(0o444)  # workers of other users read it
            with suppress(FileExistsError):
                os.link(made, path)  # whole from the start, and the first wins
        finally:
            Path(made).unlink()
    identity = path.read_text(encoding="ascii", errors="replace")
    if re.fullmatch("[0-9a-f]{32}", identity) is None:
        raise OSError(f"{path} is no identity")
    return identity


def _stat(pid: int) -> tuple[str, str] | None:
    """A process's state and the moment it began; None where /proc does not show them."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the command's name in brackets and may hold anything.
    fields = stat.rpartition(")")[2].split()
    return fields[0], fields[19]
