// Computing in a forked child, in which the threads of the parent do not exist.
#include <sys/wait.h>
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <csignal>

#include "stages.h"

using namespace backlite;
using namespace backlite::test;

namespace {

// Of many heads and tiles, so that every stage works on several threads.
const Case kCase = {.batch = 2, .heads = 4, .key_heads = 4, .query_length = 700, .key_length = 300};

void run_select_alone() {
  Stages stages(kCase);
  std::fill(stages.tile_stats.begin(), stages.tile_stats.end(), 0.1f);
  stages.run_select({0});
}

void run_all() {
  Stages stages(kCase);
  stages.run_forward();
  stages.run_select({0});
  stages.run_backward(true, true);
}

void check_that_a_child_ends() {
  constexpr unsigned kSecondsToHang = 60;
  const pid_t child = fork();
  BOOST_REQUIRE(child >= 0);
  if (child == 0) {
    alarm(kSecondsToHang);
    run_all();
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  BOOST_TEST(!(WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM), "the child hangs");
  BOOST_TEST(status == 0);
}

}  // namespace

BOOST_AUTO_TEST_SUITE(after_fork)

// The first case is about a process that has used some of the libraries and not yet others, so
// these run in this order, in a process of their own.
BOOST_AUTO_TEST_CASE(of_a_parent_that_has_selected) {
  run_select_alone();
  check_that_a_child_ends();
}

BOOST_AUTO_TEST_CASE(of_a_parent_that_has_used_all_stages) {
  run_all();
  check_that_a_child_ends();
}

BOOST_AUTO_TEST_SUITE_END()
