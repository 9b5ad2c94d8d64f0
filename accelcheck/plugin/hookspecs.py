"""Specifies hooks by which other plugins and conftest files register devices, techniques and workloads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from accelcheck.devices.base import Device
    from accelcheck.techniques.base import Technique
    from accelcheck.workloads.base import Workload


@pytest.hookspec
def pytest_accel_devices() -> Iterable[Device]:  # type: ignore[empty-body]  # a specification
    """Devices besides the built-in ones.

    The controller calls it before torch is imported: the module that defines the device must not import torch at its
    top.
    """


@pytest.hookspec
def pytest_accel_techniques() -> Iterable[Technique]:  # type: ignore[empty-body]  # a specification
    """Techniques besides the built-in ones. Called when cases are collected."""


@pytest.hookspec
def pytest_accel_workloads() -> Iterable[Workload]:  # type: ignore[empty-body]  # a specification
    """Workloads besides the built-in ones. Called when cases are collected."""
