// The sum, over some axes, of a product of two or three tensors, in one pass over memory and without the product.
//
// It is the gradient of a factor that was broadcast: of a scale, a gate, a temperature. Each product is rounded as in a
// multiplication of its own; the sums are in double precision, in parts that do not depend on the number of threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "broadcast.h"

namespace sums {

using broadcast::BLOCK;

constexpr std::int64_t MOST_SHARES = 16;  // sums that are made beside one another, to be added at the end
constexpr std::int64_t LARGEST = 1 << 20;  // entries of all of them
constexpr std::int64_t LANES = 32, IN_FLOAT = 1 << 10;  // entries that a lane's share of is added in single precision

FOR_EACH_PROCESSOR
void multiply(const float* __restrict a, const float* __restrict b, float* __restrict made, std::int64_t entries) {
  for (std::int64_t i = 0; i < entries; ++i) made[i] = a[i] * b[i];
}

FOR_EACH_PROCESSOR
double sum_of_products(const float* __restrict a, const float* __restrict b, std::int64_t entries) {
  double total = 0;
  for (std::int64_t from = 0; from < entries; from += IN_FLOAT) {
    const std::int64_t end = std::min(entries, from + IN_FLOAT);
    float lanes[LANES] = {};
    std::int64_t i = from;
    for (; i + LANES <= end; i += LANES) {
      for (std::int64_t lane = 0; lane < LANES; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
    }
    for (; i < end; ++i) total += static_cast<double>(a[i] * b[i]);
    for (float lane : lanes) total += static_cast<double>(lane);
  }
  return total;
}

FOR_EACH_PROCESSOR
void add_products(const float* __restrict a, const float* __restrict b, double* __restrict totals,
                  std::int64_t entries) {
  for (std::int64_t i = 0; i < entries; ++i) totals[i] += static_cast<double>(a[i] * b[i]);
}

// Sum into `made`, which has `sums` entries; `steps` are its own, 0 along the axes that are summed over.
void compute(const Ints& shape, std::vector<broadcast::Source> factors, const Ints& steps, std::int64_t sums,
             float* made) {
  const std::size_t result = factors.size();
  factors.push_back({made, steps});
  const broadcast::Rows rows(shape, std::move(factors));
  const std::int64_t shares =
      std::min({rows.parts(), MOST_SHARES, std::max<std::int64_t>(1, LARGEST / sums)});
  std::vector<double> totals(shares * sums);
  std::atomic<std::int64_t> next{0};
  const auto take_shares = [&] {
    for (std::int64_t share = next++; share < shares; share = next++) {
      double* of_share = totals.data() + share * sums;
      const auto add = [&](std::int64_t row, std::int64_t from, std::int64_t entries) {
        float first[BLOCK], second[BLOCK], third[BLOCK], product[BLOCK];
        const float* a = rows.entries(0, row, from, entries, first);
        const float* b = rows.entries(1, row, from, entries, second);
        if (result > 2) {
          multiply(a, b, product, entries);
          a = product;
          b = rows.entries(2, row, from, entries, third);
        }
        double* to = of_share + rows.offset(result, row);
        if (rows.is_repeated(result)) {
          *to += sum_of_products(a, b, entries);
        } else {
          add_products(a, b, to + from, entries);
        }
      };
      const std::int64_t end = rows.parts() * (share + 1) / shares;
      for (std::int64_t part = rows.parts() * share / shares; part < end; ++part) rows.visit(part, add);
    }
  };
  if (rows.parts() < broadcast::WORTH_THREADS) {
    take_shares();
  } else {
    in_threads(take_shares);
  }
  for (std::int64_t i = 0; i < sums; ++i) {
    double total = 0;
    for (std::int64_t share = 0; share < shares; ++share) total += totals[share * sums + i];
    made[i] = static_cast<float>(total);
  }
}

}  // namespace sums
