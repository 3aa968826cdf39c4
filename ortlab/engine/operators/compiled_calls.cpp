// The calls of PyTorch's operators that small models make most, without a way into Python and back.
//
// ONNX Runtime calls one C function for each ATen node of a graph (`aten_executor.py` has its signature). In Python such
// a call takes some 30 microseconds; here it takes a few. Each kernel below computes what the function of its name in
// `torch_kernels.py`, or torch's operator, computes, with the same kernels of torch and so the same bits; those of
// `dropout.h` and `where.h` are ours, with the same bits, those of `depthwise.h` and `sums_of_products.h` round their own
// way. A kernel returns false where it is not sure to do so, before it has changed anything, and the call goes to
// Python: on another device, where Python would take memory that is kept from step to step for the output
// (`torch_kernels.OutputBuffers`), with anything out of the ordinary, and where torch raises an error, which Python
// then raises again with its text.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <mutex>
#include <shared_mutex>
#include <sstream>
#include <string>
#include <unordered_map>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "compiled_call.h"
#include "depthwise.h"
#include "dropout.h"
#include "sums_of_products.h"
#include "where.h"

namespace {

// ---- reductions -----------------------------------------------------------------------------------------------------

// Read ONNX's keepdims and noop_with_empty_axes, and the axes; none of them may stand for all.
bool read_reduction(const Call& call, std::size_t of_flags, std::size_t of_axes, Ints* axes, Ints* flags) {
  if (!call.is_ints(of_flags) || call.numel(of_flags) != 2) return false;
  if (call.given(of_axes) && !call.is_ints(of_axes)) return false;
  *flags = call.ints(of_flags);
  *axes = call.given(of_axes) ? call.ints(of_axes) : Ints();
  return true;
}

bool reduced(Call& call, const char* name, const char* overload) {
  Ints axes, flags;
  if (!call.given(0) || !read_reduction(call, 1, 2, &axes, &flags)) return false;
  if (axes.empty() && flags[1] != 0) {  // nothing to do, as at the end of a broadcast gradient that was not broadcast
    Value stack[2] = {call.tensor(0), 0};
    return call.run("aten::clone", "", stack) && call.give_result(0, stack[0]);
  }
  if (axes.empty()) {
    for (std::int64_t axis = 0; axis < call.rank(0); ++axis) axes.push_back(axis);
  }
  Value stack[4] = {call.tensor(0), call.some(call.list(axes)), flags[0] != 0, 0};
  return call.run(name, overload, stack) && call.give_result(0, stack[0]);
}
bool sum_over(Call& call) { return reduced(call, "aten::sum", "dim_IntList"); }
bool mean_over(Call& call) { return reduced(call, "aten::mean", "dim"); }

// ---- products of matrices -------------------------------------------------------------------------------------------

// Give the product of two matrices, plus what broadcasts to it if there is an addend, in a shape of as many entries.
bool product(Call& call, Tensor a, Tensor b, const Ints& shape, std::int64_t rows, std::int64_t columns,
             Tensor addend = nullptr) {
  Tensor output = call.failed ? nullptr : call.empty(shape);
  if (output == nullptr) return false;
  const Ints matrix = {rows, columns}, strides = {columns, 1};
  Tensor seen = nullptr;
  Error error = torch.from_blob(Call::floats(output), 2, matrix.data(), strides.data(), 0, FLOAT32, TORCH_CPU, NO_INDEX,
                                &seen);
  call.kept(seen);
  if (error == 0) error = addend == nullptr ? torch.mm(seen, a, b) : torch.addmm(seen, addend, a, b, 1.0, 1.0);
  if (error != 0) {
    torch.drop(output);
    return !(call.failed = true);
  }
  return call.give(0, output);
}

bool is_small(std::int64_t floats) { return floats * 4 < SMALL; }

bool multiplied(Call& call, bool turned) {
  if (!call.are_floats({0, 1}) || call.rank(0) < 1 || call.rank(1) != 2) return false;
  const std::int64_t inner = call.size(0, call.rank(0) - 1), columns = call.size(1, turned ? 0 : 1);
  if (inner == 0 || call.size(1, turned ? 1 : 0) != inner || columns == 0) return false;
  const std::int64_t rows = call.numel(0) / inner;
  if (rows == 0 || !is_small(rows * columns)) return false;
  Ints shape = call.shape(0);
  shape.back() = columns;
  return product(call, call.matrix(0, inner), call.matrix(1, call.size(1, 1), turned), shape, rows, columns);
}
bool matmul(Call& call) { return multiplied(call, false); }
bool matmul_transposed(Call& call) { return multiplied(call, true); }

bool matmul_of_rows(Call& call) {
  if (!call.are_floats({0, 1}) || call.rank(0) < 1 || call.rank(1) < 1) return false;
  const std::int64_t rows = call.size(0, call.rank(0) - 1), columns = call.size(1, call.rank(1) - 1);
  if (rows == 0 || columns == 0 || !is_small(rows * columns)) return false;
  if (call.numel(0) == 0 || call.numel(0) / rows != call.numel(1) / columns) return false;
  return product(call, call.matrix(0, rows, true), call.matrix(1, columns), {rows, columns}, rows, columns);
}

bool gemm(Call& call) {
  if (!call.are_floats({0, 1}) || call.rank(0) != 2 || call.rank(1) != 2 || !call.is_ints(2) || call.numel(2) != 2) {
    return false;
  }
  if (call.given(3) && call.type(3) != FLOAT32) return false;
  const Ints turned = call.ints(2);
  const std::int64_t rows = call.size(0, turned[0] ? 1 : 0), columns = call.size(1, turned[1] ? 0 : 1);
  if (call.size(0, turned[0] ? 0 : 1) != call.size(1, turned[1] ? 1 : 0)) return false;
  if (call.numel(0) == 0 || call.numel(1) == 0 || !is_small(rows * columns)) return false;
  Tensor a = call.matrix(0, call.size(0, 1), turned[0]), b = call.matrix(1, call.size(1, 1), turned[1]);
  Tensor addend = call.given(3) ? call.kept(call.view(3, call.shape(3))) : nullptr;
  return product(call, a, b, {rows, columns}, rows, columns, addend);
}

// ---- normalisations -------------------------------------------------------------------------------------------------

bool layer_norm(Call& call) {
  // x, weight, bias, epsilon
  if (!call.are_floats({0, 1, 2}) || !call.is_float(3)) return false;
  Value stack[5] = {call.tensor(0), call.list(call.shape(1)), call.some(call.tensor(1)), call.some(call.tensor(2)),
                    Call::number(call.one_float(3))};
  return call.run("aten::native_layer_norm", "", stack) && call.give_results(3, stack);
}

bool layer_norm_backward(Call& call) {
  if (!call.are_given({0, 1, 2, 3, 4})) return false;
  Value stack[8] = {call.tensor(0), call.tensor(1), call.list(call.shape(2)), call.tensor(3), call.tensor(4),
                    call.some(call.tensor(2)), call.some(call.tensor(2)), call.list(Ints{1, 1, 1})};
  return call.run("aten::native_layer_norm_backward", "", stack) && call.give_result(0, stack[0]) &&
         call.give_result(1, stack[1]) && call.give_result(2, stack[2]);
}

bool rms_norm_backward(Call& call) {
  if (!call.are_floats({0, 1, 2, 3}) || call.rank(2) != 1 || call.numel(1) == 0) return false;
  const std::int64_t rows = call.numel(3), width = call.numel(2);
  if (rows * width != call.numel(1) || !call.same_shape(0, 1)) return false;
  Tensor means = call.empty(call.shape(3));
  if (means == nullptr) return false;
  std::memset(Call::floats(means), 0, static_cast<std::size_t>(rows) * sizeof(float));
  Value stack[8] = {call.tensor(0), call.tensor(1), call.list(Ints{width}), Call::as_value(means), call.tensor(3),
                    call.some(call.tensor(2)), 0, call.list(Ints{1, 1, 0})};
  if (!call.run("aten::native_layer_norm_backward", "", stack)) return false;
  Call::drop_result(stack[2]);
  call.give_result(1, stack[1]);
  Value sums[2] = {Call::as_value(call.view(0, {rows, width})), call.tensor(2)};
  if (!call.run("aten::mv", "", sums)) {
    Call::drop_result(stack[0]);
    return false;
  }
  const float* of_rows = Call::floats(call.kept(reinterpret_cast<Tensor>(sums[0])));
  const float* deviations = call.data<float>(3);
  float* of_x = Call::floats(reinterpret_cast<Tensor>(stack[0]));
  for (std::int64_t row = 0; row < rows; ++row) {
    const float taken = of_rows[row] * deviations[row] / static_cast<float>(width);
    for (std::int64_t column = 0; column < width; ++column) of_x[row * width + column] += taken;
  }
  return call.give_result(0, stack[0]);
}

// ---- convolutions ---------------------------------------------------------------------------------------------------

bool convolution(Call& call) {
  if (!call.are_floats({0, 1}) || !call.is_ints(2) || !call.is_ints(3) || !call.is_ints(4) || !call.is_int(5)) return false;
  Value stack[9] = {call.tensor(0), call.tensor(1), call.optional_tensor(6), call.list(call.ints(2)),
                    call.list(call.ints(3)), call.list(call.ints(4)), 0, call.list(Ints(call.numel(2), 0)),
                    static_cast<Value>(call.one_int(5))};
  return call.run("aten::convolution", "", stack) && call.give_result(0, stack[0]);
}

bool convolution_backward(Call& call) {
  if (!call.are_floats({0, 1, 2}) || !call.is_ints(3) || !call.is_ints(4) || !call.is_ints(5) || !call.is_int(6) ||
      !call.is_ints(7)) {
    return false;
  }
  const Ints wanted = call.ints(7);
  Ints asked = {0, 0, 0};
  for (std::int64_t one : wanted) {
    if (one < 0 || one > 2) return false;
    asked[one] = 1;
  }
  Value stack[11] = {call.tensor(0), call.tensor(1), call.tensor(2), call.some(call.list(Ints{call.size(2, 0)})),
                     call.list(call.ints(3)), call.list(call.ints(4)), call.list(call.ints(5)), 0,
                     call.list(Ints(call.numel(3), 0)), static_cast<Value>(call.one_int(6)), call.list(asked)};
  if (!call.run("aten::convolution_backward", "", stack)) return false;
  bool given = true;
  for (std::size_t i = 0; i < wanted.size(); ++i) given = given && call.give_result(i, stack[wanted[i]]);
  for (std::size_t i = 0; i < 3; ++i) {
    if (asked[i] == 0) Call::drop_result(stack[i]);
  }
  return given;
}

// Inputs are grad, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups and wanted.
constexpr std::size_t STRIDE = 4, PADDING = 5, DILATION = 6, OUTPUT_PADDING = 8;

// Give those gradients that are asked for, of input, weight and bias, as torch computes them.
bool convolution_gradients(Call& call, const Ints& asked) {
  Value stack[11] = {call.tensor(0), call.tensor(1), call.tensor(2),
                     call.given(3) ? call.some(call.list(call.ints(3))) : 0, call.list(call.ints(STRIDE)),
                     call.list(call.ints(PADDING)), call.list(call.ints(DILATION)), call.one_int(7) != 0,
                     call.list(call.ints(OUTPUT_PADDING)), static_cast<Value>(call.one_int(9)), call.list(asked)};
  return call.run("aten::convolution_backward", "", stack) && call.give_results(3, stack);
}

depthwise::Axis axis_of(const Call& call, std::int64_t axis) {
  if (axis < 0) return {1, 1, 1, 1, 0, 1};  // the rows of what has columns only
  const std::size_t at = static_cast<std::size_t>(axis);
  return {call.size(1, 2 + axis), call.size(0, 2 + axis), call.size(2, 2 + axis),
          call.ints(STRIDE)[at], call.ints(PADDING)[at], call.ints(DILATION)[at]};
}

bool depthwise_backward(Call& call, const Ints& wanted) {
  if (wanted[1] != 0) {
    const std::int64_t columns = call.rank(1) - 3;
    Tensor of_weight = call.empty(call.shape(2));
    if (call.failed) return false;
    depthwise::OfWeight gradient(call.data<float>(0), call.data<float>(1), call.size(1, 0), call.size(1, 1),
                                 axis_of(call, columns - 1), axis_of(call, columns));
    gradient.compute(Call::floats(of_weight));
    if (!call.give(1, of_weight)) return false;
  }
  // Of the bias, torch's operator would compute the weight's gradient as well.
  if (wanted[2] != 0) {
    Ints axes = {0};
    for (std::int64_t axis = 2; axis < call.rank(0); ++axis) axes.push_back(axis);
    Value stack[4] = {call.tensor(0), call.some(call.list(axes)), 0, 0};
    if (!call.run("aten::sum", "dim_IntList", stack) || !call.give_result(2, stack[0])) return false;
  }
  return wanted[0] == 0 || convolution_gradients(call, {1, 0, 0});
}

bool grouped_convolution_backward(Call& call) {
  if (!call.are_floats({0, 1, 2}) || !call.is_int(7) || !call.is_int(9) || !call.is_ints(10)) return false;
  if ((call.given(3) && !call.is_ints(3)) || call.rank(1) < 2) return false;
  for (std::size_t i : {STRIDE, PADDING, DILATION, OUTPUT_PADDING}) {
    if (!call.is_ints(i)) return false;
  }
  const Ints window = call.shape(2), wanted = call.ints(10);
  if (wanted.size() != 3) return false;
  const std::int64_t channels = window[0], dimensions = static_cast<std::int64_t>(window.size()) - 2;
  bool is_wide = 0 < dimensions && dimensions <= PLANE;
  for (std::int64_t axis = 0; axis < dimensions; ++axis) is_wide = is_wide && window[2 + axis] >= WIDE_WINDOW;
  const bool is_depthwise = channels == call.one_int(9) && channels == call.size(1, 1) && call.one_int(7) == 0;
  if (is_depthwise && is_wide) return call.numel(1) != 0 && depthwise_backward(call, wanted);
  return convolution_gradients(call, wanted);
}

// ---- pooling --------------------------------------------------------------------------------------------------------

bool adaptive_avg_pool2d_backward(Call& call) {
  if (!call.are_floats({0, 1}) || call.rank(0) < 2) return false;
  const std::int64_t rank = call.rank(1), rows = call.size(1, rank - 2), columns = call.size(1, rank - 1);
  if (call.rank(0) != rank) return false;
  if (call.size(0, rank - 2) != 1 || call.size(0, rank - 1) != 1) {
    Value stack[2] = {call.tensor(0), call.tensor(1)};
    return call.run("aten::_adaptive_avg_pool2d_backward", "", stack) && call.give_result(0, stack[0]);
  }
  Tensor entries = call.empty({});
  if (entries == nullptr) return false;
  *Call::floats(entries) = static_cast<float>(rows * columns);
  Value expanded[3] = {call.tensor(0), call.list(call.shape(1)), false};
  if (!call.run("aten::expand", "", expanded)) {
    torch.drop(entries);
    return false;
  }
  Value stack[2] = {expanded[0], Call::as_value(entries)};
  return call.run("aten::div", "Tensor", stack) && call.give_result(0, stack[0]);
}

bool max_pool2d(Call& call) {
  // x, window, stride, padding, dilation, ceil_mode
  if (!call.are_floats({0}) || call.rank(0) != 4 || !call.is_int(5)) return false;
  for (std::size_t i = 1; i < 5; ++i) {
    if (!call.is_ints(i)) return false;
  }
  Value x = call.tensor(0);
  if (call.size(0, 1) >= MANY_CHANNELS) {
    Value stack[2] = {x, call.some(CHANNELS_LAST)};
    if (!call.run("aten::clone", "", stack)) return false;
    x = stack[0];
  }
  Value stack[6] = {x, call.list(call.ints(1)), call.list(call.ints(2)), call.list(call.ints(3)),
                    call.list(call.ints(4)), call.one_int(5) != 0};
  return call.run("aten::max_pool2d_with_indices", "", stack) && call.give_result(0, stack[0]) &&
         call.give_result(1, stack[1]);
}

// ---- recurrent layers -----------------------------------------------------------------------------------------------

constexpr Value LSTM = 2;  // oneDNN's number of the kind of layer

bool lstm_layer(Call& call) {
  // x, w_ih, w_hh, b_ih, b_hh, h, c, reverse
  if (!call.are_floats({0, 1, 2, 3, 4, 5, 6}) || call.rank(2) != 2 || !call.is_int(7)) return false;
  Value stack[16] = {call.tensor(0), call.tensor(1), call.tensor(2), call.tensor(3), call.tensor(4), call.tensor(5),
                     call.tensor(6), call.one_int(7) != 0, call.list(Ints()), LSTM,
                     static_cast<Value>(call.size(2, 1)), 1, true, false, false, true};
  const bool before = torch.records();
  torch.record(true);  // without it there is no workspace, whatever is said about training
  const bool ran = call.run("aten::mkldnn_rnn_layer", "", stack);
  torch.record(before);
  if (!ran) return false;
  return call.give_results(4, stack);
}

bool lstm_layer_backward(Call& call) {
  // grad_y, grad_h, grad_c, x, w_ih, w_hh, b_ih, b_hh, h, c, reverse, y, last_h, last_c, workspace
  if (!call.are_floats({3, 4, 5, 6, 7, 8, 9, 11, 12, 13}) || call.rank(5) != 2 || !call.is_int(10) || !call.given(14)) {
    return false;
  }
  Value grads[3];
  for (std::size_t i = 0; i < 3; ++i) {
    if (call.given(i) && call.type(i) != FLOAT32) return false;
  }
  for (std::size_t i = 0; i < 3; ++i) {
    const std::size_t of = 11 + i;
    if (call.given(i)) {
      grads[i] = call.some(call.tensor(i));
      continue;
    }
    Tensor zeros = call.empty(call.shape(of));
    if (zeros == nullptr) return false;
    std::memset(Call::floats(zeros), 0, static_cast<std::size_t>(call.numel(of)) * sizeof(float));
    grads[i] = call.some(Call::as_value(zeros));
  }
  Value stack[23] = {call.tensor(3), call.tensor(4), call.tensor(5), call.tensor(6), call.tensor(7), call.tensor(8),
                     call.tensor(9), call.tensor(11), call.tensor(12), call.tensor(13), grads[0], grads[1], grads[2],
                     call.one_int(10) != 0, LSTM, static_cast<Value>(call.size(5, 1)), 1, true, true, false,
                     call.list(Ints()), false, call.tensor(14)};
  if (!call.run("aten::mkldnn_rnn_layer_backward", "", stack)) return false;
  return call.give_results(7, stack);
}

// ---- entries one at a time ------------------------------------------------------------------------------------------

// Give a tensor of the first input's shape whose entries are made of those of two inputs of this shape.
template <typename Function>
bool entrywise(Call& call, std::size_t first, std::size_t second, Function entry) {
  Tensor output = call.empty(call.shape(0));
  if (output == nullptr) return false;
  const float *a = call.data<float>(first), *b = call.data<float>(second);
  float* __restrict made = Call::floats(output);
  const std::int64_t entries = call.numel(0);
  for (std::int64_t i = 0; i < entries; ++i) {
    const float of_a = a[i], of_b = b[i];  // read before anything is decided, so that several are computed at once
    made[i] = entry(of_a, of_b);
  }
  return call.give(0, output);
}

bool relu_backward(Call& call) {
  if (!call.are_floats({0, 1}) || !call.same_shape(0, 1)) return false;
  return entrywise(call, 0, 1, [](float grad, float x) { return x <= 0 ? 0.0f : grad; });
}

bool gelu_backward_of(Call& call, Text approximate) {
  if (torch.gelu_backward == nullptr || !call.are_floats({0, 1}) || !call.same_shape(0, 1)) return false;
  Tensor grad = call.kept(call.view(0, call.shape(0))), x = call.kept(call.view(1, call.shape(1)));
  if (call.failed) return false;
  try {
    Reference made = torch.gelu_backward(*static_cast<Reference*>(grad), *static_cast<Reference*>(x), approximate);
    return call.give(0, new void*(made.implementation));
  } catch (...) {
    return false;
  }
}
bool gelu_backward(Call& call) { return gelu_backward_of(call, {4, "none"}); }
bool gelu_tanh_backward(Call& call) { return gelu_backward_of(call, {4, "tanh"}); }

// Multiplied in any case, since a branch for each entry takes ten times as long: so the compiler must not see a 1.
const volatile float ONE = 1;

bool leaky_relu(Call& call) {
  if (!call.are_floats({0}) || !call.is_float(1)) return false;
  const float slope = static_cast<float>(call.one_float(1)), one = ONE;
  return entrywise(call, 0, 0, [=](float x, float) { return x * (x > 0 ? one : slope); });
}

bool leaky_relu_backward(Call& call) {
  if (!call.are_floats({0, 1}) || !call.same_shape(0, 1) || !call.is_float(2)) return false;
  const float slope = static_cast<float>(call.one_float(2)), one = ONE;
  return entrywise(call, 0, 1, [=](float grad, float result) { return grad * (result > 0 ? one : slope); });
}

bool where(Call& call) {
  if (!call.are_floats({1, 2}) || !call.given(0) || call.type(0) != UINT8) return false;
  Ints shape;
  std::vector<broadcast::Source> sources;
  Tensor made = broadcast::read(call, {0, 1, 2}, &shape, &sources) ? call.empty(shape) : nullptr;
  if (made == nullptr) return false;
  if (call.numel(0) != 0 && call.numel(1) != 0 && call.numel(2) != 0) {
    choice::compute(shape, std::move(sources), Call::floats(made));
  }
  return call.give(0, made);
}

bool sum_of_products(Call& call) {
  // int[] flags, int[]? axes, two or three factors
  Ints axes, flags;
  if (!read_reduction(call, 0, 1, &axes, &flags) || !call.are_floats({2, 3})) return false;
  std::vector<std::size_t> inputs = {2, 3};
  if (call.given(4)) inputs.push_back(4);
  Ints shape, kept, steps;
  std::vector<broadcast::Source> factors;
  for (std::size_t i : inputs) {
    if (call.type(i) != FLOAT32 || call.numel(i) == 0) return false;
  }
  if (!broadcast::read(call, inputs, &shape, &factors)) return false;
  const std::int64_t rank = static_cast<std::int64_t>(shape.size());
  if (axes.empty() && flags[1] != 0) return false;  // no sum at all
  std::vector<bool> summed(shape.size(), axes.empty());
  for (std::int64_t axis : axes) {
    if (axis < -rank || axis >= rank) return false;
    summed[axis + (axis < 0 ? rank : 0)] = true;
  }
  Ints sizes = shape;
  for (std::int64_t axis = 0; axis < rank; ++axis) {
    if (summed[axis]) sizes[axis] = 1;
    if (!summed[axis] || flags[0] != 0) kept.push_back(sizes[axis]);
  }
  steps = dense_strides(sizes);
  for (std::int64_t axis = 0; axis < rank; ++axis) {
    if (sizes[axis] == 1) steps[axis] = 0;
  }
  Tensor made = call.empty(kept);
  if (made == nullptr) return false;
  sums::compute(shape, std::move(factors), steps, count(kept.data(), static_cast<std::int64_t>(kept.size())),
                Call::floats(made));
  return call.give(0, made);
}

// ---- dropout --------------------------------------------------------------------------------------------------------

bool dropped(Call& call, std::uint64_t seed) {
  Tensor made = call.empty(call.shape(0)), mask = call.kept(call.empty(call.shape(0), UINT8));
  if (!call.failed) {
    ortlab_dropout(call.data<float>(0), Call::floats(made), static_cast<std::uint8_t*>(Call::memory(mask)),
                   call.numel(0), *call.data<float>(1), seed);
  }
  return call.give(0, made) && call.give(1, call.again(mask));
}

// x, ratio and what else a dropout is given.
bool is_dropout(Call& call) { return call.are_floats({0, 1}) && call.numel(1) == 1; }

bool dropout_of(Call& call) { return is_dropout(call) && dropped(call, ortlab_take_seeds(*call.data<float>(1) != 0)); }

bool dropout_to_repeat(Call& call) {
  Tensor kept = is_dropout(call) ? call.kept(call.empty({}, INT64)) : nullptr;
  if (kept == nullptr) return false;
  const std::uint64_t seed = ortlab_take_seeds(*call.data<float>(1) != 0);
  *static_cast<std::int64_t*>(Call::memory(kept)) = static_cast<std::int64_t>(seed);
  return dropped(call, seed) && call.give(2, call.again(kept));
}

bool dropout_repeated(Call& call) {
  return is_dropout(call) && call.is_int(3) && dropped(call, static_cast<std::uint64_t>(call.one_int(3)));
}

bool dropout_backward(Call& call) {
  // grad, mask, ratio, training
  if (!call.are_floats({0, 2}) || !call.given(1) || call.type(1) != UINT8 || call.numel(1) != call.numel(0) ||
      call.numel(2) != 1) {
    return false;
  }
  Tensor made = call.empty(call.shape(0));
  if (made == nullptr) return false;
  ortlab_dropout_backward(call.data<float>(0), call.data<std::uint8_t>(1), Call::floats(made), call.numel(0),
                          *call.data<float>(2));
  return call.give(0, made);
}

// ---- softmax --------------------------------------------------------------------------------------------------------

bool softmax_backward(Call& call) {
  if (!call.are_floats({0, 1}) || call.given(2)) return false;
  Value stack[4] = {call.tensor(0), call.tensor(1), static_cast<Value>(-1), FLOAT32};
  return call.run("aten::_softmax_backward_data", "", stack) && call.give_result(0, stack[0]);
}

bool softmax_backward_over(Call& call) {
  if (!call.are_floats({0, 1}) || call.given(2)) return false;
  Value stack[5] = {call.tensor(0), call.tensor(1), static_cast<Value>(-1), FLOAT32, call.tensor(0)};
  if (!call.run("aten::_softmax_backward_data", "out", stack)) return false;
  Call::drop_result(stack[0]);
  return call.give_input(0, 0, call.shape(0));
}

// ---- cross entropy --------------------------------------------------------------------------------------------------

constexpr std::int64_t MEAN = 1;  // of the reductions of torch
constexpr std::int64_t OF_ROWS = 1 << 14;  // entries of the rows that a thread takes at a time

// Whether an input has a class for each row of a matrix of float32.
bool are_rows_and_classes(const Call& call, std::size_t rows, std::size_t classes) {
  return call.are_floats({rows}) && call.rank(rows) == 2 && call.given(classes) && call.type(classes) == INT64 &&
         call.rank(classes) == 1 && call.numel(classes) == call.size(rows, 0);
}

// Compute the loss of log probabilities: `found` becomes the loss and the sum of the rows' weights.
bool nll_loss(Call& call, Value log_probabilities, std::size_t target, std::size_t weight, std::int64_t reduction,
              std::int64_t ignored, Value* found) {
  Value stack[5] = {log_probabilities, call.tensor(target), call.optional_tensor(weight), static_cast<Value>(reduction),
                    static_cast<Value>(ignored)};
  if (!call.run("aten::nll_loss_forward", "", stack)) return false;
  found[0] = stack[0];
  found[1] = stack[1];
  return true;
}

// Compute log probabilities and their loss from the logits, which are input 0, as the classes are input 1.
bool loss_of_logits(Call& call, std::size_t weight, std::size_t reduction, std::size_t ignored, Value* found) {
  if (!are_rows_and_classes(call, 0, 1) || !call.is_int(reduction) || !call.is_int(ignored)) return false;
  Value logits[3] = {call.tensor(0), 1, 0};
  if (!call.run("aten::_log_softmax", "", logits)) return false;
  Tensor log_probabilities = reinterpret_cast<Tensor>(logits[0]);
  if (!nll_loss(call, Call::as_value(call.again(log_probabilities)), 1, weight, call.one_int(reduction),
                call.one_int(ignored), found)) {
    torch.drop(log_probabilities);
    return false;
  }
  found[2] = Call::as_value(log_probabilities);
  return true;
}

bool cross_entropy(Call& call) {
  Value found[3];
  return loss_of_logits(call, 2, 3, 4, found) && call.give_result(0, found[0]) && call.give_result(1, found[2]) &&
         call.give_result(2, found[1]);
}

bool log_softmax_loss(Call& call) {
  Value found[3];
  if (!loss_of_logits(call, 4, 2, 3, found)) return false;
  Call::drop_result(found[1]);
  return call.give_result(0, found[0]) && call.give_result(1, found[2]);
}

bool cross_entropy_backward(Call& call) {
  // grad, log probabilities, target, weight, reduction, ignored, total; over the log probabilities
  if (!are_rows_and_classes(call, 1, 2) || !call.are_floats({0, 6}) || call.given(3) || !call.is_int(4) ||
      !call.is_int(5) || call.numel(6) != 1) {
    return false;
  }
  const std::int64_t rows = call.size(1, 0), classes = call.size(1, 1), ignored = call.one_int(5);
  const bool each = call.numel(0) == rows && call.rank(0) == 1;
  if (!each && call.numel(0) != 1) return false;
  const std::int64_t* target = call.data<std::int64_t>(2);
  for (std::int64_t row = 0; row < rows; ++row) {
    if (target[row] != ignored && (target[row] < 0 || target[row] >= classes)) return false;
  }
  Value stack[1] = {call.tensor(1)};
  if (!call.run("aten::exp_", "", stack)) return false;
  Call::drop_result(stack[0]);
  const bool is_mean = call.one_int(4) == MEAN;
  const float* grads = call.data<float>(0);
  const float total = *call.data<float>(6);
  float* made = call.data<float>(1);
  const std::int64_t rows_at_once = std::max<std::int64_t>(1, OF_ROWS / std::max<std::int64_t>(1, classes));
  std::atomic<std::int64_t> next{0};
  const auto take_rows = [&] {
    for (std::int64_t first = next.fetch_add(rows_at_once); first < rows; first = next.fetch_add(rows_at_once)) {
      for (std::int64_t row = first; row < std::min(rows, first + rows_at_once); ++row) {
        const float grad = grads[each ? row : 0], of_row = is_mean ? grad / total : grad;
        const float share = target[row] == ignored ? 0 : of_row;
        float* of_classes = made + row * classes;
        for (std::int64_t i = 0; i < classes; ++i) of_classes[i] *= share;
        of_classes[target[row] == ignored ? 0 : target[row]] -= share;
      }
    }
  };
  if (rows * classes < 2 * OF_ROWS) {
    take_rows();
  } else {
    in_threads(take_rows);
  }
  return call.give_input(0, 1, call.shape(1));
}

bool log_softmax_loss_backward(Call& call) {
  // grad, log probabilities, target, reduction, ignored, weight
  if (!are_rows_and_classes(call, 1, 2) || !call.are_floats({0}) || !call.is_int(3) || !call.is_int(4)) return false;
  const std::int64_t reduction = call.one_int(3), ignored = call.one_int(4);
  const Ints of_loss = reduction == 0 ? Ints{call.size(1, 0)} : Ints{};
  if (call.numel(0) != count(of_loss.data(), static_cast<std::int64_t>(of_loss.size()))) return false;
  Value found[2];
  if (!nll_loss(call, call.tensor(1), 2, 5, reduction, ignored, found)) return false;
  Call::drop_result(found[0]);
  Value stack[7] = {Call::as_value(call.view(0, of_loss)), call.tensor(1), call.tensor(2), call.optional_tensor(5),
                    static_cast<Value>(reduction), static_cast<Value>(ignored), found[1]};
  if (!call.run("aten::nll_loss_backward", "", stack)) return false;
  Value of_logits[4] = {stack[0], call.tensor(1), 1, FLOAT32};
  return call.run("aten::_log_softmax_backward_data", "", of_logits) && call.give_result(0, of_logits[0]);
}

// ---- rows by index --------------------------------------------------------------------------------------------------

// The places along an axis of some size that an input names; whether all are there.
bool read_places(const Call& call, std::size_t i, std::int64_t size, bool from_the_end, Ints* places) {
  if (!call.given(i) || (call.type(i) != INT64 && call.type(i) != INT32)) return false;
  *places = call.ints(i);
  for (std::int64_t& place : *places) {
    if (place < 0 && from_the_end) place += size;
    if (place < 0 || place >= size) return false;
  }
  return true;
}

// Add rows to those at their places along an axis, one after the other.
void add_at(const Ints& places, const Ints& shape, std::int64_t axis, const float* rows, float* whole) {
  const std::int64_t rank = static_cast<std::int64_t>(shape.size()), size = shape[axis];
  const std::int64_t before = count(shape.data(), axis), after = count(shape.data() + axis + 1, rank - axis - 1);
  for (std::int64_t outer = 0; outer < before; ++outer, whole += size * after) {
    for (std::int64_t place : places) {
      float* to = whole + place * after;
      for (std::int64_t i = 0; i < after; ++i) to[i] += rows[i];
      rows += after;
    }
  }
}

bool gather_backward(Call& call) {
  // int[] shape, indices, grad, int axis
  if (!call.is_ints(0) || !call.are_floats({2}) || !call.is_int(3)) return false;
  Ints shape = call.ints(0), places;
  const std::int64_t rank = static_cast<std::int64_t>(shape.size()), entries = count(shape.data(), rank);
  const std::int64_t axis = call.one_int(3) + (call.one_int(3) < 0 ? rank : 0);
  if (axis < 0 || axis >= rank || !is_small(entries) || !read_places(call, 1, shape[axis], true, &places)) return false;
  if (call.numel(2) * shape[axis] != entries * static_cast<std::int64_t>(places.size())) return false;
  Tensor output = call.empty(shape);
  if (output == nullptr) return false;
  std::memset(Call::floats(output), 0, static_cast<std::size_t>(entries) * sizeof(float));
  add_at(places, shape, axis, call.data<float>(2), Call::floats(output));
  return call.give(0, output);
}

bool rows_added(Call& call, std::size_t x, std::size_t at, std::size_t indices, std::size_t source) {
  if (!call.are_floats({x, source}) || !call.is_int(at)) return false;
  Ints shape = call.shape(x), places;
  const std::int64_t rank = call.rank(x), axis = call.one_int(at) + (call.one_int(at) < 0 ? rank : 0);
  if (axis < 0 || axis >= rank || !read_places(call, indices, shape[axis], false, &places)) return false;
  Ints rows = shape;
  rows[axis] = static_cast<std::int64_t>(places.size());
  if (call.shape(source) != rows) return false;
  Tensor output = call.empty(shape);
  if (output == nullptr) return false;
  std::memcpy(Call::floats(output), call.data<float>(x), static_cast<std::size_t>(call.numel(x)) * sizeof(float));
  add_at(places, shape, axis, call.data<float>(source), Call::floats(output));
  return call.give(0, output);
}

bool index_add(Call& call) {
  // x, int axis, indices, source, alpha
  const bool is_plain = !call.given(4) || (call.is_float(4) && call.one_float(4) == 1);
  return is_plain && rows_added(call, 0, 1, 2, 3);
}
bool index_add_to(Call& call) { return rows_added(call, 1, 2, 3, 0); }  // source, x, int axis, indices

// ---- parts of tensors -----------------------------------------------------------------------------------------------

// Go to the next place in a shape, the last axis first; return whether there is one.
bool next(Ints& place, const Ints& shape) {
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    if (++place[axis] < shape[axis]) return true;
    place[axis] = 0;
  }
  return false;
}

