// Products of a few rows with a panel of weights: the innermost loops of linear layers and of attention.
//
// A panel holds PANEL outputs, input-major, so that the weights of one input are contiguous. Its inputs are divided
// into blocks (quantized ones have their own scales) of groups of GROUP inputs; see `Form` and docs/dev/kernels.md.
#pragma once

#include <type_traits>

#include "vector.hpp"

namespace logprobe {

constexpr int PANEL = 48, GROUP = 8;
constexpr int VECTORS = PANEL / LANES;  // per panel
constexpr int RUN = 16;   // products summed separately, because a sum's rounding error grows with its length
constexpr int NO_RUNS = 0;

enum class Form : int64_t { FLOAT32, BFLOAT16, FLOAT16, INT4, INT4_WIDE, INT8, INT8_WIDE };

constexpr bool has_scales(Form form) { return form >= Form::INT4; }
constexpr bool is_int4(Form form) { return form == Form::INT4 || form == Form::INT4_WIDE; }
constexpr bool is_wide(Form form) { return form == Form::INT4_WIDE || form == Form::INT8_WIDE; }
constexpr int block_inputs(Form form) {
  return !has_scales(form) ? GROUP : form == Form::INT8_WIDE ? 16 : 32;
}
constexpr int header_bytes(Form form) {
  return !has_scales(form) ? 0 : PANEL * (is_wide(form) ? 4 : 2) * (is_int4(form) ? 2 : 1);
}
constexpr int group_bytes(Form form) {
  return GROUP * PANEL * (form == Form::FLOAT32 ? 8 : is_int4(form) ? 1 : has_scales(form) ? 2 : 4) / 2;
}
constexpr int block_bytes(Form form) {
  return header_bytes(form) + block_inputs(form) / GROUP * group_bytes(form);
}

// The sums of a tile, some rows by some or all vectors of a panel, stay in registers.
constexpr int TILE_ROWS = LANES == 16 ? 8 : 4;
constexpr int tile_vectors(int num_rows, Form form) {
  return LANES == 4 || (LANES == 8 && num_rows <= 2 && !has_scales(form)) ? 6 : 3;
}

// A vector of a block's scales (`part` 0) or summands (1).
template <Form form>
INLINE Floats header_at(const uint8_t* block, int part, int vector) {
  const int place = PANEL * part + LANES * vector;
  if constexpr (is_wide(form)) return load(reinterpret_cast<const float*>(block) + place);
  return load_float16(block + 2 * place);
}

// A block's header as float32, in memory, so that it takes no registers away from the sums.
template <Form form>
struct Header {
  alignas(64) float values[2][PANEL];

