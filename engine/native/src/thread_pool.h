// A few threads that share out numbered tasks. The caller is one of them.
//
// Not OpenMP: torch brings its own copy of that, and two of them in a process fight over the cores. Here a task is
// claimed only by a thread that is running, so a worker which is asleep, or which the system has taken off its core,
// delays nobody; and a worker without work spins for some microseconds (the next kernel of the same model step is
// usually that near) and then sleeps, so that it takes no core from another process.
#pragma once

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace pdserve {

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads) {
    // Signals are the Python main thread's business: threads inherit the mask of the one that makes them.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    for (int thread = 1; thread < num_threads; ++thread) workers_.emplace_back([this, thread] { serve(thread); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  ~ThreadPool() {
    is_closing_.store(true);
    job_.fetch_add(1);
    job_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // work(task, thread) for each task in [0, count), in any order, on any thread; returns when all are done.
  template <class Work>
  void for_each(int64_t count, const Work& work) {
    if (workers_.empty() || count <= 1) {
      for (int64_t task = 0; task < count; ++task) work(task, 0);
      return;
    }
    run(static_cast<uint32_t>(count), &work, [](const void* of, uint32_t task, int thread) {
      (*static_cast<const Work*>(of))(static_cast<int64_t>(task), thread);
    });
  }

 private:
  using Call = void (*)(const void* work, uint32_t task, int thread);

  static constexpr int kSpins = 2000;  // about 40 microseconds
  static constexpr uint32_t kClosed = UINT32_MAX;

  static uint64_t ticket(uint32_t job, uint32_t task) { return uint64_t(job) << 32 | task; }

  void run(uint32_t count, const void* work, Call call) {
    const uint32_t job = job_.load(std::memory_order_relaxed) + 1;
    next_.store(ticket(job, kClosed));  // from here on no claim on the job before can succeed
    work_.store(work, std::memory_order_release);
    call_.store(call, std::memory_order_release);
    count_.store(count, std::memory_order_release);
    unfinished_.store(count, std::memory_order_release);
    next_.store(ticket(job, 0), std::memory_order_release);
    job_.store(job);
    job_.notify_all();  // costs a system call only if someone sleeps
    do_tasks_of(job, 0);
    for (int spins = 0; unfinished_.load(std::memory_order_acquire) != 0; ++spins) {
      if (spins < kSpins) {
        _mm_pause();
      } else {
        sched_yield();  // the worker may be waiting for this very core
      }
    }
  }

  void serve(int thread) {
    uint32_t seen = 0;
    while (true) {
      for (int spins = 0; job_.load(std::memory_order_acquire) == seen && spins < kSpins; ++spins) _mm_pause();
      job_.wait(seen, std::memory_order_acquire);
      if (is_closing_.load()) return;
      seen = job_.load(std::memory_order_acquire);
      do_tasks_of(seen, thread);
    }
  }

  // next_ holds the job's number and its next task in one word. A claim that succeeds found it unchanged since it was
  // read, so what was read of the job in between was that job's own, and the job cannot end before the task is done.
  void do_tasks_of(uint32_t job, int thread) {
    uint64_t next = next_.load(std::memory_order_acquire);
    while (true) {
      const void* work = work_.load(std::memory_order_acquire);
      const Call call = call_.load(std::memory_order_acquire);
      const uint32_t count = count_.load(std::memory_order_acquire);
      const auto task = static_cast<uint32_t>(next);
      if (next >> 32 != job || task >= count) return;
      if (!next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) continue;
      call(work, task, thread);
      unfinished_.fetch_sub(1, std::memory_order_release);
      next = next_.load(std::memory_order_acquire);
    }
  }

  alignas(64) std::atomic<uint64_t> next_{0};
  alignas(64) std::atomic<uint32_t> unfinished_{0};
  alignas(64) std::atomic<uint32_t> job_{0};
  std::atomic<bool> is_closing_{false};
  std::atomic<uint32_t> count_{0};
  std::atomic<const void*> work_{nullptr};
  std::atomic<Call> call_{nullptr};
  std::vector<std::thread> workers_;
};

}  // namespace pdserve
