"""`python -m nightjar` is the command `nightjar`."""

from nightjar.pipeline.cli import main

main()
