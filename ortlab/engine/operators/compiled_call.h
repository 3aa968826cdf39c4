// One call of an operator of PyTorch by ONNX Runtime: its inputs and outputs as DLPack, and torch's C interface.
//
// torch is reached through functions of its stable C interface (torch/csrc/stable/c/shim.h and
// torch/csrc/inductor/aoti_torch/c/shim.h), whose addresses `compiled_calls.py` gives. Nothing of torch or Python is
// included, so the library is compiled in seconds and serves each version that has those functions.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

// Compile a function for several processors; the library chooses when it is loaded.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#endif
#ifndef FOR_EACH_PROCESSOR
#define FOR_EACH_PROCESSOR
#endif

namespace {

using Ints = std::vector<std::int64_t>;

// ---- DLPack 0.6, as ORT speaks it -----------------------------------------------------------------------------------

struct DLTensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t ndim;
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor*);
};

constexpr std::int32_t CPU = 1;  // kDLCPU
constexpr std::int64_t SMALL = 1 << 20;  // `torch_kernels.SMALLEST_KEPT`
constexpr std::int64_t MANY_CHANNELS = 16;  // `torch_kernels._MANY_CHANNELS`
constexpr std::int64_t PLANE = 2, WIDE_WINDOW = 5;  // `torch_kernels._PLANE`, `_WIDE_WINDOW`

// ---- torch's C interface --------------------------------------------------------------------------------------------

using Error = std::int32_t;
using Value = std::uint64_t;  // StableIValue
using Tensor = void*;         // AtenTensorHandle

// `at::Tensor` and `std::string_view`, as far as a function that takes and returns them goes: to the C++ ABI the one is
// a class with a destructor, returned in memory, the other two words.
struct Reference {
  void* implementation;
  Reference(const Reference&) = delete;
  ~Reference() {}
};
struct Text {
  std::size_t length;
  const char* start;
};

// Same order as in compiled_calls.py.
struct Torch {
  Error (*from_blob)(void*, std::int64_t, const std::int64_t*, const std::int64_t*, std::int64_t, std::int32_t,
                     std::int32_t, std::int32_t, Tensor*);
  Error (*empty)(std::int64_t, const std::int64_t*, const std::int64_t*, std::int32_t, std::int32_t, std::int32_t,
                 Tensor*);
  Error (*again)(Tensor, Tensor*);
  Error (*drop)(Tensor);
  Error (*data)(Tensor, void**);
  Error (*rank)(Tensor, std::int64_t*);
  Error (*sizes)(Tensor, std::int64_t**);
  Error (*type)(Tensor, std::int32_t*);
  Error (*is_contiguous)(Tensor, bool*);
  Error (*is_defined)(Tensor, bool*);
  Error (*mm)(Tensor, Tensor, Tensor);
  Error (*addmm)(Tensor, Tensor, Tensor, Tensor, double, double);
  Error (*call)(const char*, const char*, Value*, std::uint64_t);
  Error (*new_list)(std::size_t, void**);
  Error (*push)(void*, Value);
  Error (*new_value)(Value**);
  bool (*records)();      // whether autograd records what is called
  void (*record)(bool);
  // torch's own C++ function, which may be missing: its C interface loses the memory of a string argument.
  Reference (*gelu_backward)(const Reference&, const Reference&, Text);
  // A region of OpenMP, of as many threads as torch has; missing where torch has another OpenMP than libgomp.
  void (*start_region)(void (*)(void*), void*, unsigned);
  void (*end_region)();
};

Torch torch;

using Execute = void (*)(const char*, const char*, std::size_t, DLManagedTensor**, std::size_t, DLManagedTensor**);
Execute in_python = nullptr;
bool enabled = true;
std::atomic<std::uint64_t> computed{0};  // calls that needed no Python

constexpr std::uint64_t BUILT_FOR = (std::uint64_t{2} << 56) | (std::uint64_t{13} << 48);  // torch 2.13
constexpr std::int32_t TORCH_CPU = 0, NO_INDEX = -1;
constexpr Value CONTIGUOUS = 0, CHANNELS_LAST = 2;  // c10::MemoryFormat

// Numbers of c10::ScalarType, which torch's C interface fixes.
enum Type : std::int32_t { UINT8 = 0, INT32 = 3, INT64 = 4, FLOAT16 = 5, FLOAT32 = 6, FLOAT64 = 7, BOOL = 11, BFLOAT16 = 15 };

std::int32_t type_of(const DLTensor& x) {
  switch (x.code * 256 + x.bits) {
    case 0 * 256 + 32: return INT32;
    case 0 * 256 + 64: return INT64;
    case 1 * 256 + 8: return UINT8;
    case 2 * 256 + 16: return FLOAT16;
    case 2 * 256 + 32: return FLOAT32;
    case 2 * 256 + 64: return FLOAT64;
    case 4 * 256 + 16: return BFLOAT16;
    default: return -1;
  }
}

