"""Helpers of tests live in modules of helpers."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
IMPORT = re.compile(r"^from tests\.(?:\w+\.)*test_\w+ import|^from tests\.\w+ import test_", re.M)

PLANTED_BUGS = "kernels_cuda/test_planted_bugs.py"
"""Runs other tests on planted bugs: each must fail."""


def test_no_test_imports_from_another_test():
    files = TESTS.rglob("*.py")
    found = {str(path.relative_to(TESTS)) for path in files if IMPORT.search(path.read_text())}
    assert found == {PLANTED_BUGS}
