"""Runtimes of other projects: ONNX Runtime, OpenVINO, TensorRT."""
