"""The tests, by kind: unit, integration, acceptance, migration, parity."""

import os

# Threads of a parallel region sleep, not spin, while they wait: on a machine whose cores are
# busy, spinning keeps the thread that is waited for from running.  Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
