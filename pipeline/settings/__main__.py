"""Prints docs/reference/settings.md: `python -m nightjar.pipeline.settings`."""

import sys

from nightjar.pipeline.settings.reference import reference_page

sys.stdout.write(reference_page())
