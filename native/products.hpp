// Shared by the kernels of linear layers: how threads divide the work, and the fused epilogue.
#pragma once

#include "common.hpp"
#include "gates.hpp"
#include "tiles.hpp"

namespace logprobe {

struct Rows {  // a block of rows
  int64_t first, num_rows;
};

// The work items in groups, which threads keep to: with several blocks, groups of blocks, so that a thread packs the rows
// of a block once; with one block, runs of panels, because memory is read faster in long runs.
struct Groups {
  int64_t items, num_blocks, size;  // items of a block, blocks, groups

  explicit Groups(const ProductArgs& args)
      : items(ceil_div(ceil_div(args.num_outputs, PANEL), args.item_panels)),
        num_blocks(args.work.num_items / items),
        size(std::min<int64_t>(MAX_GROUPS, num_blocks > 1 ? num_blocks : std::min(items, args.num_threads))) {}

  int64_t first(int64_t group) const { return items * group / size; }  // of the only block
  int64_t num_items(int64_t group) const {
    return num_blocks > 1 ? ceil_div(num_blocks - group, size) * items : first(group + 1) - first(group);
  }
  int64_t item(int64_t group, int64_t number) const {
    return num_blocks > 1 ? (number / items * size + group) * items + number % items : first(group) + number;
  }
};

// Return the next item of the thread's own group (-1: none yet), or of the group with the most items left.
// There are as many items as tickets, so a thread with a ticket always finds one.
inline int64_t own_item(ProductArgs& args, const Groups& groups, int64_t& group) {
  for (;;) {
    if (group >= 0) {
      const int64_t number = __atomic_fetch_add(&args.work.taken[group], 1, __ATOMIC_RELAXED);
      if (number < groups.num_items(group)) return groups.item(group, number);
    }
    int64_t most = std::numeric_limits<int64_t>::min();
    for (int64_t other = 0; other < groups.size; other++) {
      const int64_t left = groups.num_items(other) - __atomic_load_n(&args.work.taken[other], __ATOMIC_RELAXED);
      if (left > most) most = left, group = other;
    }
  }
}

inline void prefetch_targets(const ProductArgs& args, int64_t first, int64_t num_rows, int64_t output) {
  for (int64_t row = first; row < first + num_rows; row++)
    for (int place = 0; place < PANEL; place += LINE / 4) {
      prefetch(args.out + args.out_row * row + output + place);
      if (args.residual) prefetch(args.residual + args.residual_row * row + output + place);
    }
}

// Apply bias, gate, factor and residual to a panel's outputs, and write them to `out`.
inline void finish_panel(const ProductArgs& args, const Rows& block, int64_t output, float* products, float* values) {
  const int64_t count = std::min<int64_t>(PANEL, args.num_outputs - output);
  for (int64_t place = 0; place < block.num_rows; place++) {
    float *x = products + PANEL * place, *value = values ? values + PANEL * place : nullptr;
    const int64_t row = block.first + place;
    if (args.bias)
      for (int64_t i = 0; i < count; i++) x[i] += args.bias[output + i];
    if (value && args.value_bias)
      for (int64_t i = 0; i < count; i++) value[i] += args.value_bias[output + i];
    gate_row(x, value, count, static_cast<Activation>(args.activation));
    if (args.factor != 1.0f)
      for (int64_t i = 0; i < count; i++) x[i] *= static_cast<float>(args.factor);
    float* out = args.out + args.out_row * row + output;
    if (args.residual) {
      const float* residual = args.residual + args.residual_row * row + output;
      for (int64_t i = 0; i < count; i++) out[i] = x[i] + residual[i];
    } else {
      std::memcpy(out, x, sizeof(float) * count);
    }
  }
}

// Run items until all are taken, with the number of rows in `args` at least 1. `pack(rows)` is called when the thread comes
// to another block of rows, then `times(rows, number, weights, out)` for panels, to add their products to `out`.
template <typename Pack, typename Times>
void run_items(ProductArgs& args, float* products, float* values, Pack pack, Times times) {
  const Groups groups(args);
  const int64_t num_panels = ceil_div(args.num_outputs, PANEL), items = groups.items;
  int64_t group = -1, packed_from = -1;
  while (take(args.work) >= 0) {
    const int64_t item = own_item(args, groups, group), first = item / items * args.block_rows;
    const Rows rows{first, std::min(args.block_rows, args.num_rows - first)};
    if (packed_from != first) pack(rows);
    packed_from = first;
    const int64_t start = item % items * args.item_panels;
    for (int64_t number = start; number < std::min(num_panels, start + args.item_panels); number++) {
      const auto multiply = [&](const uint8_t* weights, float* out) {
        std::memset(out, 0, sizeof(float) * PANEL * rows.num_rows);
        times(rows, number, weights + number * args.panel_bytes, out);
      };
      multiply(args.weights, products);
      if (args.value_weights) multiply(args.value_weights, values);
      finish_panel(args, rows, PANEL * number, products, args.value_weights ? values : nullptr);
    }
  }
}

}  // namespace logprobe
