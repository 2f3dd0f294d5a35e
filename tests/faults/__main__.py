"""`python -m tests.faults [pytest options]`: every fault, and the report of what was found.

`-k flushed` or a file's name runs some of them; the rows of the others stay as they are.
"""

import sys
from pathlib import Path

import pytest

from tests.faults.report import Report


def main() -> int:
    given = sys.argv[1:]
    files = [argument.partition("::")[0] for argument in given]
    if not any(file and Path(file).exists() for file in files):  # "" would be this directory
        given.append(str(Path(__file__).parent))
    return int(pytest.main(["--timeout=3600", *given], plugins=[Report()]))


if __name__ == "__main__":
    sys.exit(main())
