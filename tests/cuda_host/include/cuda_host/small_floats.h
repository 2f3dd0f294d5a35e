// Floating point numbers of 16 bits: storage, conversions that round to nearest even, and
// arithmetic computed in float and rounded once (for + - * / that equals rounding the exact result).
#pragma once

#include <math.h>
#include <stdint.h>

#include "cuda_host/entry.h"
#include "cuda_host/sync.h"
#include "cuda_host/vector_types.h"

namespace cuda_host {

struct Half {  // IEEE 754 binary16
  static uint16_t round(float x) { return from_bits<uint16_t>(to_bits(static_cast<_Float16>(x))); }
  // Through double only for fused multiply-add, whose exact product does not fit a float.
  static uint16_t round(double x) { return from_bits<uint16_t>(to_bits(static_cast<_Float16>(x))); }
  // Without the compiler's library function, which took a fifth of the time of an engine's step.
  static float widen(uint16_t bits) {
    const uint32_t moved = (bits & 0x7fffu) << 13;
    const bool is_finite = moved < 0x0f800000u;
    const float magnitude = is_finite ? from_bits<float>(moved) * 0x1p112f  // moves the exponent
                                      : from_bits<float>(moved + 0x70000000u);
    return bits & 0x8000u ? -magnitude : magnitude;
  }
};

struct Bfloat16 {  // the upper half of a float
  static uint16_t round(float x) {
    const auto bits = from_bits<uint32_t>(to_bits(x));
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // every NaN becomes CUDA's
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
  static uint16_t round(double x) {
    // Rounded to odd first, so that rounding twice is rounding once.
    float near = static_cast<float>(x);
    if (near != x && near == near) {
      auto bits = from_bits<uint32_t>(to_bits(near));
      if (fabs(static_cast<double>(near)) > fabs(x)) --bits;  // towards zero
      near = from_bits<float>(bits | 1u);
    }
    return round(near);
  }
  static float widen(uint16_t bits) { return from_bits<float>(static_cast<uint32_t>(bits) << 16); }
};

template <class Format>
struct SmallFloat {
  uint16_t bits;

  SmallFloat() = default;  // trivial: shared arrays of it have no constructor to run
  SmallFloat(float x) : bits(Format::round(x)) {}
  SmallFloat(double x) : bits(Format::round(x)) {}
  SmallFloat(int x) : bits(Format::round(static_cast<float>(x))) {}
  static SmallFloat of_bits(uint16_t bits) {
    SmallFloat made;
    made.bits = bits;
    return made;
  }
  operator float() const { return Format::widen(bits); }

  SmallFloat operator-() const { return of_bits(bits ^ 0x8000u); }
  SmallFloat& operator+=(SmallFloat other) { return *this = *this + other; }
  SmallFloat& operator-=(SmallFloat other) { return *this = *this - other; }
  SmallFloat& operator*=(SmallFloat other) { return *this = *this * other; }
  SmallFloat& operator/=(SmallFloat other) { return *this = *this / other; }
  friend SmallFloat operator+(SmallFloat a, SmallFloat b) { return float(a) + float(b); }
  friend SmallFloat operator-(SmallFloat a, SmallFloat b) { return float(a) - float(b); }
  friend SmallFloat operator*(SmallFloat a, SmallFloat b) { return float(a) * float(b); }
  friend SmallFloat operator/(SmallFloat a, SmallFloat b) { return float(a) / float(b); }
  friend bool operator<(SmallFloat a, SmallFloat b) { return float(a) < float(b); }
  friend bool operator>(SmallFloat a, SmallFloat b) { return float(a) > float(b); }
  friend bool operator<=(SmallFloat a, SmallFloat b) { return float(a) <= float(b); }
  friend bool operator>=(SmallFloat a, SmallFloat b) { return float(a) >= float(b); }
  friend bool operator==(SmallFloat a, SmallFloat b) { return float(a) == float(b); }
  friend bool operator!=(SmallFloat a, SmallFloat b) { return float(a) != float(b); }
};

template <class Format>
struct alignas(4) SmallFloat2 {
  SmallFloat<Format> x, y;