std::int64_t count(const std::int64_t* sizes, std::int64_t rank) {
  std::int64_t product = 1;
  for (std::int64_t axis = 0; axis < rank; ++axis) product *= sizes[axis];
  return product;
}

Ints dense_strides(const Ints& sizes) {
  Ints strides(sizes.size());
  std::int64_t step = 1;
  for (std::size_t axis = sizes.size(); axis-- > 0;) {
    strides[axis] = step;
    step *= sizes[axis] > 1 ? sizes[axis] : 1;
  }
  return strides;
}

// An output for ORT: the tensor of torch whose memory it is, or the input in whose memory it lies.
struct Output {
  DLManagedTensor managed;
  Tensor tensor;
  DLManagedTensor* input;
  Ints shape;

  static void give_back(DLManagedTensor* managed) {
    auto* self = static_cast<Output*>(managed->manager_ctx);
    if (self->tensor != nullptr) torch.drop(self->tensor);
    if (self->input != nullptr && self->input->deleter != nullptr) self->input->deleter(self->input);
    delete self;
  }
};

// One call: its inputs, which are ours to give back, and its outputs. Whatever torch refuses makes it `failed`.
class Call {
 public:
  Call(std::size_t n_inputs, DLManagedTensor** inputs, std::size_t n_outputs, DLManagedTensor** outputs)
      : n_inputs_(n_inputs), inputs_(inputs), n_outputs_(n_outputs), outputs_(outputs) {
    for (std::size_t i = 0; i < n_outputs_; ++i) outputs_[i] = nullptr;
  }

  // Take back what was made for ORT, so that the call can be made in Python.
  void undo() {
    for (std::size_t i = 0; i < n_outputs_; ++i) {
      if (outputs_[i] != nullptr) {
        Output::give_back(outputs_[i]);
        outputs_[i] = nullptr;
      }
    }
    for (Tensor tensor : owned_) torch.drop(tensor);
    owned_.clear();
  }

  // Give the inputs back that no output keeps.
  void end() {
    for (Tensor tensor : owned_) torch.drop(tensor);
    for (std::size_t i = 0; i < n_inputs_; ++i) {
      if (inputs_[i] != nullptr && inputs_[i]->deleter != nullptr) inputs_[i]->deleter(inputs_[i]);
    }
  }

  bool all_on_cpu() const {
    for (std::size_t i = 0; i < n_inputs_; ++i) {
      if (given(i) && (input(i).device_type != CPU || type(i) < 0)) return false;
    }
    return true;
  }
  bool all_small() const {
    for (std::size_t i = 0; i < n_inputs_; ++i) {
      if (given(i) && numel(i) * input(i).bits / 8 >= SMALL) return false;
    }
    return true;
  }

  bool given(std::size_t i) const { return i < n_inputs_ && inputs_[i] != nullptr; }
  bool are_given(std::initializer_list<std::size_t> which) const {
    for (std::size_t i : which) {
      if (!given(i)) return false;
    }
    return true;
  }
  // Whether the first inputs are there, and of float32.
  bool are_floats(std::initializer_list<std::size_t> which) const {
    for (std::size_t i : which) {
      if (!given(i) || type(i) != FLOAT32) return false;
    }
    return true;
  }
  const DLTensor& input(std::size_t i) const { return inputs_[i]->dl_tensor; }
  std::int32_t type(std::size_t i) const { return type_of(input(i)); }
  std::int64_t rank(std::size_t i) const { return input(i).ndim; }
  std::int64_t size(std::size_t i, std::int64_t axis) const { return input(i).shape[axis]; }
  std::int64_t numel(std::size_t i) const { return count(input(i).shape, input(i).ndim); }
  Ints shape(std::size_t i) const { return Ints(input(i).shape, input(i).shape + input(i).ndim); }
  bool same_shape(std::size_t i, std::size_t j) const { return shape(i) == shape(j); }
  std::size_t outputs() const { return n_outputs_; }

  template <typename T>
  T* data(std::size_t i) const {
    return reinterpret_cast<T*>(static_cast<char*>(input(i).data) + input(i).byte_offset);
  }

