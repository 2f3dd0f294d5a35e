"""Planted races are found on every schedule, and what is ordered is no race."""

import re

import numpy as np
import pytest

from tests.cuda_host import KernelFault, RawModule, schedule

SOURCE = r"""
// Sum over the block; the second call uses `sums` again.
template <bool kBarrierBefore, bool kBarrierBetween>
__device__ int block_sum(int value, int* sums) {
  for (int step = 16; step; step >>= 1) value += __shfl_xor_sync(0xffffffffu, value, step);
  if (kBarrierBefore) __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  if (kBarrierBetween) __syncthreads();
  int total = 0;
  for (int warp = 0; warp < blockDim.x / 32; ++warp) total += sums[warp];
  return total;
}

template <bool kBarrierBefore, bool kBarrierBetween>
__global__ void two_sums(int* out) {
  __shared__ int sums[32];
  const int first = block_sum<kBarrierBefore, kBarrierBetween>(threadIdx.x, sums);
  out[threadIdx.x] = first + block_sum<kBarrierBefore, kBarrierBetween>(1, sums);
}

extern "C" __global__ void all_write_one_word(int* out) { out[blockIdx.x] = 7; }

extern "C" __global__ void read_the_next_blocks_row(float* x) {
  const int row = blockIdx.x, next = (row + 1) % gridDim.x;
  x[row * blockDim.x + threadIdx.x] += x[next * blockDim.x + threadIdx.x];
}

extern "C" __global__ void count_without_atomics(int* counter) { counter[0] = counter[0] + 1; }
extern "C" __global__ void count(unsigned* counter) { atomicAdd(counter, 1u); }
extern "C" __global__ void count_and_look(unsigned* counter, unsigned* seen) {
  atomicAdd(counter, 1u);
  seen[threadIdx.x] = *counter;
}

extern "C" __global__ void neighbouring_bytes(unsigned char* out) {
  out[threadIdx.x] = threadIdx.x;
}
extern "C" __global__ void overlapping_words(unsigned char* out) {
  if (threadIdx.x == 0) *reinterpret_cast<unsigned*>(out) = 1;
  if (threadIdx.x == 1) out[3] = 1;
}

enum Order { kNothing, kShuffle, kVote, kWarp, kHalfWarps, kBlock };
template <int order>
__global__ void read_the_other_lane(int* out) {
  __shared__ int box[32];
  const int lane = threadIdx.x;
  box[lane] = lane;
  if (order == kShuffle) __shfl_sync(0xffffffffu, lane, 0);
  if (order == kVote) __any_sync(0xffffffffu, lane);
  if (order == kWarp) __syncwarp();
  if (order == kHalfWarps) __syncwarp(lane < 16 ? 0xffffu : 0xffff0000u);
  if (order == kBlock) __syncthreads();
  out[lane] = box[lane ^ 16];
}
extern "C" __global__ void read_inside_the_half(int* out) {
  __shared__ int box[32];
  box[threadIdx.x] = threadIdx.x;
  __syncwarp(threadIdx.x < 16 ? 0xffffu : 0xffff0000u);
  out[threadIdx.x] = box[threadIdx.x ^ 8];
}

// Many readers, only one of which is not ordered before the writer.
extern "C" __global__ void one_late_reader(int* out) {
  __shared__ int word;
  if (threadIdx.x == 0) word = 5;
  __syncthreads();
  out[threadIdx.x] = word;
  __syncwarp();
  if (threadIdx.x == 1) word = 6;  // warp 1 may not have read yet
}

// The last block to arrive adds up what the others left.
template <bool kRelease, bool kAcquire, bool kAtOnce = false>
__global__ void last_block_sums(float* partial, unsigned* arrived, float* out) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = blockIdx.x + 1;
    if (kRelease) __threadfence();
    const unsigned before =
        kAtOnce ? cuda_host::add_acq_rel(arrived, 1u) : atomicAdd(arrived, 1u);
    last = before == gridDim.x - 1;
    if (kAcquire) __threadfence();
  }
  __syncthreads();
  if (last && threadIdx.x == 32) {
    float sum = 0;
    for (int i = 0; i < gridDim.x; ++i) sum += partial[i];
    out[0] = sum;
  }
}
"""
SEEDS = range(6)
NAMES = [
    "two_sums<true, true>",
    "two_sums<true, false>",
    "two_sums<false, true>",
    *(f"read_the_other_lane<{order}>" for order in range(6)),
    *(f"last_block_sums<{a}, {b}>" for a in ("true", "false") for b in ("true", "false")),
    "last_block_sums<false, false, true>",
]


@pytest.fixture(scope="module")
def module():
    return RawModule(SOURCE, name_expressions=NAMES)


