// A choice between two tensors, entry by entry, in one pass over memory, with what is broadcast read in place.
//
// torch's kernel asks for each entry where to go on, which takes ten times as long where the condition has no pattern.
// ONNX Runtime's makes two tensors, each 0 where the other one is chosen, and puts them together; so it makes 0 of -0.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "compiled_call.h"

namespace choice {

constexpr std::int64_t BLOCK = 1 << 12;  // entries that are chosen at a time
constexpr std::int64_t WORTH_THREADS = 8;  // blocks for which other threads are asked

FOR_EACH_PROCESSOR
void choose(const std::uint8_t* __restrict condition, const float* __restrict a, const float* __restrict b,
            float* __restrict made, std::int64_t entries) {
  for (std::int64_t i = 0; i < entries; ++i) {
    const float yes = a[i], no = b[i];
    made[i] = condition[i] != 0 ? yes : no;
  }
}

// A tensor that is broadcast: how far its entries are apart along each axis of the result, 0 along which it is repeated.
struct Source {
  const void* data;
  Ints steps;
};

// The result's shape, with as few axes as there can be: neighbours are one where all sources go on from row to row.
class Choice {
 public:
  // `sources` are the condition, what is chosen where it is true, and the rest. No size is 0.
  Choice(const Ints& shape, std::vector<Source> sources, float* made) : sources_(std::move(sources)), made_(made) {
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
      if (shape[axis] == 1) continue;
      const bool goes_on = !sizes_.empty() && std::all_of(sources_.begin(), sources_.end(), [&](const Source& one) {
        return one.steps[last_] == one.steps[axis] * shape[axis];
      });
      if (goes_on) {
        sizes_.back() *= shape[axis];
        axes_.back() = axis;
      } else {
        sizes_.push_back(shape[axis]);
        axes_.push_back(axis);
      }
      last_ = axis;
    }
    if (sizes_.empty()) {
      sizes_.push_back(1);
      axes_.push_back(shape.size());
      for (Source& one : sources_) one.steps.push_back(0);
    }
    row_ = sizes_.back();
    in_row_ = (row_ + BLOCK - 1) / BLOCK;
    rows_ = count(sizes_.data(), static_cast<std::int64_t>(sizes_.size()) - 1);
    rows_of_part_ = std::max<std::int64_t>(1, BLOCK / row_);
    parts_ = (rows_ + rows_of_part_ - 1) / rows_of_part_ * in_row_;
  }

  void compute() {
    const auto take_parts = [this] {
      for (std::int64_t part = next_++; part < parts_; part = next_++) take(part);
    };
    if (parts_ < WORTH_THREADS) {
      take_parts();
    } else {
      in_threads(take_parts);
    }
  }

 private:
  // Choose in a block of a row, or, where rows are short, in several rows.
  void take(std::int64_t part) const {
    float yes[BLOCK], no[BLOCK];  // one value many times, where a row is a choice between values
    std::uint8_t same[BLOCK];
    const std::int64_t from = part % in_row_ * BLOCK, entries = std::min(BLOCK, row_ - from);
    const std::int64_t first = part / in_row_ * rows_of_part_, end = std::min(rows_, first + rows_of_part_);
    for (std::int64_t row = first; row < end; ++row) {
      choose(entries_of(sources_[0], row, from, entries, same), entries_of(sources_[1], row, from, entries, yes),
             entries_of(sources_[2], row, from, entries, no), made_ + row * row_ + from, entries);
    }
  }

  // Return the entries of a source in a row: where they are, or in `repeated` if they are one.
  template <typename T>
  const T* entries_of(const Source& source, std::int64_t row, std::int64_t from, std::int64_t entries,
                      T* repeated) const {
    const T* found = static_cast<const T*>(source.data);
    for (std::size_t at = sizes_.size() - 1; at-- > 0; row /= sizes_[at]) {
      found += row % sizes_[at] * source.steps[axes_[at]];
    }
    if (source.steps[axes_.back()] != 0) return found + from;
    std::fill(repeated, repeated + entries, *found);
    return repeated;
  }

  std::vector<Source> sources_;
  float* made_;
  Ints sizes_;
  std::vector<std::size_t> axes_;  // the last of the axes that each of them stands for
  std::size_t last_ = 0;
  std::int64_t row_, in_row_, rows_, rows_of_part_, parts_;
  std::atomic<std::int64_t> next_{0};
};

}  // namespace choice

extern "C" {

// Choose into `made`. `steps` are those of the condition, of what is chosen where it is true, and of the rest.
void ortlab_where(std::int64_t rank, const std::int64_t* shape, const std::int64_t* steps, const void* condition,
                  const void* a, const void* b, float* made) {
  if (count(shape, rank) == 0) return;
  const auto source = [&](const void* data, std::int64_t which) {
    return choice::Source{data, Ints(steps + which * rank, steps + (which + 1) * rank)};
  };
  choice::Choice(Ints(shape, shape + rank), {source(condition, 0), source(a, 1), source(b, 2)}, made).compute();
}
}
