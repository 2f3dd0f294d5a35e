// A weight times up to 8 rows, bound by reading the weight, with what comes before and after it:
// y = activation(norm(x) W^T + bias), gated or added to the residual stream.
#include "activation.cuh"
#include "product_rows.cuh"
#include "mma.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * WARP;
constexpr int ROWS = 8;       // columns of an mma: rows that are not there are zeros
constexpr int TILE = 16;      // channels of a tile: rows of an mma
constexpr int AHEAD = 4;      // spans whose weights a warp has loads in flight for: 64 KB of a block
constexpr int SPAN_BYTES = 128;  // of each weight row, that a warp takes side by side
constexpr int PAD_BYTES = 64;    // behind a row, so that rows side by side lie in different banks

enum Norm { PLAIN, RMS, LAYER };

#if !defined(CUDA_ON_HOST) && __CUDA_ARCH__ < 890
// Codes are widened bit by bit, which takes registers.  No model is computed in FP8 on such a GPU.
constexpr int FP8_BLOCKS = 1;
#else
constexpr int FP8_BLOCKS = 2;
#endif

template <typename W>
constexpr int SPAN = SPAN_BYTES / static_cast<int>(sizeof(W));  // inputs

// From the first half span of a warp's inputs to half span i.
template <typename W>
__device__ constexpr int offset(int i) {
  return i / 2 * WARPS * SPAN<W> + i % 2 * (SPAN<W> / 2);
}

// What a lane holds of a tile's weights: a load of two rows, 2 * AHEAD times; read at `low` and
// `high`, of which `left` inputs are there.
template <typename W>
struct Pieces {
  uint4 at[2 * AHEAD][2];
  const W *low, *high;
  int left;

  __device__ __forceinline__ void read(int i) {
    at[i][0] = at[i][1] = uint4{0, 0, 0, 0};
    if (offset<W>(i) < left) {
      at[i][0] = __ldcs(reinterpret_cast<const uint4*>(low + offset<W>(i)));
      at[i][1] = __ldcs(reinterpret_cast<const uint4*>(high + offset<W>(i)));
    }
  }
};

// Sum over a row [inputs], or of the squares of what lies off `mean`, by a warp.
template <bool SQUARES>
__device__ __forceinline__ float row_sum(const float* x, int inputs, float mean) {
  float sum = 0.0f;
  for (int place = threadIdx.x % WARP * 4; place < inputs; place += WARP * 4) {
    float v[4];
    load<4>(x + place, v);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += SQUARES ? (v[i] - mean) * (v[i] - mean) : v[i];
  }
  return warp_sum(sum);
}

// The scale of a row in shared memory that is rounded to FP8: in its pad.
__device__ __forceinline__ float& scale_of(unsigned char* rows, int row, int row_bytes) {
  return *reinterpret_cast<float*>(rows + (row + 1) * row_bytes - PAD_BYTES);
}

// A warp's row of Rounded numbers in shared memory becomes codes, which begin where the row begins.
__device__ __forceinline__ void round_in_place(unsigned char* bytes, unsigned peak, int inputs,
                                               float& scale) {
  const RowScale found = row_scale(warp_max(peak));
  for (int first = 0; first < inputs; first += WARP * 4) {
    const int place = first + static_cast<int>(threadIdx.x) % WARP * 4;
    float v[4];
    if (place < inputs) load<4>(reinterpret_cast<const Rounded*>(bytes) + place, v);
    __syncwarp();  // codes come to lie where other lanes' numbers lay
    if (place < inputs) store_codes(bytes + place, v, found.inverse);
  }
  if (threadIdx.x % WARP == 0) scale = found.scale;
}

