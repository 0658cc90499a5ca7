// Shared by all kernels: taking work items, and per-thread scratch memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <new>

extern "C" {
#include "kernels.h"
}

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace logprobe {

// Take the next item; return -1 if all are taken. Publishes the thread's earlier writes (see run_stages).
inline int64_t take(Work& work) {
  const int64_t item = __atomic_fetch_add(&work.next, 1, __ATOMIC_ACQ_REL);
  return item < work.num_items ? item : -1;
}

constexpr int64_t ceil_div(int64_t whole, int64_t part) { return (whole + part - 1) / part; }
constexpr int64_t round_up(int64_t size, int64_t step) { return ceil_div(size, step) * step; }

// Scratch memory of one thread, kept from one kernel to the next.
class Scratch {
 public:
  ~Scratch() { release(); }

  // Start over with room for `num_bytes` bytes in `num_arrays` arrays, each aligned to a cache line.
  void reserve(size_t num_bytes, int num_arrays) {
    const size_t wanted = round_up(num_bytes, 64) + 64 * num_arrays;
    if (wanted > size_) {
      release();
      memory_ = static_cast<char*>(::operator new(wanted, std::align_val_t{64}));
      size_ = wanted;
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
  void release() {
    ::operator delete(memory_, std::align_val_t{64});
    memory_ = nullptr, size_ = 0;
  }

  char* memory_ = nullptr;
  size_t size_ = 0, used_ = 0;
};

inline thread_local Scratch scratch;

}  // namespace logprobe
