import importlib
import sys
from types import ModuleType

import pytest
import torch

from nightjar.kernels import cuda, reference
from nightjar.kernels.cuda import kv_transfer as module
from nightjar.kernels.cuda.kernel import Kernel
from tests.kernels_cuda.devices import poisoned, random, storages


def caches(dtype, blocks=7, layers=3, heads=2, block_size=4, head_size=80):
    shape = (layers, blocks, heads, block_size, head_size)
    return random(shape, dtype, seed=1), random(shape, dtype, seed=2)


@pytest.mark.parametrize("storage", storages)
def test_packed_blocks_hold_every_layer(device, storage):
    keys, values = caches(storages[storage])
    blocks = torch.tensor([5, 0, 6])
    packed = poisoned((3, 3, 2, 2, 4, 80), keys.dtype).to(device)
    cuda.kv_transfer.kv_pack(*(x.to(device) for x in (keys, values, blocks)), packed)
    wanted = torch.stack((keys[:, blocks], values[:, blocks]), 2).transpose(0, 1)
    assert torch.equal(packed.cpu(), wanted)


def test_unpacking_elsewhere_restores_the_blocks_and_nothing_else(device):
    keys, values = (x.to(device) for x in caches(torch.float16))
    packed = poisoned((2, 3, 2, 2, 4, 80), torch.float16).to(device)
    cuda.kv_transfer.kv_pack(keys, values, torch.tensor([4, 1], device=device), packed)
    before = keys.clone(), values.clone()
    to = torch.tensor([0, 3], device=device)
    cuda.kv_transfer.kv_unpack(keys, values, to, packed)
    for cache, old in zip((keys, values), before, strict=True):
        assert torch.equal(cache[:, to], old[:, [4, 1]])
        assert torch.equal(cache[:, [1, 2, 4, 5, 6]], old[:, [1, 2, 4, 5, 6]])


def test_blocks_go_to_the_hosts_pinned_memory_and_back(device):
    keys, values = (x.to(device) for x in caches(torch.float16))
    packed = poisoned((2, 3, 2, 2, 4, 80), torch.float16)
    packed = packed.pin_memory() if device == "cuda" else packed
    blocks = torch.tensor([4, 1], device=device)
    cuda.kv_transfer.kv_pack(keys, values, blocks, packed)
    wanted = keys[:, blocks].clone()
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(packed[:, :, 0].transpose(0, 1), wanted.cpu())
    keys[:, blocks] = 0
    cuda.kv_transfer.kv_unpack(keys, values, blocks, packed)
    assert torch.equal(keys[:, blocks], wanted)


def test_some_layers_of_some_slots(device):
    """Layer by layer, to slots and back: the other slots and layers stay as they are."""
    keys, values = (x.to(device) for x in caches(torch.bfloat16))
    packed = torch.zeros(5, 3, 2, 2, 4, 80, dtype=torch.bfloat16, device=device)
    blocks, slots = (torch.tensor(x, device=device) for x in ([5, 0], [3, 1]))
    one = slice(1, 2)
    cuda.kv_transfer.kv_pack(keys[one], values[one], blocks, packed[:, one], slots)
    wanted = torch.zeros_like(packed)
    wanted[slots, 1, 0], wanted[slots, 1, 1] = keys[1, blocks], values[1, blocks]
    assert torch.equal(packed, wanted)
    to, before = torch.tensor([2, 6], device=device), keys.clone()
    cuda.kv_transfer.kv_unpack(keys[one], values[one], to, packed[:, one], slots)
    before[1, to] = before[1, blocks]
    assert torch.equal(keys, before)
    assert torch.equal(values[1, to], values[1, blocks])


