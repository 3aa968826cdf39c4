// Tensors that are broadcast to one shape, read in place, a row or several at a time.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "compiled_call.h"

namespace broadcast {

constexpr std::int64_t BLOCK = 1 << 12;  // entries that are computed at a time
constexpr std::int64_t WORTH_THREADS = 8;  // blocks for which other threads are asked

// A tensor: how far its entries are apart along each axis of the whole shape, 0 along which it is repeated.
struct Source {
  const void* data;
  Ints steps;
};

// The shape, with as few axes as there can be: neighbours are one where all sources go on from row to row.
class Rows {
 public:
  // No size is 0.
  Rows(const Ints& shape, std::vector<Source> sources) : sources_(std::move(sources)) {
    std::size_t last = 0;
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
      if (shape[axis] == 1) continue;
      const bool goes_on = !sizes_.empty() && std::all_of(sources_.begin(), sources_.end(), [&](const Source& one) {
        return one.steps[last] == one.steps[axis] * shape[axis];
      });
      if (goes_on) {
        sizes_.back() *= shape[axis];
        axes_.back() = axis;
      } else {
        sizes_.push_back(shape[axis]);
        axes_.push_back(axis);
      }
      last = axis;
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
  }

  // How many parts there are: blocks of a row, or, where rows are short, several rows.
  std::int64_t parts() const { return (rows_ + rows_of_part_ - 1) / rows_of_part_ * in_row_; }
  std::int64_t row() const { return row_; }

  // Visit each row of a part: its number, where in the row the part begins, and how many entries it has there.
  template <typename Take>
  void visit(std::int64_t part, const Take& take) const {
    const std::int64_t from = part % in_row_ * BLOCK, entries = std::min(BLOCK, row_ - from);
    const std::int64_t first = part / in_row_ * rows_of_part_, end = std::min(rows_, first + rows_of_part_);
    for (std::int64_t row = first; row < end; ++row) take(row, from, entries);
  }

  // Whether a source has one entry for all of a row.
  bool is_repeated(std::size_t which) const { return sources_[which].steps[axes_.back()] == 0; }

  // Return how many entries lie in front of those of a row.
  std::int64_t offset(std::size_t which, std::int64_t row) const {
    std::int64_t found = 0;
    for (std::size_t at = sizes_.size() - 1; at-- > 0; row /= sizes_[at]) {
      found += row % sizes_[at] * sources_[which].steps[axes_[at]];
    }
    return found;
  }

  // Return the entries of a source in a row: where they are, or in `repeated` if they are one.
  template <typename T>
  const T* entries(std::size_t which, std::int64_t row, std::int64_t from, std::int64_t entries, T* repeated) const {
    const T* found = static_cast<const T*>(sources_[which].data) + offset(which, row);
    if (!is_repeated(which)) return found + from;
    std::fill(repeated, repeated + entries, *found);
    return repeated;
  }

 private:
  std::vector<Source> sources_;
  Ints sizes_;
  std::vector<std::size_t> axes_;  // the last of the axes that each of them stands for
  std::int64_t row_, in_row_, rows_, rows_of_part_;
};

// Read the shape to which inputs of a call are broadcast, and the steps of each; false where they do not fit.
inline bool read(const Call& call, const std::vector<std::size_t>& inputs, Ints* shape, std::vector<Source>* sources) {
  std::size_t rank = 0;
  for (std::size_t i : inputs) rank = std::max(rank, static_cast<std::size_t>(call.rank(i)));
  shape->assign(rank, 1);
  for (std::size_t i : inputs) {
    const Ints sizes = call.shape(i), apart = dense_strides(sizes);
    Ints steps(rank, 0);
    for (std::size_t from_last = 1; from_last <= sizes.size(); ++from_last) {
      const std::int64_t size = sizes[sizes.size() - from_last];
      if (size == 1) continue;
      std::int64_t& whole = (*shape)[rank - from_last];
      if (whole != 1 && whole != size) return false;
      whole = size;
      steps[rank - from_last] = apart[sizes.size() - from_last];
    }
    sources->push_back({call.data<void>(i), steps});
  }
  return true;
}

}  // namespace broadcast
