"""Runtimes of other projects: ONNX Runtime, OpenVINO, TensorRT.

They share `accelcheck.techniques.compilation.conversion` with ``torch.export``.
"""