  ALWAYS_INLINE void read(const uint8_t* block, int first = 0, int num_vectors = VECTORS) {
    if constexpr (has_scales(form))
      for (int part = 0; part < (is_int4(form) ? 2 : 1); part++)
        for (int j = first; j < first + num_vectors; j++)
          store(values[part] + LANES * j, header_at<form>(block, part, j));
  }
};

// The weights of input `i` of a group; with a scale and a summand, rounded once.
template <Form form, int i>
INLINE Floats weights_at(const uint8_t* group, const Header<form>& header, int vector) {
  if constexpr (form == Form::FLOAT32)
    return load(reinterpret_cast<const float*>(group) + PANEL * i + LANES * vector);
  if constexpr (form == Form::FLOAT16) return load_float16(group + 2 * (PANEL * i + LANES * vector));
  if constexpr (form == Form::BFLOAT16) {  // a lane holds inputs i and i + 1
    const Ints both = load_ints(group + 4 * (PANEL * (i / 2) + LANES * vector));
    return floats_of(i % 2 ? both & broadcast(static_cast<int32_t>(0xFFFF0000)) : both << 16);
  }
  const Floats scale = load(header.values[0] + LANES * vector);
  if constexpr (is_int4(form)) {
    const Floats number = int4<i>(load_ints(group + 4 * LANES * vector));
    return fma(number, scale, load(header.values[1] + LANES * vector));
  }
  return load_int8(group + PANEL * i + LANES * vector) * scale;
}

// Call `use.template operator()<0>()` to `<GROUP - 1>`: the loop over a group's inputs, unrolled.
template <typename Use>
INLINE void each_of_group(Use use) {
  use(std::integral_constant<int, 0>{}), use(std::integral_constant<int, 1>{});
  use(std::integral_constant<int, 2>{}), use(std::integral_constant<int, 3>{});
  use(std::integral_constant<int, 4>{}), use(std::integral_constant<int, 5>{});
  use(std::integral_constant<int, 6>{}), use(std::integral_constant<int, 7>{});
}

// The rows of a tile, `stride` numbers apart.
struct RowsOf {
  const float* start;
  int64_t stride;
  ALWAYS_INLINE float at(int row, int64_t input) const { return start[row * stride + input]; }
};

// The rows of a tile, stored column by column.
struct ColumnsOf {
  const float* start;
  int64_t stride;
  ALWAYS_INLINE float at(int row, int64_t input) const { return start[input * stride + row]; }
};

// The rows of a tile, by pointer.
template <int ROWS>
struct RowsAt {
  const float* rows[ROWS];
  ALWAYS_INLINE float at(int row, int64_t input) const { return rows[row][input]; }
};

// Add the products of a tile of rows with the vectors of a panel from `vector` on to `out`, (ROWS, PANEL). Each sum
// runs over the inputs in order by fused multiply-adds, for any number of rows. With RUN_INPUTS, each run of that many
// inputs is summed separately, and then the runs are added.
template <Form form, int ROWS, int RUN_INPUTS, typename X>
INLINE void multiply_vectors(const uint8_t* panel, int64_t num_inputs, const X& x, int vector, float* out) {
  constexpr int NUM = tile_vectors(ROWS, form), STEP = RUN_INPUTS ? RUN_INPUTS : GROUP;
  constexpr int BLOCK = block_inputs(form) > STEP ? block_inputs(form) : STEP;
  Floats sums[ROWS][NUM] = {}, totals[ROWS][NUM] = {};
  Header<form> header;
  for (int64_t start = 0; start < num_inputs; start += BLOCK) {
    header.read(panel, vector, NUM);
    panel += header_bytes(form);
    for (int first = 0; first < BLOCK; first += STEP) {
#pragma GCC unroll 2
      for (int place = first; place < first + STEP; place += GROUP) {
        each_of_group([&](auto i) ALWAYS_INLINE {
          const bool begins = RUN_INPUTS && i == 0 && place == first;
          const auto add = [&](int row, int j, Floats value, Floats weight) ALWAYS_INLINE {
            sums[row][j] = begins ? value * weight : fma(value, weight, sums[row][j]);
          };
          if constexpr (ROWS <= 2) {  // keep the rows' values in registers, otherwise the weights
            Floats values[ROWS];
            for (int row = 0; row < ROWS; row++) values[row] = broadcast(x.at(row, start + place + i));
            for (int j = 0; j < NUM; j++) {
              const Floats weight = weights_at<form, i>(panel, header, vector + j);
              for (int row = 0; row < ROWS; row++) add(row, j, values[row], weight);
            }
          } else {
            Floats weights[NUM];
            for (int j = 0; j < NUM; j++) weights[j] = weights_at<form, i>(panel, header, vector + j);
            for (int row = 0; row < ROWS; row++) {
              const Floats value = broadcast(x.at(row, start + place + i));
              for (int j = 0; j < NUM; j++) add(row, j, value, weights[j]);
            }
          }
        });
        panel += group_bytes(form);
      }
      if constexpr (RUN_INPUTS != 0)
        for (int row = 0; row < ROWS; row++)
          for (int j = 0; j < NUM; j++) totals[row][j] += sums[row][j];
    }
  }
  for (int row = 0; row < ROWS; row++)
    for (int j = 0; j < NUM; j++) {
      float* place = out + PANEL * row + LANES * (vector + j);
      store(place, load(place) + (RUN_INPUTS ? totals : sums)[row][j]);
    }
}

// `multiply_vectors` for all vectors of the panel.
template <Form form, int ROWS, int RUN_INPUTS, typename X>
INLINE void multiply_tile(const uint8_t* panel, int64_t num_inputs, const X& x, float* out) {
  for (int vector = 0; vector < VECTORS; vector += tile_vectors(ROWS, form))
    multiply_vectors<form, ROWS, RUN_INPUTS>(panel, num_inputs, x, vector, out);
}

// `multiply_tile` for 1 to MOST rows, a number known at run time.
template <Form form, int MOST, int RUN_INPUTS, typename X>
INLINE void multiply_rows(int64_t num_rows, const uint8_t* panel, int64_t num_inputs, const X& x, float* out) {
  if constexpr (MOST > 1)
    if (num_rows < MOST) return multiply_rows<form, MOST - 1, RUN_INPUTS>(num_rows, panel, num_inputs, x, out);
  multiply_tile<form, MOST, RUN_INPUTS>(panel, num_inputs, x, out);
}

}  // namespace logprobe
