// Threads that are started and joined within a call. There is no pool, so nothing spins beside the
// engines and a forked child works.
#ifndef OUTRIDER_THREADS_H
#define OUTRIDER_THREADS_H

#include <algorithm>
#include <new>
#include <system_error>
#include <thread>

namespace {

constexpr int MAX_THREADS = 64;

// Runs loop(thread) on this thread, number 0, and on up to threads - 1 others, as many as can be
// started. The loops divide the work among themselves.
template <class Loop> void on_threads(int threads, const Loop& loop) {
  std::thread started[MAX_THREADS];
  int running = 0;
  try {
    for (; running < std::min(threads, MAX_THREADS) - 1; ++running)
      started[running] = std::thread(loop, running + 1);
  } catch (const std::system_error&) { // out of threads
  } catch (const std::bad_alloc&) {
  }
  loop(0);
  for (int i = 0; i < running; ++i) started[i].join();
}

} // namespace
#endif
