// Blocks of the decoder whose weights are FP32 or bfloat16.

#include "blocks.h"
#include "float_product.h"

// Whether this build has fused multiply-adds of vectors.
extern "C" int float_linear_works() {
#if defined(__AVX512F__) || defined(__FMA__)
  return 1;
#else
  return 0;
#endif
}

// Whether it adds two products of bfloat16 at once in every lane, and Linux grants the tile registers
// that it was built for.
extern "C" int bfloat_linear_works() {
#if defined(__AVX512BF16__)
  return nightjar::may_use_tile_registers();
#else
  return 0;
#endif
}

// Output channels of a panel.
extern "C" int64_t float_panel_columns() { return 3 * nightjar::kLanes; }

#if defined(__AVX512F__) || defined(__FMA__)

using namespace nightjar;

NIGHTJAR_BLOCKS(float, FloatWeight)

namespace {

// out[i] = row ids[i] of the weight, whose outputs are a vocabulary, or zeros past the last: float[n,
// inputs].
template <typename S>
void read_rows(const PanelWeight<S>& weight, const int64_t* ids, int64_t n, float* out) {
  const auto read_row = [=](int64_t i) {
    const int64_t panel = ids[i] / kFloatColumns, column = ids[i] % kFloatColumns;
    const S* from = weight.panels + panel * weight.stride * kFloatColumns + column * kWord<S>;
    float* to = out + i * weight.inputs;
    if (ids[i] >= weight.columns) {
      std::fill(to, to + weight.inputs, 0.0f);
      return;
    }
    for (int64_t k = 0; k < weight.inputs; ++k) {
      to[k] = widened(from[k / kWord<S> * kWord<S> * kFloatColumns + k % kWord<S>]);
    }
  };
  parallel([&](Member& member) { member.share(n, read_row); });
}

}  // namespace

extern "C" void float_rows(const FloatWeight* weight, const int64_t* ids, int64_t n, float* out) {
  read_rows(*weight, ids, n, out);
}

#if defined(__AVX512BF16__)

NIGHTJAR_BLOCKS(bfloat, BfloatWeight)

extern "C" void bfloat_rows(const BfloatWeight* weight, const int64_t* ids, int64_t n, float* out) {
  read_rows(*weight, ids, n, out);
}

#endif

#endif
