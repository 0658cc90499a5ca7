// What all kernels share: how their work is taken, and where their scratch lies.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace logprobe {

constexpr int MAX_GROUPS = 11;  // of blocks of rows, which threads keep to

// The beginning of every kernel's arguments. Items are taken one after another by whichever thread is free.
struct Work {
  std::atomic<int64_t> next;
  std::atomic<int64_t> taken[MAX_GROUPS];  // items of each group of blocks of rows (products)
  int64_t num_items;

  void begin() {
    next.store(0, std::memory_order_relaxed);
    for (auto& count : taken) count.store(0, std::memory_order_relaxed);
  }

  // The next item that no thread has taken, or -1.
  int64_t take() {
    const int64_t item = next.fetch_add(1, std::memory_order_relaxed);
    return item < num_items ? item : -1;
  }
};

constexpr int64_t ceil_div(int64_t whole, int64_t part) { return (whole + part - 1) / part; }
constexpr int64_t round_up(int64_t size, int64_t step) { return ceil_div(size, step) * step; }

// Memory of one thread that a kernel uses while it runs: kept for the next one unless it is large.
class Scratch {
 public:
  ~Scratch() { std::free(memory_); }

  // Begin anew, with room for so many bytes in arrays that each begin with a cache line.
  void reserve(size_t num_bytes, int num_arrays) {
    const size_t wanted = round_up(num_bytes, 64) + 64 * num_arrays;
    if (wanted > size_) {
      std::free(memory_);
      size_ = 0;
      memory_ = static_cast<char*>(std::aligned_alloc(64, round_up(wanted, 64)));
      if (memory_ == nullptr) throw std::bad_alloc();
      size_ = round_up(wanted, 64);
    }
    used_ = 0;
  }

  template <typename T>
  T* array(size_t count) {
    T* start = reinterpret_cast<T*>(memory_ + used_);
    used_ += round_up(count * sizeof(T), 64);
    return start;
  }

 private:
  char* memory_ = nullptr;
  size_t size_ = 0, used_ = 0;
};

inline thread_local Scratch scratch;

}  // namespace logprobe
