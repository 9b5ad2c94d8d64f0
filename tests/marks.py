"""Marks of tests that need something of this machine. Contains no tests."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler"
)
needs_python_backends = pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="torch 2.9 has no Python-written backends",
)
