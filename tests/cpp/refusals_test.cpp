// Every refusal names the argument, its value and what is accepted; and nothing is computed.
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <functional>
#include <string>

#include "stages.h"

using namespace backlite;
using namespace backlite::test;

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// A sound call of every stage, for a test to break.
struct Call {
  Stages stages{{.heads = 4, .key_heads = 2}};
  Problem problem = stages.problem;
  std::vector<int64_t> negl_prob = {0};
  Bytes plan{backlite::schedule_bytes(problem) + 64};
  Bytes memory{std::max(backlite::backward_workspace_bytes(problem, 2),
                        backlite::forward_workspace_bytes(problem, true, 2)) +
               64};
  Execution execution = {
      .num_threads = 2, .workspace = memory.data(), .workspace_bytes = memory.size() - 64};
  ForwardArgs forward = stages.forward_args(true);
  SelectArgs select = {.tile_stats = stages.tile_stats.data(),
                       .negl_prob = negl_prob.data(),
                       .num_negl_prob = 1,
                       .tile_bits = stages.tile_bits.data()};
  ScheduleArgs schedule = {.schedule = plan.data(), .schedule_bytes = plan.size() - 64};
  BackwardArgs backward = stages.backward_args(true, nullptr, plan.data());

  void run_forward() { backlite::forward(problem, forward, execution); }
  void run_select() { backlite::select(problem, select, execution); }
  void run_schedule() { backlite::schedule(problem, schedule, execution); }
  void run_backward() { backlite::backward(problem, backward, execution); }
};

using Break = std::function<void(Call&)>;

struct Refusal {
  std::string argument;  // "name = value", as the message starts
  std::string accepted;  // part of what the message says about accepted values
  Break break_it;
};

std::ostream& operator<<(std::ostream& out, const Refusal& refusal) {
  return out << refusal.argument;
}

template <typename Kind = InvalidArgument>
void check_refused(const Refusal& refusal, const std::function<void(Call&)>& run) {
  Call call;
  refusal.break_it(call);
  try {
    run(call);
    BOOST_ERROR(refusal.argument << ": not refused");
  } catch (const Kind& error) {
    const std::string message = error.what();
    BOOST_TEST(message.starts_with(refusal.argument + ": "), message);
    BOOST_TEST(message.find(refusal.accepted, refusal.argument.size()) != std::string::npos,
               message);
  }
}

std::vector<Refusal> problem_refusals() {
  const auto with = [](auto field, auto value) {
    return [=](Call& call) { call.problem.*field = value; };
  };
  return {
      {"batch = -1", "0 to", with(&Problem::batch, -1)},
      {"num_query_heads = 0", "1 to", with(&Problem::num_query_heads, 0)},
      {"num_query_heads = 5", "multiple of num_key_heads = 2", with(&Problem::num_query_heads, 5)},
      {"num_key_heads = 0", "1 to", with(&Problem::num_key_heads, 0)},
      {"num_key_heads = -2", "1 to", with(&Problem::num_key_heads, -2)},
      {"query_length = -1", "0 to", with(&Problem::query_length, -1)},
      {"key_length = -7", "0 to", with(&Problem::key_length, -7)},
      {"key_length = 9223372036854775807", "0 to", with(&Problem::key_length, INT64_MAX)},
      {"head_dim = 0", "multiples of 8 from 8 to 256", with(&Problem::head_dim, 0)},
      {"head_dim = 100", "multiples of 8 from 8 to 256", with(&Problem::head_dim, 100)},
      {"head_dim = 264", "multiples of 8 from 8 to 256", with(&Problem::head_dim, 264)},
      {"head_dim = -8", "multiples of 8 from 8 to 256", with(&Problem::head_dim, -8)},
      {"scale = nan", "finite", with(&Problem::scale, kNaN)},
      {"scale = -inf", "finite", with(&Problem::scale, -INFINITY)},
      {"scale = 1e+39", "float32", with(&Problem::scale, 1e39)},
      {"scale = -1e-40", "float32", with(&Problem::scale, -1e-40)},
      {"window_left = -2", "-1 (unlimited)", with(&Problem::window_left, -2)},
      {"window_right = -5", "-1 (unlimited)", with(&Problem::window_right, -5)},
      {"dtype = 7", "kBFloat16", with(&Problem::dtype, static_cast<DType>(7))},
      {"device = 7", "kCpu", with(&Problem::device, static_cast<Device>(7))},
      {"batch * num_query_heads * length * head_dim = 9223372036854775808", "up to 2^50",
       [](Call& c) {
         c.problem.batch = int64_t{1} << 30;
         c.problem.num_query_heads = int64_t{1} << 3;
         c.problem.query_length = int64_t{1} << 25;
         c.problem.head_dim = 32;
       }},
  };
}