  // Numbers that the graph has as a tensor: whole ones of int64, int32 or, truth values, of uint8.
  bool is_ints(std::size_t i) const {
    return given(i) && (type(i) == INT64 || type(i) == INT32 || type(i) == UINT8);
  }
  Ints ints(std::size_t i) const {
    Ints read(numel(i));
    for (std::size_t at = 0; at < read.size(); ++at) {
      read[at] = type(i) == INT64   ? data<std::int64_t>(i)[at]
                 : type(i) == INT32 ? data<std::int32_t>(i)[at]
                                    : data<std::uint8_t>(i)[at];
    }
    return read;
  }
  bool is_int(std::size_t i) const { return is_ints(i) && numel(i) == 1; }
  std::int64_t one_int(std::size_t i) const { return ints(i)[0]; }
  bool is_float(std::size_t i) const {
    return is_int(i) || (given(i) && numel(i) == 1 && (type(i) == FLOAT32 || type(i) == FLOAT64));
  }
  double one_float(std::size_t i) const {
    return type(i) == FLOAT64   ? *data<double>(i)
           : type(i) == FLOAT32 ? static_cast<double>(*data<float>(i))
                                : static_cast<double>(one_int(i));
  }

  // ---- arguments of torch's operators: each is torch's, once it has been given to `run` --------------------------

  Value tensor(std::size_t i) { return as_value(view(i, shape(i))); }
  Value mask(std::size_t i) { return as_value(view(i, shape(i), {}, BOOL)); }
  Value optional_tensor(std::size_t i) { return given(i) ? some(tensor(i)) : 0; }
  static Value number(double x) {
    Value value;
    std::memcpy(&value, &x, sizeof value);
    return value;
  }
  Value some(Value inner) {
    Value* place = nullptr;
    if (torch.new_value(&place) == 0) {
      *place = inner;
    } else {
      failed = true;
    }
    return reinterpret_cast<Value>(place);
  }
  Value list(const Ints& values) {
    void* made = nullptr;
    if (torch.new_list(values.size(), &made) != 0) failed = true;
    for (std::int64_t value : values) {
      if (failed || torch.push(made, static_cast<Value>(value)) != 0) failed = true;
    }
    return reinterpret_cast<Value>(made);
  }

  // ---- tensors of torch ------------------------------------------------------------------------------------------

  // The memory of an input in some shape; without strides it is dense.
  Tensor view(std::size_t i, const Ints& sizes, const Ints& strides = {}, std::int32_t type = -1) {
    const Ints& steps = strides.empty() ? dense_strides(sizes) : strides;
    Tensor made = nullptr;
    if (torch.from_blob(data<void>(i), static_cast<std::int64_t>(sizes.size()), sizes.data(), steps.data(), 0,
                        type < 0 ? this->type(i) : type, TORCH_CPU, NO_INDEX, &made) != 0) {
      failed = true;
    }
    return made;
  }
  // The memory of an input as a matrix with `columns` columns, or as its transpose.
  Tensor matrix(std::size_t i, std::int64_t columns, bool turned = false) {
    const std::int64_t rows = columns == 0 ? 0 : numel(i) / columns;
    return kept(turned ? view(i, {columns, rows}, {1, columns}) : view(i, {rows, columns}, {columns, 1}));
  }
  // A dense tensor without values.
  Tensor empty(const Ints& sizes, std::int32_t type = FLOAT32) {
    const Ints strides = dense_strides(sizes);
    Tensor made = nullptr;
    if (torch.empty(static_cast<std::int64_t>(sizes.size()), sizes.data(), strides.data(), type, TORCH_CPU,
                    NO_INDEX, &made) != 0) {
      failed = true;
    }
    return made;
  }
  // The same tensor once more.
  Tensor again(Tensor tensor) {
    Tensor made = nullptr;
    if (torch.again(tensor, &made) != 0) failed = true;
    return made;
  }
  // Drop a tensor when the call ends.
  Tensor kept(Tensor tensor) {
    if (tensor != nullptr) owned_.push_back(tensor);
    return tensor;
  }
  static Value as_value(Tensor tensor) { return reinterpret_cast<Value>(tensor); }
  static float* floats(Tensor tensor) { return static_cast<float*>(memory(tensor)); }
  static void* memory(Tensor tensor) {
    void* found = nullptr;
    torch.data(tensor, &found);
    return found;
  }

  // ---- what kernels do -------------------------------------------------------------------------------------------

  // Call torch's operator; its results take the place of the arguments.
  bool run(const char* name, const char* overload, Value* stack) {
    if (!failed && torch.call(name, overload, stack, BUILT_FOR) != 0) failed = true;
    return !failed;
  }

