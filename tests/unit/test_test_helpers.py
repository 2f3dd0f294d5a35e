"""Helpers of tests live in modules of helpers."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
IMPORT = re.compile(r"^from tests\.(?:\w+\.)*test_\w+ import|^from tests\.\w+ import test_", re.M)

STILL = {
    "faults/test_protocol.py",
    "kernels_cuda/test_planted_bugs.py",  # runs tests on planted bugs: each must fail
    "unit/test_engine_families.py",
    "unit/test_engine_host_tier.py",
    "unit/test_engine_transfers.py",
    "unit/test_packaging.py",
}
"""Import from other tests.  The list may only become shorter."""


def test_no_test_imports_from_another_test():
    files = TESTS.rglob("*.py")
    found = {str(path.relative_to(TESTS)) for path in files if IMPORT.search(path.read_text())}
    assert found == STILL
