// The thread pool that runs kernels: one per process. Idle threads spin for a while and then sleep. A job is run by
// its caller and by the pool threads that join in time; it is done once all work is taken and no thread is inside.
// So a thread that the system has descheduled is waited for only if it may hold work. While one caller uses the
// pool, other callers run their jobs on their own thread.
#if defined(_WIN32)
static int pthread_atfork(void (*)(), void (*)(), void (*)()) { return 0; }  // Windows has no fork
#else
#include <pthread.h>
#endif

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "common.hpp"
#include "vector.hpp"

namespace logprobe {
namespace {

constexpr int SPINS = 4000;  // before a thread that waits for a job sleeps, or one that waits for others yields

INLINE void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Job {
  Stage* stages;
  int64_t num_stages;
  std::atomic<bool> lacks_memory{false};
};

// Run the stages in order; each participating thread calls this. A thread that finds all items taken also sees every
// thread that took one counted in `num_inside`, since a thread is counted before it takes an item (see take).
void run_stages(Job& job) {
  for (Stage* stage = job.stages; stage < job.stages + job.num_stages; stage++) {
    Work& work = *static_cast<Work*>(stage->args);
    if (__atomic_load_n(&work.next, __ATOMIC_ACQUIRE) < work.num_items) {
      __atomic_fetch_add(&stage->num_inside, 1, __ATOMIC_RELAXED);
      try {
        stage->kernel(stage->args);
      } catch (const std::bad_alloc&) {
        job.lacks_memory = true;
        __atomic_fetch_add(&work.next, work.num_items, __ATOMIC_ACQ_REL);
      }
      __atomic_fetch_sub(&stage->num_inside, 1, __ATOMIC_RELEASE);
    }
    for (int turn = 0; __atomic_load_n(&stage->num_inside, __ATOMIC_ACQUIRE) != 0; turn++)
      if (turn < SPINS) pause();
      else std::this_thread::yield();
  }
}

class Pool {
 public:
  int run(Job& job, int64_t num_threads) {
    std::unique_lock<std::mutex> own(owner_, std::try_to_lock);
    if (num_threads <= 1 || !own.owns_lock()) {
      run_stages(job);
      return job.lacks_memory ? -1 : 0;
    }
    start_workers(num_threads - 1);
    job_ = &job;
    num_wanted_.store(num_threads - 1, std::memory_order_relaxed);
    state_.fetch_add(OPEN - CLOSED, std::memory_order_seq_cst);
    if (num_asleep_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> guard(sleep_);
      wake_.notify_all();
    }
    run_stages(job);
    close();
    return job.lacks_memory ? -1 : 0;
  }

  // A forked child has none of its parent's threads, and nothing there releases the locks that they held.
  void forget_threads() { new (this) Pool(); }

 private:
  // The state is the number of the job times OPEN, plus CLOSED once no more threads may join, plus the number
  // of threads inside.
  static constexpr uint64_t CLOSED = uint64_t{1} << 31, OPEN = uint64_t{1} << 32;

  // If the system allows no more threads, the job runs on the existing ones.
  void start_workers(int64_t count) {
    try {
      for (; num_workers_ < count; num_workers_++)
        std::thread([this, number = num_workers_] { work(number); }).detach();
    } catch (const std::system_error&) {
    }
  }

  void work(int64_t number) {
    uint64_t seen = 0;
    for (;;) {
      uint64_t state = await_job(seen);
      seen = state / OPEN;
      if (number >= num_wanted_.load(std::memory_order_relaxed)) continue;
      while (state / OPEN == seen && !(state & CLOSED))
        if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
          run_stages(*job_);
          state_.fetch_sub(1, std::memory_order_acq_rel);
          break;
        }
    }
  }

  // Wait for a job other than `seen`; return the state.
  uint64_t await_job(uint64_t seen) {
    uint64_t state;
    for (int turn = 0; turn < SPINS; turn++) {
      state = state_.load(std::memory_order_acquire);
      if (state / OPEN != seen) return state;
      pause();
    }
    std::unique_lock<std::mutex> guard(sleep_);
    num_asleep_.fetch_add(1, std::memory_order_seq_cst);
    while ((state = state_.load(std::memory_order_seq_cst)) / OPEN == seen) wake_.wait(guard);
    num_asleep_.fetch_sub(1, std::memory_order_relaxed);
    return state;
  }

  void close() {
    uint64_t state = state_.fetch_or(CLOSED, std::memory_order_acq_rel) | CLOSED;
    for (int turn = 0; (state & (CLOSED - 1)) != 0; turn++) {
      if (turn < SPINS) pause();
      else std::this_thread::yield();
      state = state_.load(std::memory_order_acquire);
    }
  }

  std::mutex owner_, sleep_;
  std::condition_variable wake_;
  std::atomic<uint64_t> state_{CLOSED};
  std::atomic<int64_t> num_wanted_{0}, num_asleep_{0};
  int64_t num_workers_ = 0;
  Job* job_ = nullptr;
};

// Never destroyed: threads may still run when the process exits. Not a static of `pool`, whose guard would stay locked
// in a child that is forked during initialisation. Not created when the library is loaded, because that also happens
// on processors without the variant's instructions.
std::atomic<Pool*> only_pool{nullptr};

Pool& pool() {
  Pool* found = only_pool.load();
  if (found != nullptr) return *found;
  pthread_atfork(nullptr, nullptr, [] {  // registering it twice is harmless
    if (Pool* pool = only_pool.load()) pool->forget_threads();
  });
  Pool* made = new Pool();
  if (only_pool.compare_exchange_strong(found, made)) return *made;
  delete made;
  return *found;
}

}  // namespace
}  // namespace logprobe

EXPORT int logprobe_run(Stage* stages, int64_t num_stages, int64_t num_threads) {
  using namespace logprobe;
  for (Stage* stage = stages; stage < stages + num_stages; stage++) {
    Work& work = *static_cast<Work*>(stage->args);
    work.next = 0;
    stage->num_inside = 0;  // a fork may have copied the stages of a running job
    std::fill(work.taken, work.taken + MAX_GROUPS, 0);
  }
  Job job{stages, num_stages};
  return pool().run(job, num_threads);
}