// What takes a problem and computes, and what takes one and counts bytes.
const std::vector<std::pair<const char*, Break>> kStages = {
    {"forward", [](Call& c) { c.run_forward(); }},
    {"select", [](Call& c) { c.run_select(); }},
    {"schedule", [](Call& c) { c.run_schedule(); }},
    {"backward", [](Call& c) { c.run_backward(); }}};
const std::vector<std::pair<const char*, Break>> kCounters = {
    {"forward_workspace_bytes", [](Call& c) { forward_workspace_bytes(c.problem, true, 1); }},
    {"select_workspace_bytes", [](Call& c) { select_workspace_bytes(c.problem, 1); }},
    {"schedule_bytes", [](Call& c) { schedule_bytes(c.problem); }},
    {"backward_workspace_bytes", [](Call& c) { backward_workspace_bytes(c.problem, 1); }}};

// Null pointers, strides and the like, by the stage that refuses them.
std::vector<Refusal> forward_refusals() {
  return {
      {"query.data = nullptr", "needed", [](Call& c) { c.forward.query.data = nullptr; }},
      {"key.data = nullptr", "needed", [](Call& c) { c.forward.key.data = nullptr; }},
      {"value.data = nullptr", "needed", [](Call& c) { c.forward.value.data = nullptr; }},
      {"out.data = nullptr", "needed", [](Call& c) { c.forward.out.data = nullptr; }},
      {"query.length_stride = 31", "at least head_dim = 32",
       [](Call& c) { c.forward.query.length_stride = 31; }},
      {"key.length_stride = -1", "at least head_dim = 32",
       [](Call& c) { c.forward.key.length_stride = -1; }},
      {"out.length_stride = 0", "rows apart", [](Call& c) { c.forward.out.length_stride = 0; }},
  };
}

std::vector<Refusal> select_refusals() {
  const auto with_negl_prob = [](std::vector<int64_t> values, int64_t count) {
    return [=](Call& c) {
      c.negl_prob = values;
      c.select.negl_prob = c.negl_prob.data();
      c.select.num_negl_prob = count;
    };
  };
  return {
      {"tile_stats = nullptr", "needed", [](Call& c) { c.select.tile_stats = nullptr; }},
      {"tile_bits = nullptr", "needed", [](Call& c) { c.select.tile_bits = nullptr; }},
      {"negl_prob = nullptr", "needed", [](Call& c) { c.select.negl_prob = nullptr; }},
      {"num_negl_prob = 0", "1 and num_query_heads = 4", with_negl_prob({0}, 0)},
      {"num_negl_prob = 2", "1 and num_query_heads = 4", with_negl_prob({0, 0}, 2)},
      {"negl_prob[0] = -1", "0 to 1099511627775", with_negl_prob({-1}, 1)},
      {"negl_prob[0] = 1099511627776", "0 to 1099511627775", with_negl_prob({kProbOne}, 1)},
      {"negl_prob[3] = -5", "0 to 1099511627775", with_negl_prob({0, 0, 0, -5}, 4)},
  };
}

std::vector<Refusal> schedule_refusals() {
  return {
      {"schedule = nullptr", "needed", [](Call& c) { c.schedule.schedule = nullptr; }},
      {"schedule_bytes = 0", "at least", [](Call& c) { c.schedule.schedule_bytes = 0; }},
  };
}