// The norm of the residual stream [rows, inputs] into shared memory, a warp a row, row_bytes apart: in
// T, and if weights are in FP8 rounded to that.
template <typename T, typename W, bool CENTRED>
__device__ __forceinline__ void normalize(const float* __restrict__ stream,
                                          const float* __restrict__ weight,
                                          const float* __restrict__ bias, float epsilon, int rows,
                                          int inputs, unsigned char* normed, int row_bytes) {
  static_assert(WARPS == ROWS, "a warp a row");
  const int row = threadIdx.x / WARP;
  if (row < rows) {
    const float* const x = stream + static_cast<int64>(row) * inputs;
    float mean = 0.0f;
    if constexpr (CENTRED) mean = row_sum<false>(x, inputs, 0.0f) / inputs;
    const float inverse = 1.0f / sqrtf(row_sum<true>(x, inputs, mean) / inputs + epsilon);
    unsigned peak = 0;
    for (int place = threadIdx.x % WARP * 4; place < inputs; place += WARP * 4) {
      float v[4], scaled[4], shift[4];
      load<4>(x + place, v);
      load<4>(weight + place, scaled);
#pragma unroll
      for (int i = 0; i < 4; ++i) scaled[i] *= (v[i] - mean) * inverse;
      if constexpr (CENTRED) {
        load<4>(bias + place, shift);
#pragma unroll
        for (int i = 0; i < 4; ++i) scaled[i] += shift[i];
      }
      if constexpr (IS_FP8<W>) {
#pragma unroll
        for (int i = 0; i < 4; ++i) peak = max(peak, magnitude(widen(narrow<T>(scaled[i]))));
      }
      store<4>(reinterpret_cast<T*>(normed + row * row_bytes) + place, scaled);
    }
    if constexpr (IS_FP8<W>) {
      float& scale = scale_of(normed, row, row_bytes);
      round_in_place(normed + row * row_bytes, peak, inputs, scale);
    }
  }
  __syncthreads();
}

// The rows [rows, inputs] rounded to FP8 into shared memory, row_bytes apart, all warps for each row.
// peaks: shared memory of the block.
__device__ __forceinline__ void round_rows(const Rounded* __restrict__ x, int64 x_stride, int rows,
                                           int inputs, Fp8* codes, int row_bytes,
                                           unsigned (&peaks)[WARPS][ROWS]) {
  constexpr int WIDTH = WIDE<Rounded>;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  unsigned peak[ROWS] = {};
  for (int place = threadIdx.x * WIDTH; place < inputs; place += THREADS * WIDTH) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      if (row >= rows) continue;
      float v[WIDTH];
      load<WIDTH>(x + row * x_stride + place, v);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) peak[row] = max(peak[row], magnitude(v[i]));
    }
  }
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    const unsigned most = warp_max(peak[row]);
    if (lane == row) peaks[warp][row] = most;
  }
  __syncthreads();
  for (int row = 0; row < rows; ++row) {
    unsigned most = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) most = max(most, peaks[w][row]);
    const RowScale found = row_scale(most);
    for (int place = threadIdx.x * WIDTH; place < inputs; place += THREADS * WIDTH) {
      float v[WIDTH];
      load<WIDTH>(x + row * x_stride + place, v);
      store_codes(codes + row * row_bytes + place, v, found.inverse);
    }
    if (threadIdx.x == 0) scale_of(codes, row, row_bytes) = found.scale;
  }
  __syncthreads();
}

// Adds to two chains of sums the products of a load of weights, of two rows, with one of x's rows.
template <typename W>
__device__ __forceinline__ void multiply_load(float (&sums)[4], float (&others)[4], const uint4& low,
                                              const uint4& high, const uint4& in) {
  if constexpr (IS_FP8<W>) {
    const unsigned lows[4] = {low.x, low.y, low.z, low.w};
    const unsigned highs[4] = {high.x, high.y, high.z, high.w};
    const unsigned ins[4] = {in.x, in.y, in.z, in.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Every code is a number of __half, whatever the activations are.
      const auto two = [](unsigned codes) { return widen_codes<__half>(codes); };
      multiply_tile<__half>(i % 2 == 0 ? sums : others,
                            {two(lows[i]), two(highs[i]), two(lows[i] >> 16), two(highs[i] >> 16)},
                            {two(ins[i]), two(ins[i] >> 16)});
    }
  } else {
    multiply_tile<W>(sums, {low.x, high.x, low.y, high.y}, {in.x, in.y});
    multiply_tile<W>(others, {low.z, high.z, low.w, high.w}, {in.z, in.w});
  }
}