std::int64_t offset(const Ints& place, const Ints& strides) {
  std::int64_t sum = 0;
  for (std::size_t axis = 0; axis < place.size(); ++axis) sum += place[axis] * strides[axis];
  return sum;
}

bool rotary_backward(Call& call) {
  // grad, cosines, sines
  if (!call.are_floats({0, 1, 2}) || !call.same_shape(1, 2) || call.rank(0) != call.rank(1)) return false;
  Ints rows = call.shape(0), factors = call.shape(1);
  if (rows.empty() || call.numel(0) == 0 || rows.back() % 2 != 0 || factors.back() != rows.back()) return false;
  Ints strides = dense_strides(factors);
  for (std::size_t axis = 0; axis < rows.size(); ++axis) {
    if (factors[axis] == 1) strides[axis] = 0;
    if (factors[axis] != 1 && factors[axis] != rows[axis]) return false;
  }
  Tensor output = call.empty(call.shape(0));
  if (output == nullptr) return false;
  const std::int64_t width = rows.back(), half = width / 2;
  rows.pop_back();
  strides.pop_back();
  const float* grad = call.data<float>(0);
  float* made = Call::floats(output);
  Ints row(rows.size(), 0);
  do {
    const float *cosines = call.data<float>(1) + offset(row, strides), *sines = call.data<float>(2) + offset(row, strides);
    for (std::int64_t i = 0; i < half; ++i) {
      made[i] = grad[i] * cosines[i] + grad[half + i] * sines[half + i];
      made[half + i] = grad[half + i] * cosines[half + i] - grad[i] * sines[i];
    }
    grad += width;
    made += width;
  } while (next(row, rows));
  return call.give(0, output);
}

