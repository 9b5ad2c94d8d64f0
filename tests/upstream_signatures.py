"""Signatures of upstream functions that tests imitate, read from source, stored in ``upstream.json``.

Usage: python tests/upstream_signatures.py [--check]

Fetches each package with pip, reads its source without importing it, and writes the file; with ``--check`` it compares
only, and exits with 1 where a signature has changed. A package that cannot be fetched is named, and keeps what is
stored. CuPy has no Python source of what is imitated, and of openvino, onnxscript and torch_xla only the name is.
"""

from __future__ import annotations

import argparse
import ast
import datetime as dt
import inspect
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

STORED = Path(__file__).with_name("upstream.json")
_FLASH = tuple(f"flash_attn_{kind}func" for kind in ("", "qkvpacked_", "varlen_"))
_NVML = ("Init", "Shutdown", *(f"DeviceGet{what}" for what in (
    "HandleByUUID", "ClockInfo", "Temperature", "TotalEnergyConsumption", "CurrentClocksEventReasons",
    "CurrentClocksThrottleReasons",
)))  # fmt: skip
_SESSION = ("io_binding", "get_inputs", "get_outputs", "run_with_iobinding")
PACKAGES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "flash-attn": {
        "flash_attn/flash_attn_interface.py": (*_FLASH, "flash_attn_varlen_qkvpacked_func"),
        "hopper/flash_attn_interface.py": _FLASH,
    },
    "flash-attn-4": {"flash_attn/cute/interface.py": ("flash_attn_func", "flash_attn_varlen_func")},
    "torch-tensorrt": {"torch_tensorrt/dynamo/_compiler.py": ("compile",)},
    "torch-tensorrt==2.9.0": {"torch_tensorrt/dynamo/_compiler.py": ("compile",)},
    "nvidia-modelopt": {
        "modelopt/torch/quantization/model_quant.py": ("quantize",),
        "modelopt/torch/quantization/utils/core_utils.py": ("export_torch_mode",),
    },
    "nvidia-ml-py": {"pynvml.py": (*(f"nvml{name}" for name in _NVML), "NVML_CLOCK_SM", "NVML_TEMPERATURE_GPU")},
    "amdsmi": {
        "amdsmi/amdsmi_interface.py": (
            "amdsmi_init",
            "amdsmi_shut_down",
            "amdsmi_get_processor_handle_from_bdf",
            "amdsmi_get_energy_count",
            "amdsmi_get_gpu_metrics_info",
        )
    },
    "onnxruntime": {
        "onnxruntime/capi/onnxruntime_inference_collection.py": (
            "InferenceSession.__init__",
            *(f"Session.{name}" for name in _SESSION),
            "IOBinding.bind_input",
            "IOBinding.bind_output",
        )
    },
    "jax": {"jax/_src/dlpack.py": ("from_dlpack",)},
}
"""Names to compare, by file of a package, by what pip is asked for."""
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "flash-attn": (
        "--no-binary",
        "flash-attn",
        "--no-build-isolation",
    ),  # there are no wheels; its metadata needs torch
    "flash-attn-4": ("--pre", "--only-binary", ":all:"),
}
"""Options of ``pip download``; by default wheels only."""


def stored() -> dict[str, Any]:
    """The file: date of the comparison, and for each package its version and the signatures by ``file.py:name``."""
    return dict(json.loads(STORED.read_text("utf-8")))


def signature(package: str, name: str) -> inspect.Signature:
    """The stored signature of ``file.py:name``; a default that is no literal is ``...``."""
    text = stored()["packages"][package]["signatures"][name]
    return inspect.signature(eval(f"lambda {text}: None"))


