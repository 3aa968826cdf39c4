// The two functions that onnxruntime-training 1.19.2 calls to run a torch.autograd.Function, in C++ because their
// signature is C++: std::vector by reference, and std::vector as the result. They turn the call into plain C and
// hand it to a Python function made by ctypes (ortlab/engine/functions/abi.py), which takes the GIL itself.
//
// ORT's typedef is CustomFunctionRunnerType in orttraining/core/framework/torch/custom_function_register.h; the
// installed package declares the same signature in
// torch_cpp_extensions/cpu/torch_interop_utils/custom_function_fw.h.
//
// Nothing of Python or torch is included, so the library fits every version of both, and no headers need be
// installed; PyObject is only a name here (CPython's own: `typedef struct _object PyObject`).

#include <cstddef>
#include <cstdint>
#include <vector>

typedef struct _object PyObject;

namespace {

// Same order and types as `NativeCall` in function_abi.py.
struct NativeCall {
  const char* name;
  void* callback;
  const char* kernel;
  const std::int64_t* requires_grad;
  const std::int64_t* is_tensor;
  PyObject* const* arguments;
  std::size_t n_arguments;
  const std::int64_t* reuse;
  std::size_t n_outputs;
  PyObject** outputs;  // room for n_outputs; filled with new references
  bool backward;
  bool training;
  bool safe;
};

typedef bool (*Delegate)(const NativeCall*);
Delegate delegate = nullptr;

std::vector<PyObject*> run(bool backward, const char* name, void* callback,
                           const std::vector<std::int64_t>& requires_grad,
                           const std::vector<std::int64_t>& is_tensor, bool training,
                           const std::vector<std::int64_t>& reuse, const char* kernel, bool safe,
                           const std::vector<PyObject*>& arguments) {
  std::vector<PyObject*> outputs(reuse.size());
  const NativeCall call = {name,         callback,         kernel,       requires_grad.data(),
                           is_tensor.data(), arguments.data(), arguments.size(), reuse.data(),
                           outputs.size(),   outputs.data(),   backward,     training,
                           safe};
  // Too few results make the kernel fail; an exception would have to cross from one C++ runtime into another.
  if (delegate == nullptr || !delegate(&call)) outputs.clear();
  return outputs;
}

std::vector<PyObject*> run_forward(const char* name, void* callback, const std::vector<std::int64_t>& requires_grad,
                                   const std::vector<std::int64_t>& is_tensor, const bool training,
                                   const std::vector<std::int64_t>& reuse, const char* kernel, const bool safe,
                                   const std::vector<PyObject*>& arguments) {
  return run(false, name, callback, requires_grad, is_tensor, training, reuse, kernel, safe, arguments);
}

std::vector<PyObject*> run_backward(const char* name, void* callback, const std::vector<std::int64_t>& requires_grad,
                                    const std::vector<std::int64_t>& is_tensor, const bool training,
                                    const std::vector<std::int64_t>& reuse, const char* kernel, const bool safe,
                                    const std::vector<PyObject*>& arguments) {
  return run(true, name, callback, requires_grad, is_tensor, training, reuse, kernel, safe, arguments);
}

}  // namespace

extern "C" void ortlab_set_delegate(Delegate function) { delegate = function; }
extern "C" std::size_t ortlab_forward_runner() { return reinterpret_cast<std::size_t>(&run_forward); }
extern "C" std::size_t ortlab_backward_runner() { return reinterpret_cast<std::size_t>(&run_backward); }
