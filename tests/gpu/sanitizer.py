"""NVIDIA's compute-sanitizer around a program of ours."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck", "initcheck")
VARIABLE = "NIGHTJAR_COMPUTE_SANITIZER"
"""Names the program; OFF: these tests are left out."""
OFF = "none"

FOUND_ERRORS = 86
"""What the program returns where it found errors and the tests had none of their own."""

LONGEST_S = 540

SELECTION = (
    "test_activation.py::test_a_gate_multiplies_halves_of_one_projection",
    "test_argmax.py::test_ties_go_to_the_lowest_id",
    "test_decode_attention.py::test_lengths_around_the_split",
    "test_decode_attention.py::test_every_launch_leaves_its_counts_at_zero_for_the_next",
    "test_decode_attention.py::test_query_heads_that_share_key_heads",
    "test_decode_attention.py::test_shared_key_heads_are_written_once",
    "test_decode_attention.py::test_what_is_asked_for_ahead_changes_nothing",
    "test_embedding.py::test_ids_past_the_vocabulary_read_their_own_prompt_vectors",
    "test_kv_transfer.py::test_unpacking_elsewhere_restores_the_blocks_and_nothing_else",
    "test_linear.py::test_a_block_goes_on_to_its_next_tile",
    "test_linear.py::test_every_channel_is_written_once",
    "test_linear.py::test_the_norm_before_it",
    "test_linear.py::test_what_is_asked_for_ahead_changes_nothing",
    "test_merge.py::test_an_empty_set_is_not_read",
    "test_norm.py::test_heads_inside_a_packed_projection_are_normalised_in_place",
    "test_norm.py::test_rows_do_not_depend_on_their_batch",
    "test_paged_prefill.py::test_rows_that_see_the_same_and_rows_that_see_nothing",
    "test_paged_prefill.py::test_tiles_of_no_work_write_nothing",
    "test_penalties.py::test_bits_past_the_vocabulary_reach_nothing",
    "test_philox.py::test_more_numbers_than_a_block_has_threads",
    "test_product_rows.py::test_a_norm_rounds_its_rows_as_they_are_rounded_after_it",
    "test_product_rows.py::test_every_number_of_rows",
    "test_product_rows.py::test_the_norm_before_it",
    "test_qkv_post.py::test_channels_past_the_turned_ones_are_kept",
    "test_sample.py::test_rows_of_all_kinds_share_a_batch",
    "test_step_update.py::test_a_finished_row_stays_as_it_was",
    "test_step_update.py::test_more_rows_than_a_block_has_threads",
    "test_token_nll.py::test_rows_at_a_stride",
)
NODES = [f"tests/kernels_cuda/{name}" for name in SELECTION]
"""A launch of every source, with what is awkward for it: a sanitizer makes each some hundred times
slower."""

TOOLKITS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")


@dataclass(frozen=True, slots=True)
class Outcome:
    """returncode: of the sanitizer; output: its own and the program's."""

    returncode: int
    output: str

    @property
    def errors_found(self) -> int:
        """What the sanitizer counted: errors, or with racecheck hazards.

        Raises:
            AssertionError: It says nothing of the kind: it did not work here.
        """
        found = re.search(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)", self.output, re.MULTILINE)
        if found is None:
            raise AssertionError(f"no summary: {self.summary}")
        return int(found[1])

    @property
    def all_passed(self) -> bool:
        """Whether tests ran inside and passed, all of them.

        Of the sanitizer's own lines, which begin with =, none is read: they count errors as well.
        """
        said = [line for line in self.output.splitlines() if not line.startswith("=")]
        counts = re.findall(r"\b\d+ (passed|failed|errors?|skipped)", "\n".join(said))
        return set(counts) == {"passed"}

    @property
    def summary(self) -> str:
        """The end of the output, where the sanitizer counts what it found."""
        return f"compute-sanitizer returned {self.returncode}:\n{self.output[-6000:]}"


def find(environment: Mapping[str, str] = os.environ) -> str | None:
    """The program's path, OFF, or None where there is none."""
    named = environment.get(VARIABLE)
    if named == OFF:
        return OFF
    if named:
        return shutil.which(named)
    folders = [environment.get("PATH", os.defpath), *TOOLKITS]
    if toolkit := environment.get("CUDA_PATH") or environment.get("CUDA_HOME"):
        folders += [f"{toolkit}/bin", f"{toolkit}/compute-sanitizer"]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def require(environment: Mapping[str, str] = os.environ) -> str:
    """The program's path; the test is skipped where it is left out, and fails where there is none:
    silence would be taken for a result."""
    found = find(environment)
    if found == OFF:
        pytest.skip(f"{VARIABLE} leaves compute-sanitizer out")
    if found is None:
        pytest.fail(
            "compute-sanitizer was not found: install the CUDA toolkit, name the program in "
            f"{VARIABLE}, or set {VARIABLE}={OFF} to leave these tests out",
            pytrace=False,
        )
    return found


ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Every tensor gets an allocation of its own (torch keeps none), so that reading beside one, or
reading what nobody wrote, is seen."""


def prefix(sanitizer: str, tool: str) -> tuple[str, ...]:
    """What stands before a program that a tool is to watch.  Errors that calls of CUDA's API return
    are left to the program: torch asks for some of them."""
    return (
        sanitizer,
        *("--tool", tool),
        *("--error-exitcode", str(FOUND_ERRORS)),
        *("--report-api-errors", "no"),
        *("--print-limit", "20"),
    )


def run(
    sanitizer: str, tool: str, python_arguments: Sequence[str], limit_s: float | None = None
) -> Outcome:
    """Run our Python under one of the tools, from the repository's root; LONGEST_S unless told."""
    limit_s = LONGEST_S if limit_s is None else limit_s
    command = [*prefix(sanitizer, tool), sys.executable, *python_arguments]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": path}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        said = late.output or b""
        text = said if isinstance(said, str) else said.decode(errors="replace")
        return Outcome(-1, f"{text}\nnot finished after {limit_s:g} s")
    return Outcome(done.returncode, done.stdout)
