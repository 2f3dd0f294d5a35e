"""One rank of a split model with an engine of its own: `python -m tests.gpu.rank`.

Engines that are given the same requests take the same steps. So the ranks need nothing but the
exchanges of their model, and this runs on a bare GPU machine.
"""

import gc
import json
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import Engine, EngineConfig
from nightjar.gpu_worker.models import load_model, padded_steps
from nightjar.gpu_worker.models.shard import ShardDecoder
from nightjar.gpu_worker.models.split import Part
from nightjar.kernels.cuda import launch
from tests.engines import assert_nothing_held, drain, generate, ids
from tests.kernels_cuda.devices import run_on_host

WAYS = {
    "windows and graphs": {},
    "windows": {"cuda_graphs": False},
    "single steps": {"window_steps": 1, "cuda_graphs": False},
}


class Exchanges:
    """A Collective over torch.distributed."""

    def __init__(self, *, is_recordable: bool) -> None:
        self.is_recordable = is_recordable

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        ranks = dist.get_world_size()
        gathered = x.new_empty(ranks * x.numel())
        dist.all_gather_single(gathered, x.flatten())
        return gathered.view(ranks, *x.shape)

    def broadcast(self, x: Tensor) -> Tensor:
        raise NotImplementedError("each rank has its own engine")


def main(folder: str, meeting: str, rank: str, ranks: str, device: str) -> None:
    """Write the tokens of every request, by the way of computing them, as JSON."""
    number, count, on_gpu = int(rank), int(ranks), device == "cuda"
    if on_gpu:
        device = f"cuda:{number}"
        torch.cuda.set_device(device)
    store = dist.FileStore(meeting, count)  # type: ignore[attr-defined]
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=number,
        world_size=count,
        device_id=torch.device(device) if on_gpu else None,
    )
    padded_steps.RECORDED_AT = 1
    directory = ModelDirectory.open(Path(folder))
    part = Part.of(directory.config, number, count)
    found = {}
    with nullcontext() if on_gpu else launch.using(run_on_host):
        own = load_model(directory, "fp16" if on_gpu else "fp32", device, part)
        exchanges = Exchanges(is_recordable=on_gpu)
        exchanges.sum(torch.zeros(1, 1, device=device))  # NCCL connects at its first use
        held = []
        for way, given in WAYS.items():
            config = EngineConfig(kv_cache_bytes=1 << 22, max_step_tokens=32, **given)
            texts = directory.tokenizer().token_bytes
            engine = Engine(ShardDecoder(own, part, exchanges), texts, config)
            results = drain(engine, *requests())
            assert engine.windows is not None
            assert_nothing_held(engine)
            found[way] = {i: [one.token_ids for one in x.outputs] for i, x in results.items()}
            held.append(weakref.ref(engine.windows.steps))
        # NCCL does not end before the graphs that hold its exchanges.
        del engine
        gc.collect()
        assert not any(one() for one in held)
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(found, sort_keys=True) + "\n")


def requests():
    """Prompts of one and of several steps; texts that end apart, one of which needs the host."""
    kinds = ({}, {"temperature": 0.9, "seed": 4, "top_k": 30}, {"n": 2, "temperature": 1.1})
    found = [generate(i, ids(5 + 13 * i, i), 5 + i, **kinds[i % 3]) for i in range(4)]
    return [*found, generate(9, ids(9), 4, logprobs=1)]


if __name__ == "__main__":
    main(*sys.argv[1:])
