// Prints the float32 multiply-adds per second that a number of threads do in registers, without memory access.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "../native/vector.hpp"

using namespace logprobe;

constexpr int SUMS = 12;  // enough to fill the pipeline, and few enough for the registers
constexpr int64_t NUM_TURNS = 1'000'000, NUM_ROUNDS = 20;

void multiply_adds(float start, float* result) {
  const Floats factor = broadcast(start);  // unknown at compile time, so that nothing is folded
  Floats sums[SUMS];
  for (int i = 0; i < SUMS; i++) sums[i] = factor * static_cast<float>(i);
  for (int64_t turn = 0; turn < NUM_TURNS; turn++)
    for (int i = 0; i < SUMS; i++) sums[i] = fma(sums[i], factor, factor);
  for (int i = 1; i < SUMS; i++) sums[0] += sums[i];
  *result = sums[0][0];
}

int main(int, char** arguments) {
  const int num_threads = std::atoi(arguments[1]);
  const float start = static_cast<float>(std::atof(arguments[2]));
  std::vector<float> results(num_threads);
  double best_s = 1e9;  // of some rounds of milliseconds: others may use the machine
  for (int64_t round = 0; round < NUM_ROUNDS; round++) {
    const auto started = std::chrono::steady_clock::now();
    std::vector<std::thread> threads;
    for (auto& result : results) threads.emplace_back(multiply_adds, start, &result);
    for (auto& thread : threads) thread.join();
    best_s = std::min(best_s, std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count());
  }
  std::fprintf(stderr, "%g\n", results[0]);  // used, so that nothing is left out
  std::printf("%.17g\n", double(num_threads) * NUM_TURNS * SUMS * LANES / best_s);
}
