// The arguments of every kernel, as Python fills them in: each field takes eight bytes, so that no compiler pads.
// `logprobe/kernels/native.py` declares the same fields in the same order, which a test holds to `layouts`.
#pragma once

#include "common.hpp"

namespace logprobe {

struct ProductArgs : Work {
  const float* x;  // (num_rows, width)
  const uint8_t* weights;
  const float* bias;               // (num_outputs,), or null
  const uint8_t* value_weights;    // a second product u; the first is its gate g: activation(g) * u; or null
  const float* value_bias;         // or null
  const float* residual;           // (num_rows, num_outputs) to add; or null
  float* out;                      // (num_rows, num_outputs)
  int64_t x_stride, residual_stride, out_stride;  // numbers from one row to the next
  int64_t num_rows, width, num_inputs, num_outputs;  // num_inputs: width filled up to whole blocks
  int64_t panel_bytes, item_panels, block_rows, form, activation;
  double factor;  // of all that before the residual is added
};

struct NormArgs : Work {
  const float* x;  // (num_rows, parts * width)
  const float* weight;    // (width,)
  const float* bias;      // (width,), or null
  const float* residual;  // laid out as `out`, or null
  float* out;
  int64_t x_stride, out_stride, width, parts, num_rows, block_rows, is_centred;
  double epsilon;
};

struct RotaryArgs : Work {
  const float *query, *key, *value;  // (num_rows, heads, dim) each; a head's numbers are contiguous
  const float *cosines, *sines;      // (num_rows, rotary_dim)
  const float* query_scales;         // (num_rows,), or null
  float* out;                        // (num_rows, heads, key_dim)
  float *key_pool, *value_pool;      // (num_slots, kv_heads, dim)
  const int64_t* slots;              // (num_rows,)
  int64_t query_row, query_head, key_row, key_head, value_row, value_head;  // strides in numbers
  int64_t num_rows, heads, kv_heads, key_dim, value_dim, rotary_dim, is_paired, block_rows;
};

struct GateArgs : Work {
  const float *gates, *values;  // (num_rows, width); values may be null
  float* out;
  int64_t gates_stride, values_stride, out_stride, width, piece, activation;
};

struct StoreArgs : Work {
  const float *keys, *values;  // (num_rows, key_width) and (num_rows, value_width)
  float *key_pool, *value_pool;
  const int64_t* slots;
  int64_t key_width, value_width, num_rows, block_rows;
};

struct AttentionArgs : Work {
  const float *query, *keys, *values;
  float* out;
  const float* sinks;  // (heads,), or null
  int64_t query_row, query_head, key_row, key_head, value_row, value_head, out_row, out_head;  // strides in numbers
  int64_t heads, kv_heads, key_dim, value_dim, window;
  double scale, softcap;  // softcap 0: none
};

struct AttendRowsArgs : AttentionArgs {
  const int32_t *rows, *begins, *lengths;  // (num_rows,): row of query and out, its context in `slots`
  const int32_t* slots;
  int64_t parts;  // of the key/value heads, an item each: 1, or as many as there are heads
};

struct AttendChunkArgs : AttentionArgs {
  const int64_t* slots;  // (context,)
  int64_t num_rows, context, num_blocks, item_lanes;
};

struct ExtractArgs : Work {
  const void* logits;
  int64_t row_bytes, vocab_size, kind;  // kind 0: float32, 1: float16, 2: bfloat16
  const int32_t *chosen, *num_logprobs;
  int32_t* token_ids;  // (num_rows, width)
  float* logprobs;     // (num_rows, width)
  int64_t width;
  int32_t* ranks;
  float* lse;
  uint8_t* is_valid;
  float *entropy, *varentropy, *margin;  // (num_rows,), each or null
  const int64_t* given_offsets;          // (num_rows + 1,), or null: no ids are given
  const int32_t* given_ids;
  float* given_logprobs;
  int32_t* given_ranks;
};

struct PeakArgs : Work {
  float* factors;  // one at the beginning of a cache line for each item
  int64_t num_turns;
};

struct DrawArgs : Work {
  const float* logits;
  int64_t row_stride, vocab_size;
  const float *temperatures, *top_ks, *top_ps, *min_ps;  // (num_rows,) each
  const double* uniforms;
  int32_t* token_ids;
  float* cut_logits;
  int32_t* cut_ids;
  uint8_t* is_valid;
};

}  // namespace logprobe