std::vector<Refusal> backward_refusals() {
  return {
      {"query.data = nullptr", "needed", [](Call& c) { c.backward.query.data = nullptr; }},
      {"key.data = nullptr", "needed", [](Call& c) { c.backward.key.data = nullptr; }},
      {"value.data = nullptr", "needed", [](Call& c) { c.backward.value.data = nullptr; }},
      {"out.data = nullptr", "needed", [](Call& c) { c.backward.out.data = nullptr; }},
      {"grad_out.data = nullptr", "needed", [](Call& c) { c.backward.grad_out.data = nullptr; }},
      {"lse = nullptr", "needed", [](Call& c) { c.backward.lse = nullptr; }},
      {"schedule = nullptr", "needed", [](Call& c) { c.backward.schedule = nullptr; }},
      {"grad_query.data = nullptr", "needed",
       [](Call& c) { c.backward.grad_query.data = nullptr; }},
      {"grad_key.data = nullptr", "needed", [](Call& c) { c.backward.grad_key.data = nullptr; }},
      {"grad_value.data = nullptr", "needed",
       [](Call& c) { c.backward.grad_value.data = nullptr; }},
      {"grad_out.length_stride = 16", "at least head_dim = 32",
       [](Call& c) { c.backward.grad_out.length_stride = 16; }},
      {"grad_query.length_stride = 0", "rows apart",
       [](Call& c) { c.backward.grad_query.length_stride = 0; }},
      {"grad_key.length_stride = 0", "rows apart",
       [](Call& c) { c.backward.grad_key.length_stride = 0; }},
      {"grad_key.head_stride = 0", "rows apart",
       [](Call& c) { c.backward.grad_key.head_stride = 0; }},
  };
}

}  // namespace

BOOST_AUTO_TEST_SUITE(refusals)

BOOST_AUTO_TEST_CASE(a_sound_call_is_not_refused) {
  Call call;
  BOOST_CHECK_NO_THROW(call.run_forward());
  BOOST_CHECK_NO_THROW(call.run_select());
  BOOST_CHECK_NO_THROW(call.run_schedule());
  BOOST_CHECK_NO_THROW(call.run_backward());
}

BOOST_DATA_TEST_CASE(problem, boost::unit_test::data::make(problem_refusals()), refusal) {
  for (const auto* functions : {&kStages, &kCounters}) {
    for (const auto& [name, run] : *functions) {
      BOOST_TEST_CONTEXT(name) { check_refused(refusal, run); }
    }
  }
}

BOOST_AUTO_TEST_CASE(cuda_is_not_supported_by_a_cpu_build) {
  if (has_cuda()) return;
  const Refusal refusal = {"device = cuda", "cpu",
                           [](Call& c) { c.problem.device = Device::kCuda; }};
  for (const auto* functions : {&kStages, &kCounters}) {
    for (const auto& [name, run] : *functions) {
      BOOST_TEST_CONTEXT(name) { check_refused<NotSupported>(refusal, run); }
    }
  }
}

BOOST_DATA_TEST_CASE(arguments_of_forward, boost::unit_test::data::make(forward_refusals()),
                     refusal) {
  check_refused(refusal, [](Call& c) { c.run_forward(); });
}

BOOST_DATA_TEST_CASE(arguments_of_select, boost::unit_test::data::make(select_refusals()),
                     refusal) {
  check_refused(refusal, [](Call& c) { c.run_select(); });
}

BOOST_DATA_TEST_CASE(arguments_of_schedule, boost::unit_test::data::make(schedule_refusals()),
                     refusal) {
  check_refused(refusal, [](Call& c) { c.run_schedule(); });
}

BOOST_DATA_TEST_CASE(arguments_of_backward, boost::unit_test::data::make(backward_refusals()),
                     refusal) {
  check_refused(refusal, [](Call& c) { c.run_backward(); });
}

BOOST_AUTO_TEST_CASE(num_threads) {
  for (const int count : {0, -3}) {
    const Refusal refusal = {"num_threads = " + std::to_string(count), "at least 1",
                             [=](Call& c) { c.execution.num_threads = count; }};
    for (const auto& [name, run] : kStages) {
      BOOST_TEST_CONTEXT(name) { check_refused(refusal, run); }
    }
    const Problem p = Call().problem;
    BOOST_CHECK_THROW(forward_workspace_bytes(p, true, count), InvalidArgument);
    BOOST_CHECK_THROW(select_workspace_bytes(p, count), InvalidArgument);
    BOOST_CHECK_THROW(backward_workspace_bytes(p, count), InvalidArgument);
  }
}

