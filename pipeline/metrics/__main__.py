"""Prints docs/reference/metrics.md: `python -m nightjar.pipeline.metrics`."""

import sys

from nightjar.pipeline.metrics.reference import reference_page

sys.stdout.write(reference_page())
