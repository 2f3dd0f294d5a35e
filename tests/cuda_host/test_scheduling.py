"""Deadlocks, diverging barriers, wrong warp masks; what a seed decides."""

import re

import numpy as np
import pytest

from tests.cuda_host import KernelFault, RawModule, schedule

SOURCE = r"""
extern "C" __global__ void barrier_in_a_branch(int* out) {
  if (threadIdx.x < 16) __syncthreads();
  out[threadIdx.x] = 1;
}
extern "C" __global__ void return_before_a_barrier(int* out, int n) {
  if (threadIdx.x >= n) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}
extern "C" __global__ void two_barriers(int* out) {
  if (threadIdx.x % 2) {
    out[threadIdx.x] = 1;
    __syncthreads();
  } else {
    __syncthreads();
    out[threadIdx.x] = 2;
  }
}
__device__ void meet() { __syncthreads(); }
extern "C" __global__ void one_barrier_called_from_two_places(int* out) {
  if (threadIdx.x % 2) {
    meet();
    out[threadIdx.x] = 1;
  } else {
    meet();
    out[threadIdx.x] = 2;
  }
}
extern "C" __global__ void trips_of_different_length(int* out) {
  for (int i = 0; i < threadIdx.x / 32 + 1; ++i) __syncthreads();
  out[threadIdx.x] = 1;
}
extern "C" __global__ void same_branch_for_all(int* out, int n) {
  if (n > 3) __syncthreads();
  for (int i = 0; i < n; ++i) __syncthreads();
  out[threadIdx.x] = n;
}
extern "C" __global__ void barrier_against_warp(int* out) {
  if (threadIdx.x == 0) __syncthreads();
  else __syncwarp();
  out[threadIdx.x] = 1;
}

extern "C" __global__ void shuffle_in_a_branch(int* out) {
  int value = threadIdx.x;
  if (value < 16) value = __shfl_xor_sync(0xffffffffu, value, 1);
  __syncwarp();
  out[threadIdx.x] = value;
}
extern "C" __global__ void vote_with(unsigned* out, unsigned mask) {
  out[threadIdx.x] = __ballot_sync(mask, 1);
}
extern "C" __global__ void each_its_own_mask(unsigned* out) {
  out[threadIdx.x] = __ballot_sync(threadIdx.x < 8 ? 0xffffu : 0xffffffffu, 1);
}
extern "C" __global__ void shuffle_after_return(int* out) {
  if (threadIdx.x >= 16) return;
  out[threadIdx.x] = __shfl_down_sync(0xffffffffu, int(threadIdx.x), 1);
}
extern "C" __global__ void read_outside_of_the_mask(int* out) {
  if (threadIdx.x < 8) out[threadIdx.x] = __shfl_down_sync(0xffu, int(threadIdx.x), 4);
}
extern "C" __global__ void read_inside_the_segment(int* out) {
  if (threadIdx.x < 8) out[threadIdx.x] = __shfl_down_sync(0xffu, int(threadIdx.x), 4, 8);
}

extern "C" __global__ void wait_for_another_thread(volatile int* flag, int* out) {
  if (threadIdx.x == 0) while (atomicAdd(const_cast<int*>(flag), 0) == 0) {}
  else atomicExch(const_cast<int*>(flag), 1);
  out[threadIdx.x] = 1;
}
extern "C" __global__ void wait_for_nobody(int* flag) {
  while (atomicAdd(flag, 0) == 0) {}
}

extern "C" __global__ void order_of_arrival(unsigned* next, unsigned* place) {
  place[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(next, 1u);
}
extern "C" __global__ void check_value(int* value) { assert(value[threadIdx.x] < 3); }
extern "C" __global__ void trap_if(int condition) { if (condition) __trap(); }
"""
SEEDS = range(4)


@pytest.fixture(scope="module")
def module():
    return RawModule(SOURCE)


def line_of(text):
    return next(n for n, line in enumerate(SOURCE.splitlines(), 1) if text in line)


def fault(module, name, *args, block=32, seed=0):
    with schedule(seed), pytest.raises(KernelFault) as caught:
        module.get_function(name)((1,), (block,), args)
    return caught.value


def ints(n=64):
    return np.zeros(n, np.int32)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("block", [32, 64])
def test_a_barrier_in_a_divergent_branch(module, block, seed):
    found = fault(module, "barrier_in_a_branch", ints(), block=block, seed=seed)
    assert found.kinds == {"deadlock"}
    line = line_of("if (threadIdx.x < 16) __syncthreads();")
    assert "16 threads, (0, 0, 0) to (15, 0, 0), of block (0, 0, 0) waits at" in str(found)
    assert f"__syncthreads at kernel.cu:{line} in barrier_in_a_branch" in str(found)
    assert f"{block - 16} threads, (16, 0, 0)" in str(found)
    assert "has returned" in str(found)


def test_a_thread_that_returns_before_a_barrier(module):
    assert fault(module, "return_before_a_barrier", ints(), np.int32(31)).kinds == {"deadlock"}
    module.get_function("return_before_a_barrier")((1,), (32,), (ints(), np.int32(32)))


