// Linear layers: rows of activations times weights in panels, with a fused epilogue.
//
// A work item is some panels of a block of rows. With few rows, weights are converted to float32 in registers; with
// more, one piece of a panel at a time is converted into the L1 cache, for all rows of the block to read. Each thread
// stays on its own group of items while any are left (see Groups).
#include "common.hpp"
#include "gates.hpp"
#include "tiles.hpp"

namespace logprobe {
namespace {

constexpr int PIECE = 96;  // inputs of a panel that fit in the L1 cache together with the rows
constexpr int DIRECT_ROWS = LANES == 8 ? 4 : 8;  // measured

struct Block {  // rows, packed piece by piece: a row's inputs of one piece are contiguous
  int64_t first, num_rows;
  const float* packed;

  const float* piece(int64_t start) const { return packed + start * num_rows; }
};

void pack_rows(const ProductArgs& args, int64_t first, int64_t num_rows, float* packed) {
  for (int64_t start = 0; start < args.num_inputs; start += PIECE)
    for (int64_t row = first; row < first + num_rows; row++, packed += PIECE) {
      const int64_t count = std::clamp<int64_t>(args.width - start, 0, PIECE);
      std::memcpy(packed, args.x + args.x_row * row + start, sizeof(float) * count);
      std::memset(packed + count, 0, sizeof(float) * (PIECE - count));
    }
}

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
int64_t own_item(ProductArgs& args, const Groups& groups, int64_t& group) {
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

template <Form form>
void widen_piece(const uint8_t* panel, int64_t num_inputs, float* out) {
  Header<form> header;
  for (int64_t start = 0; start < num_inputs; start += block_inputs(form)) {
    header.read(panel);
    panel += header_bytes(form);
    for (int group = 0; group < block_inputs(form) / GROUP; group++) {
      each_of_group([&](auto i) ALWAYS_INLINE {
        for (int j = 0; j < VECTORS; j++) store(out + PANEL * i + LANES * j, weights_at<form, i>(panel, header, j));
      });
      panel += group_bytes(form);
      out += PANEL * GROUP;
    }
  }
}

void prefetch_targets(const ProductArgs& args, int64_t first, int64_t num_rows, int64_t output) {
  for (int64_t row = first; row < first + num_rows; row++)
    for (int place = 0; place < PANEL; place += LINE / 4) {
      prefetch(args.out + args.out_row * row + output + place);
      if (args.residual) prefetch(args.residual + args.residual_row * row + output + place);
    }
}

// Few rows: convert weights in registers.
template <Form form>
void multiply_directly(const ProductArgs& args, const Block& block, const uint8_t* panel, float* products) {
  for (int64_t start = 0; start < args.num_inputs; start += PIECE) {
    const int64_t count = std::min<int64_t>(PIECE, args.num_inputs - start);
    const uint8_t* source = panel + start / block_inputs(form) * block_bytes(form);
    multiply_rows<form, DIRECT_ROWS, RUN>(block.num_rows, source, count, RowsOf{block.piece(start), PIECE},
                                                products);
  }
}

// Many rows: convert each piece once for all of them. Only the conversion reads memory, so the next piece is
// prefetched between tiles.
template <Form form>
void multiply_pieces(const ProductArgs& args, const Block& block, int64_t number, const uint8_t* panel,
                     float* piece, float* products) {
  constexpr int64_t PIECE_BYTES = PIECE / block_inputs(form) * block_bytes(form);
  constexpr int ROWS = LANES == 16 ? 5 : 4;  // measured
  for (int64_t start = 0; start < args.num_inputs; start += PIECE) {
    const int64_t count = std::min<int64_t>(PIECE, args.num_inputs - start);
    const uint8_t* source = panel + start / block_inputs(form) * block_bytes(form);
    const uint8_t* weights = form == Form::FLOAT32 ? source : reinterpret_cast<uint8_t*>(piece);
    if constexpr (form != Form::FLOAT32) widen_piece<form>(source, count, piece);
    for (int64_t row = 0; row < block.num_rows; row += ROWS) {
      const int64_t some = std::min<int64_t>(ROWS, block.num_rows - row);
      for (int64_t place = row * PIECE_BYTES; place < (row + some) * PIECE_BYTES; place += block.num_rows * LINE)
        prefetch<2>(source + PIECE_BYTES + place / block.num_rows);  // not into L1, which this piece fills
      if (start + PIECE >= args.num_inputs) prefetch_targets(args, block.first + row, some, PANEL * number);
      const RowsOf x{block.piece(start) + PIECE * row, PIECE};
      multiply_rows<Form::FLOAT32, ROWS, RUN>(some, weights, count, x, products + PANEL * row);
    }
  }
}

// Apply bias, gate, factor and residual to a panel's outputs, and write them to `out`.
void finish_panel(const ProductArgs& args, const Block& block, int64_t output, float* products, float* values) {
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

template <Form form>
void multiply(ProductArgs& args) {
  if (args.num_rows == 0) return;  // a tile needs at least one row
  const Groups groups(args);
  const int64_t num_panels = ceil_div(args.num_outputs, PANEL), items = groups.items;
  const int64_t rows = std::min(args.block_rows, args.num_rows), padded = round_up(args.num_inputs, PIECE);
  scratch.reserve(sizeof(float) * (2 * rows * PANEL + PIECE * PANEL + rows * padded), 4);
  float *products = scratch.array<float>(rows * PANEL), *values = scratch.array<float>(rows * PANEL);
  float *piece = scratch.array<float>(PIECE * PANEL), *packed = scratch.array<float>(rows * padded);
  const bool is_direct = args.num_rows <= DIRECT_ROWS;
  int64_t group = -1, packed_from = -1;
  while (take(args.work) >= 0) {
    const int64_t item = own_item(args, groups, group), first = item / items * args.block_rows;
    const Block block{first, std::min(args.block_rows, args.num_rows - first), packed};
    if (packed_from != first) pack_rows(args, first, block.num_rows, packed);
    packed_from = first;
    const int64_t start = item % items * args.item_panels;
    for (int64_t number = start; number < std::min(num_panels, start + args.item_panels); number++) {
      const auto times = [&](const uint8_t* weights, float* out) {
        const uint8_t* panel = weights + number * args.panel_bytes;
        std::memset(out, 0, sizeof(float) * PANEL * block.num_rows);
        if (is_direct) multiply_directly<form>(args, block, panel, out);
        else multiply_pieces<form>(args, block, number, panel, piece, out);
      };
      times(args.weights, products);
      if (args.value_weights) times(args.value_weights, values);
      finish_panel(args, block, PANEL * number, products, args.value_weights ? values : nullptr);
    }
  }
}

}  // namespace
}  // namespace logprobe

EXPORT void logprobe_products(void* pointer) {
  using namespace logprobe;
  auto& args = *static_cast<ProductArgs*>(pointer);
  switch (static_cast<Form>(args.form)) {
    case Form::FLOAT32: return multiply<Form::FLOAT32>(args);
    case Form::BFLOAT16: return multiply<Form::BFLOAT16>(args);
    case Form::FLOAT16: return multiply<Form::FLOAT16>(args);
    case Form::INT4: return multiply<Form::INT4>(args);
    case Form::INT4_WIDE: return multiply<Form::INT4_WIDE>(args);
    case Form::INT8: return multiply<Form::INT8>(args);
    case Form::INT8_WIDE: return multiply<Form::INT8_WIDE>(args);
  }
}
