"""Builds the device's extension. The other settings are in pyproject.toml."""

from __future__ import annotations

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

SOURCES = ["faults", "kernels", "memory", "runtime", "streams"]

setup(
    ext_modules=[
        CppExtension(  # type: ignore[no-untyped-call]  # torch does not annotate it
            "acme_npu._C",
            [f"csrc/{name}.cpp" for name in SOURCES],
            include_dirs=["csrc"],
            extra_compile_args=["-O1", "-g0"],
            depends=["csrc/acme.h"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
