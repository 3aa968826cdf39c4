"""A `torch.autograd.Function` inside an ONNX graph: exported, and run in Python by ONNX Runtime."""
