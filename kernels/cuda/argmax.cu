// The best token of each row, ties to the lowest id.
#include "best_token.cuh"

constexpr int WARPS = 16;

// Block: one row of logits [batch, vocab_size].  finite[row]: whether its best score is a number;
// a NaN anywhere in the row is its best score, so one test finds every row that went wrong.
__global__ void __launch_bounds__(WARPS* WARP)
    argmax(const float* __restrict__ logits, int64* __restrict__ tokens,
           unsigned char* __restrict__ finite, int vocab_size) {
  const int64 row = blockIdx.x;
  const uint64 own = own_best<WARPS>(logits + row * vocab_size, vocab_size);
  const int token = token_of(best_of<WARPS>(own));
  if (threadIdx.x == 0) {
    tokens[row] = token;
    if (finite != nullptr) finite[row] = isfinite(logits[row * vocab_size + token]);
  }
}
