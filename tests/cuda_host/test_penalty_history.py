"""Two bugs that repetition penalties of other systems had, in small: both are found.

FasterTransformer's kernel kept the logits of seen ids in shared memory, and read that memory also
for ids outside of the vocabulary, which nobody had written. An earlier one let two threads penalise
the same repeated id.
"""

import numpy as np
import pytest

from tests.cuda_host import KernelFault, RawModule, schedule

SOURCE = r"""
__device__ float penalised(float logit, float penalty) {
  return logit < 0 ? logit * penalty : logit / penalty;
}

// Reads all logits of seen ids first, writes them after, so that repeats count once.
template <bool kAlsoOutside>
__global__ void keep_then_write(float* logits, const int* ids, int n, int vocabulary,
                                float penalty) {
  extern __shared__ float kept[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    if (ids[i] < vocabulary) kept[i] = logits[ids[i]];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 0; i < n; ++i) {
    const float value = kAlsoOutside || ids[i] < vocabulary ? penalised(kept[i], penalty) : 0;
    if (ids[i] < vocabulary) logits[ids[i]] = value;
  }
}

// Each occurrence penalises, whoever else does the same.
extern "C" __global__ void each_occurrence(float* logits, const int* ids, int n, float penalty) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    logits[ids[i]] = penalised(logits[ids[i]], penalty);
  }
}

// Whoever sets an id's bit penalises it.
extern "C" __global__ void first_occurrence(float* logits, const int* ids, int n, int vocabulary,
                                            float penalty) {
  extern __shared__ unsigned seen[];
  for (int i = threadIdx.x; i < (vocabulary + 31) / 32; i += blockDim.x) seen[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const int id = ids[i];
    if (id >= vocabulary) continue;
    const unsigned bit = 1u << (id & 31);
    if (!(atomicOr(&seen[id >> 5], bit) & bit)) logits[id] = penalised(logits[id], penalty);
  }
}
"""
SEEDS = range(8)
VOCABULARY, PENALTY = 50, np.float32(1.3)


@pytest.fixture(scope="module")
def module():
    names = ["keep_then_write<true>", "keep_then_write<false>"]
    return RawModule(SOURCE, name_expressions=names)


def logits_and_ids(*, outside=0, repeated=True):
    random = np.random.default_rng(3)
    logits = random.standard_normal(VOCABULARY).astype(np.float32)
    ids = random.permutation(VOCABULARY)[:40].astype(np.int32)
    if repeated:
        ids[20:] = ids[:20]
    ids[:outside] = VOCABULARY + 3  # a prompt vector's place
    return logits, ids


def expected(logits, ids):
    seen = np.unique(ids[ids < VOCABULARY])
    out = logits.copy()
    out[seen] = np.where(out[seen] < 0, out[seen] * PENALTY, out[seen] / PENALTY)
    return out


def launch(kernel, logits, ids, seed, *more):
    with schedule(seed):
        kernel((1,), (64,), (logits, ids, np.int32(len(ids)), *more, PENALTY), shared_mem=256)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_id_outside_of_the_vocabulary_reads_what_nobody_wrote(module, seed):
    logits, ids = logits_and_ids(outside=2)
    want = expected(logits, ids)
    kernel = module.get_function("keep_then_write<true>")
    with pytest.raises(KernelFault) as caught:
        launch(kernel, logits, ids, seed, np.int32(VOCABULARY))
    assert "uninitialised read" in caught.value.kinds
    assert "bytes 0 to 3 of dynamic shared memory" in str(caught.value)
    np.testing.assert_array_equal(logits, want)  # the result does not show it


@pytest.mark.parametrize("seed", SEEDS)
def test_two_threads_that_penalise_one_id(module, seed):
    logits, ids = logits_and_ids()
    with pytest.raises(KernelFault) as caught:
        launch(module.get_function("each_occurrence"), logits, ids, seed)
    assert caught.value.kinds == {"race"}


@pytest.mark.parametrize("seed", SEEDS)
def test_without_repeats_there_is_no_race(module, seed):
    logits, ids = logits_and_ids(repeated=False)
    want = expected(logits, ids)
    launch(module.get_function("each_occurrence"), logits, ids, seed)
    np.testing.assert_array_equal(logits, want)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("outside", [0, 2])
def test_a_bitmap_has_neither_bug(module, outside, seed):
    logits, ids = logits_and_ids(outside=outside)
    want = expected(logits, ids)
    launch(module.get_function("first_occurrence"), logits, ids, seed, np.int32(VOCABULARY))
    np.testing.assert_array_equal(logits, want)
