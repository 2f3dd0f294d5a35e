// A weight times up to 8 rows, bound by reading the weight, with what comes before and after it:
// y = activation(norm(x) W^T + bias), gated or added to the residual stream.
#include "activation.cuh"
#include "mma.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * WARP;
constexpr int ROWS = 8;       // columns of an mma: rows that are not there are zeros
constexpr int TILE = 16;      // channels of a tile: rows of an mma
constexpr int SPAN = 64;      // inputs that a warp takes side by side, 128 bytes of each weight row
constexpr int AHEAD = 4;      // spans whose weights a warp has loads in flight for: 64 KB of a block
constexpr int ROW_PAD = 32;   // so that rows side by side lie in different banks

enum Norm { PLAIN, RMS, LAYER };

// From the first half span of a warp's inputs to half span i.
__device__ constexpr int offset(int i) { return i / 2 * WARPS * SPAN + i % 2 * (SPAN / 2); }

// What a lane holds of a tile's weights: 8 inputs of two rows, 2 * AHEAD times; read at `low` and
// `high`, of which `left` inputs are there.
template <typename T>
struct Pieces {
  uint4 at[2 * AHEAD][2];
  const T *low, *high;
  int left;

  __device__ __forceinline__ void read(int i) {
    at[i][0] = at[i][1] = uint4{0, 0, 0, 0};
    if (offset(i) < left) {
      at[i][0] = __ldcs(reinterpret_cast<const uint4*>(low + offset(i)));
      at[i][1] = __ldcs(reinterpret_cast<const uint4*>(high + offset(i)));
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

// The norm of the residual stream [rows, inputs] into shared memory, a warp a row.
template <typename T, bool CENTRED>
__device__ __forceinline__ void normalize(const float* __restrict__ stream,
                                          const float* __restrict__ weight,
                                          const float* __restrict__ bias, float epsilon, int rows,
                                          int inputs, T* normed) {
  static_assert(WARPS == ROWS, "a warp a row");
  const int row = threadIdx.x / WARP;
  if (row < rows) {
    const float* const x = stream + static_cast<int64>(row) * inputs;
    float mean = 0.0f;
    if constexpr (CENTRED) mean = row_sum<false>(x, inputs, 0.0f) / inputs;
    const float inverse = 1.0f / sqrtf(row_sum<true>(x, inputs, mean) / inputs + epsilon);
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
      store<4>(normed + row * (inputs + ROW_PAD) + place, scaled);
    }
  }
  __syncthreads();
}

// Prefetches what the blocks of the next product read first, of so many of its channels: memory stays
// busy while this kernel ends and that one begins.
template <typename T>
__device__ __forceinline__ void fetch_first(const T* weight, int channels, int inputs) {
  const int bytes = min(inputs, SPAN * WARPS * AHEAD) * static_cast<int>(sizeof(T));
  if (threadIdx.x % WARP != 0) return;  // a warp's lanes would prefetch one after the other
  for (int channel = blockIdx.x + threadIdx.x / WARP * gridDim.x; channel < channels;
       channel += WARPS * gridDim.x) {
    fetch_ahead(weight + static_cast<int64>(channel) * inputs, bytes);
  }
}

// Tiles of 16 channels, one after another a block: its warps share a tile's inputs out, each for all
// rows, and add up in their order, so a row's bits depend neither on the others nor on the grid.
//
// x: [rows, inputs], x_stride apart; with a norm instead `stream`, float [rows, inputs].  weight, gate:
// [channels, inputs]; GATED: y = activation(gate) * weight, 8 channels of each a tile; biases may be
// null.  The result goes to y [rows, channels], or if that is null to `wide`, float [rows, channels],
// without rounding; `adds`: it is added to what is there.  inputs: a multiple of 8.  next, and next_too
// if it is gated: weights of the product after this one, [any, next_inputs], of which next_channels are
// prefetched here, or none.
template <typename T, int NORM, bool GATED>
__global__ void __launch_bounds__(THREADS, 2)
    linear(const T* __restrict__ x, int64 x_stride, const float* __restrict__ stream,
           const float* __restrict__ norm_weight, const float* __restrict__ norm_bias,
           float epsilon, const T* __restrict__ weight, const T* __restrict__ bias,
           const T* __restrict__ gate, const T* __restrict__ gate_bias, int activation, T* y,
           float* wide, int adds, int rows, int inputs, int channels, const T* __restrict__ next,
           const T* __restrict__ next_too, int next_channels, int next_inputs) {
  constexpr int CHANNELS = GATED ? TILE / 2 : TILE;  // that a tile gives
  extern __shared__ uint4 shared[];
  alignas(WIDE_BYTES) __shared__ float parts[2][WARPS][TILE * ROWS];
  T* const normed = reinterpret_cast<T*>(shared);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int tiles = (channels + CHANNELS - 1) / CHANNELS;
  const int batches = (inputs + SPAN * WARPS * AHEAD - 1) / (SPAN * WARPS * AHEAD);
  const int r = lane / 4;  // row of a tile, and of x

  // Inputs in halves of a span, 32 numbers: a lane's 8 lie side by side, in both factors alike.  The
  // offset of the first half; the others are at a distance that the compiler knows.
  const auto place_of = [&](int batch) {
    return (batch * AHEAD * WARPS + warp) * SPAN + lane % 4 * 8;
  };
  Pieces<T> ahead;
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
    normalize<T, NORM == LAYER>(stream, norm_weight, norm_bias, epsilon, rows, inputs, normed);
  }
  const T* const row = NORM == PLAIN ? x + r * x_stride : normed + r * (inputs + ROW_PAD);
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
    float sums[4] = {}, others[4] = {};  // two chains: a product need not wait for the one before it
    for (int batch = 0; batch < batches; ++batch) {
      const int place = place_of(batch);
      const bool last = batch == batches - 1;
      ask(last ? tile + gridDim.x : tile, last ? 0 : batch + 1);
#pragma unroll
      for (int i = 0; i < 2 * AHEAD; ++i) {
        const uint4 low = ahead.at[i][0], high = ahead.at[i][1];
        uint4 in = {0, 0, 0, 0};
        if (place + offset(i) < end) {
          in = *reinterpret_cast<const uint4*>(row + place + offset(i));
        }
        multiply_tile<T>(sums, {low.x, high.x, low.y, high.y}, {in.x, in.y});
        multiply_tile<T>(others, {low.z, high.z, low.w, high.w}, {in.z, in.w});
        ahead.read(i);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += others[i];
    store<4>(parts[turn][warp] + lane * 4, sums);
    __syncthreads();  // the other turn's sums are read by then
    const auto whole = [&](int place) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += parts[turn][w][place];
      return sum;
    };
    if (owns) {
      float value = whole(holder * 4 + kept) + widen(GATED ? gate_added : added);
      value = activated(activation, value);
      if constexpr (GATED) value *= whole(holder * 4 + kept + 2) + widen(added);
      if (y != nullptr) {
        y[place] = narrow<T>(value);
      } else {
        wide[place] = before + value;
      }
    }
    turn ^= 1;
  }
  if (next != nullptr) fetch_first(next, next_channels, next_inputs);
  if (next_too != nullptr) fetch_first(next_too, next_channels, next_inputs);
}