  // Hand a tensor to ORT, which reads dense memory only.
  bool give(std::size_t i, Tensor tensor) {
    if (failed || tensor == nullptr) return !(failed = true);
    bool defined = true, dense = false;
    torch.is_defined(tensor, &defined);
    if (!defined) {  // a null output is an undefined tensor to ORT, too
      torch.drop(tensor);
      return true;
    }
    torch.is_contiguous(tensor, &dense);
    if (!dense) {
      Value stack[2] = {as_value(tensor), some(CONTIGUOUS)};
      if (!run("aten::clone", "", stack)) return false;
      tensor = reinterpret_cast<Tensor>(stack[0]);
    }
    std::int64_t rank = 0, *sizes = nullptr;
    std::int32_t type = -1;
    void* memory = nullptr;
    torch.rank(tensor, &rank);
    torch.sizes(tensor, &sizes);
    torch.type(tensor, &type);
    torch.data(tensor, &memory);
    DLTensor described{};
    describe(&described, type);
    if (described.bits == 0) {
      torch.drop(tensor);
      return !(failed = true);
    }
    give(i, described, memory, tensor, nullptr, Ints(sizes, sizes + rank));
    return true;
  }
  // Hand an input to ORT as an output, in some shape of as many entries: the last thing that a kernel does.
  bool give_input(std::size_t i, std::size_t which, const Ints& shape) {
    DLTensor described = input(which);
    give(i, described, data<void>(which), nullptr, inputs_[which], shape);
    inputs_[which] = nullptr;
    return true;
  }
  // Hand a tensor to ORT, a copy of it where it lies in the memory of an input.
  bool give_own(std::size_t i, Tensor tensor) {
    if (!failed && is_in_an_input(tensor)) {
      Value stack[2] = {as_value(tensor), some(CONTIGUOUS)};
      tensor = run("aten::clone", "", stack) ? reinterpret_cast<Tensor>(stack[0]) : nullptr;
    }
    if (failed && tensor != nullptr) torch.drop(tensor);
    return !failed && give(i, tensor);
  }
  static bool is_of(Tensor tensor, std::int32_t type) {
    std::int32_t found = -1;
    torch.type(tensor, &found);
    return found == type;
  }
  bool has_shape_of(Tensor tensor, std::size_t i) const {
    std::int64_t rank = 0, *sizes = nullptr;
    torch.rank(tensor, &rank);
    torch.sizes(tensor, &sizes);
    return given(i) && shape(i) == Ints(sizes, sizes + rank);
  }
  bool give_result(std::size_t i, Value value) { return give(i, reinterpret_cast<Tensor>(value)); }
  // Hand all results of torch's operator to ORT, in their order.
  bool give_results(std::size_t count, const Value* stack) {
    bool given = true;
    for (std::size_t i = 0; i < count; ++i) given = give_result(i, stack[i]) && given;
    return given;
  }
  static void drop_result(Value value) {
    if (value != 0) torch.drop(reinterpret_cast<Tensor>(value));
  }

  bool failed = false;

 private:
  bool is_in_an_input(Tensor tensor) const {
    const char* found = static_cast<const char*>(memory(tensor));
    for (std::size_t i = 0; i < n_inputs_; ++i) {
      const char* start = given(i) ? data<const char>(i) : nullptr;
      if (start != nullptr && start <= found && found < start + numel(i) * input(i).bits / 8) return true;
    }
    return false;
  }
  static void describe(DLTensor* described, std::int32_t type) {
    described->lanes = 1;
    switch (type) {
      case INT32: described->code = 0, described->bits = 32; break;
      case INT64: described->code = 0, described->bits = 64; break;
      case UINT8: case BOOL: described->code = 1, described->bits = 8; break;
      case FLOAT16: described->code = 2, described->bits = 16; break;
      case FLOAT32: described->code = 2, described->bits = 32; break;
      case FLOAT64: described->code = 2, described->bits = 64; break;
      case BFLOAT16: described->code = 4, described->bits = 16; break;
      default: break;
    }
  }
  void give(std::size_t i, const DLTensor& described, void* memory, Tensor tensor, DLManagedTensor* input,
            const Ints& shape) {
    auto* output = new Output{};
    output->tensor = tensor;
    output->input = input;
    output->shape = shape;
    DLTensor& x = output->managed.dl_tensor;
    x = described;
    x.data = memory;
    x.byte_offset = 0;
    x.device_type = CPU;
    x.device_id = 0;
    x.ndim = static_cast<std::int32_t>(output->shape.size());
    x.shape = output->shape.data();
    x.strides = nullptr;
    output->managed.manager_ctx = output;
    output->managed.deleter = &Output::give_back;
    outputs_[i] = &output->managed;
  }

  std::size_t n_inputs_;
  DLManagedTensor** inputs_;
  std::size_t n_outputs_;
  DLManagedTensor** outputs_;
  std::vector<Tensor> owned_;
};

// Do some work in as many threads as torch has, each of which takes parts of it until none are left.
template <typename Work>
void in_threads(const Work& take_parts) {
  if (torch.start_region == nullptr || torch.end_region == nullptr) return take_parts();
  const auto take = [](void* of) { (*static_cast<const Work*>(of))(); };
  torch.start_region(take, const_cast<Work*>(&take_parts), 0);
  take_parts();
  torch.end_region();
}

}  // namespace