BOOST_AUTO_TEST_CASE(workspace_too_small_missing_or_misaligned) {
  const Problem p = Call().problem;
  const std::vector<std::tuple<const char*, size_t, Break>> stages = {
      {"forward", forward_workspace_bytes(p, true, 2), [](Call& c) { c.run_forward(); }},
      {"select", select_workspace_bytes(p, 2), [](Call& c) { c.run_select(); }},
      {"backward", backward_workspace_bytes(p, 2), [](Call& c) { c.run_backward(); }}};
  for (const auto& [name, bytes, run] : stages) {
    BOOST_TEST_CONTEXT(name) {
      const size_t too_few = bytes - 1;
      check_refused(
          {"workspace_bytes = " + std::to_string(too_few), "at least " + std::to_string(bytes),
           [=](Call& c) { c.execution.workspace_bytes = too_few; }},
          run);
      check_refused(
          {"workspace = nullptr", "needed", [](Call& c) { c.execution.workspace = nullptr; }}, run);
      Call call;
      call.execution.workspace = call.memory.data() + 32;
      try {
        run(call);
        BOOST_ERROR("a misaligned workspace is not refused");
      } catch (const InvalidArgument& error) {
        const std::string message = error.what();
        BOOST_TEST(message.starts_with("workspace = "), message);
        BOOST_TEST(message.find("multiple of 64") != std::string::npos, message);
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(misaligned_schedule) {
  for (const auto& run :
       {Break([](Call& c) { c.run_schedule(); }), Break([](Call& c) { c.run_backward(); })}) {
    Call call;
    call.schedule.schedule = call.plan.data() + 32;
    call.backward.schedule = call.plan.data() + 32;
    BOOST_CHECK_EXCEPTION(run(call), InvalidArgument, [](const InvalidArgument& error) {
      const std::string message = error.what();
      return message.starts_with("schedule = ") &&
             message.find("multiple of 64") != std::string::npos;
    });
  }
}

BOOST_AUTO_TEST_CASE(negl_prob) {
  const auto message_for = [](double negl_prob) -> std::string {
    try {
      negl_prob_to_fixed(negl_prob);
      return "not refused";
    } catch (const InvalidArgument& error) {
      return error.what();
    }
  };
  for (const double wrong : {1.0, 1.5, -0.25, HUGE_VAL, kNaN}) {
    const std::string message = message_for(wrong);
    BOOST_TEST(message.starts_with("negl_prob = "), message);
    BOOST_TEST(message.find("from 0 to below 1") != std::string::npos, message);
  }
  // The value must show why it is refused.
  BOOST_TEST(message_for(-1e-9).starts_with("negl_prob = -1e-09"), message_for(-1e-9));
}

BOOST_AUTO_TEST_CASE(all_errors_are_of_one_family) {
  static_assert(std::is_base_of_v<Error, InvalidArgument>);
  static_assert(std::is_base_of_v<Error, NotSupported>);
  static_assert(std::is_base_of_v<std::runtime_error, Error>);
  BOOST_CHECK_THROW(negl_prob_to_fixed(2.0), Error);
}

BOOST_AUTO_TEST_CASE(strides_of_dimensions_of_size_one_mean_nothing) {
  Stages stages({.batch = 1, .query_length = 1, .key_length = 1});
  ForwardArgs args = stages.forward_args(true);
  args.query.length_stride = args.key.length_stride = args.value.length_stride = 1;
  args.out.length_stride = 0;
  args.query.batch_stride = args.out.batch_stride = 1;
  const Workspace workspace(forward_workspace_bytes(stages.problem, true, 1), {.num_threads = 1});
  BOOST_CHECK_NO_THROW(backlite::forward(stages.problem, args, workspace.execution()));
}

BOOST_AUTO_TEST_SUITE_END()