// Prefetches what the blocks of the next product read first, of so many of its channels: memory stays
// busy while this kernel ends and that one begins.
__device__ __forceinline__ void fetch_first(const unsigned char* weight, int channels,
                                            int row_bytes) {
  const int bytes = min(row_bytes, SPAN_BYTES * WARPS * AHEAD);
  if (threadIdx.x % WARP != 0) return;  // a warp's lanes would prefetch one after the other
  for (int channel = blockIdx.x + threadIdx.x / WARP * gridDim.x; channel < channels;
       channel += WARPS * gridDim.x) {
    fetch_ahead(weight + static_cast<int64>(channel) * row_bytes, bytes);
  }
}

// Tiles of 16 channels, one after another a block: its warps share a tile's inputs out, each for all
// rows, and add up in their order, so a row's bits depend neither on the others nor on the grid.
//
// x: [rows, inputs], x_stride apart; with a norm instead `stream`, float [rows, inputs].  weight, gate:
// [channels, inputs]; GATED: y = activation(gate) * weight, 8 channels of each a tile; biases may be
// null.  The result goes to y [rows, channels], or if that is null to `wide`, float [rows, channels],
// without rounding; `adds`: it is added to what is there.  inputs: whole loads of weights.  next, and
// next_too if it is gated: weights of the product after this one, rows of next_bytes, of which
// next_channels are prefetched here, or none.
//
// W, the weights' storage, is T or Fp8.  Weights in FP8 have a scale for each channel, `scales`.  Their
// rows are rounded to FP8 in shared memory, each with a scale of its own.
template <typename T, typename W, int NORM, bool GATED>
__global__ void __launch_bounds__(THREADS, IS_FP8<W> ? FP8_BLOCKS : 2)
    linear(const T* __restrict__ x, int64 x_stride, const float* __restrict__ stream,
           const float* __restrict__ norm_weight, const float* __restrict__ norm_bias,
           float epsilon, const W* __restrict__ weight, const T* __restrict__ bias,
           const float* __restrict__ scales, const W* __restrict__ gate,
           const T* __restrict__ gate_bias, const float* __restrict__ gate_scales, int activation,
           T* y, float* wide, int adds, int rows, int inputs, int channels,
           const unsigned char* __restrict__ next, const unsigned char* __restrict__ next_too,
           int next_channels, int next_bytes) {
  constexpr int CHANNELS = GATED ? TILE / 2 : TILE;  // that a tile gives
  constexpr bool STAGED = NORM != PLAIN || IS_FP8<W>;  // rows lie in shared memory
  extern __shared__ uint4 shared[];
  alignas(WIDE_BYTES) __shared__ float parts[2][WARPS][TILE * ROWS];
  auto* const staged = reinterpret_cast<unsigned char*>(shared);
  const int row_bytes = inputs * static_cast<int>(NORM == PLAIN ? sizeof(W) : sizeof(T)) + PAD_BYTES;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int tiles = (channels + CHANNELS - 1) / CHANNELS;
  const int batches = (inputs + SPAN<W> * WARPS * AHEAD - 1) / (SPAN<W> * WARPS * AHEAD);
  const int r = lane / 4;  // row of a tile, and of x

  // Inputs in halves of a span, 4 loads: a lane's lie side by side, in both factors alike.  The
  // offset of the first half; the others are at a distance that the compiler knows.
  const auto place_of = [&](int batch) {
    return (batch * AHEAD * WARPS + warp) * SPAN<W> + lane % 4 * WIDE<W>;
  };
  Pieces<W> ahead;
  const auto ask = [&](int tile, int batch) {
    const int low = min(tile * CHANNELS + r, channels - 1);  // past the end: not kept, so any
    const int high = min(tile * CHANNELS + r + TILE / 2, channels - 1);
    const int place = place_of(batch);
    ahead.low = (GATED ? gate : weight) + static_cast<int64>(low) * inputs + place;
    ahead.high = weight + static_cast<int64>(GATED ? low : high) * inputs + place;
    ahead.left = tile < tiles ? inputs - place : 0;
  };
  ask(blockIdx.x, 0);
#pragma unroll
  for (int i = 0; i < 2 * AHEAD; ++i) ahead.read(i);
  if constexpr (NORM != PLAIN) {  // while the first weights are on their way
    normalize<T, W, NORM == LAYER>(stream, norm_weight, norm_bias, epsilon, rows, inputs, staged,
                                   row_bytes);
  } else if constexpr (IS_FP8<W>) {
    auto& peaks = reinterpret_cast<unsigned(&)[WARPS][ROWS]>(parts);  // there are no sums yet
    round_rows(x, x_stride, rows, inputs, staged, row_bytes, peaks);
  }
  const W* row;
  if constexpr (STAGED) {
    row = reinterpret_cast<const W*>(staged + r * row_bytes);
  } else {
    row = x + r * x_stride;
  }
  const int end = r < rows ? inputs : 0;
  int turn = 0;
  // The first threads each have one number of a tile's result, as multiply_tile leaves them: d[0], d[1]
  // and, if there is no gate, d[2], d[3] of each lane.
  constexpr int KEPT = GATED ? 2 : 4;
  const int holder = threadIdx.x / KEPT, kept = threadIdx.x % KEPT;
  const int own_row = holder % 4 * 2 + kept % 2;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    // Load here what the result is added to: at the end nothing would hide the latency.
    const int channel = tile * CHANNELS + holder / 4 + kept / 2 * (TILE / 2);
    const bool owns = threadIdx.x < CHANNELS * ROWS && own_row < rows && channel < channels;
    const int64 place = static_cast<int64>(own_row) * channels + channel;
    const T added = owns && bias != nullptr ? bias[channel] : narrow<T>(0.0f);
    const T gate_added = owns && gate_bias != nullptr ? gate_bias[channel] : narrow<T>(0.0f);
    const float before = owns && adds ? wide[place] : 0.0f;
    float scale = 1.0f, gate_scale = 1.0f;
    if (IS_FP8<W> && owns) {
      const float own = scale_of(staged, own_row, row_bytes);
      scale = own * scales[channel];
      if constexpr (GATED) gate_scale = own * gate_scales[channel];
    }
    float sums[4] = {}, others[4] = {};  // two chains: a product need not wait for the one before it
    for (int batch = 0; batch < batches; ++batch) {
      const int place = place_of(batch);
      const bool last = batch == batches - 1;
      ask(last ? tile + gridDim.x : tile, last ? 0 : batch + 1);
#pragma unroll
      for (int i = 0; i < 2 * AHEAD; ++i) {
        const uint4 low = ahead.at[i][0], high = ahead.at[i][1];
        uint4 in = {0, 0, 0, 0};
        if (place + offset<W>(i) < end) {
          in = *reinterpret_cast<const uint4*>(row + place + offset<W>(i));
        }
        multiply_load<W>(sums, others, low, high, in);
        ahead.read(i);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += others[i];
    store<4>(parts[turn][warp] + lane * 4, sums);
    __syncthreads();  // the other turn's sums are read by then
    const auto whole = [&](int place, float scale) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += parts[turn][w][place];
      return IS_FP8<W> ? sum * scale : sum;
    };
    if (owns) {
      const int place_of_sum = holder * 4 + kept;
      float value = whole(place_of_sum, GATED ? gate_scale : scale) + widen(GATED ? gate_added : added);
      value = activated(activation, value);
      if constexpr (GATED) value *= whole(place_of_sum + 2, scale) + widen(added);
      if (y != nullptr) {
        y[place] = narrow<T>(value);
      } else {
        wide[place] = before + value;
      }
    }
    turn ^= 1;
  }
  if (next != nullptr) fetch_first(next, next_channels, next_bytes);
  if (next_too != nullptr) fetch_first(next_too, next_channels, next_bytes);
}
