// Log-probabilities of rows of logits in one pass: log-normaliser, chosen token, top-k, ranks, given ids.
//
// The k-th largest of the maxima of k or more groups is a lower bound of the k-th largest value, because k groups
// hold a value that is at least as large. Only blocks whose maximum reaches the bound are read again.
#include <functional>
#include <numeric>

#include "common.hpp"
#include "vector.hpp"

namespace logprobe {
namespace {

constexpr int64_t BLOCK = 1024;  // values that stay in the L1 cache between the passes over them
constexpr int GROUPS = 64;       // maximum per block; group i holds every 64th value from i on
constexpr int MIN_GROUPS = 2;
constexpr int64_t FEW_GIVEN = 4;     // up to this many, a count for each is faster than sorting the largest values
constexpr int64_t MANY_GIVEN = 128;  // above this many, sorting the row is faster than a pass for each
constexpr int64_t FEW_PAIRS = 48;    // up to this many, insertion sort is faster than radix sort

// A key that is smaller for a larger float, and equal for -0.0 and 0.0.
uint32_t descending_key(float value) {
  const uint32_t bits = float_to_bits(value + 0.0f);
  return ~(bits & 0x80000000u ? ~bits : bits | 0x80000000u);
}
// (descending key, id), which sorts by descending value, ties by ascending id.
uint64_t pair_of(float value, int64_t id) { return uint64_t{descending_key(value)} << 32 | uint64_t(id); }

struct Pairs {
  uint64_t* start;
  int64_t size;
};

// Sort pairs whose ids are in ascending order; the result is in one of the two arrays.
Pairs sorted(uint64_t* pairs, int64_t size, uint64_t* other) {
  if (size <= FEW_PAIRS) {
    for (int64_t end = 1; end < size; end++) {
      const uint64_t pair = pairs[end];
      int64_t place = end;
      for (; place > 0 && pairs[place - 1] > pair; place--) pairs[place] = pairs[place - 1];
      pairs[place] = pair;
    }
    return {pairs, size};
  }
  int64_t counts[4][256] = {};  // radix sort by the key's bytes, lowest first; stable, so that ids need no pass
  for (int64_t i = 0; i < size; i++)
    for (int digit = 0; digit < 4; digit++) counts[digit][pairs[i] >> (32 + 8 * digit) & 255]++;
  for (int digit = 0; digit < 4; digit++) {
    int64_t *places = counts[digit], place = 0;
    const int shift = 32 + 8 * digit;
    if (places[pairs[0] >> shift & 255] == size) continue;
    for (int value = 0; value < 256; value++) {
      const int64_t count = places[value];
      places[value] = place;
      place += count;
    }
    for (int64_t i = 0; i < size; i++) other[places[pairs[i] >> shift & 255]++] = pairs[i];
    std::swap(pairs, other);
  }
  return {pairs, size};
}

struct Row {
  const float* values;
  int64_t size;
  float* group_maxima;  // (num_blocks, num_groups)
  float* block_maxima;  // (num_blocks,)
  int64_t num_blocks, num_groups;
  uint64_t *pairs, *other_pairs;
  Pairs whole;  // the row's sorted pairs; empty if not sorted

  int64_t block_end(int64_t block) const { return std::min(size, (block + 1) * BLOCK); }
  int64_t num_maxima() const { return num_blocks * num_groups; }

