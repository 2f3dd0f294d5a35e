// Rows of a product rounded to FP8: codes, and a scale for each row.
#include "product_rows.cuh"

constexpr int THREADS = 256;

// A block a row, which it reads twice: for its largest number, and from the cache for its codes.
// x: [any, inputs], x_stride apart.  codes: [any, padded], 0 past the inputs; scales: [any].
template <int WIDTH>
__global__ void __launch_bounds__(THREADS)
    round_rows(const Rounded* __restrict__ x, int64 x_stride, Fp8* __restrict__ codes,
               float* __restrict__ scales, int inputs, int padded) {
  const int64 row = blockIdx.x;
  x += row * x_stride;
  codes += row * padded;
  unsigned peak = 0;
  for (int place = threadIdx.x * WIDTH; place < inputs; place += THREADS * WIDTH) {
    float v[WIDTH];
    load<WIDTH>(x + place, v);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) peak = max(peak, magnitude(v[i]));
  }
  const RowScale found = row_scale(block_max<THREADS / WARP>(peak));
  for (int place = threadIdx.x * WIDTH; place < padded; place += THREADS * WIDTH) {
    float v[WIDTH] = {};
    if (place < inputs) load<WIDTH>(x + place, v);
    store_codes(codes + place, v, found.inverse);
  }
  if (threadIdx.x == 0) scales[row] = found.scale;
}