def test_the_reference_moves_the_same(device):
    keys, values = (x.to(device) for x in caches(torch.float32))
    blocks, slots = (torch.tensor(x, device=device) for x in ([4, 1, 3], [0, 4, 2]))
    packed = [torch.zeros(5, 3, 2, 2, 4, 80, device=device) for _ in range(2)]
    copies = [(keys.clone(), values.clone()) for _ in range(2)]
    to = torch.tensor([6, 0, 2], device=device)
    for ops, place, copy in zip(
        (cuda.kv_transfer, reference.kv_transfer), packed, copies, strict=True
    ):
        ops.kv_pack(keys, values, blocks, place, slots)
        ops.kv_unpack(*copy, to, place, slots)
    assert torch.equal(*packed)
    assert all(torch.equal(*pair) for pair in zip(*copies, strict=True))


def test_memory_of_the_host_that_is_not_pinned_is_refused(monkeypatch):
    """Without CuPy: what the backend does with a tensor before it starts anything."""
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    backend = importlib.import_module("nightjar.kernels.cuda.cupy_backend")
    monkeypatch.delitem(sys.modules, "nightjar.kernels.cuda.cupy_backend")
    kernel, tensor = Kernel("kv_transfer", "kv_transfer"), torch.ones(4)
    with pytest.raises(ValueError, match="a tensor is on cpu"):
        backend._argument(kernel, tensor, 0)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    assert backend._argument(kernel, tensor, 0) == tensor.data_ptr()


@pytest.mark.parametrize("most", [1, 3, 100])
def test_pieces_are_shared_out_among_any_number_of_blocks(device, monkeypatch, most):
    """Cache blocks of two pieces, the second of which is not a whole one."""
    monkeypatch.setattr(module, "BLOCKS", most)
    keys, values = caches(torch.float32, blocks=4, layers=2, block_size=20, head_size=128)
    blocks = torch.tensor([2, 0])
    packed = poisoned((2, 2, 2, 2, 20, 128), torch.float32).to(device)
    given = [x.to(device) for x in (keys, values, blocks)]
    cuda.kv_transfer.kv_pack(*given, packed)
    wanted = torch.stack((keys[:, blocks], values[:, blocks]), 2).transpose(0, 1)
    assert torch.equal(packed.cpu(), wanted)
    emptied = [torch.zeros_like(x) for x in given[:2]]
    cuda.kv_transfer.kv_unpack(*emptied, given[2], packed)
    for got, whole in zip(emptied, (keys, values), strict=True):
        assert torch.equal(got[:, blocks].cpu(), whole[:, blocks])
        assert not got[:, [1, 3]].any()


def test_no_blocks_are_no_work(device):
    keys, values = (x.to(device) for x in caches(torch.float16))
    packed = torch.empty(0, 3, 2, 2, 4, 80, dtype=torch.float16, device=device)
    cuda.kv_transfer.kv_unpack(
        keys, values, torch.empty(0, dtype=torch.int64, device=device), packed
    )
    assert torch.equal(keys.cpu(), caches(torch.float16)[0])


def test_bad_arguments_are_named():
    keys, values = caches(torch.float16, head_size=3, block_size=1, heads=1)
    packed = torch.empty(1, 3, 2, 1, 1, 3, dtype=torch.float16)
    with pytest.raises(ValueError, match="whole words of 16"):
        cuda.kv_transfer.kv_pack(keys, values, torch.tensor([0]), packed)
    with pytest.raises(ValueError, match="packed has shape"):
        cuda.kv_transfer.kv_pack(keys, values, torch.tensor([0, 1]), packed)
    with pytest.raises(ValueError, match="slots has shape"):
        cuda.kv_transfer.kv_pack(keys, values, torch.tensor([0]), packed, torch.tensor([0, 1]))
    apart = torch.empty(1, 6, 2, 1, 1, 3, dtype=torch.float16)[:, ::2]
    with pytest.raises(ValueError, match="layers of a slot must lie one after another"):
        cuda.kv_transfer.kv_pack(keys, values, torch.tensor([0]), apart)
    with pytest.raises(ValueError, match="blocks is int32"):
        cuda.kv_transfer.kv_pack(keys, values, torch.tensor([0], dtype=torch.int32), packed)
