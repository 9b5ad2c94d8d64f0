"""torch's operators of control flow, ``cond``, ``while_loop`` and ``scan``, in one compiled graph."""

from collections.abc import Iterable
from typing import Any

import torch

from accelcheck.core.capability import Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices import torch_names
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.compilation.compile import Compilation, graph_breaks, graphs
from accelcheck.techniques.compilation.regions import entered
from accelcheck.techniques.observe import Log, at_least, exactly
from accelcheck.workloads.base import Program, Workload

_NODES = "operators of the graphs"


class ControlFlow(Compilation):
    """Operator in place of Python's control flow, compiled without a graph break and run with eager kernels."""

    family = "control-flow"
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD})

    def __init__(self, name: str, page: str) -> None:
        self.name, self.operator = f"torch-{name}", name.replace("-", "_")
        self.promise = f"{self.operator} in one graph takes the branches and steps of Python, and has its gradients."
        self.source = f"https://docs.pytorch.org/docs/stable/{page}.html"
        self.workloads = frozenset({f"control-{name}"})

    def refusal(self, workload: Workload) -> str:
        own = workload.name in self.workloads
        return super().refusal(workload) or (
            "" if own else "changes modules that have torch's control flow and Python's"
        )

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        if self.operator == "while_loop" and mode is Mode.BACKWARD and torch.__version__ < "2.10":
            reason = f"torch {torch.__version__} compiles no gradient of while_loop"
            raise Unsupported(unsupported(Code.WRONG_VERSION, reason))
        super().prepare(program, mode, device)
        nodes = program.extras[_NODES] = list[str]()

        def backend(graph: Any, inputs: Any) -> Any:
            nodes.extend(str(node.target) for node in graph.graph.nodes)
            return torch_names.lookup_backend("aot_eager")(graph, inputs)

        vars(program.module)["operator"] = True
        program.call = torch.compile(program.module, backend=backend, fullgraph=True)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield exactly("graphs compiled", graphs(), 1)
        yield exactly("graph breaks", graph_breaks(), 0)
        yield at_least("compiled regions entered", entered(log).total())
        yield at_least(f"{self.operator} in the graph", program.extras[_NODES].count(self.operator))


TECHNIQUES: tuple[Technique, ...] = (
    ControlFlow("cond", "cond"),
    ControlFlow("while-loop", "higher_order_ops/while_loop"),
    ControlFlow("scan", "higher_order_ops/scan"),
)
