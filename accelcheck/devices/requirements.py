"""Reads accelcheck's requirements from its metadata, finds the installed ones, and names pip's commands. No torch."""

import re
import shutil
import sys
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement  # pytest requires it
from packaging.utils import canonicalize_name

import accelcheck
from accelcheck.devices.packages import version

_CHECKOUT = Path(accelcheck.__file__).parents[1]
_RIVALS = {
    "onnxruntime": (
        *("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml", "onnxruntime-rocm"),
        *("onnxruntime-migraphx", "onnxruntime-qnn", "onnxruntime-training", "onnxruntime-cann", "ort-nightly"),
    ),
    "cupy": ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy-rocm-4-3", "cupy-rocm-5-0", "cupy-rocm-7-0"),
    "triton": ("triton", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu", "triton-nightly"),
}
"""Distributions that install the same module, by module: the last one installed overwrites files of the others."""


@dataclass(frozen=True, slots=True)
class Needed:
    """One requirement of accelcheck: a distribution, its legal and its installed version, and the extra requiring it.

    The legal versions, such as ``<2.16,>=2.9``, are empty for any, and the extra for accelcheck itself.
    """

    name: str
    wanted: str
    installed: str
    extra: str = ""

    @property
    def met(self) -> bool:
        """True when a legal version is installed."""
        requirement = Requirement(f"{self.name}{self.wanted}")
        return bool(self.installed) and requirement.specifier.contains(self.installed, prereleases=True)

    @property
    def words(self) -> str:
        """The requirement in pip's form."""
        return f"{self.name}{self.wanted}"


def needed() -> list[Needed]:
    """All requirements that apply to this Python and platform, those of accelcheck itself first.

    A checkout's are read from its ``pyproject.toml``: the metadata of an editable install may be older.
    """
    requirements: list[Needed] = []
    for text, extra in _declared():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            name = canonicalize_name(requirement.name)
            requirements.append(Needed(name, str(requirement.specifier), version(name), extra))
    return requirements


def install(extra: str) -> str:
    """The command that installs an extra of accelcheck in this environment, from this accelcheck's source."""
    return f"{pip()} install {source(extra)}"


def pip() -> str:
    """The words that call pip of this interpreter."""
    program = shutil.which("pip")
    ours = program is not None and Path(program).parent == Path(sys.executable).parent
    return "pip" if ours else f"{sys.executable} -m pip"


def source(extra: str = "") -> str:
    """The argument of pip for accelcheck with an extra: a checkout, or the name of the package."""
    extras = f"[{extra}]" if extra else ""
    if not checkout():
        return f"'accelcheck{extras}'"
    folder = "." if Path.cwd() == _CHECKOUT else str(_CHECKOUT)
    return f"-e '{folder}{extras}'"


def here(action: str) -> str:
    """An action with its commands that install extras rewritten for this accelcheck's source."""
    for extra in {extra for _, extra in _declared() if extra}:
        for quote in ("'", '"'):
            action = action.replace(f"pip install {quote}accelcheck[{extra}]{quote}", install(extra))
    return action


def checkout() -> bool:
    """True when this accelcheck is a checkout and no installed copy."""
    return (_CHECKOUT / "pyproject.toml").is_file() and (_CHECKOUT / "tests").is_dir()


def rivals() -> dict[str, list[str]]:
    """The installed distributions, with versions, of each module that several of them install."""
    have = {
        module: [f"{name} {text}" for name in names if (text := version(name))] for module, names in _RIVALS.items()
    }
    return {module: names for module, names in have.items() if len(names) > 1}


def _declared() -> list[tuple[str, str]]:
    """Each requirement with its extra."""
    if checkout():
        project = tomllib.loads((_CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras: dict[str, list[str]] = project.get("optional-dependencies", {})
        own = [(text, "") for text in project["dependencies"]]
        return own + [(text, extra) for extra, texts in extras.items() for text in texts]
    try:
        texts = metadata.requires("accelcheck") or []
    except metadata.PackageNotFoundError:
        return []
    named = ((text, re.search(r"""extra == ['"]([\w.-]+)['"]""", text)) for text in texts)
    return [(text, match[1] if match else "") for text, match in named]