bool slice_backward(Call& call) {
  // grad, shape, starts, ends, axes, steps
  if (!call.are_floats({0}) || !call.is_ints(1) || !call.is_ints(2) || !call.is_ints(3)) return false;
  if ((call.given(4) && !call.is_ints(4)) || (call.given(5) && !call.is_ints(5))) return false;
  const Ints shape = call.ints(1), starts = call.ints(2), ends = call.ints(3);
  const Ints axes = call.given(4) ? call.ints(4) : Ints(), steps = call.given(5) ? call.ints(5) : Ints();
  const std::int64_t rank = static_cast<std::int64_t>(shape.size());
  Ints part = shape, first(shape.size(), 0), every(shape.size(), 1);
  for (std::size_t i = 0; i < starts.size(); ++i) {
    std::int64_t axis = axes.empty() ? static_cast<std::int64_t>(i) : axes[i];
    const std::int64_t step = steps.empty() ? 1 : steps[i];
    if (axis < 0) axis += rank;
    if (axis < 0 || axis >= rank || step < 1) return false;
    const std::int64_t size = shape[axis];
    const auto inside = [size](std::int64_t place) {
      if (place < 0) place += size;
      return place < 0 ? 0 : place > size ? size : place;
    };
    first[axis] = inside(starts[i]);
    part[axis] = (inside(ends[i]) - first[axis] + step - 1) / step;
    every[axis] = step;
  }
  const std::int64_t entries = count(shape.data(), rank);
  if (rank == 0 || call.numel(0) == 0 || call.shape(0) != part || !is_small(entries)) return false;
  Tensor output = call.empty(shape);
  if (output == nullptr) return false;
  float* whole = Call::floats(output);
  std::memset(whole, 0, static_cast<std::size_t>(entries) * sizeof(float));
  Ints strides = dense_strides(shape);
  whole += offset(first, strides);
  for (std::int64_t axis = 0; axis < rank; ++axis) strides[axis] *= every[axis];
  const std::int64_t width = part.back(), apart = strides.back();
  part.pop_back();
  strides.pop_back();
  const float* grad = call.data<float>(0);
  Ints row(part.size(), 0);
  do {
    float* to = whole + offset(row, strides);
    for (std::int64_t i = 0; i < width; ++i) to[i * apart] = *grad++;
  } while (next(row, part));
  return call.give(0, output);
}

