"""Names of `NIGHTJAR_*` environment variables: which exist, and what an unknown one may mean."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches

PREFIX = "NIGHTJAR_"

OTHER_VARIABLES = frozenset(
    {
        "NIGHTJAR_API",  # the command line: where the API listens
        "NIGHTJAR_COMPUTE_SANITIZER",  # tests on a GPU: the program compute-sanitizer
        "NIGHTJAR_CPU_KERNELS",  # kernels/native/build.py: auto, native or torch
        "NIGHTJAR_FLOWER_AUTH",  # the command line: user and password of Flower
        "NIGHTJAR_KERNEL_CACHE",  # kernels/cache_folder.py: where compiled kernels are kept
        "NIGHTJAR_PREBUILT_KERNELS",  # kernels/cuda/cubin_cache.py: compiled on another machine
        "NIGHTJAR_MODEL_DIR",  # docker-compose.yml: the model's directory on the host
    }
)
"""Variables that are read outside Settings."""

# The test suite's own: NIGHTJAR_TEST_POSTGRES and others.
_TESTS = "NIGHTJAR_TEST_"
_LIKE = 0.85


def unknown_variables(
    environment: Iterable[str], fields: Collection[str]
) -> list[tuple[str, str | None]]:
    """Return each unknown variable, with the known name that it resembles or None.

    fields: the names of the settings, without the prefix.
    """
    known = {name.removeprefix(PREFIX) for name in OTHER_VARIABLES}
    known |= {field.upper() for field in fields}
    found: list[tuple[str, str | None]] = []
    for name in sorted(environment):
        given = name.removeprefix(PREFIX)
        if not name.startswith(PREFIX) or name.startswith(_TESTS) or given in known:
            continue
        like = get_close_matches(given, known, n=1, cutoff=_LIKE)
        found.append((name, PREFIX + like[0] if like else None))
    return found
