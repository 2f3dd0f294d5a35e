"""The race checker against vector clocks written out in full, on random small programs."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.cuda_host import KernelFault, RawModule, schedule

SOURCE = r"""
enum { kNothing, kReadWord, kWriteWord, kAtomic, kReadByte, kWriteByte = kReadByte + 4,
       kHalfWarps = kWriteByte + 4, kWarp, kBlock };

// Every thread does its own list of steps, all on one word.
__device__ void interpret(const int* program, unsigned* word, unsigned* out, int steps) {
  const int thread = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned char* bytes = reinterpret_cast<unsigned char*>(word);
  unsigned sum = 0;
  for (int i = 0; i < steps; ++i) {
    const int step = program[thread * steps + i];
    if (step == kReadWord) sum += *word;
    if (step == kWriteWord) *word = thread;
    if (step == kAtomic) sum += atomicAdd(word, 1u);
    if (step >= kReadByte && step < kReadByte + 4) sum += bytes[step - kReadByte];
    if (step >= kWriteByte && step < kWriteByte + 4) bytes[step - kWriteByte] = thread;
    if (step == kHalfWarps) __syncwarp(threadIdx.x % 32 < 16 ? 0xffffu : 0xffff0000u);
    if (step == kWarp) __syncwarp();
    if (step == kBlock) __syncthreads();
  }
  out[thread] = sum;
}
extern "C" __global__ void on_global_memory(const int* program, unsigned* word, unsigned* out,
                                            int steps) {
  interpret(program, word, out, steps);
}
extern "C" __global__ void on_shared_memory(const int* program, unsigned* unused, unsigned* out,
                                            int steps) {
  __shared__ unsigned word;
  if (threadIdx.x == 0) word = 0;
  __syncthreads();
  interpret(program, &word, out, steps);
}
"""
READ_WORD, WRITE_WORD, ATOMIC, READ_BYTE, WRITE_BYTE = 1, 2, 3, 4, 8
HALF_WARPS, WARP, BLOCK = 12, 13, 14
BLOCKS, THREADS, LANES, STEPS = 2, 64, 32, 5
ALL = BLOCKS * THREADS


@dataclass(frozen=True)
class Access:
    thread: int
    own_time: int
    kind: str
    touched: frozenset[int]


def access(step):
    """What a step does to which bytes of the word; None if it synchronises or does nothing."""
    word = frozenset(range(4))
    if step in (READ_WORD, WRITE_WORD, ATOMIC):
        return ("read", "write", "atomic")[step - READ_WORD], word
    if READ_BYTE <= step < HALF_WARPS:
        kind = "read" if step < WRITE_BYTE else "write"
        return kind, frozenset({(step - READ_BYTE) % 4})
    return None


def groups(step):
    """How many neighbouring threads a step brings into order."""
    return {HALF_WARPS: LANES // 2, WARP: LANES, BLOCK: THREADS}[step]


def races(program, *, blocks_share):
    """Whether two accesses conflict that no chain of synchronisation orders."""
    clocks = np.zeros((ALL, ALL), int)  # [t, u]: how much of u's time t knows of
    np.fill_diagonal(clocks, 1)
    earlier: list[Access] = []
    for steps in program.T:
        for thread, step in enumerate(steps):
            done = access(step)
            if done is None:
                continue
            now = Access(thread, clocks[thread, thread], *done)
            for other in earlier:
                same_memory = blocks_share or other.thread // THREADS == thread // THREADS
                conflict = {now.kind, other.kind} not in ({"read"}, {"atomic"})
                ordered = clocks[thread, other.thread] >= other.own_time
                if same_memory and conflict and now.touched & other.touched and not ordered:
                    return True
            earlier.append(now)
        for size in (LANES // 2, LANES, THREADS):
            for first in range(0, ALL, size):
                if all(s >= HALF_WARPS and groups(s) == size for s in steps[first : first + size]):
                    members = slice(first, first + size)
                    clocks[members] = clocks[members].max(0)
                    for thread in range(first, first + size):
                        clocks[thread, thread] += 1
    return False


@st.composite
def programs(draw):
    """A few accesses by threads that are likely to be neighbours, between synchronisations."""
    program = np.zeros((ALL, STEPS), np.int32)
    for step in range(STEPS):
        for block in range(BLOCKS):
            if draw(st.booleans()):
                continue
            kind = draw(st.sampled_from([HALF_WARPS, WARP, BLOCK]))
            first = block * THREADS
            size = THREADS
            if kind != BLOCK and draw(st.booleans()):
                size = LANES
                first += LANES * draw(st.integers(0, 1))
            program[first : first + size, step] = kind
    threads = st.sampled_from([0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100])
    kinds = st.integers(READ_WORD, HALF_WARPS - 1)
    for _ in range(draw(st.integers(2, 6))):
        thread, step = draw(threads), draw(st.integers(0, STEPS - 1))
        if program[thread, step] < HALF_WARPS:
            program[thread, step] = draw(kinds)
    return program


@pytest.fixture(scope="module")
def module():
    return RawModule(SOURCE)


def verdict(kernel, program, seed):
    args = (program, np.zeros(1, np.uint32), np.zeros(ALL, np.uint32), np.int32(STEPS))
    kinds = set()
    try:
        with schedule(seed):
            kernel((BLOCKS,), (THREADS,), args)
    except KernelFault as fault:
        kinds = fault.kinds
    assert kinds <= {"race"}
    return bool(kinds)


@settings(max_examples=150, deadline=None)
@given(program=programs(), seed=st.integers(0, 20))
def test_global_memory(module, program, seed):
    wanted = races(program, blocks_share=True)
    event(f"race: {wanted}")
    assert verdict(module.get_function("on_global_memory"), program, seed) == wanted


@settings(max_examples=150, deadline=None)
@given(program=programs(), seed=st.integers(0, 20))
def test_shared_memory(module, program, seed):
    wanted = races(program, blocks_share=False)
    event(f"race: {wanted}")
    assert verdict(module.get_function("on_shared_memory"), program, seed) == wanted
