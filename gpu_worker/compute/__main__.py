"""Entry point of the compute process: `python -m nightjar.gpu_worker.compute`."""

import sys

from nightjar.gpu_worker.compute.loop import main

sys.exit(main())
