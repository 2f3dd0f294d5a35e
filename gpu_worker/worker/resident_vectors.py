"""Which prompt vectors and LoRA adapters the compute process holds, within a bound of bytes."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping

from nightjar.gpu_worker.compute.messages import ForgetVectors, RegisterVectors
from nightjar.jobs.vector_records import VectorFile


class VectorsMissingError(Exception):
    """The compute process lacks vectors whose data was not given."""


class ResidentVectors:
    """The keys that the compute process holds, least recently used first; not thread-safe.

    Vectors of requests in flight are never dropped. So they may exceed the bound for a while, by
    what the tokens in flight name: a vector takes a token's position in a prompt. A micro-batch
    names few adapters (`MOST_ADAPTERS` in `pipeline/planning/pack.py`).

    Args:
        most_bytes: What the vectors may take in the memory of the compute process.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._bytes = 0

    @property
    def held_bytes(self) -> int:
        """The bytes of all vectors that the compute process holds."""
        return self._bytes

    def missing(self, keys: Iterable[str]) -> list[str]:
        """The keys among these that the compute process does not hold."""
        return [key for key in keys if key not in self._sizes]

    def use(
        self,
        keys: Collection[str],
        files: Mapping[str, VectorFile],
        in_flight: Callable[[], Collection[str]],
    ) -> list[RegisterVectors | ForgetVectors]:
        """Return what to tell the compute process before requests that name these keys.

        Args:
            keys: What the requests name.
            files: Of the keys that may be missing; without data for a key that does not exist,
                whose requests the engine refuses.
            in_flight: Returns the keys of requests that are being computed. Called only where
                something must be dropped.

        Raises:
            VectorsMissingError: The file of a missing key is not given.
        """
        missing = self.missing(keys)
        if any(key not in files for key in missing):
            raise VectorsMissingError
        told: list[RegisterVectors | ForgetVectors] = []
        for key in missing:
            file = files[key]
            if file.data:
                self._sizes[key] = len(file.data)
                self._bytes += len(file.data)
                told.append(RegisterVectors(key=key, data=file.data, kind=file.kind))
        for key in keys:
            if key in self._sizes:
                self._sizes.move_to_end(key)
        if self._bytes <= self._most_bytes:
            return told
        return self._evictions({*keys, *in_flight()}) + told

    def clear(self) -> None:
        """Note that the compute process is a new one, which holds nothing."""
        self._sizes.clear()
        self._bytes = 0

    def _evictions(self, needed: Collection[str]) -> list[RegisterVectors | ForgetVectors]:
        """Drop what was not used for longest, until the rest fits or is needed."""
        dropped: list[RegisterVectors | ForgetVectors] = []
        for key in list(self._sizes):
            if self._bytes <= self._most_bytes:
                break
            if key not in needed:
                self._bytes -= self._sizes.pop(key)
                dropped.append(ForgetVectors(key=key))
        return dropped
