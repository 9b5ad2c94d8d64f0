"""Runtimes of other projects: ONNX Runtime, OpenVINO, TensorRT. ``torch.export`` is in `compilation`."""
