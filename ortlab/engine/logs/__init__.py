"""What PyTorch's exporter, ORTModule and ONNX Runtime say, collected into a lab's messages."""
