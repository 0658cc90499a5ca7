// Exported functions of the library, and the arguments of its kernels. Python reads this file with cffi
// (logprobe/kernels/native.py), so it must be self-contained and only hold C declarations.
#pragma once
#include <stdint.h>

enum { MAX_GROUPS = 11 };

// `x_row` and `x_head` are the strides of an array `x` from one row, or head, to the next, in elements.

// First field of every kernel's arguments. Free threads take its items one after another.
typedef struct {
  int64_t next;               // first item that no thread has taken
  int64_t taken[MAX_GROUPS];  // products: items taken per group; threads keep to their group
  int64_t num_items;
} Work;

typedef struct {
  Work work;
  const float *x;  // (num_rows, width)
  const uint8_t *weights;
  const float *bias;               // (num_outputs,), or null
  const uint8_t *value_weights;    // of a second product u, gated by the first, g: activation(g) * u; or null
  const float *value_bias;         // or null
  const float *residual;           // (num_rows, num_outputs) to add; or null
  float *out;                      // (num_rows, num_outputs)
  int64_t x_row, residual_row, out_row;
  int64_t num_rows, width, num_inputs, num_outputs;  // num_inputs: width rounded up to whole blocks
  int64_t panel_bytes, item_panels, block_rows, form, activation;
  int64_t num_threads;  // that share the items of one block, at least 1
  int64_t has_tiles;    // logprobe_products_bf16x3: use the processor's tiles, not emulated ones
  double factor;  // multiplies the result before the residual is added
} ProductArgs;

typedef struct {
  Work work;
  const float *x;  // (num_rows, parts * width)
  const float *weight;    // (width,)
  const float *bias;      // (width,), or null
  const float *residual;  // same layout as `out`, or null
  float *out;
  int64_t x_row, out_row, width, parts, num_rows, block_rows, is_centred;
  double epsilon;
} NormArgs;

typedef struct {
  Work work;
  const float *query, *key, *value;  // (num_rows, heads, dim) each; a head's numbers are contiguous
  const float *cosines, *sines;      // (num_rows, rotary_dim)
  const float *query_scales;         // (num_rows,), or null
  float *out;                        // (num_rows, heads, key_dim)
  float *key_pool, *value_pool;      // (num_slots, kv_heads, dim)
  const int64_t *slots;              // (num_rows,)
  int64_t query_row, query_head, key_row, key_head, value_row, value_head;
  int64_t num_rows, heads, kv_heads, key_dim, value_dim, rotary_dim, is_paired, block_rows;
} RotaryArgs;

typedef struct {
  Work work;
  const float *gates, *values;  // (num_rows, width); values may be null
  float *out;
  int64_t gates_row, values_row, out_row, width, piece, activation;
} GateArgs;

typedef struct {
  Work work;
  float *logits;  // (num_rows, width), replaced by cap * tanh(logits / cap)
  int64_t logits_row, width, piece;
  double cap;
} SoftcapArgs;

typedef struct {
  Work work;
  const float *query, *keys, *values;  // (num_rows, heads, key_dim), (num_slots, kv_heads, dim) each
  float *out;                          // (num_rows, heads, value_dim)
  const float *sinks;                  // (heads,), or null
  int64_t query_row, query_head, keys_row, keys_head, values_row, values_head, out_row, out_head;
  int64_t heads, kv_heads, key_dim, value_dim, window;
  double scale, softcap;  // softcap 0: none
  // attend_rows, (num_rows,) each: row of query and out, and its context in `slots`.
  const int32_t *rows, *begins, *lengths;
  const int32_t *slots;
  int64_t parts;  // work items per row: 1, or one per key/value head
  // attend_chunk: the rows are the last positions of the context.
  const int64_t *chunk_slots;  // (context,)
  int64_t num_rows, context, num_blocks, item_lanes;
} AttentionArgs;

typedef struct {
  Work work;
  const void *logits;
  int64_t logits_row, vocab_size, kind;  // kind 0: float32, 1: float16, 2: bfloat16
  const int32_t *chosen, *num_logprobs;
  int32_t *token_ids;  // (num_rows, width)
  float *logprobs;     // (num_rows, width)
  int64_t width;
  int32_t *ranks;
  float *lse;
  uint8_t *is_valid;
  float *entropy, *varentropy, *margin;  // (num_rows,), each or null
  const int64_t *given_offsets;          // (num_rows + 1,), or null: no ids are given
  const int32_t *given_ids;
  float *given_logprobs;
  int32_t *given_ranks;
} ExtractArgs;

typedef struct {
  Work work;
  const float *logits;
  int64_t logits_row, vocab_size;
  const float *temperatures, *top_ks, *top_ps, *min_ps;  // (num_rows,) each
  const double *uniforms;
  int32_t *token_ids;
  float *cut_logits;
  int32_t *cut_ids;
  uint8_t *is_valid;
} DrawArgs;

// Kernels: run items until all are taken; several threads call one with the same arguments.
void logprobe_attend_chunk(void *args);
void logprobe_attend_rows(void *args);
void logprobe_draw(void *args);
void logprobe_extract(void *args);
void logprobe_gate(void *args);
void logprobe_norm(void *args);
void logprobe_products(void *args);
void logprobe_products_bf16x3(void *args);  // not on Arm; the same bits with and without tiles
void logprobe_rotary(void *args);
void logprobe_softcap(void *args);

typedef struct {
  void (*kernel)(void *args);
  void *args;
  int64_t num_inside;  // threads that run it at present
} Stage;

// Run the stages in order on up to `num_threads` threads; return 0, or -1 if memory cannot be allocated.
int logprobe_run(Stage *stages, int64_t num_stages, int64_t num_threads);

int logprobe_has_tiles(void);            // 1 if this process can use AMX tiles for bfloat16, else 0
int logprobe_can_run(void);              // 1 if this processor has the variant's instructions, else 0
const char *logprobe_compiler(void);     // name and version of the compiler
