// One token a row, drawn from the filtered softmax, without sorting.
#include "best_token.cuh"

constexpr int WARPS = 16;  // more, and the pivots' sums would not fit into registers
constexpr int THREADS = WARPS * WARP;
constexpr int PIVOTS = 15;  // thresholds tried in one pass over the row: 4 bits of the answer
constexpr int AHEAD = 1;  // loads of 4 scores: weighing them takes longer than a cache to answer
constexpr int FEW = 2048;  // scores that are worth a list of their own: four a thread
constexpr int WARPS_BEST = 24;  // lanes of each warp whose best score is sure to be on the first list
constexpr float UNIT = 0x1p44f;  // weight of the best token; 2^18 of them fit into 64 bits

// A row's scores, from the best one down, and their weights.
struct Row {
  const float* logits;
  int vocab_size;
  float best, temperature;

  __device__ float scaled(float logit) const { return (logit - best) / temperature; }
};

// Weights are whole numbers: their sums are exact, so no order of adding can matter.
__device__ __forceinline__ uint64 weight(float score) {
  return static_cast<uint64>(expf(score) * UNIT);
}

struct Tokens {  // for top-k: every token weighs 1
  __device__ static uint64 of(float) { return 1; }
};
struct Weights {
  __device__ static uint64 of(float score) { return weight(score); }
};

// The highest threshold on ordered_bits(score), at least `least`, that MASS reaches `wanted` from:
// what is kept is as little as can be, equal scores together.  Found 4 bits at a time; a pass adds
// up only the tokens between the last two pivots, the mass above them being known.  Once these are
// FEW, a pass lists their logits in `few`, in any order, and the passes after it read no others.
// known: logits that `few` holds already, of all tokens that matter; 0: none.
template <typename MASS>
__device__ unsigned find_threshold(const Row& row, uint64 wanted, unsigned least, float* few,
                                   int known) {
  __shared__ uint64 masses[PIVOTS];
  __shared__ int between, listed;
  if (threadIdx.x == 0) listed = 0;  // barriers follow before the first pass that lists
  unsigned found = 0;
  uint64 above = 0;
  bool reads_list = known > 0;
  int left = known;  // on the list, or to be listed
  bool lists = false;
  for (int shift = 28; shift >= 0; shift -= 4) {
    uint64 mine[PIVOTS];
#pragma unroll
    for (int p = 0; p < PIVOTS; ++p) mine[p] = 0;
    int here = 0;
    const auto add = [&](int, float logit) {
      const float score = row.scaled(logit);
      const unsigned bits = ordered_bits(score), digit = (bits - found) >> shift;
      if (bits < found || bits < least || digit > PIVOTS) return;
      ++here;
      if (lists) few[atomicAdd(&listed, 1)] = logit;
      if (digit == 0) return;
      const uint64 mass = MASS::of(score);
#pragma unroll
      for (int p = 0; p < PIVOTS; ++p) {
        if (digit > p) mine[p] += mass;
      }
    };
    if (reads_list) {
#pragma unroll 1
      for (int i = threadIdx.x; i < left; i += THREADS) add(0, few[i]);
    } else {
      each_score<THREADS, AHEAD>(row.logits, 0, row.vocab_size, threadIdx.x, add);
    }
    __syncthreads();  // the reads of the last pass are over
    if (threadIdx.x < PIVOTS) masses[threadIdx.x] = 0;
    if (threadIdx.x == 0) between = 0;
    __syncthreads();
    if (__any_sync(WHOLE_WARP, here > 0)) {  // after some passes, few warps have such tokens
      here = warp_sum(here);
      if (threadIdx.x % WARP == 0) atomicAdd(&between, here);
#pragma unroll
      for (int p = 0; p < PIVOTS; ++p) {
        const uint64 sum = warp_sum(mine[p]);
        if (threadIdx.x % WARP == 0) atomicAdd(&masses[p], sum);
      }
    }
    __syncthreads();
    unsigned digit = 0;  // the masses fall from pivot to pivot
    while (digit < PIVOTS && above + masses[digit] >= wanted) ++digit;
    found += digit << shift;
    if (digit < PIVOTS) above += masses[digit];
    if (!reads_list) {
      left = between;
      reads_list = lists;
      lists = !reads_list && left <= FEW;
    }
  }
  return max(found, least);
}

// The logits of the best tokens into `few`, in any order: all that score at least as high as a certain
// one, which three quarters of the threads' own best tokens do, so several hundred of tens of
// thousands.  Returns how many, or 0 where there is no room for them.  own: see own_best.
__device__ int list_best(const Row& row, uint64 own, float* few) {
  __shared__ unsigned bounds[WARPS];
  __shared__ int listed;
  const auto mine = static_cast<unsigned>(own >> 32);
  const int lane = threadIdx.x % WARP;
  int before = 0;  // lanes with a better token
#pragma unroll
  for (int other = 0; other < WARP; ++other) {
    const unsigned theirs = __shfl_sync(WHOLE_WARP, mine, other);
    before += theirs > mine || (theirs == mine && other < lane);
  }
  if (before == WARPS_BEST - 1) bounds[threadIdx.x / WARP] = mine;
  if (threadIdx.x == 0) listed = 0;
  __syncthreads();
  unsigned bound = bounds[0];
#pragma unroll
  for (int warp = 1; warp < WARPS; ++warp) bound = min(bound, bounds[warp]);
  // Compared as thresholds are: tokens of different logits may have one score.
  if (bound > 0) bound = ordered_bits(row.scaled(ordered_number(bound)));
  each_score<THREADS, AHEAD>(row.logits, 0, row.vocab_size, threadIdx.x, [&](int, float logit) {
    if (ordered_bits(row.scaled(logit)) < bound) return;
    const int place = atomicAdd(&listed, 1);
    if (place < FEW) few[place] = logit;
  });
  __syncthreads();
  return listed <= FEW ? listed : 0;
}

