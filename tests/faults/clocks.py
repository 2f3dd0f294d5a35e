"""Wall clocks that are wrong, for one process each, and that jump while it runs."""

import mmap
import struct
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock.c")


class WrongClock:
    """The wall clock of every process that is started with `environment`.

    Args:
        directory: Where the library is compiled to and the shift is kept.
        name: Tells this clock from others in the directory.
    """

    def __init__(self, directory: Path, name: str) -> None:
        library, told = directory / "clock.so", directory / f"{name}.clock"
        if not library.exists():
            command = ["cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, _SOURCE]
            subprocess.run([*command, "-ldl"], check=True)
        told.write_bytes(bytes(mmap.PAGESIZE))
        with told.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self.environment = {"LD_PRELOAD": str(library), "NIGHTJAR_TEST_CLOCK": str(told)}

    def shift(self, seconds: int) -> None:
        """From now on the clock is wrong by so many seconds."""
        self._page[:8] = struct.pack("=q", seconds)
