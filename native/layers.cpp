// Norms, rotary embedding, gated activations, and the soft cap of logits.
#include "common.hpp"
#include "gates.hpp"

namespace logprobe {
namespace {

template <typename Args, typename Each>
void each_row(Args& args, Each each) {
  for (int64_t item; (item = take(args.work)) >= 0;)
    for (int64_t row = item * args.block_rows; row < std::min(args.num_rows, (item + 1) * args.block_rows); row++)
      each(row);
}

void norm(const NormArgs& args, const float* x, const float* residual, float* out) {
  const int64_t width = args.width;
  const float mean =
      args.is_centred ? sum_of(x, width, [](auto a) { return a; }) / static_cast<float>(width) : 0.0f;
  // A second pass about the mean: E[x**2] - E[x]**2 would lose precision.
  const float squares = sum_of(x, width, [mean](auto a) { return (a - mean) * (a - mean); });
  const double variance = squares / static_cast<float>(width) + static_cast<float>(args.epsilon);
  const auto factor = static_cast<float>(1 / std::sqrt(variance));
  for (int64_t i = 0; i < width; i++) {
    float y = (x[i] - mean) * factor * args.weight[i];
    if (args.bias) y += args.bias[i];
    out[i] = residual ? residual[i] + y : y;
  }
}

void rotate(const float* x, float* out, const RotaryArgs& args, int64_t row) {
  const int64_t half = args.rotary_dim / 2;
  const float *cosines = args.cosines + args.rotary_dim * row, *sines = args.sines + args.rotary_dim * row;
  if (args.is_paired) {
    for (int64_t i = 0; i < half; i++) {
      const float first = x[2 * i], second = x[2 * i + 1];
      out[2 * i] = first * cosines[i] - second * sines[i];
      out[2 * i + 1] = second * cosines[i] + first * sines[i];
    }
  } else {
    for (int64_t i = 0; i < half; i++) {
      const float first = x[i], second = x[half + i];
      out[i] = first * cosines[i] - second * sines[i];
      out[half + i] = second * cosines[half + i] + first * sines[half + i];
    }
  }
  std::memcpy(out + args.rotary_dim, x + args.rotary_dim, sizeof(float) * (args.key_dim - args.rotary_dim));
}

}  // namespace
}  // namespace logprobe

EXPORT void logprobe_norm(void* pointer) {
  using namespace logprobe;
  auto& args = *static_cast<NormArgs*>(pointer);
  each_row(args, [&](int64_t row) {
    for (int64_t part = 0; part < args.parts; part++) {
      const int64_t place = args.out_row * row + args.width * part;
      norm(args, args.x + args.x_row * row + args.width * part, args.residual ? args.residual + place : nullptr,
           args.out + place);
    }
  });
}

EXPORT void logprobe_rotary(void* pointer) {
  using namespace logprobe;
  auto& args = *static_cast<RotaryArgs*>(pointer);
  each_row(args, [&](int64_t row) {
    const int64_t dim = args.key_dim, slot = args.slots[row];
    float* out = args.out + args.heads * dim * row;
    for (int64_t head = 0; head < args.heads; head++)
      rotate(args.query + args.query_row * row + args.query_head * head, out + dim * head, args, row);
    if (args.query_scales)
      for (int64_t i = 0; i < args.heads * dim; i++) out[i] *= args.query_scales[row];
    for (int64_t head = 0; head < args.kv_heads; head++) {
      rotate(args.key + args.key_row * row + args.key_head * head,
             args.key_pool + (args.kv_heads * slot + head) * dim, args, row);
      std::memcpy(args.value_pool + (args.kv_heads * slot + head) * args.value_dim,
                  args.value + args.value_row * row + args.value_head * head, sizeof(float) * args.value_dim);
    }
  });
}

EXPORT void logprobe_gate(void* pointer) {
  using namespace logprobe;
  auto& args = *static_cast<GateArgs*>(pointer);
  const int64_t pieces = ceil_div(args.width, args.piece);
  for (int64_t item; (item = take(args.work)) >= 0;) {
    const int64_t row = item / pieces, start = item % pieces * args.piece;
    const int64_t count = std::min(args.piece, args.width - start);
    const float *gates = args.gates + args.gates_row * row + start;
    float* out = args.out + args.out_row * row + start;
    if (out != gates) std::memcpy(out, gates, sizeof(float) * count);
    gate_row(out, args.values ? args.values + args.values_row * row + start : nullptr, count,
             static_cast<Activation>(args.activation));
  }
}

EXPORT void logprobe_softcap(void* pointer) {
  using namespace logprobe;
  auto& args = *static_cast<SoftcapArgs*>(pointer);
  const int64_t pieces = ceil_div(args.width, args.piece);
  for (int64_t item; (item = take(args.work)) >= 0;) {
    const int64_t start = item % pieces * args.piece, count = std::min(args.piece, args.width - start);
    soft_cap(args.logits + args.logits_row * (item / pieces) + start, count, static_cast<float>(args.cap));
  }
}