def found(kernel, grid, block, args, seed):
    """The findings of a launch that must fail."""
    with schedule(seed), pytest.raises(KernelFault) as caught:
        kernel((grid,), (block,), args)
    return caught.value


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_with_every_barrier_are_clean(module, seed):
    out = np.zeros(128, np.int32)
    with schedule(seed):
        module.get_function("two_sums<true, true>")((1,), (128,), (out,))
    assert (out == 128 * 127 // 2 + 128).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_barrier_before_shared_memory_is_used_again(module, seed):
    out = np.zeros(128, np.int32)
    fault = found(module.get_function("two_sums<false, true>"), 1, 128, (out,), seed)
    assert fault.kinds == {"race"}
    assert "shared memory two_sums<false, true>::sums" in str(fault)


def test_a_race_is_reported_even_where_the_result_is_right(module):
    out = np.zeros(128, np.int32)
    found(module.get_function("two_sums<false, true>"), 1, 128, (out,), seed=0)
    assert (out == 128 * 127 // 2 + 128).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_barrier_between_write_and_read(module, seed):
    fault = found(
        module.get_function("two_sums<true, false>"), 1, 128, (np.zeros(128, np.int32),), seed
    )
    assert "race" in fault.kinds


@pytest.mark.parametrize("seed", SEEDS)
def test_two_threads_that_write_one_word(module, seed):
    fault = found(module.get_function("all_write_one_word"), 1, 2, (np.zeros(1, np.int32),), seed)
    assert fault.kinds == {"race"}
    assert "bytes 0 to 3 of argument 0 (4 bytes)" in str(fault)
    assert "thread (0, 0, 0)" in str(fault)
    assert "thread (1, 0, 0)" in str(fault)


def test_a_report_names_the_kernel_and_the_lines_of_both_accesses(module):
    fault = found(module.get_function("count_without_atomics"), 1, 2, (np.zeros(1, np.int32),), 0)
    line = next(n for n, text in enumerate(SOURCE.splitlines(), 1) if "without_atomics" in text)
    assert str(fault).count(f"kernel.cu:{line} in count_without_atomics") >= 2
    assert str(fault).startswith("count_without_atomics, schedule seed 0:")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_block_that_reads_what_another_writes(module, seed):
    fault = found(
        module.get_function("read_the_next_blocks_row"), 4, 8, (np.ones(32, np.float32),), seed
    )
    assert fault.kinds == {"race"}
    blocks = set(re.findall(r"of block \((\d)", str(fault)))
    assert len(blocks) > 1


def test_no_race_inside_one_block_alone(module):
    x = np.ones(8, np.float32)
    module.get_function("read_the_next_blocks_row")((1,), (8,), (x,))
    assert (x == 2).all()


def test_a_random_schedule_shows_what_the_race_does(module):
    counts = set()
    for seed in range(12):
        counter = np.zeros(1, np.int32)
        found(module.get_function("count_without_atomics"), 1, 32, (counter,), seed)
        counts.add(int(counter[0]))
    assert len(counts) > 1
    assert min(counts) < 32


@pytest.mark.parametrize("seed", SEEDS)
def test_atomics_do_not_race_with_atomics(module, seed):
    counter = np.zeros(1, np.uint32)
    with schedule(seed):
        module.get_function("count")((4,), (64,), (counter,))
    assert counter[0] == 256


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plain_read_races_with_another_threads_atomic(module, seed):
    args = (np.zeros(1, np.uint32), np.zeros(32, np.uint32))
    fault = found(module.get_function("count_and_look"), 1, 32, args, seed)
    assert fault.kinds == {"race"}
    assert "updates atomically" in str(fault)


def test_bytes_of_one_word_are_different_places(module):
    out = np.zeros(64, np.uint8)
    with schedule(1):
        module.get_function("neighbouring_bytes")((1,), (64,), (out,))
    assert (out == np.arange(64)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_byte_races_with_the_word_around_it(module, seed):
    fault = found(module.get_function("overlapping_words"), 1, 2, (np.zeros(4, np.uint8),), seed)
    assert "bytes 3 to 3 of argument 0" in str(fault)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("order", [0, 1, 2, 4], ids=["nothing", "shuffle", "vote", "half warps"])
def test_what_does_not_order_the_lanes_memory(module, order, seed):
    kernel = module.get_function(f"read_the_other_lane<{order}>")
    assert "race" in found(kernel, 1, 32, (np.zeros(32, np.int32),), seed).kinds


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("order", [3, 5], ids=["__syncwarp", "__syncthreads"])
def test_what_orders_the_lanes_memory(module, order, seed):
    out = np.zeros(32, np.int32)
    with schedule(seed):
        module.get_function(f"read_the_other_lane<{order}>")((1,), (32,), (out,))
    assert (out == np.arange(32) ^ 16).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_half_a_warp_can_be_ordered_by_itself(module, seed):
    out = np.zeros(32, np.int32)
    with schedule(seed):
        module.get_function("read_inside_the_half")((1,), (32,), (out,))
    assert (out == np.arange(32) ^ 8).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_one_unordered_reader_among_many(module, seed):
    fault = found(module.get_function("one_late_reader"), 1, 64, (np.zeros(64, np.int32),), seed)
    assert fault.kinds == {"race"}


@pytest.mark.parametrize("seed", SEEDS)
def test_readers_of_the_writers_own_warp_are_ordered(module, seed):
    out = np.zeros(32, np.int32)
    with schedule(seed):
        module.get_function("one_late_reader")((1,), (32,), (out,))
    assert (out == 5).all()


def last_block(module, release, acquire, seed, at_once=False):
    args = (np.zeros(5, np.float32), np.zeros(1, np.uint32), np.zeros(1, np.float32))
    chosen = (release, acquire, True) if at_once else (release, acquire)
    name = f"last_block_sums<{', '.join(map(str, chosen)).lower()}>"
    with schedule(seed):
        module.get_function(name)((5,), (64,), args)
    return args[2][0]


@pytest.mark.parametrize("seed", SEEDS)
def test_fences_around_an_atomic_hand_results_to_another_block(module, seed):
    assert last_block(module, release=True, acquire=True, seed=seed) == 15


@pytest.mark.parametrize("seed", SEEDS)
def test_so_does_an_atomic_that_acquires_and_releases(module, seed):
    assert last_block(module, release=False, acquire=False, seed=seed, at_once=True) == 15


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("release", "acquire"), [(True, False), (False, True), (False, False)])
def test_handing_over_needs_both_fences(module, release, acquire, seed):
    with pytest.raises(KernelFault) as caught:
        last_block(module, release, acquire, seed)
    assert caught.value.kinds == {"race"}