@pytest.mark.parametrize("seed", SEEDS)
def test_two_barriers_are_not_one(module, seed):
    found = fault(module, "two_barriers", ints(), seed=seed)
    assert found.kinds == {"barrier divergence"}
    first = line_of("void two_barriers")
    lines = {int(line) for line in re.findall(r"kernel.cu:(\d+) in two_barriers", str(found))}
    assert lines == {first + 3, first + 5}


def test_one_barrier_reached_from_two_places(module):
    found = fault(module, "one_barrier_called_from_two_places", ints())
    assert found.kinds == {"barrier divergence"}


def test_loops_of_different_length_around_a_barrier(module):
    assert fault(module, "trips_of_different_length", ints(), block=64).kinds == {"deadlock"}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_branch_that_all_take_may_hold_a_barrier(module, seed):
    out = ints(96)
    with schedule(seed):
        module.get_function("same_branch_for_all")((1,), (96,), (out, np.int32(5)))
    assert (out == 5).all()


def test_threads_that_wait_for_different_things(module):
    found = fault(module, "barrier_against_warp", ints())
    assert found.kinds == {"deadlock"}
    assert "waits in __syncwarp with mask 0xffffffff" in str(found)
    assert "waits at __syncthreads" in str(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_full_mask_where_half_a_warp_comes(module, seed):
    found = fault(module, "shuffle_in_a_branch", ints(), seed=seed)
    assert found.kinds == {"deadlock"}
    assert "a shuffle with mask 0xffffffff" in str(found)
    assert "__syncwarp with mask 0xffffffff" in str(found)


@pytest.mark.parametrize("mask", [0x0000FFFF, 0xFFFFFFFE, 0])
def test_a_mask_without_the_caller(module, mask):
    found = fault(module, "vote_with", np.zeros(64, np.uint32), np.uint32(mask))
    assert found.kinds == {"warp mask"}
    assert f"a vote with mask {mask:#010x}" in str(found)


def test_a_mask_with_lanes_that_the_block_lacks(module):
    out = np.zeros(48, np.uint32)
    found = fault(module, "vote_with", out, np.uint32(0xFFFFFFFF), block=48)
    assert found.kinds == {"warp mask"}
    assert "thread (32, 0, 0)" in str(found)


def test_masks_that_do_not_agree(module):
    assert fault(module, "each_its_own_mask", np.zeros(32, np.uint32)).kinds == {"deadlock"}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mask_with_lanes_that_have_returned(module, seed):
    found = fault(module, "shuffle_after_return", ints(), seed=seed)
    assert found.kinds <= {"warp mask", "deadlock"}


def test_a_shuffle_from_a_lane_outside_of_the_mask(module):
    found = fault(module, "read_outside_of_the_mask", ints())
    assert found.kinds == {"inactive lane"}
    assert "reads lane 8" in str(found)


def test_a_shuffle_inside_its_segment(module):
    out = ints(8)
    module.get_function("read_inside_the_segment")((1,), (32,), (out,))
    assert out.tolist() == [4, 5, 6, 7, 4, 5, 6, 7]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_thread_may_wait_for_another_of_its_block(module, seed):
    out = ints(2)
    with schedule(seed):
        module.get_function("wait_for_another_thread")((1,), (2,), (ints(1), out))
    assert out.tolist() == [1, 1]


def test_a_thread_that_waits_for_ever(module):
    found = fault(module, "wait_for_nobody", ints(1), block=2)
    assert found.kinds == {"no progress"}
    assert "in wait_for_nobody" in str(found)


def arrivals(module, seed):
    place = np.zeros(4 * 64, np.uint32)
    with schedule(seed):
        module.get_function("order_of_arrival")((4,), (64,), (np.zeros(1, np.uint32), place))
    assert sorted(place) == list(range(256))
    return place.tolist()


def test_seed_0_is_in_order(module):
    assert arrivals(module, 0) == list(range(256))


def test_a_seed_is_one_schedule(module):
    assert arrivals(module, 5) == arrivals(module, 5)


def test_seeds_are_different_schedules(module):
    assert len({tuple(arrivals(module, seed)) for seed in range(8)}) == 8


def test_blocks_come_in_any_order(module):
    first_blocks = {int(np.argmin(arrivals(module, seed))) // 64 for seed in range(1, 12)}
    assert len(first_blocks) > 1


def test_an_assertion_in_a_kernel(module):
    found = fault(module, "check_value", np.arange(4, dtype=np.int32), block=4)
    assert found.kinds == {"trap"}
    assert "assert(value[threadIdx.x] < 3)" in str(found)
    assert "thread (3, 0, 0)" in str(found)


def test_a_trap(module):
    assert fault(module, "trap_if", np.int32(1)).kinds == {"trap"}
    module.get_function("trap_if")((1,), (32,), (np.int32(0),))


def test_the_next_launch_after_a_fault_is_clean(module):
    fault(module, "barrier_in_a_branch", ints(), block=64)
    out = ints(64)
    module.get_function("same_branch_for_all")((1,), (64,), (out, np.int32(4)))
    assert (out == 4).all()
