"""One model over several processes: rank 0 schedules, the others compute the same in lockstep.

docs/shards.md says what is split how, what is sent, and what happens when a rank fails.
"""

from nightjar.gpu_worker.shards.leader import Leader
from nightjar.gpu_worker.shards.process import GroupLostError, Place

__all__ = ["GroupLostError", "Leader", "Place"]
