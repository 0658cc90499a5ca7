// Runs every kernel on fixed inputs and prints a digest of its output bits, one line per case. Builds for different
// architectures must print the same lines (tests/kernels/test_aarch64.py).
#include <cmath>
#include <cstdio>
#include <vector>

#include "../common.hpp"
#include "../gates.hpp"
#include "../tiles.hpp"

using namespace logprobe;

namespace {

uint64_t state = 1;

uint64_t random_bits() {  // SplitMix64
  uint64_t z = state += 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

// In [-scale, scale), exact multiples of a power of two times `scale`.
float random_float(float scale = 1) { return scale * (float(int32_t(random_bits() >> 40) - (1 << 23)) / (1 << 23)); }

std::vector<float> random_floats(size_t count, float scale = 1) {
  std::vector<float> x(count);
  for (auto& value : x) value = random_float(scale);
  return x;
}

uint16_t random_half() { return uint16_t((random_bits() & 0x83FF) | (8 + random_bits() % 7) << 10); }  // finite

template <typename T>
void print(const char* name, int64_t number, const std::vector<T>& out) {
  uint64_t digest = 0xCBF29CE484222325u;  // FNV-1a
  const auto* bytes = reinterpret_cast<const uint8_t*>(out.data());
  for (size_t i = 0; i < sizeof(T) * out.size(); i++) digest = (digest ^ bytes[i]) * 0x100000001B3u;
  std::printf("%s %lld %016llx\n", name, static_cast<long long>(number), static_cast<unsigned long long>(digest));
}

template <typename Args>
void run(void (*kernel)(void*), Args& args, int64_t num_items) {
  args.work.num_items = num_items;
  Stage stage{kernel, &args, 0};
  if (logprobe_run(&stage, 1, 2)) std::abort();
}

template <Form form>
std::vector<uint8_t> random_panels(int64_t num_panels, int64_t num_inputs) {
  std::vector<uint8_t> panels;
  const auto put = [&](const auto& value) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
    panels.insert(panels.end(), bytes, bytes + sizeof value);
  };
  for (int64_t block = 0; block < num_panels * num_inputs / block_inputs(form); block++) {
    for (int i = 0; i < header_bytes(form) / (is_wide(form) ? 4 : 2); i++)
      if (is_wide(form)) put(random_float());
      else put(random_half());
    for (int i = 0; i < block_inputs(form) / GROUP * group_bytes(form); i += 4)
      if (form == Form::FLOAT32) put(random_float());
      else if (form == Form::FLOAT16) put(random_half()), put(random_half());
      else if (form == Form::BFLOAT16)
        for (int k = 0; k < 2; k++) put(uint16_t(float_to_bits(random_float()) >> 16));
      else put(uint32_t(random_bits()));
  }
  return panels;
}

template <Form form>
void products() {
  constexpr int64_t width = 250, num_inputs = 256, num_outputs = 100, num_panels = 3;
  const auto weights = random_panels<form>(num_panels, num_inputs), values = random_panels<form>(num_panels, num_inputs);
  const auto bias = random_floats(num_outputs);
  for (const int64_t num_rows : {1, 2, 5, 7, 70}) {
    const auto x = random_floats(num_rows * width), residual = random_floats(num_rows * num_outputs);
    for (int64_t activation = NONE; activation <= RELU2; activation++) {
      std::vector<float> out(num_rows * num_outputs);
      ProductArgs args{};
      args.x = x.data(), args.weights = weights.data(), args.bias = bias.data(), args.out = out.data();
      if (activation != NONE) args.value_weights = values.data();
      args.residual = residual.data(), args.factor = 0.75;
      args.x_row = width, args.residual_row = args.out_row = num_outputs;
      args.num_rows = num_rows, args.width = width, args.num_inputs = num_inputs, args.num_outputs = num_outputs;
      args.panel_bytes = int64_t(weights.size()) / num_panels, args.item_panels = 1, args.block_rows = 40;
      args.form = int64_t(form), args.activation = activation, args.num_threads = 2;
      run(logprobe_products, args, num_panels * ceil_div(num_rows, args.block_rows));
      print("products", 1000 * args.form + 10 * num_rows + activation, out);
    }
  }
}

void norms() {
  for (const int64_t width : {1, 63, 64, 577})
    for (const int64_t is_centred : {0, 1}) {
      const int64_t num_rows = 5;
      const auto x = random_floats(num_rows * width, 30), weight = random_floats(width), bias = random_floats(width);
      std::vector<float> out(num_rows * width);
      NormArgs args{};
      args.x = x.data(), args.weight = weight.data(), args.out = out.data(), args.bias = is_centred ? bias.data() : nullptr;
      args.residual = is_centred ? x.data() : nullptr;
      args.x_row = args.out_row = args.width = width, args.parts = 1, args.num_rows = num_rows, args.block_rows = 2;
      args.is_centred = is_centred, args.epsilon = 1e-6;
      run(logprobe_norm, args, 3);
      print("norm", 2 * width + is_centred, out);
    }
}

void gates() {
  for (int64_t activation = SILU; activation <= RELU2; activation++) {
    const int64_t width = 4099;
    const auto gates = random_floats(width, 12), values = random_floats(width);
    std::vector<float> out(width);
    GateArgs args{};
    args.gates = gates.data(), args.values = values.data(), args.out = out.data();
    args.gates_row = args.values_row = args.out_row = args.width = width, args.piece = 1000;
    args.activation = activation;
    run(logprobe_gate, args, 5);
    print("gate", activation, out);
  }
}

void softcap() {
  auto logits = random_floats(3 * 1001, 90);
  logits[5] = INFINITE, logits[6] = -INFINITE, logits[7] = NOT_A_NUMBER, logits[1000] = 1e-30f;
  SoftcapArgs args{};
  args.logits = logits.data(), args.logits_row = args.width = 1001, args.piece = 100, args.cap = 30;
  run(logprobe_softcap, args, 33);
  print("softcap", 0, logits);
}

void rotary() {
  for (const int64_t is_paired : {0, 1}) {
    const int64_t num_rows = 3, heads = 4, kv_heads = 2, dim = 24;
    const auto query = random_floats(num_rows * heads * dim), key = random_floats(num_rows * kv_heads * dim);
    const auto cosines = random_floats(num_rows * 16), sines = random_floats(num_rows * 16), scales = random_floats(num_rows);
    const std::vector<int64_t> slots{4, 0, 2};
    std::vector<float> out(query.size()), key_pool(5 * kv_heads * dim), value_pool(key_pool.size());
    RotaryArgs args{};
    args.query = query.data(), args.key = args.value = key.data(), args.cosines = cosines.data(), args.sines = sines.data();
    args.query_scales = scales.data(), args.out = out.data(), args.key_pool = key_pool.data();
    args.value_pool = value_pool.data(), args.slots = slots.data();
    args.query_row = heads * dim, args.key_row = args.value_row = kv_heads * dim;
    args.query_head = args.key_head = args.value_head = dim;
    args.num_rows = num_rows, args.heads = heads, args.kv_heads = kv_heads, args.key_dim = args.value_dim = dim;
    args.rotary_dim = 16, args.is_paired = is_paired, args.block_rows = 1;
    run(logprobe_rotary, args, num_rows);
    out.insert(out.end(), key_pool.begin(), key_pool.end()), out.insert(out.end(), value_pool.begin(), value_pool.end());
    print("rotary", is_paired, out);
  }
}

void attention(float softcap) {
  const int64_t heads = 6, kv_heads = 2, key_dim = 30, value_dim = 26, context = 450, num_rows = 40;
  const auto query = random_floats(num_rows * heads * key_dim), sinks = random_floats(heads);
  const auto keys = random_floats(context * kv_heads * key_dim, 3), values = random_floats(context * kv_heads * value_dim);
  std::vector<int64_t> chunk_slots(context);
  std::vector<int32_t> slots(context), rows(num_rows), begins(num_rows), lengths(num_rows);
  for (int64_t i = 0; i < context; i++) slots[i] = int32_t(chunk_slots[i] = (i * 7 + 3) % context);
  for (int64_t i = 0; i < num_rows; i++) rows[i] = int32_t(i), lengths[i] = int32_t(context - num_rows + i + 1);
  for (const int64_t window : {int64_t{1} << 40, int64_t{200}}) {
    std::vector<float> out(num_rows * heads * value_dim);
    AttentionArgs args{};
    args.query = query.data(), args.keys = keys.data(), args.values = values.data(), args.out = out.data();
    args.sinks = window == 200 ? sinks.data() : nullptr;
    args.query_row = heads * key_dim, args.keys_row = kv_heads * key_dim, args.values_row = kv_heads * value_dim;
    args.query_head = args.keys_head = key_dim, args.values_head = args.out_head = value_dim;
    args.out_row = heads * value_dim;
    args.heads = heads, args.kv_heads = kv_heads, args.key_dim = key_dim, args.value_dim = value_dim;
    args.window = window, args.scale = 0.25, args.softcap = softcap;
    args.rows = rows.data(), args.begins = begins.data(), args.lengths = lengths.data(), args.slots = slots.data();
    args.parts = kv_heads;
    run(logprobe_attend_rows, args, num_rows * args.parts);
    print("attend_rows", int64_t(softcap), out);
    std::fill(out.begin(), out.end(), 0.0f);
    args.chunk_slots = chunk_slots.data(), args.num_rows = num_rows, args.context = context;
    args.item_lanes = 2 * PANEL, args.num_blocks = ceil_div(num_rows * heads / kv_heads, args.item_lanes);
    run(logprobe_attend_chunk, args, args.num_blocks * kv_heads);
    print("attend_chunk", int64_t(softcap), out);
  }
}

void extraction() {
  const int64_t num_rows = 6, width = 41, num_given = 10;
  for (const int64_t size : {1, 50, 5003})
    for (const int64_t kind : {0, 1, 2}) {
      const auto logits = random_floats(num_rows * size, 20);
      std::vector<uint16_t> halves(num_rows * size);
      for (auto& half : halves) half = kind == 1 ? random_half() : uint16_t(float_to_bits(random_float(20)) >> 16);
      std::vector<int32_t> ids(num_rows * width), chosen(num_rows, int32_t(size - 1)), counts(num_rows), ranks(num_rows);
      std::vector<int32_t> given_ids(num_rows * num_given), given_ranks(given_ids.size());
      std::vector<float> logprobs(num_rows * width), numbers(4 * num_rows), given(given_ids.size());
      std::vector<uint8_t> is_valid(num_rows);
      std::vector<int64_t> offsets(num_rows + 1);
      for (int64_t row = 0; row <= num_rows; row++) offsets[row] = row * num_given;
      for (auto& id : given_ids) id = int32_t(random_bits() % size);
      for (int64_t row = 0; row < num_rows; row++) counts[row] = int32_t(std::min(size, row * 8));
      ExtractArgs args{};
      args.logits = kind ? static_cast<const void*>(halves.data()) : logits.data();
      args.logits_row = args.vocab_size = size, args.kind = kind;
      args.chosen = chosen.data(), args.num_logprobs = counts.data(), args.token_ids = ids.data();
      args.logprobs = logprobs.data(), args.width = width, args.ranks = ranks.data(), args.is_valid = is_valid.data();
      args.lse = numbers.data(), args.entropy = args.lse + num_rows;
      args.varentropy = args.entropy + num_rows, args.margin = args.varentropy + num_rows;
      args.given_offsets = offsets.data(), args.given_ids = given_ids.data();
      args.given_logprobs = given.data(), args.given_ranks = given_ranks.data();
      run(logprobe_extract, args, num_rows);
      logprobs.insert(logprobs.end(), numbers.begin(), numbers.end()), logprobs.insert(logprobs.end(), given.begin(), given.end());
      ids.insert(ids.end(), ranks.begin(), ranks.end()), ids.insert(ids.end(), given_ranks.begin(), given_ranks.end());
      print("extract", 10 * size + kind, logprobs);
      print("extract_ids", 10 * size + kind, ids);
    }
}

void draws() {
  const int64_t num_rows = 64, size = 3001;
  const auto logits = random_floats(num_rows * size, 10);
  std::vector<float> temperatures(num_rows), top_ks(num_rows), top_ps(num_rows), min_ps(num_rows), cuts(num_rows);
  std::vector<double> uniforms(num_rows);
  std::vector<int32_t> ids(num_rows), cut_ids(num_rows);
  std::vector<uint8_t> is_valid(num_rows);
  for (int64_t row = 0; row < num_rows; row++) {
    temperatures[row] = 0.25f * float(row % 7), top_ks[row] = float(row % 3 * 20);
    top_ps[row] = row % 2 ? 0.9f : 1.0f, min_ps[row] = row % 5 ? 0.0f : 0.01f;
    uniforms[row] = double(random_bits() >> 11) / double(uint64_t{1} << 53);
  }
  DrawArgs args{};
  args.logits = logits.data(), args.logits_row = args.vocab_size = size, args.temperatures = temperatures.data();
  args.top_ks = top_ks.data(), args.top_ps = top_ps.data(), args.min_ps = min_ps.data(), args.uniforms = uniforms.data();
  args.token_ids = ids.data(), args.cut_logits = cuts.data(), args.cut_ids = cut_ids.data(), args.is_valid = is_valid.data();
  run(logprobe_draw, args, num_rows);
  print("draw", 0, cuts);
  ids.insert(ids.end(), cut_ids.begin(), cut_ids.end());
  print("draw_ids", 0, ids);
}

// True if functions that replace those of the C library are as accurate as their comments say.
bool are_errors_small() {
  double largest = 0;
  for (int i = 1; i < 200000; i++) {
    const float x = 1e-4f * float(i);
    const double error = std::fabs(double(logprobe::tanh(x)) / std::tanh(double(x)) - 1);
    largest = std::max(largest, error);
    if (logprobe::tanh(-x) != -logprobe::tanh(x) || logprobe::tanh(broadcast(x))[LANES - 1] != logprobe::tanh(x)) return false;
  }
  return largest < 2e-7 && logprobe::tanh(INFINITE) == 1 && logprobe::tanh(0.0f) == 0 && std::isnan(logprobe::tanh(NOT_A_NUMBER));
}

}  // namespace

int main() {
  if (!are_errors_small()) return 1;
  products<Form::FLOAT32>(), products<Form::BFLOAT16>(), products<Form::FLOAT16>();
  products<Form::INT4>(), products<Form::INT4_WIDE>(), products<Form::INT8>(), products<Form::INT8_WIDE>();
  norms(), gates(), softcap(), rotary();
  attention(0), attention(15);
  extraction(), draws();
}