// Entries along the last axis, by indices that are broadcast to a shape.
struct Entries {
  Ints rows;     // the shape without its last axis
  Ints strides;  // of the indices, for each of these
  std::int64_t width;
  std::int64_t size;  // of the last axis that they are taken from
  const std::int64_t* indices;

  // Read them for a tensor of `shape`, from one of `from`; return whether each is inside, counted from either end.
  bool read(const Call& call, std::size_t which, const Ints& shape, const Ints& from, std::int64_t axis) {
    const std::int64_t rank = static_cast<std::int64_t>(shape.size());
    if (!call.given(which) || call.type(which) != INT64 || rank == 0 || call.rank(which) != rank) return false;
    if (from.size() != shape.size() || (axis != -1 && axis != rank - 1)) return false;
    const Ints sizes = call.shape(which);
    strides = dense_strides(sizes);
    for (std::int64_t i = 0; i < rank; ++i) {
      if (sizes[i] != shape[i] && (sizes[i] != 1 || i == rank - 1)) return false;
      if (shape[i] == 0 || (i < rank - 1 && from[i] != shape[i])) return false;
      if (sizes[i] == 1) strides[i] = 0;
    }
    rows = Ints(shape.begin(), shape.end() - 1);
    strides.pop_back();
    width = shape.back();
    size = from.back();
    indices = call.data<std::int64_t>(which);
    for (std::int64_t i = 0; i < call.numel(which); ++i) {
      if (indices[i] < -size || indices[i] >= size) return false;
    }
    return true;
  }
  std::int64_t at(const std::int64_t* row, std::int64_t i) const { return row[i] < 0 ? row[i] + size : row[i]; }
};

