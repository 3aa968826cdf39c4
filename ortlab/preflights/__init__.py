"""The pre-flight: what stands between a model and ONNX Runtime, found before a training step."""
