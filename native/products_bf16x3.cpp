// Linear layers on the matrix units of the processor (Intel AMX), with the accuracy of float32 (`bf16x3`).
//
// Each float32 activation is split into three bfloat16 numbers, whose sum it is in the normal range. Products of bfloat16 numbers are exact
// in float32. Weights in bfloat16 are used as they are; the integers of quantized blocks are exact in bfloat16, and the
// sum over a block is multiplied by its scale. Without AMX, the tiles are emulated, slowly, with the same bits.
//
// An output is the sum of its sections of inputs, in order. In a section, each step of 32 inputs (or a block of 16) adds
// three sums: of the smallest numbers, the middle ones, the largest ones.
#include <optional>

#include "products.hpp"

#if !defined(__x86_64__)  // kernels/info.py offers the arithmetic to no other processor
EXPORT int logprobe_has_tiles() { return 0; }
EXPORT void logprobe_products_bf16x3(void*) {}
#else
#include "amx.hpp"

namespace logprobe {
namespace {

constexpr int PIECES = 3, PANEL_TILES = PANEL / 16;
constexpr int PAIR_BYTES = 4 * PANEL;  // two inputs of a panel in bfloat16
constexpr int AHEAD = 4;               // steps whose weights are prefetched: loads of tiles start no prefetching

// Inputs that one multiplication of tiles sums.
constexpr int step_inputs(Form form) { return form == Form::INT8_WIDE ? 16 : 32; }
// Inputs that are summed by themselves, for accuracy. In quantized forms, their weights as bfloat16 and the sums of their
// steps fit into the L1 cache together.
constexpr int section_inputs(Form form) { return has_scales(form) ? 128 : 256; }
constexpr int num_steps(Form form) { return section_inputs(form) / step_inputs(form); }
constexpr int step_bytes(Form form) { return step_inputs(form) / 2 * PAIR_BYTES; }  // of weights in bfloat16

// Take the next eight significant bits of `x`, as the upper half of a float32; `x` keeps the rest.
INLINE uint32_t take_piece(float& x) {
  const uint32_t bits = float_to_bits(x), piece = x == x ? bits & 0xFFFF0000 : 0x7FC00000;
  x = (bits & 0x7F800000) == 0x7F800000 ? 0 : x - bits_to_float(piece);  // nothing is left of an infinity, or of NaN
  return piece;
}

// The sum of the inputs of a block, for the summands of int4 forms.
INLINE float block_sum(const float* x) {
  float sums[8];
  for (int i = 0; i < 8; i++) sums[i] = (x[i] + x[i + 8]) + (x[i + 16] + x[i + 24]);
  return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

// A block of rows in groups of equal size, which fit into tiles: (group, step, piece, row, input). A single row of a
// quantized form is kept as float32: (step, piece, input).
template <Form form>
struct Packed {
  static constexpr int INPUTS = step_inputs(form);

  int64_t steps, groups, group_rows;
  bool is_alone;
  uint16_t* pieces;  // bfloat16
  float* row_pieces;
  float* step_sums;  // int4 forms: (group, step, row)

  explicit Packed(const ProductArgs& args)
      : steps(args.num_inputs / INPUTS), is_alone(has_scales(form) && args.num_rows == 1) {}

  uint16_t* at(int64_t group, int64_t step, int piece = 0) const {
    return pieces + ((group * steps + step) * PIECES + piece) * group_rows * INPUTS;
  }
  float* sums_at(int64_t group, int64_t step) const { return step_sums + (group * steps + step) * group_rows; }

  void pack(const ProductArgs& args, const Rows& rows) {
    groups = ceil_div(rows.num_rows, TILE_LINES), group_rows = ceil_div(rows.num_rows, groups);
    for (int64_t group = 0; group < groups; group++)
      for (int64_t row = 0; row < group_rows; row++) {
        const int64_t place = group * group_rows + row;
        const float* from = args.x + args.x_row * (rows.first + place);
        for (int64_t step = 0; step < steps; step++) {
          const int64_t inputs = place < rows.num_rows ? std::min<int64_t>(args.width - step * INPUTS, INPUTS) : 0;
          float x[INPUTS] = {};
          if (inputs > 0) std::memcpy(x, from + step * INPUTS, sizeof(float) * inputs);
          if constexpr (is_int4(form)) sums_at(group, step)[row] = block_sum(x);
          for (int piece = 0; piece < PIECES; piece++)
            if (is_alone) {
              float* numbers = row_pieces + (step * PIECES + piece) * INPUTS;
              for (int i = 0; i < INPUTS; i++) numbers[i] = bits_to_float(take_piece(x[i]));
            } else {
              uint16_t* halves = at(group, step, piece) + row * INPUTS;
              for (int i = 0; i < INPUTS; i++) halves[i] = take_piece(x[i]) >> 16;
            }
        }
      }
  }
};

// Input `i` of a group of eight for the outputs of a vector, without scale and summand; int4: -8 to 7.
template <Form form, int i>
INLINE Floats integers_at(const uint8_t* group, int vector) {
  if constexpr (is_int4(form)) return int4<i>(load_ints(group + 4 * LANES * vector)) - 8.0f;
  return load_int8(group + PANEL * i + LANES * vector);
}

// Scales and summands of a vector's outputs in a block; the summands of int4 forms are those of -8 to 7.
struct Scaling {
  Floats scale, summand;
};
template <Form form>
INLINE Scaling scaling_at(const uint8_t* block, int vector) {
  Scaling found = {header_at<form>(block, 0, vector), {}};
  if constexpr (is_int4(form)) found.summand = fma(broadcast(8.0f), found.scale, header_at<form>(block, 1, vector));
  return found;
}

// Add a block's sum to a total.
template <Form form>
INLINE Floats add_block(Floats total, Floats sum, const Scaling& block, float inputs_sum) {
  total = fma(block.scale, sum, total);
  return is_int4(form) ? fma(broadcast(inputs_sum), block.summand, total) : total;
}

// Write the integers of blocks as bfloat16, in the layout of that form.
template <Form form>
void widen_blocks(const uint8_t* panel, int64_t count, uint8_t* out) {
  for (int64_t block = 0; block < count; block++) {
    panel += header_bytes(form);
    for (int group = 0; group < block_inputs(form) / GROUP; group++, panel += group_bytes(form))
      each_of_group([&](auto i) ALWAYS_INLINE {
        if constexpr (i % 2 == 0) {
          for (int j = 0; j < VECTORS; j++) {
            const Ints even = bits_of(integers_at<form, i>(panel, j)), odd = bits_of(integers_at<form, i + 1>(panel, j));
            const Ints low = even >> 16 & broadcast(int32_t{0xFFFF});
            store(reinterpret_cast<float*>(out) + LANES * j, floats_of(low | odd));
          }
          out += PAIR_BYTES;
        }
      });
  }
}

// What is multiplied at once: a group of rows and the weights of a section, with sums in three tiles.
struct Operands {
  const uint16_t* rows;  // of the first step
  const uint8_t* weights;
};

// Add the products of a step of one or two operands to their sums. The smallest numbers come first.
template <int NUM, typename Tiles>
INLINE void multiply_tiles(Tiles& tiles, const Operands (&operands)[2], int64_t piece_size) {
  for (int piece = PIECES - 1; piece >= 0; piece--) {
    tiles.load_rows(operands[0].rows + piece * piece_size);
    tiles.load_weights(operands[0].weights, PAIR_BYTES), tiles.template multiply<0>();
    tiles.load_weights(operands[0].weights + TILE_BYTES, PAIR_BYTES), tiles.template multiply<1>();
    tiles.load_weights(operands[0].weights + 2 * TILE_BYTES, PAIR_BYTES), tiles.template multiply<2>();
    if constexpr (NUM == 2) {
      tiles.load_rows(operands[1].rows + piece * piece_size);
      tiles.load_weights(operands[1].weights, PAIR_BYTES), tiles.template multiply<3>();
      tiles.load_weights(operands[1].weights + TILE_BYTES, PAIR_BYTES), tiles.template multiply<4>();
      tiles.load_weights(operands[1].weights + 2 * TILE_BYTES, PAIR_BYTES), tiles.template multiply<5>();
    }
  }
}

template <int NUM, typename Tiles>
INLINE void clear_tiles(Tiles& tiles) {
  tiles.template zero<0>(), tiles.template zero<1>(), tiles.template zero<2>();
  if constexpr (NUM == 2) tiles.template zero<3>(), tiles.template zero<4>(), tiles.template zero<5>();
}

using TileSums = float[PANEL_TILES][TILE_LINES][16];

template <int NUM, typename Tiles>
INLINE void store_tiles(const Tiles& tiles, TileSums* sums) {
  tiles.template store<0>(sums[0][0][0]), tiles.template store<1>(sums[0][1][0]);
  tiles.template store<2>(sums[0][2][0]);
  if constexpr (NUM == 2) {
    tiles.template store<3>(sums[1][0][0]), tiles.template store<4>(sums[1][1][0]);
    tiles.template store<5>(sums[1][2][0]);
  }
}

INLINE void add_sums(const TileSums& sums, int64_t num_rows, float* out) {
  for (int tile = 0; tile < PANEL_TILES; tile++)
    for (int64_t row = 0; row < num_rows; row++)
      for (int lane = 0; lane < 16; lane += LANES) {
        float* to = out + PANEL * row + 16 * tile + lane;
        store(to, load(to) + load(sums[tile][row] + lane));
      }
}

// bfloat16: put the sums of a section, or of two operands, into `sums`.
template <int NUM, typename Tiles>
void sum_sections(Tiles& tiles, int64_t group_rows, int64_t count, Operands (&operands)[2], bool is_first, TileSums* sums) {
  constexpr int INPUTS = step_inputs(Form::BFLOAT16), BYTES = step_bytes(Form::BFLOAT16);
  clear_tiles<NUM>(tiles);
  for (int64_t step = 0; step < count; step++) {
    if (is_first)
      for (int place = 0; place < BYTES; place += LINE)
        for (int i = 0; i < NUM; i++) prefetch(operands[i].weights + AHEAD * BYTES + place);
    multiply_tiles<NUM>(tiles, operands, group_rows * INPUTS);
    for (int i = 0; i < NUM; i++) operands[i].rows += PIECES * group_rows * INPUTS, operands[i].weights += BYTES;
  }
  store_tiles<NUM>(tiles, sums);
}

// bfloat16: multiply two groups of rows at once, or two sections of a single group, because a sum of tiles takes longer to
// be ready for the next product than three products take.
template <typename Tiles>
void multiply_floats(const ProductArgs& args, const Packed<Form::BFLOAT16>& packed, Tiles& tiles, const Rows& rows,
                     int64_t number, const uint8_t* panel, TileSums* sums, float* out) {
  constexpr int64_t STEPS = num_steps(Form::BFLOAT16), BYTES = step_bytes(Form::BFLOAT16);
  const int64_t size = packed.group_rows;
  for (int64_t first = 0; first < packed.steps;) {
    const bool is_double = packed.groups == 1 && first + 2 * STEPS <= packed.steps;
    const int64_t count = std::min<int64_t>(STEPS, packed.steps - first), next = first + count * (is_double ? 2 : 1);
    const uint8_t* weights = panel + first * BYTES;
    for (int64_t group = 0; group < packed.groups; group += 2) {
      const int64_t start = group * size, left = rows.num_rows - start;
      if (next == packed.steps)
        prefetch_targets(args, rows.first + start, std::min(2 * size, left), PANEL * number);
      const bool has_other = group + 1 < packed.groups;
      Operands operands[2] = {{packed.at(group, first), weights}, {}};
      if (is_double) operands[1] = {packed.at(group, first + STEPS), weights + STEPS * BYTES};
      if (has_other) operands[1] = {packed.at(group + 1, first), weights};
      if (is_double || has_other) sum_sections<2>(tiles, size, count, operands, group == 0, sums);
      else sum_sections<1>(tiles, size, count, operands, group == 0, sums);
      add_sums(sums[0], std::min(size, left), out + PANEL * start);
      if (is_double) add_sums(sums[1], size, out);
      if (has_other) add_sums(sums[1], std::min(size, left - size), out + PANEL * (start + size));
    }
    first = next;
  }
}

// Quantized forms: add a section's products of a group of rows to `out`. `count` is a constant for whole sections.
// `blocks`: the section in the panel, for the scales; `weights`: its integers as bfloat16.
template <Form form, typename Tiles, typename Count>
void add_section(Tiles& tiles, const Packed<form>& packed, int64_t group, int64_t num_rows, int64_t first, Count count,
                 const uint8_t* blocks, const uint8_t* weights, TileSums* sums, float* out) {
  const int64_t size = packed.group_rows * packed.INPUTS;
  for (int64_t step = 0; step < count; step += 2) {
    const int64_t next = std::min<int64_t>(step + 1, count - 1);
    const Operands operands[2] = {{packed.at(group, first + step), weights + step * step_bytes(form)},
                                  {packed.at(group, first + next), weights + next * step_bytes(form)}};
    if (next > step) {
      clear_tiles<2>(tiles), multiply_tiles<2>(tiles, operands, size), store_tiles<2>(tiles, sums + step);
    } else {
      clear_tiles<1>(tiles), multiply_tiles<1>(tiles, operands, size), store_tiles<1>(tiles, sums + step);
    }
  }
  for (int vector = 0; vector < VECTORS; vector++) {
    const int tile = LANES * vector / 16, lane = LANES * vector % 16;
    Scaling scaling[num_steps(form)];
    for (int64_t step = 0; step < count; step++) scaling[step] = scaling_at<form>(blocks + step * block_bytes(form), vector);
    for (int64_t row = 0; row < num_rows; row++) {
      Floats total = {};
      for (int64_t step = 0; step < count; step++) {
        const float inputs_sum = is_int4(form) ? packed.sums_at(group, first + step)[row] : 0;
        total = add_block<form>(total, load(sums[step][tile][row] + lane), scaling[step], inputs_sum);
      }
      float* to = out + PANEL * row + LANES * vector;
      store(to, load(to) + total);
    }
  }
}

template <Form form, typename Tiles>
void multiply_blocks(const ProductArgs& args, const Packed<form>& packed, Tiles& tiles, const Rows& rows,
                     int64_t number, const uint8_t* panel, uint8_t* widened, TileSums* sums, float* out) {
  constexpr int64_t STEPS = num_steps(form);
  for (int64_t first = 0; first < packed.steps; first += STEPS) {
    const int64_t count = std::min<int64_t>(STEPS, packed.steps - first);
    const uint8_t* section = panel + first * block_bytes(form);
    widen_blocks<form>(section, count, widened);
    for (int64_t group = 0; group < packed.groups; group++) {
      const int64_t start = group * packed.group_rows, size = std::min(packed.group_rows, rows.num_rows - start);
      if (first + count == packed.steps) prefetch_targets(args, rows.first + start, size, PANEL * number);
      const auto add = [&](auto steps) ALWAYS_INLINE {
        add_section<form>(tiles, packed, group, size, first, steps, section, widened, sums, out + PANEL * start);
      };
      if (count == STEPS) add(std::integral_constant<int64_t, STEPS>{});
      else add(count);
    }
  }
}

// Quantized forms, a single row: the same sums as those of tiles, without writing the weights to memory.
template <Form form>
void multiply_row(const Packed<form>& packed, const uint8_t* panel, float* out) {
  constexpr int NUM = LANES == 16 ? 3 : 1;  // vectors whose sums fit into the registers
  const Floats zero = {};
  for (int first = 0; first < VECTORS; first += NUM)
    for (int64_t section = 0; section < packed.steps; section += num_steps(form)) {
      Floats totals[NUM] = {};
      for (int64_t step = section; step < std::min<int64_t>(section + num_steps(form), packed.steps); step++) {
        const uint8_t *block = panel + step * block_bytes(form), *group = block + header_bytes(form);
        const float* x = packed.row_pieces + step * PIECES * packed.INPUTS;
        Floats sums[PIECES][2][NUM] = {};
        for (int start = 0; start < packed.INPUTS; start += GROUP, group += group_bytes(form))
          each_of_group([&](auto i) ALWAYS_INLINE {
            for (int j = 0; j < NUM; j++) {
              const Floats weight = integers_at<form, i>(group, first + j);
              for (int piece = 0; piece < PIECES; piece++) {
                Floats& sum = sums[piece][i % 2][j];
                sum = fma(broadcast(x[piece * packed.INPUTS + start + i]), weight, sum);
              }
            }
          });
        for (int j = 0; j < NUM; j++) {
          Floats sum = zero;
          for (int piece = PIECES - 1; piece >= 0; piece--) sum += sums[piece][0][j] + sums[piece][1][j];
          const float inputs_sum = is_int4(form) ? *packed.sums_at(0, step) : 0;
          totals[j] = add_block<form>(totals[j], sum, scaling_at<form>(block, first + j), inputs_sum);
        }
      }
      for (int j = 0; j < NUM; j++) {
        float* to = out + LANES * (first + j);
        store(to, load(to) + totals[j]);
      }
    }
}

template <Form form, typename Tiles>
void multiply(ProductArgs& args) {
  if (args.num_rows == 0) return;
  Packed<form> packed(args);
  const int64_t rows = round_up(std::min(args.block_rows, args.num_rows), TILE_LINES), inputs = args.num_inputs;
  scratch.reserve(sizeof(float) * 2 * rows * PANEL + sizeof(uint16_t) * PIECES * rows * inputs +
                      sizeof(float) * (rows * packed.steps + PIECES * inputs) +
                      num_steps(form) * (sizeof(TileSums) + step_bytes(form)),
                  7);
  float *products = scratch.array<float>(rows * PANEL), *values = scratch.array<float>(rows * PANEL);
  packed.pieces = scratch.array<uint16_t>(PIECES * rows * inputs);
  packed.row_pieces = scratch.array<float>(PIECES * inputs);
  packed.step_sums = scratch.array<float>(rows * packed.steps);
  TileSums* sums = scratch.array<TileSums>(num_steps(form));
  uint8_t* widened = scratch.array<uint8_t>(num_steps(form) * step_bytes(form));
  std::optional<Tiles> tiles;
  run_items(
      args, products, values,
      [&](const Rows& block) {
        const FlushedToZero mode;
        packed.pack(args, block);
        tiles.reset();
        if (!packed.is_alone) tiles.emplace(packed.group_rows, packed.INPUTS / 2);
      },
      [&](const Rows& block, int64_t number, const uint8_t* panel, float* out) ALWAYS_INLINE {
        const FlushedToZero mode;
        if constexpr (has_scales(form)) {
          if (packed.is_alone) multiply_row<form>(packed, panel, out);
          else multiply_blocks<form>(args, packed, *tiles, block, number, panel, widened, sums, out);
        } else {
          multiply_floats(args, packed, *tiles, block, number, panel, sums, out);
        }
      });
}

template <Form form>
void multiply(ProductArgs& args) {
#if HAS_TILE_INSTRUCTIONS
  if (args.has_tiles) return multiply<form, ProcessorTiles>(args);
#endif
  multiply<form, EmulatedTiles>(args);
}

}  // namespace
}  // namespace logprobe

EXPORT int logprobe_has_tiles() { return logprobe::has_tiles(); }

EXPORT void logprobe_products_bf16x3(void* pointer) {
  using namespace logprobe;
  auto& args = *static_cast<ProductArgs*>(pointer);
  switch (static_cast<Form>(args.form)) {
    case Form::BFLOAT16: return multiply<Form::BFLOAT16>(args);
    case Form::INT4: return multiply<Form::INT4>(args);
    case Form::INT4_WIDE: return multiply<Form::INT4_WIDE>(args);
    case Form::INT8: return multiply<Form::INT8>(args);
    case Form::INT8_WIDE: return multiply<Form::INT8_WIDE>(args);
    default: return;  // kernels/layers/panels.py uses logprobe_products for them
  }
}
#endif
