"""The process of a rank that follows, `python -m nightjar.gpu_worker.shards`."""

import argparse
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Never

from nightjar import logs
from nightjar.gpu_worker.shards.process import (
    add_place_arguments,
    leave,
    leaving_when_lost,
    live_no_longer_than_the_worker,
    place_of,
)
from nightjar.process import keep_freed_memory


def main() -> Never:
    """Follow rank 0 until it ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--pipe", type=int, required=True, help="file descriptor from rank 0")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of torch")
    add_place_arguments(parser)
    args = parser.parse_args()
    live_no_longer_than_the_worker(args.worker)
    place = place_of(args)
    logs.configure(f"compute rank {place.rank}")
    with leaving_when_lost():
        # Not above: torch takes seconds, in which this process is to be heard, and to end with the
        # worker.
        import torch

        from nightjar.gpu_worker.shards.collective import TorchCollective
        from nightjar.gpu_worker.shards.follower import Follower
        from nightjar.gpu_worker.shards.switches import switch_off

        if args.threads is not None:
            torch.set_num_threads(args.threads)
        keep_freed_memory()
        switch_off(args.without, 0, args.device)  # windows are rank 0's
        join = partial(TorchCollective, place, args.device)
        Follower(args.model, place, args.device, Connection(args.pipe), join).run()
    leave(0)


if __name__ == "__main__":
    main()
