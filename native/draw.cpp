// Draw one token per row from its logits: temperature, top-k, top-p, min-p.
//
// A row's token depends only on the row and its uniform number. Truncation does not sort the whole row: tokens are
// binned by the distance of their logit from the maximum, the counts and weights of the bins show in which bin top-k
// or top-p ends, and only that bin is sorted.
#include <vector>

#include "common.hpp"
#include "vector.hpp"

namespace logprobe {
namespace {

constexpr int64_t BLOCK = 1024;
constexpr float BINS_PER_UNIT = 32;           // per unit of (maximum - logit) / temperature
constexpr int64_t NUM_BINS = 87 * 32 + 1;  // the last bin holds all tokens of negligible weight

struct Cut {  // the last token kept, by descending logit and ascending id; -inf: all are kept
  float logit = -INFINITE;
  int64_t id = 0;
};

struct Row {
  const float* values;
  int64_t size;
  float best, temperature;

  float scaled(float value) const {
    const float d = (value - best) / temperature;
    return d < LOWEST ? LOWEST : d;
  }
  double weight(float value) const { return exponential(scaled(value)); }
  int64_t bin(float value) const { return -static_cast<int64_t>(scaled(value) * BINS_PER_UNIT); }
};

// Return the largest value, or NaN if any is NaN; `place` is its first index.
float maximum(const float* values, int64_t size, int64_t& place) {
  float best = -INFINITE;
  place = 0;
  for (int64_t i = 0; i < size; i++) {
    if (std::isnan(values[i])) {
      place = 0;
      return NOT_A_NUMBER;
    }
    if (values[i] > best) best = values[i], place = i;
  }
  return best;
}

// The ids of one bin, by descending logit and ascending id.
std::vector<int64_t> members(const Row& row, int64_t bin) {
  std::vector<int64_t> ids;
  for (int64_t id = 0; id < row.size; id++)
    if (row.values[id] > -INFINITE && row.bin(row.values[id]) == bin) ids.push_back(id);
  std::stable_sort(ids.begin(), ids.end(), [&](int64_t a, int64_t b) { return row.values[a] > row.values[b]; });
  return ids;
}

Cut cut_of(const Row& row, float top_k, float top_p) {
  std::vector<double> mass(NUM_BINS);
  std::vector<int64_t> count(NUM_BINS);
  for (int64_t id = 0; id < row.size; id++)
    if (row.values[id] > -INFINITE) {  // masked tokens are in no bin
      const float d = row.scaled(row.values[id]);
      const int64_t bin = -static_cast<int64_t>(d * BINS_PER_UNIT);
      mass[bin] += exponential(d);
      count[bin]++;
    }
  int64_t number = top_k > 0 ? std::min<int64_t>(row.size, static_cast<int64_t>(top_k)) : row.size;
  int64_t bin = 0, last = 0;  // `bin`: the one that holds the last of the first `number` tokens
  for (; bin < NUM_BINS && (count[bin] == 0 || number > count[bin]); bin++)
    if (count[bin] > 0) number -= count[bin], last = bin;
  if (bin == NUM_BINS) bin = last, number = count[last];
  std::vector<int64_t> ids = members(row, bin);
  if (top_p < 1) {
    double total = 0, reached = 0;
    for (int64_t i = 0; i < bin; i++) total += mass[i];
    for (int64_t i = 0; i < number; i++) total += row.weight(row.values[ids[i]]);
    const double wanted = total * static_cast<double>(top_p);
    int64_t end = 0;
    for (; end < bin && reached + mass[end] < wanted; end++) reached += mass[end];
    if (end < bin) {
      ids = members(row, end);
      bin = end, number = count[end];
    }
    int64_t kept = 0;
    for (; kept < number - 1; kept++) {
      const double weight = row.weight(row.values[ids[kept]]);
      if (reached + weight >= wanted) break;
      reached += weight;
    }
    number = kept + 1;
  }
  if (number == count[bin] && std::all_of(count.begin() + bin + 1, count.end(), [](int64_t n) { return n == 0; }))
    return {-INFINITE, row.size};
  return {row.values[ids[number - 1]], ids[number - 1]};
}

// Return the weight of a block's kept tokens; of those at the cut's logit, only ids up to the cut's are kept.
double block_mass(const Row& row, int64_t start, const Cut& cut) {
  const float* values = row.values + start;
  const float best = row.best, temperature = row.temperature, limit = cut.logit;
  double total = sum_of(values, std::min(BLOCK, row.size - start), [=](auto x) {
    const auto zero = decltype(x){};
    auto e = exponential((x - best) / temperature);
    return x > limit ? e : zero;
  });
  if (cut.logit > -INFINITE && start <= cut.id) {
    int64_t num_ties = 0;
    for (int64_t id = start; id < std::min({row.size, start + BLOCK, cut.id + 1}); id++)
      num_ties += row.values[id] == cut.logit;
    total += num_ties * row.weight(cut.logit);
  }
  return total;
}

// Return the kept token at which the cumulative weight, in order of ids, exceeds `uniform` times the total.
int64_t pick(const Row& row, const Cut& cut, double uniform) {
  const int64_t num_blocks = ceil_div(row.size, BLOCK);
  std::vector<double> sums(num_blocks);
  double left = 0;
  for (int64_t block = 0; block < num_blocks; block++) left += sums[block] = block_mass(row, block * BLOCK, cut);
  left *= uniform;
  int64_t block = 0, last = num_blocks - 1;
  while (last > 0 && sums[last] == 0) last--;  // rounding must not move the search past the last block with weight
  for (; block < last && left >= sums[block]; block++) left -= sums[block];
  int64_t chosen = -1;
  for (int64_t id = block * BLOCK; id < std::min(row.size, (block + 1) * BLOCK); id++) {
    const float value = row.values[id];
    if (value == -INFINITE || !(value > cut.logit || (value == cut.logit && id <= cut.id))) continue;
    chosen = id;
    left -= row.weight(value);
    if (left < 0) break;
  }
  return chosen;
}

void draw_row(const DrawArgs& args, int64_t item) {
  Row row{args.logits + args.logits_row * item, args.vocab_size, 0, args.temperatures[item]};
  int64_t place;
  row.best = maximum(row.values, row.size, place);
  args.token_ids[item] = int32_t(place);
  args.cut_logits[item] = -INFINITE;
  args.cut_ids[item] = int32_t(row.size);
  args.is_valid[item] = std::isfinite(row.best);
  if (!std::isfinite(row.best) || row.temperature == 0) return;
  Cut cut{-INFINITE, row.size};
  if (args.top_ks[item] > 0 || args.top_ps[item] < 1) cut = cut_of(row, args.top_ks[item], args.top_ps[item]);
  if (args.min_ps[item] > 0) {
    const double floor = row.best + row.temperature * std::log(double(args.min_ps[item]));
    if (float(floor) > cut.logit) cut = {float(floor), row.size};
  }
  args.cut_logits[item] = cut.logit;
  args.cut_ids[item] = int32_t(cut.id);
  args.token_ids[item] = int32_t(pick(row, cut, args.uniforms[item]));
}

}  // namespace
}  // namespace logprobe

EXPORT void logprobe_draw(void* pointer) {
  using namespace logprobe;
  auto& args = *static_cast<DrawArgs*>(pointer);
  for (int64_t item; (item = take(args.work)) >= 0;) draw_row(args, item);
}
