// A problem of the Hopper forward with its tensors: random inputs, outputs, workspace.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backlite/backlite.h"
#include "common/mask.h"
#include "probe.cuh"

struct Case {
  const char* name;
  int64_t batch, query_heads, key_heads, query_length, key_length, head_dim;
  bool causal = false;
  int64_t left = -1, right = -1;
  backlite::DType dtype = backlite::DType::kBFloat16;
  float factor = 1.0f;         // of the inputs
  double scale_factor = 1.0;   // of 1 / sqrt(D)
  int64_t padding = 0;         // extra elements between heads: strided inputs
  int64_t max_rows = 1 << 30;  // rows compared
};

template <typename Element>
struct Data : DeviceArrays {
  backlite::Problem problem;
  backlite::ForwardArgs args;
  backlite::Execution execution;
  Element *q, *k, *v, *o;
  int64_t q_elements, k_elements;
  int64_t q_strides[3], k_strides[3];
  float* lse;
  float* stats;

  Data(const Case& c, size_t workspace_bytes) : problem(problem_of(c)) {
    const int64_t row = c.head_dim + c.padding;
    q_strides[2] = row;
    q_strides[1] = row * c.query_heads;
    q_strides[0] = q_strides[1] * c.query_length;
    k_strides[2] = row;
    k_strides[1] = row * c.key_heads;
    k_strides[0] = k_strides[1] * c.key_length;
    q_elements = q_strides[0] * c.batch;
    k_elements = k_strides[0] * c.batch;
    q = own<Element>(q_elements);
    k = own<Element>(k_elements);
    v = own<Element>(k_elements);
    o = own<Element>(q_elements);
    lse = own<float>(num_rows());
    stats = own<float>(num_stats());
    fill_normal<<<1024, 256>>>(q, q_elements, 1 + c.query_length, c.factor);
    fill_normal<<<1024, 256>>>(k, k_elements, 2 + c.query_length, c.factor);
    fill_normal<<<1024, 256>>>(v, k_elements, 3 + c.query_length, c.factor);
    REQUIRE(cudaGetLastError());
    args.query = {q, q_strides[0], q_strides[1], q_strides[2]};
    args.key = {k, k_strides[0], k_strides[1], k_strides[2]};
    args.value = {v, k_strides[0], k_strides[1], k_strides[2]};
    args.out = {o, q_strides[0], q_strides[1], q_strides[2]};
    args.lse = lse;
    execution.workspace_bytes = workspace_bytes;
    execution.workspace = own<char>(execution.workspace_bytes);
  }
  int64_t num_rows() const {
    return problem.batch * problem.num_query_heads * problem.query_length;
  }
  int64_t num_stats() const {
    return problem.batch * problem.num_query_heads *
           backlite::num_query_tiles(problem.query_length) *
           backlite::num_key_tiles(problem.key_length);
  }
  backlite::ForwardArgs args_of(bool record) const {
    backlite::ForwardArgs result = args;
    if (record) result.tile_stats = stats;
    return result;
  }
  void poison() {
    REQUIRE(cudaMemset(o, 0xff, q_elements * sizeof(Element)));
    REQUIRE(cudaMemset(lse, 0xff, num_rows() * 4));
    REQUIRE(cudaMemset(stats, 0xff, num_stats() * 4));
    REQUIRE(cudaMemset(execution.workspace, 0xff, execution.workspace_bytes));
  }
};
