"""The precision of `--dtype auto` on this processor: probed once, then remembered.

So two equal runs compute in the same precision, also where the machine was busy at a start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from nightjar.gpu_worker.models.precision import Probe, computes_bfloat16, fastest_dtype, probe
from nightjar.kernels.cache_folder import cache_folder
from nightjar.kernels.device import identity

logger = logging.getLogger(__name__)


def chosen_dtype(folder: Path | None = None, measure: Callable[[], Probe] = probe) -> str:
    """Return "bf16" or "fp32": the choice of the first start with this processor and kernels.

    The first start probes.

    folder: where the choice is remembered; the folder of the compiled kernels unless given.
    """
    if not computes_bfloat16():
        return "fp32"
    path = (folder or cache_folder()) / f"precision-{_key()}.json"
    remembered = _read(path)
    if remembered is not None:
        return remembered
    found = measure()
    dtype = fastest_dtype(found)
    logger.info(
        "precision of this processor: %s",
        dtype,
        extra={
            "action": "precision_probed",
            "dtype": dtype,
            "fp32_us": round(found.fp32_s * 1e6),
            "bf16_us": round(found.bf16_s * 1e6),
        },
    )
    try:
        return _remember(path, dtype, found)
    except OSError as error:
        logger.warning(
            "the choice of %s cannot be remembered, the next start probes again: %s", dtype, error
        )
        return dtype


def _key() -> str:
    """Return a name for everything that the choice depends on."""
    return hashlib.sha256(f"{identity()} {torch.__version__}".encode()).hexdigest()[:32]


def _read(path: Path) -> str | None:
    try:
        dtype = json.loads(path.read_bytes())["dtype"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return dtype if dtype in ("fp32", "bf16") else None


def _remember(path: Path, dtype: str, found: Probe) -> str:
    """Write the choice; if another process has written one meanwhile, return that."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    note = {"dtype": dtype, "fp32_s": found.fp32_s, "bf16_s": found.bf16_s}
    handle, name = tempfile.mkstemp(prefix=".precision-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(note, stream)
        try:
            os.link(name, path)  # fails where there is a file: the first choice stands
        except FileExistsError:
            if (first := _read(path)) is not None:
                return first
            Path(name).replace(path)  # not readable: no choice
        return dtype
    finally:
        Path(name).unlink(missing_ok=True)