bool gather_elements(Call& call) {
  // x, indices, shape, axis
  Entries entries;
  if (!call.are_floats({0}) || !call.is_ints(2) || !call.is_int(3)) return false;
  const Ints shape = call.ints(2);
  if (!entries.read(call, 1, shape, call.shape(0), call.one_int(3))) return false;
  if (!is_small(count(shape.data(), static_cast<std::int64_t>(shape.size())))) return false;
  Tensor output = call.empty(shape);
  if (output == nullptr) return false;
  const float* x = call.data<float>(0);
  float* made = Call::floats(output);
  Ints row(entries.rows.size(), 0);
  do {
    const std::int64_t* indices = entries.indices + offset(row, entries.strides);
    for (std::int64_t i = 0; i < entries.width; ++i) *made++ = x[entries.at(indices, i)];
    x += entries.size;
  } while (next(row, entries.rows));
  return call.give(0, output);
}

bool gather_elements_backward(Call& call) {
  // grad, shape, indices, axis
  Entries entries;
  if (!call.are_floats({0}) || !call.is_ints(1) || !call.is_int(3)) return false;
  const Ints shape = call.ints(1);
  const std::int64_t numel = count(shape.data(), static_cast<std::int64_t>(shape.size()));
  if (!entries.read(call, 2, call.shape(0), shape, call.one_int(3)) || !is_small(numel)) return false;
  Tensor output = call.empty(shape);
  if (output == nullptr) return false;
  const float* grad = call.data<float>(0);
  float* whole = Call::floats(output);
  std::memset(whole, 0, static_cast<std::size_t>(numel) * sizeof(float));
  Ints row(entries.rows.size(), 0);
  do {
    const std::int64_t* indices = entries.indices + offset(row, entries.strides);
    for (std::int64_t i = 0; i < entries.width; ++i) whole[entries.at(indices, i)] += *grad++;
    whole += entries.size;
  } while (next(row, entries.rows));
  return call.give(0, output);
}

