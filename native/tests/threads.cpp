// Runs the thread pool with kernels that use non-atomic memory. ThreadSanitizer then reports an item that two threads
// took, a stage that started too early, and a job that returned before its work was done.
//
// `threads race` has a deliberate data race: if that run does not fail, the sanitizer is not active.
#include "../common.hpp"

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <thread>
#include <vector>

namespace {

using namespace logprobe;

void check(bool holds, const char* statement) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", statement);
  std::fflush(stderr);
  _exit(1);
}
#define CHECK(statement) check(statement, #statement)

struct Task {
  Work work;
  const int64_t* from;
  int64_t* to;

  Task(int64_t num_items, const int64_t* from, int64_t* to) : work{0, {}, num_items}, from(from), to(to) {}
};

int run(void (*kernel)(void*), Task& task, int64_t num_threads) {
  Stage stage{kernel, &task, 0};
  return logprobe_run(&stage, 1, num_threads);
}

// Each item reads what other threads wrote in the previous stage, and writes its own number.
void copy_and_add(void* pointer) {
  auto& task = *static_cast<Task*>(pointer);
  scratch.reserve(sizeof(int64_t), 1);
  int64_t* own = scratch.array<int64_t>(1);
  for (int64_t item; (item = take(task.work)) >= 0;) {
    if (item % 8 == 7) std::this_thread::yield();  // so that others end the stage first
    *own = task.from[(item + 1) % task.work.num_items] + 1;
    task.to[item] = *own;
  }
}

void run_out_of_memory(void* pointer) {
  auto& task = *static_cast<Task*>(pointer);
  for (int64_t item; (item = take(task.work)) >= 0;)
    if (item % 3 == 2) throw std::bad_alloc();
}

int64_t shared;  // by the threads of `race`
void race(void* pointer) {
  auto& task = *static_cast<Task*>(pointer);
  while (take(task.work) >= 0) shared++;
}

void run_jobs(int times, int64_t num_items, int64_t num_threads) {
  std::vector<int64_t> first(num_items), second(num_items);
  Task there{num_items, first.data(), second.data()}, back{num_items, second.data(), first.data()};
  for (int i = 1; i <= times; i++) {
    CHECK(run(copy_and_add, there, num_threads) == 0);
    CHECK(run(copy_and_add, back, num_threads) == 0);
    for (int64_t number : first) CHECK(number == 2 * i);
  }
}

void run_series(int times, int64_t num_stages, int64_t num_items, int64_t num_threads) {
  using Arrays = std::vector<std::vector<int64_t>>;
  Arrays arrays(num_stages + 1, std::vector<int64_t>(num_items)), wanted = arrays;
  std::deque<Task> tasks;
  std::vector<Stage> stages(num_stages);
  for (int64_t i = 0; i < num_stages; i++) {
    const int64_t size = i % 3 == 1 ? 1 : num_items;  // in some stages, most threads find no item
    tasks.emplace_back(size, arrays[i].data(), arrays[i + 1].data());
    stages[i] = {copy_and_add, &tasks[i], 0};
    for (int64_t item = 0; item < size; item++) wanted[i + 1][item] = wanted[i][(item + 1) % size] + 1;
  }
  for (int i = 0; i < times; i++) {
    for (auto& array : arrays) std::fill(array.begin(), array.end(), 0);
    CHECK(logprobe_run(stages.data(), num_stages, num_threads) == 0);
    CHECK(arrays == wanted);
  }
}

void run_from_many_callers() {
  std::vector<std::thread> callers;
  for (int i = 0; i < 6; i++)
    callers.emplace_back([i] {
      run_jobs(100, 20 + i, 3);
      run_series(10, 20, 20 + i, 4);
    });
  for (auto& caller : callers) caller.join();
}

void lack_memory() {
  std::vector<int64_t> array(100);
  for (int i = 0; i < 50; i++) {
    Task task{100, array.data(), array.data()};
    CHECK(run(run_out_of_memory, task, 4) == -1);
    Task then{100, array.data(), array.data()};
    Stage stages[2]{{run_out_of_memory, &task, 0}, {run_out_of_memory, &then, 0}};
    CHECK(logprobe_run(stages, 2, 4) == -1);
    run_jobs(1, 50, 4);
  }
}

void wake_sleepers() {
  for (int i = 0; i < 40; i++) {
    std::this_thread::sleep_for(std::chrono::milliseconds(i % 4));  // mostly longer than threads spin
    run_jobs(1, 100, 4);
  }
}

// Not run under ThreadSanitizer, which mistakes a child's new thread for the parent's thread at the same address.
void fork_and_run() {
  std::fflush(stderr);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    run_jobs(20, 100, 3);
    run_series(3, 10, 50, 3);
    const std::filesystem::directory_iterator threads("/proc/self/task");
    CHECK(std::distance(begin(threads), end(threads)) == 3);
    _exit(0);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void fork_while_others_run() {
  std::atomic<bool> is_over{false};
  std::thread caller([&] {
    while (!is_over) run_jobs(5, 100, 3);
  });
  for (int i = 0; i < 10; i++) fork_and_run();
  is_over = true;
  caller.join();
}

void run_on_one_core() {
  cpu_set_t all, one;
  CHECK(sched_getaffinity(0, sizeof all, &all) == 0);
  CPU_ZERO(&one);
  for (int cpu = 0; CPU_COUNT(&one) == 0; cpu++)
    if (CPU_ISSET(cpu, &all)) CPU_SET(cpu, &one);
  std::thread([&] {  // only this thread is pinned, not those of the pool
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    run_jobs(10, 100, 4);
    run_series(2, 10, 20, 4);
  }).join();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) {
    Task task{100'000, nullptr, nullptr};
    for (int i = 0; i < 20; i++) run(race, task, 4);
    return 0;
  }
  for (int64_t num_threads : {1, 2, 3, 16})
    for (int64_t num_items : {0, 1, 2, 7, 300}) run_jobs(num_threads > 3 ? 5 : 50, num_items, num_threads);
  for (int64_t num_threads : {1, 2, 3, 8})
    for (int64_t num_stages : {0, 1, 40}) run_series(num_threads > 3 ? 2 : 10, num_stages, 100, num_threads);
  run_from_many_callers();
  lack_memory();
  wake_sleepers();
#if !defined(__SANITIZE_THREAD__)
  fork_and_run();
  fork_while_others_run();
#endif
  run_on_one_core();
  std::puts("ok");
}
