"""int8 products on processors whose sums of bytes saturate."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nightjar.kernels.native.build import SWITCH

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "unit" / "test_kernels_int8.py"


@pytest.mark.slow
def test_processors_that_saturate_get_shorter_activations():
    """oneDNN told to use no more than AVX2: sums of 127s would saturate, sums of 63s are exact."""
    tests = "torch and (test_equals_exact_arithmetic or bounded)"
    code = (
        "from nightjar.kernels.reference.int8_linear import activation_limit\n"
        "import pytest, sys\n"
        "assert activation_limit() == 63, activation_limit()\n"
        f"sys.exit(pytest.main([{str(TESTS)!r}, '-q', '-k', {tests!r}]))\n"
    )
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", SWITCH: "torch"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