  // The k-th largest of the groups' maxima, k counted from 1.
  float kth_maximum(int64_t k) const {
    auto* copy = reinterpret_cast<float*>(other_pairs);
    std::memcpy(copy, group_maxima, sizeof(float) * num_maxima());
    std::nth_element(copy, copy + k - 1, copy + num_maxima(), std::greater<float>());
    return copy[k - 1];
  }
};

// Compute the maxima of a block's groups; add the number of its values greater than `bound` to `counts`.
void maxima_of(const float* values, float bound, float* maxima, int64_t num_groups, Ints (&counts)[2]) {
  constexpr int NUM = GROUPS / LANES;
  Floats greatest[NUM];
  for (int i = 0; i < NUM; i++) greatest[i] = broadcast(-INFINITE);
  for (int64_t start = 0; start < BLOCK; start += GROUPS)
    for (int i = 0; i < NUM; i++) {
      const Floats x = load(values + start + LANES * i);
      greatest[i] = greater(x, greatest[i]);
      counts[i % 2] -= x > bound;
    }
  int64_t size = GROUPS;
  for (int num = NUM / 2; num >= 1 && LANES * num >= num_groups; num /= 2, size /= 2)
    for (int i = 0; i < num; i++) greatest[i] = greater(greatest[i], greatest[num + i]);
  float all[GROUPS];
  for (int i = 0; i < NUM; i++) store(all + LANES * i, greatest[i]);
  while (size > num_groups) {
    size /= 2;
    for (int64_t i = 0; i < size; i++) all[i] = all[i] > all[size + i] ? all[i] : all[size + i];
  }
  std::memcpy(maxima, all, sizeof(float) * num_groups);
}

struct Sums {  // of a row: largest value m, sums of e**d and d * e**d for d = x - m, values above the chosen one
  float greatest;
  double total, products;
  int64_t num_greater;
};

Sums one_pass(Row& row, float chosen, bool with_products) {
  Sums sums{-INFINITE, 0, 0, 0};
  Ints counts[2] = {};  // two independent counters
  alignas(64) float padded[BLOCK];
  for (int64_t block = 0; block < row.num_blocks; block++) {
    const float* values = row.values + block * BLOCK;
    const int64_t size = row.block_end(block) - block * BLOCK;
    if (size < BLOCK) {
      std::memcpy(padded, values, sizeof(float) * size);
      std::fill(padded + size, padded + BLOCK, -INFINITE);
    }
    float* maxima = row.group_maxima + block * row.num_groups;
    maxima_of(size < BLOCK ? padded : values, chosen, maxima, row.num_groups, counts);
    float greatest = -INFINITE;
    for (int64_t group = 0; group < row.num_groups; group++) greatest = std::max(greatest, maxima[group]);
    row.block_maxima[block] = greatest;
    if (greatest > sums.greatest) {
      const double shift = sums.total > 0 ? double(sums.greatest) - double(greatest) : 0.0;
      sums.products = (sums.products + shift * sums.total) * std::exp(shift);
      sums.total *= std::exp(shift);
      sums.greatest = greatest;
    }
    for (int64_t place = 0; place < BLOCK; place += LINE / 4) prefetch(values + BLOCK + place);
    // As long as all values are -inf, add nothing (weight 0), but keep a NaN.
    const bool is_known = sums.greatest > -INFINITE;
    const float reference = is_known ? sums.greatest : 0.0f, weight = is_known ? 1.0f : 0.0f;
    if (with_products) {
      float totals[2];
      sums_of(values, size, totals, [reference](auto x, auto* found) {
        const auto d = x - reference;
        found[0] = exponential(d);
        found[1] = greater(LOWEST - decltype(x){}, d) * found[0];
      });
      sums.total += weight * totals[0], sums.products += weight * totals[1];
    } else {
      sums.total += weight * sum_of(values, size, [reference](auto x) { return exponential(x - reference); });
    }
  }
  int32_t lanes[LANES];
  counts[0] += counts[1];
  std::memcpy(lanes, counts, sizeof lanes);
  sums.num_greater = std::accumulate(lanes, lanes + LANES, int64_t{0});
  return sums;
}

// Sum (d - mean)**2 * e**d in a second pass, since E[d**2] - E[d]**2 would cancel.
double squares_of(const Row& row, float greatest, float mean) {
  double squares = 0;
  for (int64_t start = 0; start < row.size; start += BLOCK)
    squares += sum_of(row.values + start, std::min(BLOCK, row.size - start), [=](auto x) {
      const auto d = greater(LOWEST - decltype(x){}, x - greatest);
      return (d - mean) * (d - mean) * exponential(d);
    });
  return squares;
}

// Fill `pairs` with the values above `bound`, `ties` with the first ids equal to it; return the number of pairs.
int64_t collect(const Row& row, float bound, int32_t* ties, int64_t max_ties) {
  int64_t num_greater = 0, num_ties = 0;
  for (int64_t block = 0; block < row.num_blocks; block++) {
    const float most = row.block_maxima[block];
    if (most < bound || (most == bound && num_ties == max_ties)) continue;
    int64_t id = block * BLOCK;
    const int64_t end = row.block_end(block);
    while (id < end) {
      if (id + LANES <= end) {  // skip whole vectors below the bound
        if (!any(load(row.values + id) >= bound)) {
          id += LANES;
          continue;
        }
      }
      for (const int64_t stop = std::min<int64_t>(end, id + LANES); id < stop; id++) {
        if (row.values[id] > bound) row.pairs[num_greater++] = pair_of(row.values[id], id);
        else if (row.values[id] == bound && num_ties < max_ties) ties[num_ties++] = int32_t(id);
      }
    }
  }
  return num_greater;
}

void sort_row(Row& row) {
  for (int64_t id = 0; id < row.size; id++) row.pairs[id] = pair_of(row.values[id], id);
  row.whole = sorted(row.pairs, row.size, row.other_pairs);
}

// Write the ids of the k largest values, in order.
void top_ids(const Row& row, int32_t* ids, int64_t k) {
  if (k == 0) return;
  Pairs ordered = row.whole;
  if (ordered.size == 0) {
    const float bound = row.kth_maximum(k);
    const int64_t num_greater = collect(row, bound, ids, k);
    ordered = sorted(row.pairs, num_greater, row.other_pairs);
    for (int64_t place = k - 1; place >= num_greater; place--) ids[place] = ids[place - num_greater];  // the ties
  }
  for (int64_t place = 0; place < std::min(k, ordered.size); place++) ids[place] = int32_t(ordered.start[place]);
}

int64_t num_before(Pairs ordered, uint32_t key) {
  return std::lower_bound(ordered.start, ordered.start + ordered.size, uint64_t{key} << 32) - ordered.start;
}

// Write log-probabilities and ranks of given ids. Ranks of likely ids are looked up in the sorted largest values.
void given(const ExtractArgs& args, const Row& row, int64_t first, int64_t last, double lse) {
  for (int64_t entry = first; entry < last; entry++) {
    args.given_logprobs[entry] = float(double(row.values[args.given_ids[entry]]) - lse);
    args.given_ranks[entry] = 0;
  }
  if (std::isnan(lse)) return;
  Pairs ordered = row.whole;
  const bool is_whole = ordered.size > 0;
  float bound = INFINITE;
  if (!is_whole && last - first > FEW_GIVEN) {
    bound = row.kth_maximum(row.num_maxima() - row.num_maxima() / 16);
    ordered = sorted(row.pairs, collect(row, bound, nullptr, 0), row.other_pairs);
  }
  for (int64_t entry = first; entry < last; entry++) {
    const float value = row.values[args.given_ids[entry]];
    const bool is_sorted = is_whole || value > bound;
    args.given_ranks[entry] = 1 + (is_sorted ? int32_t(num_before(ordered, descending_key(value))) : 0);
  }
  for (int64_t block = 0; block < (is_whole ? 0 : row.num_blocks); block++)
    for (int64_t entry = first; entry < last; entry++) {
      const float value = row.values[args.given_ids[entry]];
      if (value > bound || row.block_maxima[block] <= value) continue;
      int32_t count = 0;
      for (int64_t id = block * BLOCK; id < row.block_end(block); id++) count += row.values[id] > value;
      args.given_ranks[entry] += count;
    }
}

void extract_row(const ExtractArgs& args, int64_t item, Row& row) {
  const int64_t chosen = args.chosen[item], k = args.num_logprobs[item];
  row.whole = {nullptr, 0};
  row.num_groups = MIN_GROUPS;
  while (2 * row.num_maxima() < 3 * k && row.num_groups < GROUPS) row.num_groups *= 2;
  const Sums sums = one_pass(row, row.values[chosen], args.entropy || args.varentropy);
  const bool is_valid = sums.greatest > -INFINITE && !std::isnan(sums.total);
  const double lse = is_valid ? double(sums.greatest) + std::log(sums.total) : NOT_A_NUMBER;
  args.is_valid[item] = is_valid;
  args.ranks[item] = is_valid ? int32_t(sums.num_greater + 1) : 0;
  args.lse[item] = float(lse);
  if (args.entropy)
    args.entropy[item] = is_valid ? float(std::log(sums.total) - sums.products / sums.total) : NOT_A_NUMBER;
  if (args.varentropy)
    args.varentropy[item] =
        is_valid ? float(squares_of(row, sums.greatest, float(sums.products / sums.total)) / sums.total)
                 : NOT_A_NUMBER;
  const int64_t first = args.given_offsets ? args.given_offsets[item] : 0;
  const int64_t last = args.given_offsets ? args.given_offsets[item + 1] : 0;
  if (is_valid && (3 * k > 2 * row.num_maxima() || last - first > MANY_GIVEN)) sort_row(row);
  int32_t* ids = args.token_ids + item * args.width;
  ids[0] = int32_t(chosen);
  std::fill(ids + 1, ids + 1 + k, 0);
  if (is_valid) top_ids(row, ids + 1, k);
  float* logprobs = args.logprobs + item * args.width;
  for (int64_t column = 0; column <= k; column++) logprobs[column] = float(double(row.values[ids[column]]) - lse);
  if (args.margin) {
    int32_t best[2] = {0, 0};
    const bool has_two = row.size >= 2;
    if (is_valid && has_two) top_ids(row, best, 2);
    const double apart = double(row.values[best[0]]) - double(row.values[best[1]]);
    args.margin[item] = !is_valid ? NOT_A_NUMBER : has_two ? float(apart) : INFINITE;
  }
  if (last > first) given(args, row, first, last, lse);
}

void widen_bfloat16(const uint16_t* from, int64_t size, float* to) {
  for (int64_t i = 0; i < size; i++) to[i] = bits_to_float(uint32_t{from[i]} << 16);
}
void widen_float16(const uint16_t* from, int64_t size, float* to) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) store(to + i, load_float16(from + i));
  if (i < size) {
    uint16_t rest[LANES] = {};
    float wide[LANES];
    std::memcpy(rest, from + i, 2 * (size - i));
    store(wide, load_float16(rest));
    std::memcpy(to + i, wide, 4 * (size - i));
  }
}

}  // namespace
}  // namespace logprobe

