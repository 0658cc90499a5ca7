// Attention over the KV cache, read in place, for single rows and for prompt chunks.
//
// Both process a context in blocks of BLOCK_KEYS from its start and add in the same order, so a row has the same bits
// in either kernel and in any chunk. When a block has a larger score, the sums of earlier blocks are scaled down
// (FlashAttention, Dao et al., 2022). A row's weights are summed in float64: models give most of the weight to one
// token, and in float32 the sum would lose thousands of small weights.
#include "common.hpp"
#include "gates.hpp"
#include "tiles.hpp"

namespace logprobe {
namespace {

constexpr int64_t BLOCK_KEYS = 192;  // measured; a panel's sums are read and written once per block
constexpr float LEAST = -3e38f;      // below every score except that of a masked key, -inf

// ---- single rows: scores have keys as lanes, sums have the elements of a value as lanes ----

constexpr int MAX_QUERIES = 4;             // query heads of one key head whose sums stay in registers
constexpr int MANY_KEYS = 2 * LANES;  // two vectors of keys, whose sums are independent
constexpr int MANY_VALUES = 8;

struct RowScratch {
  float *queries, *scores, *block, *sums;  // (MAX_QUERIES, key_dim, BLOCK_KEYS, value_dim, value_dim)
};

// Get pointers to COUNT keys or values, repeating the last one if there are fewer; prefetch the next COUNT.
template <int COUNT>
void find(const float* start, int64_t stride, const int32_t* slots, int64_t first, int64_t size, int64_t dim,
          const float** places) {
  for (int i = 0; i < COUNT; i++) {
    places[i] = start + stride * slots[std::min(first + i, size - 1)];
    const float* ahead = start + stride * slots[std::min(first + i + COUNT, size - 1)];
    for (int64_t place = 0; place < dim; place += LINE / 4) prefetch(ahead + place);
  }
}

// Compute scores of NUM vectors of keys for QUERIES queries; each sum runs over the elements in order.
template <int QUERIES, int NUM>
void score(const float* queries, int64_t dim, const float* const* keys, float* scores) {
  Floats sums[QUERIES][NUM] = {};
  const auto add = [&](int64_t number, int group, Floats x) ALWAYS_INLINE {
    for (int query = 0; query < QUERIES; query++)
      sums[query][group] = fma(broadcast(queries[query * dim + number]), x, sums[query][group]);
  };
  int64_t number = 0;
  for (; number + 4 <= dim; number += 4)
    for (int group = 0; group < NUM; group++) {
      const float* places[LANES];
      for (int lane = 0; lane < LANES; lane++) places[lane] = keys[LANES * group + lane] + number;
      Floats rows[4], transposed[4];
      for (int row = 0; row < 4; row++) rows[row] = load_fours(places + row, 4);
      transpose_fours(rows, transposed);
      for (int row = 0; row < 4; row++) add(number + row, group, transposed[row]);
    }
  for (; number < dim; number++)
    for (int group = 0; group < NUM; group++) {
      Floats x;
      for (int lane = 0; lane < LANES; lane++) x[lane] = keys[LANES * group + lane][number];
      add(number, group, x);
    }
  for (int query = 0; query < QUERIES; query++)
    for (int group = 0; group < NUM; group++) store(scores + BLOCK_KEYS * query + LANES * group, sums[query][group]);
}

// Add COUNT weighted values to the sums of QUERIES queries, in order.
template <int QUERIES, int COUNT>
void weigh(const float* weights, const float* const* values, int64_t dim, float* sums) {
  int64_t number = 0;
  for (; number + LANES <= dim; number += LANES) {
    Floats totals[QUERIES];
    for (int query = 0; query < QUERIES; query++) totals[query] = load(sums + dim * query + number);
    for (int key = 0; key < COUNT; key++) {
      const Floats value = load(values[key] + number);
      for (int query = 0; query < QUERIES; query++)
        totals[query] = fma(broadcast(weights[BLOCK_KEYS * query + key]), value, totals[query]);
    }
    for (int query = 0; query < QUERIES; query++) store(sums + dim * query + number, totals[query]);
  }
  for (; number < dim; number++)
    for (int query = 0; query < QUERIES; query++)
      for (int key = 0; key < COUNT; key++)
        sums[dim * query + number] =
            fma(weights[BLOCK_KEYS * query + key], values[key][number], sums[dim * query + number]);
}

// Replace a query's scores by their exponentials; return the factor for the sums of earlier blocks.
float soften(float* scores, int64_t count, float& largest) {
  const float before = largest;
  for (int64_t key = 0; key < count; key++) largest = scores[key] > largest ? scores[key] : largest;
  const float reference = std::max(largest, LEAST);
  int64_t key = 0;
  for (; key + LANES <= count; key += LANES) {
    const Floats x = load(scores + key);
    store(scores + key, x < broadcast(LEAST) ? Floats{} : exponential(x - reference));
  }
  for (; key < count; key++) scores[key] = scores[key] < LEAST ? 0.0f : exponential(scores[key] - reference);
  return exponential(before - reference);
}

// Compute attention of one row for QUERIES query heads of one key head.
template <int QUERIES>
void attend_row(const AttentionArgs& args, int64_t number, int64_t kv_head, int64_t first_head, const RowScratch& own) {
  const int64_t key_dim = args.key_dim, dim = args.value_dim, length = args.lengths[number];
  const int32_t* slots = args.slots + args.begins[number];
  const int64_t row = args.rows[number];
  const float *keys = args.keys + args.keys_head * kv_head, *values = args.values + args.values_head * kv_head;
  float largest[QUERIES], factors[QUERIES];
  double totals[QUERIES];
  for (int query = 0; query < QUERIES; query++) {
    const float* x = args.query + args.query_row * row + args.query_head * (first_head + query);
    for (int64_t i = 0; i < key_dim; i++) own.queries[key_dim * query + i] = x[i] * float(args.scale);
    largest[query] = args.sinks ? args.sinks[first_head + query] : -INFINITE;
    totals[query] = args.sinks ? 1 : 0;
  }
  std::fill(own.sums, own.sums + QUERIES * dim, 0.0f);
  const int64_t start = std::max<int64_t>(0, length - args.window);
  for (int64_t first = start / BLOCK_KEYS * BLOCK_KEYS; first < length; first += BLOCK_KEYS) {
    const int32_t* seen = slots + std::max(start, first);
    const int64_t count = std::min(length, first + BLOCK_KEYS) - std::max(start, first);
    const float* places[MANY_KEYS];
    for (int64_t key = 0; key < count; key += MANY_KEYS)
      if (count - key > LANES) {
        find<MANY_KEYS>(keys, args.keys_row, seen, key, count, key_dim, places);
        score<QUERIES, 2>(own.queries, key_dim, places, own.scores + key);
      } else {
        find<LANES>(keys, args.keys_row, seen, key, count, 0, places);
        score<QUERIES, 1>(own.queries, key_dim, places, own.scores + key);
      }
    for (int query = 0; query < QUERIES; query++) {
      float* scores = own.scores + BLOCK_KEYS * query;
      if (args.softcap > 0) soft_cap(scores, count, float(args.softcap));
      factors[query] = soften(scores, count, largest[query]);
      totals[query] *= factors[query];
    }
    for (int64_t key = 0; key < count; key++)  // inner loop over queries, whose sums are independent
      for (int query = 0; query < QUERIES; query++) totals[query] += own.scores[BLOCK_KEYS * query + key];
    std::fill(own.block, own.block + QUERIES * dim, 0.0f);
    int64_t key = 0;
    for (; key + MANY_VALUES <= count; key += MANY_VALUES) {
      find<MANY_VALUES>(values, args.values_row, seen, key, count, dim, places);
      weigh<QUERIES, MANY_VALUES>(own.scores + key, places, dim, own.block);
    }
    for (; key < count; key++) {
      find<1>(values, args.values_row, seen, key, count, 0, places);
      weigh<QUERIES, 1>(own.scores + key, places, dim, own.block);
    }
    for (int query = 0; query < QUERIES; query++)
      for (int64_t i = dim * query; i < dim * (query + 1); i++) own.sums[i] = own.sums[i] * factors[query] + own.block[i];
  }
  for (int query = 0; query < QUERIES; query++) {
    const auto share = float(1 / totals[query]);
    float* out = args.out + args.out_row * row + args.out_head * (first_head + query);
    for (int64_t i = 0; i < dim; i++) out[i] = own.sums[dim * query + i] * share;
  }
}

template <int MOST>
void attend_queries(const AttentionArgs& args, int64_t number, int64_t kv_head, int64_t first_head, int64_t count,
                    const RowScratch& own) {
  if constexpr (MOST > 1)
    if (count < MOST) return attend_queries<MOST - 1>(args, number, kv_head, first_head, count, own);
  attend_row<MOST>(args, number, kv_head, first_head, own);
}

// ---- chunks: scores and sums have query rows as lanes, in panels ----

constexpr int64_t MAX_LANES = 4 * PANEL;  // per item: query rows that share a block of keys

struct Panel {  // query rows of one key head, and their running results
  const float* queries;  // (width, PANEL), scaled
  const int32_t* positions;
  float* largest;
  double* totals;
  float* sums;  // (dims, PANEL)
};

struct Block {  // keys and values, copied to contiguous memory
  int64_t first, size;
  const float *keys, *values;  // (BLOCK_KEYS, width) and (BLOCK_KEYS, dims)
  bool is_finite;              // True if all values are finite
};

bool is_finite(const float* x, int64_t size) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < size; i++) largest = std::max(largest, float_to_bits(x[i]) & 0x7FFFFFFF);
  return largest < 0x7F800000;
}