def unlike_upstream(package: str, name: str, stub: Callable[..., Any]) -> list[str]:
    """Returns the reasons why a call of a stub is not a call of the real function.

    A stub may have fewer parameters than the real one, if those that it lacks have defaults, and may require what has
    one. Names that begin with an underscore stand for any name, at their place.
    """
    real, own = signature(package, name).parameters, inspect.signature(stub).parameters
    positional = [p for p in real.values() if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
    variable = {p.kind for p in real.values() if p.kind in {p.VAR_POSITIONAL, p.VAR_KEYWORD}}
    wrong, matched = [], set()
    for place, parameter in enumerate(own.values()):
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            wrong += [] if parameter.kind in variable else [f"{parameter}: takes what the real one refuses"]
            continue
        expected = real.get(parameter.name)
        if parameter.kind is not parameter.KEYWORD_ONLY:
            at_place = positional[place] if place < len(positional) else None
            expected = at_place if parameter.name.startswith("_") or expected is at_place else None
        if expected is None:
            wrong.append(f"{parameter.name}: the real one has none, or at another place")
            continue
        matched.add(expected.name)
        if expected.default is not ... and parameter.default not in {parameter.empty, expected.default}:
            wrong.append(f"{parameter}: the real default is {expected.default}")
    required = {p.name for p in real.values() if p.default is p.empty and p.kind not in variable}
    wrong += [f"{missing}: required by the real one" for missing in sorted(required - matched)]
    return [f"{package}: {name}: {line}; compared on {stored()['compared']}" for line in wrong]


def fetched(requirement: str, folder: Path) -> Path:
    """The wheel or source archive of a package.

    Raises:
        subprocess.CalledProcessError: pip cannot fetch it; its output says why.
    """
    options = OPTIONS.get(requirement, ("--only-binary", ":all:"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        *options,
        requirement,
    ]
    environment = {**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=600)
    (archive,) = folder.iterdir()
    return archive


def source(archive: Path, path: str) -> str:
    """The text of a file, by its path in the package.

    Raises:
        KeyError: There is none.
    """
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(path).decode()
    with tarfile.open(archive) as tar:
        file = tar.extractfile(f"{archive.name.removesuffix('.tar.gz')}/{path}")
        assert file is not None
        return file.read().decode()


def extracted(read: Callable[[str], str], path: str, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The signatures of a file's functions, and the values of its constants as keyword ``value``."""
    tree = ast.parse(read(path))
    scope = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for name in names:
        first, _, method = name.partition(".")
        node: ast.AST | None = scope.get(first)
        if isinstance(node, ast.ClassDef):
            node = next(n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == method)
        if isinstance(node, ast.FunctionDef):
            yield f"{path}:{name}", _signature(node.args, read, path, method=bool(method))
        else:
            yield f"{path}:{name}", f"value={constants(tree)[name]!r}"


def constants(tree: ast.Module) -> dict[str, Any]:
    """The literals that a module assigns to names."""
    values: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                values[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return values


def _signature(arguments: ast.arguments, read: Callable[[str], str], path: str, *, method: bool) -> str:
    """Without annotations; a constant of a module beside, such as ``_defaults.SIZE``, by its value."""

    def default(node: ast.expr | None) -> ast.expr | None:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            try:
                beside = constants(ast.parse(read(f"{path.rpartition('/')[0]}/{node.value.id}.py")))
            except (KeyError, SyntaxError):
                beside = {}
            return ast.parse(repr(beside.get(node.attr, ...)).replace("Ellipsis", "..."), mode="eval").body
        if node is None:
            return None
        try:
            ast.literal_eval(node)
        except ValueError:
            return ast.Constant(...)
        return node

    for parameter in [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]:
        if parameter is not None:
            parameter.annotation = None
    arguments.defaults = [value for node in arguments.defaults if (value := default(node)) is not None]
    arguments.kw_defaults = [default(node) for node in arguments.kw_defaults]
    if method:  # as a caller sees it
        del (arguments.posonlyargs or arguments.args)[0]
    return ast.unparse(arguments)


def compared(requirement: str) -> dict[str, Any]:
    """A package's version and signatures, afresh."""
    with tempfile.TemporaryDirectory() as folder:
        archive = fetched(requirement, Path(folder))
        read = partial(source, archive)
        signatures = dict(p for path, names in PACKAGES[requirement].items() for p in extracted(read, path, names))
    return {"version": archive.name.split("-")[1].removesuffix(".tar.gz"), "signatures": signatures}


def main() -> int:
    """Write the file, or compare with it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the stored file, and leave it as it is")
    check = parser.parse_args().check
    before = stored()["packages"] if STORED.exists() else {}
    after, changed = dict[str, Any](), 0
    for requirement in PACKAGES:
        try:
            after[requirement] = compared(requirement)
        except KeyError as error:
            changed += 1
            print(f"{requirement}: has no {error} any more")
            after |= {requirement: before[requirement]} if requirement in before else {}
            continue
        except (subprocess.SubprocessError, OSError) as error:
            reason = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1]
            print(f"{requirement}: not fetched: {reason}")
            after |= {requirement: before[requirement]} if requirement in before else {}
            continue
        old = before.get(requirement, {"version": "nothing", "signatures": {}})
        new = after[requirement]
        print(f"{requirement}: {new['version']}, stored: {old['version']}")
        for name in new["signatures"].keys() | old["signatures"].keys():
            then, now = (version["signatures"].get(name, "absent") for version in (old, new))
            if then != now:
                changed += 1
                print(f"  {name}\n    stored: {then}\n    now:    {now}")
    if not check:
        whole = {"compared": dt.date.today().isoformat(), "packages": after}
        STORED.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    return int(check and changed > 0)


if __name__ == "__main__":
    sys.exit(main())
