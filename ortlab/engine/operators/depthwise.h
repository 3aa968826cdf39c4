// The gradient of a depthwise convolution's weight: each channel has a window of its own.
//
// torch's kernels take it one window after the other, or with channels last; both take several times as long as the
// multiplications do. Here 32 channels are laid side by side, a few rows of an image at a time, and each entry of the
// window is the sum of what stands under it: a multiplication and an addition for all 32 at once. Padding takes no part,
// since zero times infinity is not a number.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "compiled_call.h"

namespace depthwise {

constexpr std::int64_t LANES = 32, TILE = 16;
constexpr std::int64_t BAND = 1 << 16;  // floats that are laid out at a time: 256 KiB, which a core's cache holds
constexpr std::int64_t PARTS = 16;      // into which the work is divided at least, where there are as many images

// One axis of the images: sizes of input, gradient and window, and how the window moves.
struct Axis {
  std::int64_t input, grad, window, stride, padding, dilation;

  // The place in the input under an entry of the window, at a place of the gradient.
  std::int64_t under(std::int64_t at, std::int64_t entry) const { return at * stride + entry * dilation - padding; }
  // The places of the gradient at which an entry of the window is over the image, `first` to before `end`.
  void over_image(std::int64_t entry, std::int64_t* first, std::int64_t* end) const {
    const std::int64_t before = -under(0, entry), left = input + before;
    *first = before > 0 ? (before + stride - 1) / stride : 0;
    *end = left > 0 ? std::min(grad, (left + stride - 1) / stride) : 0;
  }
};

// Lay `places` entries of each channel side by side; a channel's entries begin `apart` behind those of the last.
FOR_EACH_PROCESSOR
void lay_out(const float* __restrict from, float* __restrict to, std::int64_t channels, std::int64_t apart,
             std::int64_t places) {
  for (std::int64_t first = 0; first < places; first += TILE) {
    const std::int64_t end = std::min(places, first + TILE);
    for (std::int64_t channel = 0; channel < channels; ++channel) {
      for (std::int64_t at = first; at < end; ++at) to[at * LANES + channel] = from[channel * apart + at];
    }
  }
}

// Add the products of gradients and what is under them to the sums of one entry of the window.
FOR_EACH_PROCESSOR
void add_products(const float* __restrict grad, const float* __restrict x, float* __restrict sums, std::int64_t places,
                  std::int64_t stride) {
  float held[LANES];
  for (int i = 0; i < LANES; ++i) held[i] = sums[i];
  for (std::int64_t at = 0; at < places; ++at) {
    for (int i = 0; i < LANES; ++i) held[i] += grad[at * LANES + i] * x[at * stride * LANES + i];
  }
  for (int i = 0; i < LANES; ++i) sums[i] = held[i];
}

// The gradient of one weight. Parts of the work are blocks of channels of some images; which they are does not depend
// on the number of threads, so neither does any bit.
class OfWeight {
 public:
  OfWeight(const float* grad, const float* x, std::int64_t images, std::int64_t channels, Axis rows, Axis columns)
      : grad_(grad), x_(x), images_(images), channels_(channels), rows_(rows), columns_(columns),
        blocks_((channels + LANES - 1) / LANES),
        shares_(std::min(images, std::max<std::int64_t>(1, PARTS / blocks_))),
        sums_(blocks_ * shares_ * rows.window * columns.window * LANES) {}

  void compute(float* made) {
    in_threads([this] { take_parts(); });
    const std::int64_t window = rows_.window * columns_.window;
    for (std::int64_t channel = 0; channel < channels_; ++channel) {
      for (std::int64_t entry = 0; entry < window; ++entry) {
        float sum = 0;
        for (std::int64_t share = 0; share < shares_; ++share) {
          sum += sums_[((share * blocks_ + channel / LANES) * window + entry) * LANES + channel % LANES];
        }
        made[channel * window + entry] = sum;
      }
    }
  }

 private:
  void take_parts() {
    std::vector<float> grad, x;
    for (std::int64_t part = next_++; part < blocks_ * shares_; part = next_++) {
      const std::int64_t share = part / blocks_;
      const std::int64_t end = images_ * (share + 1) / shares_;
      for (std::int64_t image = images_ * share / shares_; image < end; ++image) add_image(image, part, grad, x);
    }
  }

  void add_image(std::int64_t image, std::int64_t part, std::vector<float>& grad, std::vector<float>& x) {
    const std::int64_t first = part % blocks_ * LANES, channels = std::min(LANES, channels_ - first);
    const std::int64_t of_grad = rows_.grad * columns_.grad, of_x = rows_.input * columns_.input;
    const float* from_grad = grad_ + (image * channels_ + first) * of_grad;
    const float* from_x = x_ + (image * channels_ + first) * of_x;
    const std::int64_t band = std::max(rows_.window, BAND / (columns_.grad * LANES));
    for (std::int64_t top = 0; top < rows_.grad; top += band) {
      const std::int64_t bottom = std::min(rows_.grad, top + band);
      const std::int64_t top_x = std::max<std::int64_t>(0, rows_.under(top, 0));
      const std::int64_t bottom_x = std::min(rows_.input, rows_.under(bottom - 1, rows_.window - 1) + 1);
      if (top_x >= bottom_x) continue;
      grad.resize((bottom - top) * columns_.grad * LANES);
      x.resize((bottom_x - top_x) * columns_.input * LANES);
      lay_out(from_grad + top * columns_.grad, grad.data(), channels, of_grad, (bottom - top) * columns_.grad);
      lay_out(from_x + top_x * columns_.input, x.data(), channels, of_x, (bottom_x - top_x) * columns_.input);
      add_band(grad.data(), x.data(), top, bottom, top_x, sums_.data() + part * rows_.window * columns_.window * LANES);
    }
  }

  // Rows that meet stay in the fastest cache while a row of the window passes over them.
  void add_band(const float* grad, const float* x, std::int64_t top, std::int64_t bottom, std::int64_t top_x, float* sums) {
    for (std::int64_t of_row = 0; of_row < rows_.window; ++of_row, sums += columns_.window * LANES) {
      std::int64_t above, below;
      rows_.over_image(of_row, &above, &below);
      for (std::int64_t row = std::max(top, above); row < std::min(bottom, below); ++row) {
        const float* grad_row = grad + (row - top) * columns_.grad * LANES;
        const float* x_row = x + (rows_.under(row, of_row) - top_x) * columns_.input * LANES;
        for (std::int64_t of_column = 0; of_column < columns_.window; ++of_column) {
          std::int64_t left, right;
          columns_.over_image(of_column, &left, &right);
          if (left >= right) continue;
          add_products(grad_row + left * LANES, x_row + columns_.under(left, of_column) * LANES, sums + of_column * LANES,
                       right - left, columns_.stride);
        }
      }
    }
  }

  const float *grad_, *x_;
  const std::int64_t images_, channels_;
  const Axis rows_, columns_;
  const std::int64_t blocks_, shares_;
  std::vector<float> sums_;
  std::atomic<std::int64_t> next_{0};
};

}  // namespace depthwise
