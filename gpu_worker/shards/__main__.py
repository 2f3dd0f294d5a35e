"""The process of a rank that follows rank 0, `python -m nightjar.gpu_worker.shards`."""

from functools import partial
from multiprocessing.connection import Connection
from typing import Never

from nightjar.gpu_worker.shards.process import begin, leave, leaving_when_lost
from nightjar.process import keep_freed_memory


def main() -> Never:
    """Follow rank 0 until it ends."""
    start, member = begin()
    config = start.config
    with leaving_when_lost():
        # Imported late: torch takes seconds. Signs of life must come before that, and the process
        # must end with its worker meanwhile.
        import torch

        from nightjar.gpu_worker.shards.collective import TorchCollective
        from nightjar.gpu_worker.shards.follower import Follower
        from nightjar.gpu_worker.shards.switches import apply_switches

        if config.threads_per_rank is not None:
            torch.set_num_threads(config.threads_per_rank)
        keep_freed_memory()
        device = config.rank_device
        apply_switches(config, device, start.rank)
        join = partial(TorchCollective, member, device)
        Follower(config.model, member, device, Connection(start.pipe), join).run()
    leave(0)


if __name__ == "__main__":
    main()