EXPORT void logprobe_extract(void* pointer) {
  using namespace logprobe;
  auto& args = *static_cast<ExtractArgs*>(pointer);
  const int64_t size = args.vocab_size, num_blocks = ceil_div(size, BLOCK);
  scratch.reserve(4 * (size * (args.kind != 0) + num_blocks * (GROUPS + 1)) + 8 * (2 * size + GROUPS), 5);
  float* wide = scratch.array<float>(args.kind ? size : 0);
  Row row{};
  row.size = size, row.num_blocks = num_blocks;
  row.group_maxima = scratch.array<float>(num_blocks * GROUPS);
  row.block_maxima = scratch.array<float>(num_blocks);
  row.pairs = scratch.array<uint64_t>(size);
  row.other_pairs = scratch.array<uint64_t>(size + GROUPS);  // also holds a copy of a small row's maxima
  for (int64_t item; (item = take(args.work)) >= 0;) {
    const auto* logits = static_cast<const uint8_t*>(args.logits) + item * args.logits_row * (args.kind ? 2 : 4);
    const auto* halves = reinterpret_cast<const uint16_t*>(logits);
    if (args.kind == 1) widen_float16(halves, size, wide);
    if (args.kind == 2) widen_bfloat16(halves, size, wide);
    row.values = args.kind ? wide : reinterpret_cast<const float*>(logits);
    extract_row(args, item, row);
  }
}
