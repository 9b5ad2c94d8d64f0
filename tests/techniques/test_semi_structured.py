"""2:4 sparse weights up to the hardware: torch's own compression, with kernels of the CPU where a GPU's would be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fault_harness import built_in, verdict_of
from torch import Tensor, nn
from torch.nn.functional import linear

from accelcheck.core.capability import Code
from accelcheck.core.case import Verdict
from accelcheck.devices.cpu import Cpu
from accelcheck.selftest.faults.base import Planted
from accelcheck.selftest.faults.integers import FAULTS
from accelcheck.techniques.quantization import semi_structured
from accelcheck.verify.oracle import Store

NAMES = [technique.name for technique in semi_structured.TECHNIQUES]
CONVERSIONS = "torch.sparse._semi_structured_conversions"


def named(name: str) -> Any:
    return next(technique for technique in semi_structured.TECHNIQUES if technique.name == name)


def compressed(dense: Tensor) -> Tensor:
    """Values, then their places, in one tensor: such as cuSPARSELt makes, in an order of our own."""
    groups = dense.reshape(len(dense), -1, 4)
    places = (groups != 0).to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices[..., :2]
    assert ((groups != 0).sum(-1) <= 2).all()
    pairs = (places[..., 0] + 4 * places[..., 1]).to(torch.uint8)
    return torch.cat([groups.gather(-1, places).flatten(), pairs.flatten().view(dense.dtype)])


def expanded(whole: Tensor, columns: int) -> Tensor:
    count = whole.numel() * 4 // 5
    values, pairs = whole[:count].reshape(-1, columns // 4, 2), whole[count:].view(torch.uint8)
    pairs = pairs.reshape(values.shape[:2])
    places = torch.stack([pairs & 3, pairs >> 2], -1).long()
    return torch.zeros(*values.shape[:2], 4, dtype=whole.dtype).scatter(-1, places, values).flatten(1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives the CPU the kernels of a GPU with sparse matrix units."""
    conversions = pytest.importorskip(CONVERSIONS)

    def product(weight: Tensor, dense: Tensor, bias: Tensor | None, *, transposed: bool = False) -> Tensor:
        out = linear(dense.t().float(), weight.float(), None if bias is None else bias.float()).to(dense.dtype)
        return out if transposed else out.t()

    def opened(packed: Tensor, meta: Tensor) -> Tensor:
        out: Tensor = conversions.sparse_semi_structured_to_dense_cutlass(packed, meta)
        return out

    def by_cslt(
        whole: Tensor,
        dense: Tensor,
        bias: Tensor | None = None,
        alpha: Any = None,
        out_dtype: Any = None,
        transpose_result: bool = False,
        *rest: Any,
        **words: Any,
    ) -> Tensor:
        return product(expanded(whole, len(dense)), dense, bias, transposed=transpose_result)

    library: Any = vars(torch.library)["Library"]("aten", "IMPL")
    library.impl("_sparse_semi_structured_mm", lambda w, m, x, **_: product(opened(w, m), x, None), "CPU")
    library.impl("_sparse_semi_structured_addmm", lambda b, w, m, x, **_: product(opened(w, m), x, b), "CPU")
    library.impl("_cslt_compress", compressed, "CPU")
    library.impl("_cslt_sparse_mm", by_cslt, "CPU")
    check = "_validate_device_dim_dtype_shape"
    monkeypatch.setattr(torch.sparse.SparseSemiStructuredTensor, check, lambda _: None)
    yield
    library._destroy()


@pytest.mark.parametrize("name", NAMES)
def test_the_cpu_has_no_sparse_products_and_says_so(name: str) -> None:
    answer = named(name).capability(Cpu())
    assert (answer.ok, answer.code, answer.tried) == (False, Code.NO_FEATURE, True)
    assert "2:4 sparse weight" in answer.reason
    assert "cpu" in answer.reason


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("workload", ["mlp", "mlp-blocks", "transformer-block"])
def test_a_device_with_sparse_products_passes(name: str, workload: str, gpu: None, fresh: Store) -> None:
    assert named(name).capability(Cpu()).ok
    record = verdict_of(fresh, named(name), built_in()[workload], dtype="bfloat16")
    assert record.verdict is Verdict.PASS, record.why


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.technique in NAMES], ids=lambda fault: fault.name)
def test_its_faults_are_caught_on_such_a_device(fault: Any, gpu: None, fresh: Store) -> None:
    technique = Planted(named(fault.technique), fault.plant(1.0))
    record = verdict_of(fresh, technique, built_in()["mlp"], dtype="bfloat16")
    assert record.verdict is Verdict.FAIL, record.why


def test_of_four_neighbours_the_two_largest_stay_and_of_equal_ones_the_first() -> None:
    weight = torch.tensor([[1.0, -3.0, 2.0, 0.5, 4.0, 4.0, -4.0, 4.0, 0.0, 5.0]])
    kept = [[0.0, -3.0, 2.0, 0.0, 4.0, 4.0, 0.0, 0.0, 0.0, 5.0]]
    assert semi_structured.pruned(weight).tolist() == kept


def test_what_cutlass_compresses_is_the_pruned_weight(gpu: None) -> None:
    layer = nn.Linear(40, 10).bfloat16()
    sparse = semi_structured.SparseLinear(layer, backend="CUTLASS")
    packed, meta = sparse.held()
    whole = pytest.importorskip(CONVERSIONS).sparse_semi_structured_to_dense_cutlass(packed, meta)
    assert torch.equal(whole[:10, :40].double(), semi_structured.pruned(layer.weight.detach()))
    assert packed.shape == (32, 32)  # half of the columns
