// The threads of kernels: one pool in a process, whose threads spin for a while and then sleep.
#pragma once

#include "common.hpp"

namespace logprobe {

struct Stage {  // one kernel of a series, with its arguments
  void (*kernel)(void*);
  Work* work;
  std::atomic<int64_t> inside;  // threads that run it now
};

}  // namespace logprobe

// Run a kernel, or stages one after another, on so many threads; 0, or -1 where memory was lacking.
EXPORT int logprobe_run(void (*kernel)(void*), void* work, int64_t num_threads);
EXPORT int logprobe_run_series(void* stages, int64_t num_stages, int64_t num_threads);
