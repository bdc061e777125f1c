// Threads that are started for a call and joined in it: no pool, so nothing spins beside the engines
// and nothing breaks in a forked child.
#ifndef OUTRIDER_THREADS_H
#define OUTRIDER_THREADS_H

#include <algorithm>
#include <new>
#include <system_error>
#include <thread>

namespace {

constexpr int MAX_THREADS = 64;

// loop(thread) on this thread, which is number 0, and on as many others as are asked for and can be
// had: the loops share out the work between them.
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
