// OpenMP for ThreadSanitizer. GNU OpenMP is not instrumented: ThreadSanitizer does not see that its
// barriers order anything, and calls every parallel loop a race. These are the functions of it that
// GCC calls for src/common/parallel.h, on threads and locks that ThreadSanitizer knows. The
// libraries are built and tested as they are; only who runs their loops differs.
//
// A program's functions come before those of a library, so linking this file is enough. What is not
// here (any other kind of loop) would still go to GNU OpenMP and show as a race.
#include <algorithm>
#include <mutex>
#include <thread>
#include <vector>

namespace {

struct Team {
  std::mutex mutex;
  bool has_begun = false;  // its one loop
  long next = 0, end = 0, step = 0, chunk = 0;
};

thread_local Team* team = nullptr;
thread_local int thread_num = 0;

// The next chunk of the team's loop, [*begin, *end).
bool next_chunk(long* begin, long* end) {
  const std::lock_guard lock(team->mutex);
  if (team->next >= team->end) return false;
  *begin = team->next;
  *end = std::min(team->next + team->step * team->chunk, team->end);
  team->next = *end;
  return true;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int omp_get_thread_num() { return thread_num; }

void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads, unsigned) {
  Team new_team;
  const auto run = [&](int number) {
    team = &new_team;
    thread_num = number;
    body(data);
    team = nullptr;
    thread_num = 0;
  };
  std::vector<std::jthread> workers;
  for (unsigned i = 1; i < num_threads; ++i) workers.emplace_back(run, static_cast<int>(i));
  run(0);
}

bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long step, long chunk,
                                          long* chunk_begin, long* chunk_end) {
  {
    const std::lock_guard lock(team->mutex);
    if (!team->has_begun) {
      team->has_begun = true;
      team->next = start, team->end = end, team->step = step, team->chunk = chunk;
    }
  }
  return next_chunk(chunk_begin, chunk_end);
}

bool GOMP_loop_nonmonotonic_dynamic_next(long* chunk_begin, long* chunk_end) {
  return next_chunk(chunk_begin, chunk_end);
}

// The region ends with its one loop: joining the threads is the barrier.
void GOMP_loop_end() {}
}
#pragma GCC visibility pop