// Replace scores, (num_keys, PANEL), by their exponentials, per lane; return true if any of `factors` is not 1.
bool soften_lanes(float* scores, int64_t num_keys, const Panel& panel, float* factors) {
  bool is_scaled = false;
  for (int j = 0; j < PANEL; j += LANES) {
    const Floats before = load(panel.largest + j);
    Floats largest = before;
    for (int64_t key = 0; key < num_keys; key++) largest = greater(load(scores + PANEL * key + j), largest);
    store(panel.largest + j, largest);
    const Floats least = broadcast(LEAST), reference = largest > least ? largest : least;
    const Floats factor = exponential(before - reference);
    store(factors + j, factor);
    is_scaled |= any(factor != 1.0f);
    Doubles totals[2];
    std::memcpy(totals, panel.totals + j, sizeof totals);
    totals[0] *= low_doubles(factor), totals[1] *= high_doubles(factor);
    for (int64_t key = 0; key < num_keys; key++) {
      const Floats x = load(scores + PANEL * key + j);
      const Floats weight = x < least ? Floats{} : exponential(x - reference);
      store(scores + PANEL * key + j, weight);
      totals[0] += low_doubles(weight), totals[1] += high_doubles(weight);
    }
    std::memcpy(panel.totals + j, totals, sizeof totals);
  }
  return is_scaled;
}

