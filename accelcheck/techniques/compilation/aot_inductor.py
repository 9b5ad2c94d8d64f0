"""AOTInductor: a program compiled ahead of time to a shared library, packaged in a file, loaded, run without Python.

Constants, as observed with torch 2.9 and 2.13: The package holds copies of all parameters and buffers, so that later
changes of the module have no effect. ``load_constants`` replaces them by copies, or, with ``user_managed``, by the
caller's own tensors, whose later changes take effect. One-dimensional tensors of up to 8 elements become literals in
the code: ``get_constant_fqns`` does not list them, and they cannot be replaced.
"""

import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from accelcheck.core.case import Evidence, Mode
from accelcheck.core.files import scratch
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique
from accelcheck.techniques.compilation.compile import inductor_capability
from accelcheck.techniques.compilation.conversion import Conversion, Converted
from accelcheck.techniques.observe import at_least, none_of
from accelcheck.workloads.base import Program


class Package(Converted):
    """Module that is compiled for the sizes of the program's inputs, packaged in a file in a folder, and loaded.

    `options` configure inductor. `size` is that of the file in bytes; `libraries` names the shared libraries in it, and
    `mapped` has the paths of those that loading mapped into this process.
    """

    kind = "package"

    def __init__(self, program: Program, folder: Path, options: Mapping[str, Any]) -> None:
        # An import of a second, for this technique alone.
        from accelcheck.devices.torch_names import aoti_compile_and_package, aoti_load_package

        exported = torch.export.export(program.module, program.inputs)
        path = aoti_compile_and_package(exported, package_path=f"{folder}/model.pt2", inductor_configs=dict(options))
        self.size = Path(path).stat().st_size
        with zipfile.ZipFile(path) as archive:
            self.libraries = [name for name in archive.namelist() if name.endswith(".so")]
        before = mapped_files()
        self.model = aoti_load_package(path)
        names = {Path(name).name for name in self.libraries}
        self.mapped = [file for file in mapped_files() - before if Path(file).name in names]
        super().__init__(program.module, self.model)

    def evidence(self) -> Iterable[Evidence]:
        yield from super().evidence()
        yield at_least(f"shared libraries in the package of {self.size} bytes", len(self.libraries))
        yield at_least("of them mapped into the process", len(self.mapped))


class Supplied(Package):
    """Package without weights, into which the module's own are loaded."""

    def __init__(self, program: Program, folder: Path, options: Mapping[str, Any]) -> None:
        super().__init__(program, folder, options)
        module = program.module
        own = dict(module.named_buffers()) | module.state_dict()  # those that are not saved too
        given = {name: own[name] for name in self.model.get_constant_fqns()}
        self.model.load_constants(given, check_full_update=True, user_managed=True)
        self.literals = sorted({name for name, _ in module.named_parameters()} - given.keys())

    def evidence(self) -> Iterable[Evidence]:
        yield from super().evidence()
        yield none_of("parameters that the package keeps for itself", self.literals)


class AotInductor(Conversion):
    """Package that contains its weights."""

    name = "aot-inductor"
    family = "aot-inductor"
    promise = (
        "A shared library that is compiled ahead of time and contains the weights computes what the module computes."
    )
    source = "https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_aot_inductor.html"
    level = 3  # a compilation takes 5 to 15 s of one core, and each draw of parameters needs one
    modes = frozenset({Mode.FORWARD})
    workloads = frozenset({"mlp"})
    options: Mapping[str, Any] = MappingProxyType({})
    """Configuration of inductor."""
    package: type[Package] = Package
    capability = staticmethod(inductor_capability)

    def converted(self, program: Program, device: Device) -> Package:
        folder = self.held.enter_context(tempfile.TemporaryDirectory(prefix="aoti-", dir=scratch()))
        return self.package(program, Path(folder), self.options)


class Constants(AotInductor):
    """Package without weights, which uses the module's own."""

    name = "aot-inductor-constants"
    promise = "A shared library that gets its weights after loading computes with them and follows their changes."
    bakes = False
    workloads = frozenset({"mlp", "elementwise-5", "cnn", "attention-causal", "transformer-block"})
    early = frozenset({"mlp", "elementwise-5", "transformer-block"})
    options: Mapping[str, Any] = MappingProxyType({"aot_inductor.package_constants_in_so": False})
    package = Supplied


def mapped_files() -> set[str]:
    """Lists the paths of files that are mapped into this process: the sixth words in Linux's list of mappings."""
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return {words[5] for words in lines if len(words) == 6}


TECHNIQUES: tuple[Technique, ...] = (AotInductor(), Constants())
