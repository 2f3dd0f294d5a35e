// Blocks of the decoder whose weights are int8; their rows arrive and leave in FP32 or in half
// precision.

#include "int8_product.h"

// Whether this build can multiply bytes: the processor adds four products to an int32 at once.
extern "C" int int8_linear_works() {
#if defined(__AVX512VNNI__)
  return 1;
#else
  return 0;
#endif
}

#if defined(__AVX512VNNI__)

using namespace nightjar;

// out[n_rows, columns] = activation(x @ weight.T + bias); x: [n_rows, inputs], rows x_stride numbers
// apart.  What out is made of if not floats takes no activation.
extern "C" void int8_linear(const void* x, int64_t x_numbers, int64_t x_stride, int64_t n_rows,
                            const Weight* weight, int64_t activation, void* out,
                            int64_t out_numbers) {
  const Rows rows(Rows::room(n_rows, weight->stride), n_rows, *weight);
  expect_regions();
  parallel([&](Member& member) {
    in_parts(n_rows, [&](int64_t first, int64_t n) {
      with_rows(x, x_numbers, [&](const auto* x) {
        quantize_rows(member, x + first * x_stride, x_stride, n, *weight, rows);
      });
      with_rows(out, out_numbers, [&](auto* out) {
        multiply_all(member, *weight, rows, n, activation, out + first * weight->columns);
      });
    });
  });
}

// The same of norm(residual), to which delta is added first, in place; delta: null for nothing.
extern "C" void int8_normed_linear(float* residual, const float* delta, int64_t n_rows,
                                   const Norm* norm, const Weight* weight, void* out,
                                   int64_t out_numbers) {
  const Rows rows(Rows::room(n_rows, weight->stride), n_rows, *weight);
  expect_regions();
  parallel([&](Member& member) {
    in_parts(n_rows, [&](int64_t first, int64_t n) {
      quantize_normalized(member, Stream(*norm, residual, delta, first), n, *weight, rows);
      with_rows(out, out_numbers, [&](auto* out) {
        multiply_all(member, *weight, rows, n, kNone, out + first * weight->columns);
      });
    });
  });
}

// And of a whole feed-forward block: out = activation(norm(residual) @ up) @ down.
extern "C" void int8_feed_forward(float* residual, const float* delta, int64_t n_rows,
                                  const Norm* norm, const Weight* up, int64_t activation,
                                  const Weight* down, void* out, int64_t out_numbers) {
  uint8_t* room = Rows::room(n_rows, std::max(up->stride, down->stride));
  const int64_t inner_bytes = std::min(n_rows, kRowsAtOnce) * up->columns * sizeof(Inner);
  Inner* inner = static_cast<Inner*>(room_for(kInner, inner_bytes));
  const Rows rows(room, n_rows, *up), inner_rows(room, n_rows, *down);
  expect_regions();
  parallel([&](Member& member) {
    in_parts(n_rows, [&](int64_t first, int64_t n) {
      quantize_normalized(member, Stream(*norm, residual, delta, first), n, *up, rows);
      multiply_all(member, *up, rows, n, activation, inner);
      quantize_rows(member, inner, up->columns, n, *down, inner_rows);
      with_rows(out, out_numbers, [&](auto* out) {
        multiply_all(member, *down, inner_rows, n, kNone, out + first * down->columns);
      });
    });
  });
}

#endif
