// The activations of feed-forward blocks, of one number.
#pragma once

#include "common.cuh"

// 0.5 x (1 + tanh(u)) = x sigmoid(2 u); u as in arXiv 1606.08415.
struct GeluTanh {
  __device__ static float of(float x) {
    const float twice = 1.5957691216057308f * (x + 0.044715f * x * x * x);
    return x / (1.0f + expf(-twice));
  }
};
struct Gelu {
  __device__ static float of(float x) { return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f)); }
};
struct Relu {
  __device__ static float of(float x) { return x < 0.0f ? 0.0f : x; }  // NaN stays
};
struct Silu {
  __device__ static float of(float x) { return x / (1.0f + expf(-x)); }
};

// The same, chosen while the kernel runs: activation.py's KINDS by number, 0 for none.
__device__ __forceinline__ float activated(int kind, float x) {
  switch (kind) {
    case 1: return GeluTanh::of(x);
    case 2: return Gelu::of(x);
    case 3: return Relu::of(x);
    case 4: return Silu::of(x);
    default: return x;
  }
}