// ---- sums of the user's outputs, of which ORT would write one over an operand ---------------------------------------

FOR_EACH_PROCESSOR void add_rows(const float* a, const float* b, float* total, std::int64_t rows, std::int64_t width) {
  for (std::int64_t row = 0; row < rows; ++row, a += width, total += width) {
    for (std::int64_t i = 0; i < width; ++i) total[i] = a[i] + b[i];
  }
}

// Whether input j has the last axes of input i, so that it is added to each of its rows.
bool is_row_of(const Call& call, std::size_t i, std::size_t j) {
  const Ints whole = call.shape(i), row = call.shape(j);
  return row.size() <= whole.size() && std::equal(row.rbegin(), row.rend(), whole.rbegin());
}

void add_row(const Call& call, std::size_t i, std::size_t j, float* total) {
  const std::int64_t width = call.numel(j);
  add_rows(call.data<float>(i), call.data<float>(j), total, width == 0 ? 0 : call.numel(i) / width, width);
}

bool add(Call& call) {
  if (!call.are_floats({0, 1})) return false;
  const std::size_t whole = is_row_of(call, 0, 1) ? 0 : 1;
  if (!is_row_of(call, whole, 1 - whole)) return false;
  Tensor made = call.empty(call.shape(whole));
  if (!call.failed) add_row(call, whole, 1 - whole, Call::floats(made));
  return call.give(0, made);
}

bool add_bias(Call& call) {
  if (!call.are_floats({0, 1}) || !is_row_of(call, 0, 1)) return false;
  add_row(call, 0, 1, call.data<float>(0));
  return call.give_input(0, 0, call.shape(0));
}

// ---- in the memory of the first input -------------------------------------------------------------------------------

bool add_output_gradient(Call& call) {
  if (!call.are_floats({0, 1}) || (call.given(2) && !call.is_ints(2))) return false;
  const Ints shape = call.given(2) ? call.ints(2) : call.shape(0);
  for (std::int64_t size : shape) {
    if (size < 0) return false;
  }
  if (count(shape.data(), static_cast<std::int64_t>(shape.size())) != call.numel(0)) return false;
  if (call.rank(1) != 0) {
    if (call.shape(1) != shape) return false;
    float* total = call.data<float>(0);
    const float* grad = call.data<float>(1);
    const std::int64_t entries = call.numel(0);
    for (std::int64_t i = 0; i < entries; ++i) total[i] += grad[i];
  }
  return call.give_input(0, 0, shape);
}

