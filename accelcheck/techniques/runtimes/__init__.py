"""Runtimes that are not torch's own: ONNX Runtime, OpenVINO, TensorRT.

Conversion that they share with export is in `accelcheck.techniques.compilation.conversion`.
"""
