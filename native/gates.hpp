// Activations of feed-forward layers, for a number or a vector, and the soft cap of scores and logits.
#pragma once

#include "vector.hpp"

namespace logprobe {

enum Activation : int64_t { NONE, SILU, GELU_TANH, GELU, RELU, RELU2 };

template <typename T>
INLINE T sigmoid(T x) {
  const T zero = T{}, one = 1.0f - zero;
  const T e = exponential(x < zero ? x : -x);  // NaN for NaN
  return (x >= zero ? one : e) / (one + e);
}

INLINE float gelu(float x) {
  const double wide = x;
  return static_cast<float>(wide * 0.5 * (1.0 + std::erf(wide * 0.70710678118654757)));
}
INLINE Floats gelu(Floats x) {
  for (int i = 0; i < LANES; i++) x[i] = gelu(x[i]);
  return x;
}

// activation(gate) * value.
template <Activation activation, typename T>
INLINE T gated(T gate, T value) {
  const T zero = T{};
  if constexpr (activation == SILU) return gate * sigmoid(gate) * value;
  if constexpr (activation == GELU_TANH) {  // (1 + tanh z) / 2 is sigmoid(2 z)
    const T slope = 1.5957691216057308f - zero, cube = 0.044715f - zero;
    return gate * sigmoid(slope * (gate + cube * gate * gate * gate)) * value;
  }
  if constexpr (activation == GELU) return gelu(gate) * value;
  const T positive = gate < zero ? zero : gate;  // NaN stays NaN
  if constexpr (activation == RELU) return positive * value;
  return positive * gate * value;
}

template <Activation activation>
INLINE void gate_all(float* gates, const float* values, int64_t size) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES)
    store(gates + i, gated<activation>(load(gates + i), values ? load(values + i) : broadcast(1.0f)));
  for (; i < size; i++) gates[i] = gated<activation>(gates[i], values ? values[i] : 1.0f);
}

// Replace each gate by activation(gate) * value, or by activation(gate) without values.
INLINE void gate_row(float* gates, const float* values, int64_t size, Activation activation) {
  switch (activation) {
    case SILU: return gate_all<SILU>(gates, values, size);
    case GELU_TANH: return gate_all<GELU_TANH>(gates, values, size);
    case GELU: return gate_all<GELU>(gates, values, size);
    case RELU: return gate_all<RELU>(gates, values, size);
    case RELU2: return gate_all<RELU2>(gates, values, size);
    case NONE: return;
  }
}

// Replace each number x by cap * tanh(x / cap).
INLINE void soft_cap(float* x, int64_t count, float cap) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(x + i, cap * tanh(load(x + i) / cap));
  for (; i < count; i++) x[i] = cap * tanh(x[i] / cap);
}

}  // namespace logprobe
