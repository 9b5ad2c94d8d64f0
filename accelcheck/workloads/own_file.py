"""User-owned models made by a file: ``FILE:FUNCTION``, as in `--accel-model` and ``accelcheck check``."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import random
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from accelcheck.core.case import Mode, stable_seed
from accelcheck.core.foreign import calling
from accelcheck.core.registry import unknown
from accelcheck.workloads.base import Workload
from accelcheck.workloads.nested import OwnModelError
from accelcheck.workloads.own_model import task_of, workload_of

if TYPE_CHECKING:
    from pathlib import Path

FUNCTION = "make"
"""Default name of the function."""
RETURNS = (
    "expected (model, inputs), (model, inputs, keywords), or a dict of model, inputs and further arguments of "
    "accelcheck.api.workload_of and task_of"
)
TRAINING = ("loss", "target", "batches", "optimizer", "steps")
ACCURACY = ("data", "metric", "max_drop")
KEYS = ("model", "inputs", "keywords", "sizes", "estimators", "name", "traits", *TRAINING, *ACCURACY)
"""Keys allowed in a dict."""


@functools.cache  # a command asks for them too, and models may be large
def workloads_of(spec: str, folder: Path, taken: frozenset[str] = frozenset()) -> tuple[Workload, ...]:
    """Workloads of a model, for numbers and speed, and for accuracy where there are data and a metric.

    A training has a workload of its own if there are inputs beside its batches.

    The function is called without arguments. The name seeds the random generators of Python, NumPy and torch, so that
    every process makes the same model: the file's, with the function's where that is not `make` or the name is taken.

    Args:
        spec: ``FILE:FUNCTION``, or ``FILE`` for its function ``make``.
        folder: Folder that the path is relative to.
        taken: Names of other workloads.

    Raises:
        OwnModelError: There is no such file or function, or its return value cannot be checked.
        ForeignCodeError: The file or the function raises.
        UnknownNameError: A dict has an unknown key.
    """
    path, function = _found(spec, folder)
    name, longer = (_slug(own) for own in (path.stem, f"{path.stem}.{function}"))
    if function != FUNCTION or name in taken:
        name = longer
    with calling(f"{spec}: the file"):
        module = _imported(path)
    make = getattr(module, function, None)
    if not callable(make):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise OwnModelError(f"{spec}: {unknown('function', function, functions)}")
    with calling(f"{spec}: {function}()"), seeded(stable_seed(name)):
        made = make()
    with _named(spec):
        return tuple(_workloads(made, name))


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "model"


def _found(spec: str, folder: Path) -> tuple[Path, str]:
    words, _, function = spec.rpartition(":")
    if not words:
        words, function = spec, FUNCTION
    path = folder / words
    if not path.is_file():
        raise OwnModelError(f"{spec}: there is no file {path}: expected FILE:FUNCTION, such as path/to/model.py:make")
    return path.resolve(), function


def _imported(path: Path) -> Any:
    """Module of a file, which can import its neighbours, as a program in that folder can."""
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = path.stem if known is None else f"accelcheck_model_{stable_seed(str(path))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise OwnModelError(f"{path}: expected a file of Python, named FILE.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the random generators of Python, NumPy and torch inside a context, and restores their states after it."""
    plain, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(plain)
            np.random.set_state(numbers)


@contextlib.contextmanager
def _named(spec: str) -> Iterator[None]:
    try:
        yield
    except OwnModelError as error:
        raise OwnModelError(f"{spec}: {error}") from error


def _workloads(made: Any, name: str) -> Iterator[Workload]:
    if isinstance(made, Workload):
        yield made
        return
    given = _arguments(made)
    name = given.get("name", name)
    data, metric = given.get("data"), given.get("metric")
    if (data is None) != (metric is None):
        raise OwnModelError("accuracy needs data and a metric: give both, or none of them")
    shared = {key: given[key] for key in ("traits",) if key in given}
    training = {key: given[key] for key in TRAINING if key in given}
    called = {key: given[key] for key in ("inputs", "keywords") if not _empty(given.get(key))}
    apart = bool(called) and "batches" in given  # they may be of other sizes or arguments than the inputs
    if called or training or data is None:
        others = {key: given[key] for key in ("sizes", "estimators") if key in given}
        yield workload_of(given["model"], name=name, **called, **others, **({} if apart else training), **shared)
    if apart:
        own = workload_of(given["model"], name=f"{name}.training", sizes=(), **training, **shared)
        yield replace(own, modes=own.modes & {Mode.TRAIN, Mode.TRAIN_SPEED})
    if data is not None and metric is not None:
        words = {key: given[key] for key in ("max_drop",) if key in given}
        yield task_of(given["model"], data, metric, name=f"{name}.accuracy", **words, **shared)


def _arguments(made: Any) -> dict[str, Any]:
    """Arguments by name, from a tuple or a dict; raises `OwnModelError` without a model, or with an unknown name."""
    if isinstance(made, tuple) and len(made) in {2, 3}:
        made = dict(zip(("model", "inputs", "keywords"), made, strict=False))
    if not isinstance(made, Mapping):
        raise OwnModelError(f"{RETURNS}, got {_kind(made)}")
    for key in made:
        if key not in KEYS:
            raise OwnModelError(str(unknown("key", str(key), KEYS)))
    if "model" not in made:
        raise OwnModelError(f"{RETURNS}, got a dict without 'model'")
    return dict(made)


def _empty(argument: Any) -> bool:
    return argument is None or (isinstance(argument, (tuple, Mapping)) and not argument)


def _kind(made: Any) -> str:
    return f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