// True if the row at a position attends to a key.
bool sees(int64_t position, int64_t key, int64_t window) { return position >= key && position - key < window; }

// Set the scores of keys that a lane's row does not attend to to -inf.
void hide(float* scores, int64_t num_keys, int64_t first_key, const int32_t* positions, int64_t window) {
  for (int64_t key = 0; key < num_keys; key++)
    for (int lane = 0; lane < PANEL; lane++)
      if (!sees(positions[lane], first_key + key, window)) scores[PANEL * key + lane] = -INFINITE;
}

// Add the weighted values of the keys that each lane attends to. Used if values are not finite, since 0 * NaN and
// 0 * inf are not 0.
void weigh_seen(const float* scores, const float* values, int64_t num_keys, int64_t first_key, const Panel& panel,
                int64_t dims, int64_t window) {
  for (int64_t number = 0; number < dims; number++)
    for (int lane = 0; lane < PANEL; lane++) {
      float sum = 0;
      for (int64_t key = 0; key < num_keys; key++)
        if (sees(panel.positions[lane], first_key + key, window))
          sum = fma(scores[PANEL * key + lane], values[dims * key + number], sum);
      panel.sums[PANEL * number + lane] += sum;
    }
}

// Add the attention over a block of keys to a panel's sums.
void attend_block(const AttentionArgs& args, const Block& block, const Panel& panel, int64_t width, int64_t dims,
                  float* scores, float* factors) {
  // Skip keys at both ends that no row attends to; they would add exact zeros.
  const int64_t first_row = panel.positions[0], last_row = panel.positions[PANEL - 1];
  const int64_t skipped = std::max<int64_t>(0, first_row + 1 - args.window - block.first) / GROUP * GROUP;
  const int64_t num_keys = std::min(block.size, last_row + 1 - block.first) - skipped;
  if (num_keys <= 0) return;
  const int64_t first_key = block.first + skipped, filled = round_up(num_keys, GROUP);
  const float *keys = block.keys + width * skipped, *values = block.values + dims * skipped;
  const auto* queries = reinterpret_cast<const uint8_t*>(panel.queries);
  std::fill(scores, scores + PANEL * filled, 0.0f);
  for (int64_t key = 0; key < num_keys; key += TILE_ROWS)
    multiply_rows<Form::FLOAT32, TILE_ROWS, NO_RUNS>(std::min<int64_t>(TILE_ROWS, num_keys - key), queries, width,
                                                     RowsOf{keys + width * key, width}, scores + PANEL * key);
  if (args.softcap > 0) soft_cap(scores, PANEL * num_keys, float(args.softcap));
  if (first_row < first_key + num_keys - 1 || last_row - args.window >= first_key)
    hide(scores, num_keys, first_key, panel.positions, args.window);
  if (soften_lanes(scores, num_keys, panel, factors))
    for (int64_t number = 0; number < dims; number++)
      for (int lane = 0; lane < PANEL; lane++) panel.sums[PANEL * number + lane] *= factors[lane];
  if (!block.is_finite) return weigh_seen(scores, values, num_keys, first_key, panel, dims, args.window);
  for (int64_t number = 0; number < dims; number += TILE_ROWS)
    multiply_tile<Form::FLOAT32, TILE_ROWS, NO_RUNS>(reinterpret_cast<const uint8_t*>(scores), filled,
                                                     ColumnsOf{values + number, dims}, panel.sums + PANEL * number);
}

}  // namespace
}  // namespace logprobe