bool add_embedding_gradient(Call& call) {
  // total, grad, indices, padding_idx
  if (!call.are_floats({0, 1}) || call.rank(0) != 2 || !call.given(2) || call.type(2) != INT64 || !call.is_int(3)) return false;
  const std::int64_t rows = call.numel(2), width = call.size(0, 1), padding = call.one_int(3);
  const std::int64_t* indices = call.data<std::int64_t>(2);
  if (call.numel(1) != rows * width) return false;
  for (std::int64_t row = 0; row < rows; ++row) {
    if (indices[row] < 0 || indices[row] >= call.size(0, 0)) return false;
  }
  const float* grad = call.data<float>(1);
  for (std::int64_t row = 0; row < rows; ++row, grad += width) {
    float* total = call.data<float>(0) + indices[row] * width;
    const bool counts = padding < 0 || indices[row] != padding;
    for (std::int64_t i = 0; i < width; ++i) total[i] += counts ? grad[i] : 0;
  }
  return call.give_input(0, 0, call.shape(0));
}

// ---- by name --------------------------------------------------------------------------------------------------------

struct Kernel {
  const char* name;  // those of `torch_kernels.py` have its namespace in front, torch's operators none
  bool (*compute)(Call&);
  bool any_size;  // whether Python takes no memory that is kept, or the kernel looks at the size itself
};

const Kernel KERNELS[] = {
    {"ortlab::sum_over", sum_over, true},
    {"ortlab::mean_over", mean_over, true},
    {"ortlab::sum_of_products", sum_of_products, true},
    {"ortlab::matmul", matmul, true},
    {"ortlab::matmul_transposed", matmul_transposed, true},
    {"ortlab::matmul_of_rows", matmul_of_rows, true},
    {"ortlab::gemm", gemm, true},
    {"ortlab::layer_norm", layer_norm, true},
    {"ortlab::layer_norm_backward", layer_norm_backward, true},
    {"ortlab::rms_norm_backward", rms_norm_backward, false},
    {"ortlab::convolution", convolution, true},
    {"ortlab::convolution_backward", convolution_backward, true},
    {"ortlab::grouped_convolution_backward", grouped_convolution_backward, true},
    {"ortlab::max_pool2d", max_pool2d, true},
    {"ortlab::adaptive_avg_pool2d_backward", adaptive_avg_pool2d_backward, true},
    {"ortlab::lstm_layer", lstm_layer, true},
    {"ortlab::lstm_layer_backward", lstm_layer_backward, true},
    {"ortlab::relu_backward", relu_backward, false},
    {"ortlab::gelu_backward", gelu_backward, false},
    {"ortlab::gelu_tanh_backward", gelu_tanh_backward, false},
    {"ortlab::leaky_relu", leaky_relu, false},
    {"ortlab::leaky_relu_backward", leaky_relu_backward, false},
    {"ortlab::where", where, false},
    {"ortlab::dropout", dropout_of, false},
    {"ortlab::dropout_to_repeat", dropout_to_repeat, false},
    {"ortlab::dropout_repeated", dropout_repeated, false},
    {"ortlab::dropout_backward", dropout_backward, false},
    {"ortlab::softmax_backward", softmax_backward, false},
    {"ortlab::softmax_backward_over", softmax_backward_over, true},
    {"ortlab::cross_entropy", cross_entropy, false},
    {"ortlab::cross_entropy_backward", cross_entropy_backward, true},
    {"ortlab::log_softmax_loss", log_softmax_loss, true},
    {"ortlab::log_softmax_loss_backward", log_softmax_loss_backward, true},
    {"ortlab::gather_backward", gather_backward, false},
    {"index_add", index_add, false},
    {"ortlab::index_add_to", index_add_to, false},
    {"ortlab::rotary_backward", rotary_backward, false},
    {"ortlab::slice_backward", slice_backward, false},
    {"ortlab::gather_elements", gather_elements, false},
    {"ortlab::gather_elements_backward", gather_elements_backward, false},
    {"ortlab::add", add, false},
    {"ortlab::add_bias", add_bias, false},
    {"ortlab::add_output_gradient", add_output_gradient, false},
    {"ortlab::add_embedding_gradient", add_embedding_gradient, true},
};

// ---- operators of torch ----------------------------------------------------------------------------------------------

// An argument of torch's operator: an input of the node by its number, or a constant.
struct Argument {
  bool is_optional = false;
  char kind = 0;  // Tensor, mask, int, float, boolean, list of ints; lower case for a constant; n for "not given"
  std::size_t input = 0;
  std::int64_t whole = 0;
  double real = 0;
  Ints list;
};

// What an output has to be, lest Python makes the call: its type, and the input whose shape it has; -1 for anything.
struct Result {
  std::int32_t type;
  std::int64_t like;
};

struct Description {
  std::string operator_name, overload;
  std::vector<Argument> arguments;
  std::vector<Result> results;
};

std::unordered_map<std::string, Description> descriptions;  // by the name and the overload that ORT gives
std::shared_mutex describing;

std::string key_of(const char* name, const char* overload) { return std::string(name) + '\n' + overload; }

// Read arguments that are separated by spaces, such as "T0 T1 ?T3 i1 f0.5 l2,2 n".
std::vector<Argument> arguments_of(const char* text) {
  std::vector<Argument> found;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    Argument one;
    one.is_optional = word[0] == '?';
    one.kind = word[one.is_optional];
    std::istringstream value(word.substr(1 + one.is_optional));
    switch (one.kind) {
      case 'f': value >> one.real; break;
      case 'i': case 'b': value >> one.whole; break;
      case 'l':
        for (std::string entry; std::getline(value, entry, ',');) one.list.push_back(std::stoll(entry));
        break;
      case 'n': break;
      default: value >> one.input; break;
    }
    found.push_back(one);
  }
  return found;
}

bool is_left_out(const Call& call, const Argument& one) {
  return one.kind == 'n' || (one.is_optional && one.kind < 'a' && !call.given(one.input));
}

bool fits(const Call& call, const Argument& one) {
  if (is_left_out(call, one)) return true;
  switch (one.kind) {
    case 'T': return call.given(one.input);
    case 'M': return call.given(one.input) && call.type(one.input) == UINT8;
    case 'L': return call.is_ints(one.input);
    case 'F': return call.is_float(one.input);
    case 'I': case 'B': return call.is_int(one.input);
    default: return true;
  }
}

Value value_of(Call& call, const Argument& one) {
  switch (one.kind) {
    case 'T': return call.tensor(one.input);
    case 'M': return call.mask(one.input);
    case 'L': return call.list(call.ints(one.input));
    case 'F': return Call::number(call.one_float(one.input));
    case 'I': return static_cast<Value>(call.one_int(one.input));
    case 'B': return call.one_int(one.input) != 0;
    case 'l': return call.list(one.list);
    case 'f': return Call::number(one.real);
    case 'b': return one.whole != 0;
    default: return static_cast<Value>(one.whole);
  }
}

bool compute(Call& call, const Description& said) {
  if (call.outputs() != said.results.size()) return false;
  for (const Argument& one : said.arguments) {
    if (!fits(call, one)) return false;
  }
  std::vector<Value> stack;
  for (const Argument& one : said.arguments) {
    const Value value = is_left_out(call, one) ? 0 : value_of(call, one);
    stack.push_back(one.is_optional && !is_left_out(call, one) ? call.some(value) : value);
  }
  stack.resize(std::max(stack.size(), said.results.size()));
  if (!call.run(said.operator_name.c_str(), said.overload.c_str(), stack.data())) return false;
  for (std::size_t i = 0; i < said.results.size(); ++i) {
    const Result& result = said.results[i];
    Tensor tensor = reinterpret_cast<Tensor>(stack[i]);
    const bool is_right = (result.type < 0 || Call::is_of(tensor, result.type)) &&
                          (result.like < 0 || call.has_shape_of(tensor, result.like));
    if (!is_right) call.failed = true;
    call.give_own(i, tensor);
  }
  return !call.failed;
}

// A kernel of `torch_kernels.py` that is one operator of torch, with one result.
struct Named {
  Named(const char* name, const char* of_torch, const char* overload, const char* arguments, bool any_size)
      : name(name), said{of_torch, overload, arguments_of(arguments), {{-1, -1}}}, any_size(any_size) {}
  const char* name;
  Description said;
  bool any_size;
};

