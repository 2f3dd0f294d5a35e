// Repetition, presence and frequency penalties over the tokens that a sequence has seen.
#include "common.cuh"

// Block (x, y): row x; thread: one word of the row's bitmap of seen tokens, 32 tokens.  Each token
// has one bit and each bit one thread, so no score is changed twice, however often its token was
// seen.  Bits past the vocabulary (prompt vectors have no score) are never read.
//
// logits [batch, vocab_size]; seen [batch, words]; counts [batch, vocab_size], how often the token
// was generated (0 for one that only the prompt holds); penalties one a row, 1, 0, 0 for off.
__global__ void __launch_bounds__(128)
    penalize(float* __restrict__ logits, const int* __restrict__ seen,
             const int* __restrict__ counts, const float* __restrict__ repetition,
             const float* __restrict__ presence, const float* __restrict__ frequency,
             int vocab_size, int words) {
  const int64 row = blockIdx.x;
  const int word = blockIdx.y * blockDim.x + threadIdx.x;
  if (word >= words) return;
  const float repeated = repetition[row], present = presence[row], frequent = frequency[row];
  if (repeated == 1.0f && present == 0.0f && frequent == 0.0f) return;
  unsigned bits = static_cast<unsigned>(seen[row * words + word]);
  while (bits != 0) {
    const int token = word * 32 + __ffs(static_cast<int>(bits)) - 1;
    bits &= bits - 1;
    if (token >= vocab_size) break;  // ascending: so are all that follow
    const int64 place = row * vocab_size + token;
    const int count = counts[place];
    float score = logits[place];
    score = score > 0.0f ? score / repeated : score * repeated;
    // Rounded after every operation, as the formula is written: no fused multiply-add.
    score = __fsub_rn(score, __fmul_rn(frequent, static_cast<float>(count)));
    if (count > 0) score = __fsub_rn(score, present);
    logits[place] = score;
  }
}