EXPORT void logprobe_attend_rows(void* pointer) {
  using namespace logprobe;
  auto& args = *static_cast<AttentionArgs*>(pointer);
  const int64_t groups = args.heads / args.kv_heads, parts = args.parts;
  scratch.reserve(4 * MAX_QUERIES * (args.key_dim + BLOCK_KEYS + 2 * args.value_dim), 4);
  RowScratch own;
  own.queries = scratch.array<float>(MAX_QUERIES * args.key_dim);
  own.scores = scratch.array<float>(MAX_QUERIES * BLOCK_KEYS);
  own.block = scratch.array<float>(MAX_QUERIES * args.value_dim);
  own.sums = scratch.array<float>(MAX_QUERIES * args.value_dim);
  for (int64_t item; (item = take(args.work)) >= 0;) {
    const int64_t row = item / parts, part = item % parts;
    for (int64_t head = part * args.kv_heads / parts; head < (part + 1) * args.kv_heads / parts; head++)
      for (int64_t first = 0; first < groups; first += MAX_QUERIES)
        attend_queries<MAX_QUERIES>(args, row, head, head * groups + first,
                                    std::min<int64_t>(MAX_QUERIES, groups - first), own);
  }
}

EXPORT void logprobe_attend_chunk(void* pointer) {
  using namespace logprobe;
  auto& args = *static_cast<AttentionArgs*>(pointer);
  const int64_t key_dim = args.key_dim, value_dim = args.value_dim, groups = args.heads / args.kv_heads;
  const int64_t width = round_up(key_dim, GROUP), dims = round_up(value_dim, TILE_ROWS);
  scratch.reserve(4 * (MAX_LANES * (width + dims) + BLOCK_KEYS * (width + dims + PANEL) + PANEL + 2 * MAX_LANES) +
                      8 * MAX_LANES,
                  9);
  float *queries = scratch.array<float>(MAX_LANES * width), *sums = scratch.array<float>(MAX_LANES * dims);
  float *keys = scratch.array<float>(BLOCK_KEYS * width), *values = scratch.array<float>(BLOCK_KEYS * dims);
  float *scores = scratch.array<float>(BLOCK_KEYS * PANEL), *factors = scratch.array<float>(PANEL);
  auto* largest = scratch.array<float>(MAX_LANES);
  auto* positions = scratch.array<int32_t>(MAX_LANES);
  auto* totals = scratch.array<double>(MAX_LANES);
  std::fill(keys, keys + BLOCK_KEYS * width, 0.0f);
  std::fill(values, values + BLOCK_KEYS * dims, 0.0f);
  for (int64_t item; (item = take(args.work)) >= 0;) {
    // The last rows have the longest contexts, so they go first, to balance the threads' load.
    const int64_t head = item % args.kv_heads;
    const int64_t first = (args.num_blocks - 1 - item / args.kv_heads) * args.item_lanes;
    const int64_t count = std::min(args.item_lanes, args.num_rows * groups - first);
    const int64_t num_lanes = round_up(count, PANEL);
    for (int64_t lane = 0; lane < num_lanes; lane++) {  // padding lanes are copies of the last row
      const int64_t place = first + std::min(lane, count - 1), row = place / groups;
      const int64_t query_head = head * groups + place % groups;
      const float* x = args.query + args.query_row * row + args.query_head * query_head;
      float* panel = queries + lane / PANEL * PANEL * width + lane % PANEL;
      for (int64_t i = 0; i < width; i++) panel[PANEL * i] = i < key_dim ? x[i] * float(args.scale) : 0.0f;
      positions[lane] = int32_t(args.context - args.num_rows + row);
      largest[lane] = args.sinks ? args.sinks[query_head] : -INFINITE;
      totals[lane] = args.sinks ? 1 : 0;
    }
    std::fill(sums, sums + num_lanes * dims, 0.0f);
    const int64_t seen_from = std::max<int64_t>(0, positions[0] + 1 - args.window), end = positions[num_lanes - 1] + 1;
    for (int64_t first_key = seen_from / BLOCK_KEYS * BLOCK_KEYS; first_key < end; first_key += BLOCK_KEYS) {
      const int64_t size = std::min(end - first_key, BLOCK_KEYS);
      for (int64_t key = 0; key < size; key++) {
        const int64_t slot = args.chunk_slots[first_key + key];
        std::memcpy(keys + width * key, args.keys + args.keys_row * slot + args.keys_head * head, 4 * key_dim);
        std::memcpy(values + dims * key, args.values + args.values_row * slot + args.values_head * head, 4 * value_dim);
      }
      std::fill(values + dims * size, values + dims * round_up(size, GROUP), 0.0f);
      const Block block{first_key, size, keys, values, is_finite(values, dims * size)};
      for (int64_t lane = 0; lane < count; lane += PANEL)
        attend_block(args, block,
                     Panel{queries + lane * width, positions + lane, largest + lane, totals + lane, sums + lane * dims},
                     width, dims, scores, factors);
    }
    for (int64_t lane = 0; lane < count; lane++) {
      const int64_t place = first + lane, row = place / groups, query_head = head * groups + place % groups;
      const auto share = float(1 / totals[lane]);
      float* out = args.out + args.out_row * row + args.out_head * query_head;
      const float* panel = sums + lane / PANEL * PANEL * dims + lane % PANEL;
      for (int64_t i = 0; i < value_dim; i++) out[i] = panel[PANEL * i] * share;
    }
  }
}
