// Negative log-likelihood of given tokens, from one pass over each row of logits.
#include "common.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * WARP;

// Loads of a thread before the first is used: the sums wait for each other, memory need not.
__device__ constexpr int ahead(int width) { return width == 1 ? 8 : 4; }

// Block: one row of logits [rows, vocab_size] and the tokens targets[starts[row]..starts[row + 1])
// that are predicted from it.  A thread keeps a running maximum and the sum of exponentials below it
// (arXiv 1805.02867), so the row is read once; a row that nothing is predicted from is not read.
// A target outside the vocabulary gives NaN, and so does a row that holds NaN or infinities.
template <typename T, int WIDTH>
__global__ void __launch_bounds__(THREADS)
    token_nll(const T* __restrict__ logits, int64 stride, const int64* __restrict__ starts,
              const int64* __restrict__ targets, float* __restrict__ nll, int vocab_size) {
  const int64 row = blockIdx.x;
  const int64 begin = starts[row], end = starts[row + 1];
  if (begin == end) return;  // the whole block
  logits += row * stride;

  float highest = -infinity(), sum = 0.0f;
  constexpr int AHEAD = ahead(WIDTH), STEP = THREADS * WIDTH;
#pragma unroll 1
  for (int place = threadIdx.x * WIDTH; place < vocab_size; place += AHEAD * STEP) {
    float v[AHEAD][WIDTH];
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) {  // past the end the last ones: a branch would wait for each
      load<WIDTH>(logits + min(place + j * STEP, vocab_size - WIDTH), v[j]);
    }
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) {
      if (place + j * STEP >= vocab_size) break;
      float best = v[j][0];
#pragma unroll
      for (int i = 1; i < WIDTH; ++i) best = fmaxf(best, v[j][i]);
      if (best > highest) {
        sum *= expf(highest - best);
        highest = best;
      }
      // A finite score less itself is nothing; NaN, inf or -inf make the sum NaN.
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) sum += expf(v[j][i] - highest) + (v[j][i] - v[j][i]);
    }
  }
  const float whole = block_max<WARPS>(highest);
  // A thread without scores has summed nothing.
  const float scaled = highest > -infinity() ? sum * expf(highest - whole) : sum;
  const float log_sum = whole + logf(block_sum<WARPS>(scaled));

  for (int64 i = begin + threadIdx.x; i < end; i += THREADS) {
    const int64 target = targets[i];
    const bool known = target >= 0 && target < vocab_size;
    nll[i] = known ? log_sum - widen(logits[target]) : not_a_number();
  }
}
