// Linear layers: rows of activations times weights in panels, with a fused epilogue.
//
// A work item is some panels of a block of rows. With few rows, weights are converted to float32 in registers; with
// more, one piece of a panel at a time is converted into the L1 cache, for all rows of the block to read. Each thread
// stays on its own group of items while any are left (see Groups in products.hpp).
#include "products.hpp"

namespace logprobe {
namespace {

constexpr int PIECE = 96;  // inputs of a panel that fit in the L1 cache together with the rows
constexpr int DIRECT_ROWS = LANES == 8 ? 4 : 8;  // measured

struct Block : Rows {  // packed piece by piece: a row's inputs of one piece are contiguous
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

template <Form form>
void multiply(ProductArgs& args) {
  if (args.num_rows == 0) return;  // a tile needs at least one row
  const int64_t rows = std::min(args.block_rows, args.num_rows), padded = round_up(args.num_inputs, PIECE);
  scratch.reserve(sizeof(float) * (2 * rows * PANEL + PIECE * PANEL + rows * padded), 4);
  float *products = scratch.array<float>(rows * PANEL), *values = scratch.array<float>(rows * PANEL);
  float *piece = scratch.array<float>(PIECE * PANEL), *packed = scratch.array<float>(rows * padded);
  const bool is_direct = args.num_rows <= DIRECT_ROWS;
  run_items(
      args, products, values, [&](const Rows& rows) { pack_rows(args, rows.first, rows.num_rows, packed); },
      [&](const Rows& rows, int64_t number, const uint8_t* panel, float* out) ALWAYS_INLINE {
        const Block block{rows, packed};
        if (is_direct) multiply_directly<form>(args, block, panel, out);
        else multiply_pieces<form>(args, block, number, panel, piece, out);
      });
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
