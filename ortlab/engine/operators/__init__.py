"""PyTorch's operators in an ONNX graph: how they are exported, who executes them, and their gradients."""
