"""`python -m nightjar` is the command `nightjar`."""

from nightjar.pipeline.front.cli import main

main()
