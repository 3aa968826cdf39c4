"""Peers: PyTorch by itself, with checkpointed layers and compiled, beside ONNX Runtime."""
