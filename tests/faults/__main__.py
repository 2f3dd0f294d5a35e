"""`python -m tests.faults [pytest options]`: every fault, and the report of what was found."""

import sys
from pathlib import Path

import pytest

from tests.faults.report import Report


def main() -> int:
    here = str(Path(__file__).parent)
    return int(pytest.main([here, "--timeout=3600", *sys.argv[1:]], plugins=[Report()]))


if __name__ == "__main__":
    sys.exit(main())
