// Peak rate of multiply-adds in registers, without memory access; only for benchmarks.
#include "common.hpp"
#include "vector.hpp"

EXPORT int64_t logprobe_num_lanes() { return logprobe::LANES; }

EXPORT void logprobe_peak(void* pointer) {
  using namespace logprobe;
  constexpr int SUMS = 12;  // enough to fill the pipeline, and few enough for the registers
  auto& args = *static_cast<PeakArgs*>(pointer);
  for (int64_t item; (item = take(args.work)) >= 0;) {
    float* place = args.factors + LINE / 4 * item;
    const Floats factor = broadcast(*place);  // unknown at compile time, so that nothing is folded
    Floats sums[SUMS];
    for (int i = 0; i < SUMS; i++) sums[i] = factor * static_cast<float>(i);
    for (int64_t turn = 0; turn < args.num_turns; turn++)
      for (int i = 0; i < SUMS; i++) sums[i] = fma(sums[i], factor, factor);
    for (int i = 1; i < SUMS; i++) sums[0] += sums[i];
    *place = sums[0][0];
  }
}