// Which tokens may be drawn: thresholds on the score and on the weight relative to the best token's.
struct Filter {
  unsigned threshold;
  float min_p;

  __device__ uint64 kept(const Row& row, float logit) const {
    const float score = row.scaled(logit);
    return ordered_bits(score) >= threshold && expf(score) >= min_p ? weight(score) : 0;
  }
};

// sums[w]: the kept weights of the tokens [begin + w * piece, begin + (w + 1) * piece) below `end`.
__device__ void add_pieces(const Row& row, const Filter& filter, int begin, int end, int piece,
                           uint64* sums) {
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int from = begin + warp * piece, to = min(from + piece, end);
  uint64 sum = 0;
  each_score<WARP, AHEAD>(row.logits, from, to, lane,
                          [&](int, float logit) { sum += filter.kept(row, logit); });
  sum = warp_sum(sum);
  __syncthreads();  // the reads of earlier sums are over
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
}

__device__ uint64 total(const uint64* sums) {
  uint64 sum = 0;
  for (int w = 0; w < WARPS; ++w) sum += sums[w];
  return sum;
}

// The kept weights of `known` listed tokens.
__device__ uint64 listed_mass(const Row& row, const Filter& filter, const float* few, int known,
                              uint64* sums) {
  uint64 sum = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < known; i += THREADS) sum += filter.kept(row, few[i]);
  sum = warp_sum(sum);
  __syncthreads();  // the reads of earlier sums are over
  if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = sum;
  __syncthreads();
  return total(sums);
}

// A warp's share of a range: whole steps of a warp.
__device__ int piece_of(int range) {
  constexpr int STEP = WARPS * WARP;
  return (range + STEP - 1) / STEP * WARP;
}

// The first token, in the order of the vocabulary, at which the kept weights pass draw * their sum.
__device__ int walk(const Row& row, const Filter& filter, double draw, uint64* sums) {
  int begin = 0, end = row.vocab_size, piece = piece_of(end);
  add_pieces(row, filter, begin, end, piece, sums);
  // The draw is a whole number of 2^-53: the product is exact, and below the sum.
  uint64 left = __umul64hi(static_cast<uint64>(draw * 0x1p53) << 11, total(sums));
  while (true) {  // cut the range into a piece a warp until one step of a warp sees it whole
    int w = 0;
    while (w < WARPS - 1 && left >= sums[w]) left -= sums[w++];
    begin += w * piece;
    end = min(begin + piece, end);
    if (end - begin <= WARP) break;
    piece = piece_of(end - begin);
    add_pieces(row, filter, begin, end, piece, sums);
  }
  const int lane = threadIdx.x % WARP, token = begin + lane;
  uint64 sum = token < end ? filter.kept(row, row.logits[token]) : 0;
#pragma unroll
  for (int step = 1; step < WARP; step *= 2) {
    const uint64 before = __shfl_up_sync(WHOLE_WARP, sum, step);
    if (lane >= step) sum += before;
  }
  return begin + __ffs(static_cast<int>(__ballot_sync(WHOLE_WARP, sum > left))) - 1;
}

// Block: one row of logits [batch, vocab_size].  Temperature first, then top_k (0: off), top_p over
// what that left (1: off), min_p (0: off); then the draw in [0, 1) walks the weights in the order of
// the vocabulary.  A temperature of 0 takes the best token; a row whose best score is not finite
// gets token -1.  One block a multiprocessor: the registers of two would spill.
__global__ void __launch_bounds__(THREADS, 1)
    sample(const float* __restrict__ logits, const float* __restrict__ temperature,
           const int64* __restrict__ top_k, const float* __restrict__ top_p,
           const float* __restrict__ min_p, const double* __restrict__ draws,
           int64* __restrict__ tokens, int vocab_size) {
  __shared__ uint64 sums[WARPS];
  __shared__ float few[FEW];
  const int64 place = blockIdx.x;
  logits += place * vocab_size;
  const uint64 own = own_best<WARPS>(logits, vocab_size);
  int token = token_of(best_of<WARPS>(own));
  const float best = logits[token];
  if (!isfinite(best)) {
    token = -1;
  } else if (temperature[place] > 0.0f) {
    // Relative to the best score, a temperature near 0 leaves the best token and gives no NaN.
    const Row row{logits, vocab_size, best, fmaxf(temperature[place], 1e-30f)};
    Filter filter{0, 0.0f};
    const int64 k = top_k[place];
    const float p = top_p[place];
    int known = k > 0 || p < 1.0f ? list_best(row, own, few) : 0;
    bool whole = known == vocab_size;  // whether what is kept so far is all on the list
    if (k > 0) {
      whole = whole || known >= k;
      if (!whole) known = 0;  // the search takes the list's room
      filter.threshold = find_threshold<Tokens>(row, k, 0, few, known);
    }
    if (p < 1.0f) {
      const uint64 listed = known > 0 ? listed_mass(row, filter, few, known, sums) : 0;
      if (!whole) add_pieces(row, filter, 0, vocab_size, piece_of(vocab_size), sums);
      const uint64 sum = whole ? listed : total(sums);
      const double share = ceil(static_cast<double>(sum) * p);
      const uint64 wanted = max(static_cast<uint64>(share), 1ull);
      if (!whole && listed < wanted) known = 0;
      filter.threshold = find_threshold<Weights>(row, wanted, filter.threshold, few, known);
    }
    filter.min_p = min_p[place];
    token = walk(row, filter, draws[place], sums);
  }
  if (threadIdx.x == 0) tokens[place] = token;
}