const Named NAMED[] = {
    {"ortlab::silu_backward", "aten::silu_backward", "", "T0 T1", false},
    {"ortlab::sigmoid_backward", "aten::sigmoid_backward", "", "T0 T1", false},
    {"ortlab::tanh_backward", "aten::tanh_backward", "", "T0 T1", false},
    {"ortlab::divided", "aten::div", "Tensor", "T0 T1", true},
    {"ortlab::sqrt", "aten::sqrt", "", "T0", false},
    {"ortlab::tanh", "aten::tanh", "", "T0", false},
    {"ortlab::erf", "aten::erf", "", "T0", false},
    {"ortlab::sigmoid", "aten::sigmoid", "", "T0", false},
    {"ortlab::copy_of", "aten::clone", "", "T0 n", false},
    {"ortlab::scatter_add_to", "aten::scatter_add", "", "T1 I2 T3 T0", false},
    {"ortlab::adaptive_avg_pool2d", "aten::adaptive_avg_pool2d", "", "T0 L1", true},
};

bool compute_described(Call& call, const char* name, const char* overload) {
  const Description* said = nullptr;
  {
    std::shared_lock<std::shared_mutex> reading(describing);
    const auto found = descriptions.find(key_of(name, overload));
    if (found == descriptions.end()) return false;
    said = &found->second;  // which stays where it is
  }
  return compute(call, *said);
}

// ---- the rest of torch's threads ------------------------------------------------------------------------------------

// Behind each kernel of torch, the threads of OpenMP wait for the next one in a loop, for milliseconds (GOMP_SPINCOUNT of
// libgomp). They take the cores that ONNX Runtime's threads need for its own kernels. So where these take long, torch's
// threads are put to sleep: in a region of OpenMP, which ends with the next call. How long it takes behind each call
// was measured in the step before.

using Clock = std::chrono::steady_clock;

// Microseconds from which on a rest is worth its while, and after one, which about halves them; to wake the threads
// takes some 50, and more for each.
constexpr double WORTH_A_REST = 150, WORTH_ANOTHER = 50, A_THREAD = 4;
constexpr std::size_t MOST_GAPS = 10000;

thread_local std::atomic<std::uint32_t> resting{0};
thread_local bool shares_cores = false;
thread_local double of_threads = 0;
thread_local Clock::time_point since;
thread_local bool* is_rest = nullptr;  // of the gap that lasts
// Whether torch's threads sleep in each gap, by where the name of the node before it is in memory.
thread_local std::unordered_map<std::uintptr_t, bool> gaps;

void sleep_until_over(void* at) {
#ifdef __linux__
  auto* lasts = static_cast<std::atomic<std::uint32_t>*>(at);
  while (lasts->load() != 0) syscall(SYS_futex, lasts, FUTEX_WAIT_PRIVATE, 1, nullptr, nullptr, 0);
#endif
}

void begin_gap(std::uintptr_t key) {
  is_rest = &gaps[key];
  since = Clock::now();
  if (!*is_rest) return;
  resting = 1;
  torch.start_region(&sleep_until_over, &resting, 0);
}

void end_gap() {
  if (is_rest == nullptr) return;
  const double took = std::chrono::duration<double, std::micro>(Clock::now() - since).count();
  if (*is_rest) {
    resting = 0;
#ifdef __linux__
    syscall(SYS_futex, &resting, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
    torch.end_region();
  }
  *is_rest = took > of_threads + (*is_rest ? WORTH_ANOTHER : WORTH_A_REST);
  is_rest = nullptr;
}

// A turn of torch in a run.
class Turn {
 public:
  explicit Turn(const char* name) : key_(reinterpret_cast<std::uintptr_t>(name)) {
    if (shares_cores) end_gap();
  }
  ~Turn() {
    if (shares_cores) begin_gap(key_);
  }

 private:
  std::uintptr_t key_;
};

// ---- which it is ----------------------------------------------------------------------------------------------------

bool compute(Call& call, const char* name) {
  for (const Kernel& kernel : KERNELS) {
    if (std::strcmp(kernel.name, name) == 0) return (kernel.any_size || call.all_small()) && kernel.compute(call);
  }
  for (const Named& one : NAMED) {
    if (std::strcmp(one.name, name) == 0) return (one.any_size || call.all_small()) && compute(call, one.said);
  }
  return false;
}

void execute(const char* name, const char* overload, std::size_t n_inputs, DLManagedTensor** inputs,
             std::size_t n_outputs, DLManagedTensor** outputs) {
  const Turn turn(name);
  if (enabled) {
    Call call(n_inputs, inputs, n_outputs, outputs);
    const bool made = call.all_on_cpu() && ((*overload == 0 && compute(call, name)) ||
                                            (!call.failed && compute_described(call, name, overload)));
    if (made && !call.failed) {
      call.end();
      ++computed;
      return;
    }
    call.undo();
  }
  in_python(name, overload, n_inputs, inputs, n_outputs, outputs);
}

}  // namespace

extern "C" void ortlab_connect(const Torch* functions, Execute python) {
  torch = *functions;
  in_python = python;
}
// Let the library make a call itself from now on; see `compiled_calls.describe`.
extern "C" void ortlab_describe(const char* name, const char* overload, const char* of_torch, const char* torch_overload,
                                const char* arguments, const std::int64_t* results, std::size_t n_results) {
  Description said{of_torch, torch_overload, arguments_of(arguments), {}};
  for (std::size_t i = 0; i < n_results; ++i) {
    said.results.push_back({static_cast<std::int32_t>(results[2 * i]), results[2 * i + 1]});
  }
  std::unique_lock<std::shared_mutex> writing(describing);
  descriptions.emplace(key_of(name, overload), std::move(said));
}
// A run of ONNX Runtime that has several threads ends in this thread, or begins; its key is no name's place in memory.
extern "C" void ortlab_end_run() {
  if (shares_cores) end_gap();
  shares_cores = false;
}
extern "C" void ortlab_begin_run(std::uintptr_t key, std::uint32_t threads) {
#ifdef __linux__
  ortlab_end_run();  // of a run that was interrupted
  if (torch.start_region == nullptr || torch.end_region == nullptr) return;
  if (gaps.size() > MOST_GAPS) gaps.clear();  // sessions end and begin
  of_threads = A_THREAD * threads;
  shares_cores = true;
  begin_gap(key);
#endif
}
// Behind how many calls, and at how many beginnings of runs, torch's threads sleep for the runs of this thread.
extern "C" std::uint64_t ortlab_rests() {
  return static_cast<std::uint64_t>(
      std::count_if(gaps.begin(), gaps.end(), [](const auto& one) { return one.second; }));
}
// Whether Python's dicts hold the keys and the objects that they held, two pointers for each entry; called with Python's
// lock, and with the address of its PyDict_Next.
extern "C" bool ortlab_same_entries(int (*next)(void*, std::ptrdiff_t*, void**, void**), std::size_t n_dicts,
                                    void* const* dicts, const std::int64_t* lengths, void* const* held) {
  for (std::size_t i = 0; i < n_dicts; ++i) {
    std::int64_t left = lengths[i];
    std::ptrdiff_t place = 0;
    for (void *key = nullptr, *value = nullptr; next(dicts[i], &place, &key, &value) != 0; held += 2) {
      if (left-- == 0 || held[0] != key || held[1] != value) return false;
    }
    if (left != 0) return false;
  }
  return true;
}
extern "C" void ortlab_enable(bool whether) { enabled = whether; }
extern "C" std::uint64_t ortlab_computed() { return computed; }
extern "C" std::size_t ortlab_execute() { return reinterpret_cast<std::size_t>(&execute); }
