"""PyTorch against ONNX Runtime, tensor by tensor."""