  friend SmallFloat2 operator+(SmallFloat2 a, SmallFloat2 b) { return {a.x + b.x, a.y + b.y}; }
  friend SmallFloat2 operator-(SmallFloat2 a, SmallFloat2 b) { return {a.x - b.x, a.y - b.y}; }
  friend SmallFloat2 operator*(SmallFloat2 a, SmallFloat2 b) { return {a.x * b.x, a.y * b.y}; }
};

template <>
constexpr char letter<SmallFloat<Half>> = 'f';
template <>
constexpr char letter<SmallFloat<Bfloat16>> = 'b';

}  // namespace cuda_host

// The functions that CUDA overloads for both formats.
#define CUDA_HOST_SMALL template <class F>
#define CUDA_HOST_ONE cuda_host::SmallFloat<F>
#define CUDA_HOST_TWO cuda_host::SmallFloat2<F>
CUDA_HOST_SMALL CUDA_HOST_ONE __hadd(CUDA_HOST_ONE a, CUDA_HOST_ONE b) { return a + b; }
CUDA_HOST_SMALL CUDA_HOST_ONE __hsub(CUDA_HOST_ONE a, CUDA_HOST_ONE b) { return a - b; }
CUDA_HOST_SMALL CUDA_HOST_ONE __hmul(CUDA_HOST_ONE a, CUDA_HOST_ONE b) { return a * b; }
CUDA_HOST_SMALL CUDA_HOST_ONE __hdiv(CUDA_HOST_ONE a, CUDA_HOST_ONE b) { return a / b; }
CUDA_HOST_SMALL CUDA_HOST_ONE __hneg(CUDA_HOST_ONE a) { return -a; }
CUDA_HOST_SMALL CUDA_HOST_ONE __habs(CUDA_HOST_ONE a) {
  return CUDA_HOST_ONE::of_bits(a.bits & 0x7fffu);
}
CUDA_HOST_SMALL CUDA_HOST_ONE __hfma(CUDA_HOST_ONE a, CUDA_HOST_ONE b, CUDA_HOST_ONE c) {
  return CUDA_HOST_ONE(fma(double(float(a)), double(float(b)), double(float(c))));
}
CUDA_HOST_SMALL CUDA_HOST_ONE __hmax(CUDA_HOST_ONE a, CUDA_HOST_ONE b) { return fmaxf(a, b); }
CUDA_HOST_SMALL CUDA_HOST_ONE __hmin(CUDA_HOST_ONE a, CUDA_HOST_ONE b) { return fminf(a, b); }
CUDA_HOST_SMALL bool __hlt(CUDA_HOST_ONE a, CUDA_HOST_ONE b) { return a < b; }
CUDA_HOST_SMALL bool __hle(CUDA_HOST_ONE a, CUDA_HOST_ONE b) { return a <= b; }
CUDA_HOST_SMALL bool __hgt(CUDA_HOST_ONE a, CUDA_HOST_ONE b) { return a > b; }
CUDA_HOST_SMALL bool __hge(CUDA_HOST_ONE a, CUDA_HOST_ONE b) { return a >= b; }
CUDA_HOST_SMALL bool __heq(CUDA_HOST_ONE a, CUDA_HOST_ONE b) { return a == b; }
CUDA_HOST_SMALL bool __hisnan(CUDA_HOST_ONE a) { return isnan(float(a)); }
CUDA_HOST_SMALL CUDA_HOST_TWO __hadd2(CUDA_HOST_TWO a, CUDA_HOST_TWO b) { return a + b; }
CUDA_HOST_SMALL CUDA_HOST_TWO __hsub2(CUDA_HOST_TWO a, CUDA_HOST_TWO b) { return a - b; }
CUDA_HOST_SMALL CUDA_HOST_TWO __hmul2(CUDA_HOST_TWO a, CUDA_HOST_TWO b) { return a * b; }
CUDA_HOST_SMALL CUDA_HOST_TWO __hfma2(CUDA_HOST_TWO a, CUDA_HOST_TWO b, CUDA_HOST_TWO c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
CUDA_HOST_SMALL CUDA_HOST_TWO __hmax2(CUDA_HOST_TWO a, CUDA_HOST_TWO b) {
  return {__hmax(a.x, b.x), __hmax(a.y, b.y)};
}
CUDA_HOST_SMALL CUDA_HOST_TWO __hmin2(CUDA_HOST_TWO a, CUDA_HOST_TWO b) {
  return {__hmin(a.x, b.x), __hmin(a.y, b.y)};
}
CUDA_HOST_SMALL float __low2float(CUDA_HOST_TWO v) { return float(v.x); }
CUDA_HOST_SMALL float __high2float(CUDA_HOST_TWO v) { return float(v.y); }
#undef CUDA_HOST_TWO
#undef CUDA_HOST_ONE
#undef CUDA_HOST_SMALL
