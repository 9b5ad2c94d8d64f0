"""Models of other people as workloads: whatever they take and give, and what cannot be checked is named."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, TRAIN, Planted, bench, case, erred, failed, observed, passed, verdict_of
from process_harness import completed
from technique_harness import StubDevice
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.checks.remarks import IDLE, REMARKS, STRIDES, UNCLASSIFIED, UNSTEADY
from accelcheck.checks.trial import UNJUDGED
from accelcheck.core.case import SCHEME, Mode, Verdict, stable_seed
from accelcheck.core.journal import ErrorCode
from accelcheck.core.registry import UnknownNameError
from accelcheck.devices.base import Device
from accelcheck.selftest.faults.plant import calling, nothing
from accelcheck.techniques.compilation.export import Export
from accelcheck.techniques.eager import Eager
from accelcheck.techniques.matrix import Matrix
from accelcheck.techniques.precision.amp import stored_in_float32
from accelcheck.verify.oracle import Store, compute
from accelcheck.verify.oracle_runs import Arithmetic, Source
from accelcheck.workloads.base import Problem, Program, Workload
from accelcheck.workloads.nested import OwnModelError, tensors_of, written
from accelcheck.workloads.own_model import workload_of


class Cache:
    """An object that holds tensors, as caches of language models do."""

    def __init__(self, keys: Tensor) -> None:
        self.layers = [keys, keys + 1]
        self.kind = "dynamic"
        self.owner = self


@dataclass
class Output:
    scores: Tensor
    loss: Tensor | None
    cache: Cache


class Language(nn.Module):
    """Tokens to scores, with a head that is tied to the table, and a part that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(17, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.table.weight
        self.unused = nn.Linear(3, 3)
        self.aliases = [self.norm]
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens: Tensor, *, mask: dict[str, Tensor], scale: float = 1.0) -> Output:
        hidden = self.drop(self.norm(self.table(tokens)) * scale * mask["rows"][..., None])
        return Output(self.head(hidden), None, Cache(hidden))


def tokens() -> Tensor:
    return torch.arange(12).reshape(2, 6) % 17


def language(**more: Any) -> Workload:
    torch.manual_seed(0)
    keywords = {"mask": {"rows": torch.tensor([[1.0] * 6, [1.0] * 4 + [0.0] * 2])}, "scale": 2.0}
    return workload_of(Language(), (tokens(),), keywords, name="language", **more)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.act = nn.ReLU()
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.act(self.bn(self.conv(x))).mean((2, 3)))
        return out


def images(**more: Any) -> Workload:
    torch.manual_seed(0)
    return workload_of(Images(), (torch.randn(4, 3, 8, 8),), name="images", **more)


def own(workload: Workload) -> Problem:
    return workload.problem(stable_seed(workload.name))


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("make", [language, images])
@pytest.mark.parametrize("mode", [FORWARD, BACKWARD])
def test_a_model_as_it_is_passes_in_every_mode(make: Callable[[], Workload], mode: Mode, fresh: Store) -> None:
    record = passed(fresh, Eager(), make(), mode)
    assert record.compared > 0


def test_what_rounding_errors_alone_decide_is_left_out_and_named(fresh: Store) -> None:
    workload = images()
    record = passed(fresh, Eager(), workload, BACKWARD)
    assert observed(record, UNJUDGED) == "grad:conv.bias"  # before batch norm
    judged = {figure.path for figure in record.figures}
    assert "grad:conv.bias" not in judged
    record = erred(Store(fresh.cache.folder / "other"), Eager(), replace(workload, given=False), BACKWARD)
    assert "grad:conv.bias: the budget of view row is" in record.reason


def test_a_case_that_leaves_out_most_elements_says_so(fresh: Store) -> None:
    def cancelling(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sum(1), (x * 1.1).sin() - (x * 1.1).sin()

    workload = workload_of(cancelling, (torch.rand(4, 6),), name="cancelling")
    record = passed(fresh, Eager(), workload, FORWARD)
    assert observed(record, UNJUDGED) == "out[1], which are 86% of all elements"


def test_parameters_that_nothing_depends_on_are_named(fresh: Store) -> None:
    model = Shifted()
    model.spare = nn.Linear(2, 2)
    record = passed(fresh, Eager(), workload_of(model, (torch.randn(2, 16, 8),)), BACKWARD)
    assert observed(record, IDLE) == "spare.weight, spare.bias"


def test_right_results_that_a_second_run_rounds_otherwise_are_a_remark(fresh: Store) -> None:
    def unsteady() -> Planted:
        calls = itertools.count()

        def scaled(module: Any, x: Tensor) -> Tensor:
            out: Tensor = module(x)
            return out * (1 + next(calls) % 2 * 2.0**-23)

        return Planted(calling(scaled))

    torch.manual_seed(0)
    workload = workload_of(nn.Linear(8, 8), (torch.randn(4, 8),), sizes=[])
    device = StubDevice(features=("strided", "deterministic"), error=lambda: 0.0)
    record = bench(fresh, unsteady(), workload, device).run(replace(case(workload), device="stub"))
    assert record.verdict is Verdict.PASS, record.reason
    assert observed(record, UNSTEADY).startswith("1 of 1, out by 1")
    made_for_checks = replace(workload, sizes=None)
    record = bench(Store(fresh.cache.folder / "other"), unsteady(), made_for_checks, device).run(
        replace(case(workload), device="stub")
    )
    assert record.verdict is Verdict.FAIL


def test_operators_whose_rounding_is_not_known_are_named(fresh: Store) -> None:
    with torch.library._scoped_library("accelcheck_test", "DEF") as library:
        library.define("relu(Tensor x) -> Tensor")
        library.impl("relu", lambda x: x.exp(), "CompositeExplicitAutograd")
        model = workload_of(lambda x: torch.ops.accelcheck_test.relu(x).sin(), (torch.randn(8, 8),))
        record = verdict_of(fresh, Eager(), model, FORWARD)
    assert record.verdict is Verdict.PASS, record.reason
    assert observed(record, UNCLASSIFIED) == "accelcheck_test::relu"


def test_a_remark_on_operators_is_no_evidence_and_a_known_one_gets_none(fresh: Store) -> None:
    assert UNCLASSIFIED in REMARKS
    model = workload_of(lambda x: x.sin().exp_() + 1, (torch.randn(8, 8),))
    assert UNCLASSIFIED not in {entry.claim for entry in verdict_of(fresh, Eager(), model, FORWARD).evidence}


class Shifted(nn.Module):
    """Attention whose keys have a bias that the softmax cancels: its gradient is 0 but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))


def test_a_closer_look_leaves_out_what_the_first_one_does() -> None:
    torch.manual_seed(0)
    workload = workload_of(Shifted(), (torch.randn(2, 16, 8),))
    arithmetic = Arithmetic.of(Eager(), "float32")
    looks = [compute(Source(workload, arithmetic, 1, "float32", BACKWARD), careful=careful) for careful in (0, 1)]
    assert [sorted(look.unjudged) for look in looks] == [["grad:key.bias"]] * 2
    assert "grad:key.bias" not in looks[1].budgets


def test_a_model_of_which_nothing_can_be_judged_is_an_error(fresh: Store) -> None:
    record = erred(fresh, Eager(), workload_of(lambda x: (x + 1) - 1 - x, (torch.randn(9, 9),), name="noise"), FORWARD)
    assert "rounding errors alone decide every tensor" in record.reason


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("make", [language, images])
def test_a_technique_that_traces_follows_an_adapted_model(make: Callable[[], Workload], fresh: Store) -> None:
    passed(fresh, Export(), make(), FORWARD)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("make", [language, images])
def test_a_fault_in_one_output_fails(make: Callable[[], Workload], fresh: Store) -> None:
    def wrong(module: Any, *inputs: Tensor) -> Any:
        out = module(*inputs)
        first, rest = (out[0], out[1:]) if isinstance(out, tuple) else (out, None)
        first = first * torch.where(torch.arange(first.shape[-1]) == 1, 1.01, 1.0)
        return first if rest is None else (first, *rest)

    assert verdict_of(fresh, Planted(nothing), make(), FORWARD).verdict is Verdict.PASS
    assert verdict_of(fresh, Planted(calling(wrong)), make(), FORWARD).verdict is Verdict.FAIL


def test_a_training_is_checked_too(fresh: Store) -> None:
    workload = images(
        loss=functional.cross_entropy,
        target=torch.tensor([0, 1, 2, 3]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        steps=3,
    )
    assert {TRAIN, Mode.TRAIN_SPEED} <= workload.modes
    assert "training" in workload.traits
    passed(fresh, Eager(), workload, TRAIN)


def test_the_model_and_its_inputs_stay_the_callers(fresh: Store) -> None:
    model, x = Images().train(), torch.randn(4, 3, 8, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}, x.clone()
    workload = workload_of(model, (x,), name="kept")
    verdict_of(fresh, Eager(), workload, BACKWARD)
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    assert torch.equal(x, before[1])
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_first_draw_has_the_callers_numbers_and_others_the_same_ones_elsewhere() -> None:
    workload = images()
    first, other = own(workload), workload.problem(stable_seed("images") + 7919)
    torch.manual_seed(0)
    model = Images()
    assert all(map(torch.equal, first.module.parameters(), model.parameters()))
    for a, b in [
        *zip(first.module.parameters(), other.module.parameters(), strict=True),
        (first.inputs[0], other.inputs[0]),
    ]:
        assert torch.equal(a.reshape(-1).sort().values, b.reshape(-1).sort().values)
    assert not torch.equal(first.inputs[0], other.inputs[0])
    assert torch.equal(other.inputs[0], workload.problem(stable_seed("images") + 7919).inputs[0])


def test_masks_and_integers_are_the_same_in_every_draw() -> None:
    workload = language()
    first, other = own(workload), workload.problem(1)
    assert all(map(torch.equal, first.inputs, other.inputs))


@pytest.mark.slow
def test_a_process_that_has_looked_at_a_model_has_not_used_autograd() -> None:
    """Autograd counts devices on first use: a lazy backend registered later would get no gradient, in forks too."""
    code = """
import torch
from accelcheck.api import workload_of
used = []
original = torch.autograd.backward
torch.autograd.backward = lambda *a, **k: used.append(1) or original(*a, **k)
training = dict(loss=torch.nn.functional.mse_loss, target=torch.ones(2, 3), optimizer=torch.optim.SGD)
workload_of(torch.nn.Linear(4, 3), (torch.ones(2, 4),), **training)
print(len(used))
"""
    done = completed([sys.executable, "-c", code], check=True, timeout=120)
    assert done.stdout.strip() == "0"


def test_traits_are_found() -> None:
    assert images().traits == {
        "linear", "batchnorm", "inplace", "conv", "matmul", "resizable", "samplewise", "scriptable",
    }  # fmt: skip
    assert language().traits == {"linear", "matmul", "resizable", "samplewise"}

    def attention(x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x)

    sdpa = workload_of(attention, (torch.randn(1, 2, 5, 8),), name="attention")
    assert sdpa.traits == {"attention", "resizable"}  # the second dimension is heads, which may vary too

    def branch(x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1

    assert workload_of(branch, (torch.randn(5, 8),), name="branch").traits == {"branching", "resizable"}


def test_a_technique_that_finds_nothing_to_change_is_unsupported(fresh: Store) -> None:
    workload = workload_of(nn.Linear(12, 8), (torch.randn(4, 12),))
    techniques = Matrix.load().techniques
    record = verdict_of(fresh, techniques["int4-torchao-weight-only"], workload, FORWARD)  # groups have 32 elements
    assert record.verdict is Verdict.UNSUPPORTED
    assert "int4-torchao-weight-only finds nothing in this model to change: linear layers with a weight" in record.why


def test_a_compiler_that_finds_nothing_to_compile_is_unsupported(fresh: Store) -> None:
    class Looping(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):  # Dynamo skips a function with a graph break in a loop
                x = super().forward(x) if bool(x.sum() > -1e9) else x
            return x

    workload = workload_of(Looping(8, 8), (torch.randn(4, 8),))
    record = verdict_of(fresh, Matrix.load().techniques["compile-aot-eager"], workload, FORWARD)
    assert record.verdict is Verdict.UNSUPPORTED, record.why
    assert "compile-aot-eager finds nothing in this model to change: compiled regions entered >= 1: 0" in record.why


@pytest.mark.parametrize("mode", [FORWARD, BACKWARD, Mode.SPEED])
def test_a_conversion_that_a_library_refuses_is_unsupported_with_its_reason(mode: Mode, fresh: Store) -> None:
    class Outside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.from_numpy(x.detach().numpy().mean(0))

    record = verdict_of(fresh, Matrix.load().techniques["export"], workload_of(Outside(), (torch.randn(4, 12),)), mode)
    assert record.verdict is Verdict.UNSUPPORTED, record.why
    assert "export cannot be applied to this model: RuntimeError: .numpy() is not supported" in record.reason


def test_a_size_that_rounding_decides_is_undecided(fresh: Store) -> None:
    class Positive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            return y[y > 0]

    record = verdict_of(
        fresh, Matrix.load().techniques["amp-bf16"], workload_of(Positive(), (torch.randn(4096, 8),)), FORWARD
    )
    assert (record.verdict, record.code) == (Verdict.ERROR, ErrorCode.UNDECIDED)
    assert "rounding decides how large a result is: out has the shapes (" in record.headline


class Refusing(Planted):
    """Raises as a library does, in each of its preparations but the first ones."""

    bakes = True

    def __init__(self, accepted: int) -> None:
        super().__init__(nothing)
        self.accepted = accepted

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        self.accepted -= 1
        if self.accepted < 0:
            torch.ones(2) @ torch.ones(3)


Refusing.__module__ = "accelcheck.techniques.refusing"


@pytest.mark.parametrize(("accepted", "verdict"), [(0, Verdict.UNSUPPORTED), (1, Verdict.ERROR), (4, Verdict.FAIL)])
def test_what_a_library_refuses_after_it_has_accepted_the_model_is_wrong(
    accepted: int, verdict: Verdict, fresh: Store
) -> None:
    workload = workload_of(nn.Linear(12, 8), (torch.randn(4, 12),))
    record = verdict_of(fresh, Refusing(accepted), workload, FORWARD)
    assert record.verdict is verdict, record.why
    assert "RuntimeError: inconsistent tensor size" in record.why


def test_a_technique_of_ones_own_that_raises_is_an_error(fresh: Store) -> None:
    def refuse(program: Program) -> None:
        torch.ones(2) @ torch.ones(3)

    record = erred(fresh, Planted(refuse), workload_of(nn.Linear(12, 8), (torch.randn(4, 12),)), FORWARD)
    assert record.reason.startswith("RuntimeError: ")


def test_autocast_is_judged_where_a_model_does_not_run_wholly_in_half_precision(fresh: Store) -> None:
    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            spectra = torch.stft(x, 8, window=torch.ones(8, dtype=x.dtype), return_complex=True)
            out: Tensor = self.layer(spectra.abs().transpose(1, 2))
            return out

    workload = workload_of(Spectrum(), (torch.randn(2, 40),))
    passed(fresh, Matrix.load().techniques["amp-bf16"], workload, FORWARD)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x) for expert in self.experts]).sum(0)


@pytest.mark.parametrize("technique", ["checkpoint-reentrant", "checkpoint-non-reentrant"])
def test_blocks_of_one_layer_are_checkpointed(technique: str, fresh: Store) -> None:
    torch.manual_seed(0)
    workload = workload_of(Experts(), (torch.randn(5, 8),))
    passed(fresh, Matrix.load().techniques[technique], workload, BACKWARD)


class Recommender(nn.Module):
    """Several tables of one class, which are called with indices."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(11, 4, mode="sum") for _ in range(2))

    def forward(self, first: Tensor, second: Tensor, offsets: Tensor) -> Tensor:
        out: Tensor = self.tables[0](first, offsets) + self.tables[1](second, offsets)
        return out


def test_tables_that_are_called_with_indices_are_no_blocks() -> None:
    inputs = torch.arange(7), torch.arange(7) + 2, torch.tensor([0, 2, 5])
    assert "blocks" not in workload_of(Recommender(), inputs).traits


def test_a_model_that_cannot_be_exported_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def kept(x: Tensor) -> Tensor:
        rows = x.sum(1).argsort()
        return x[rows[1:][x[int(rows[0])].sum() <= x[rows[1:]].sum(1)]]

    assert "branching" in workload_of(kept, (torch.randn(5, 3),)).traits
    assert capfd.readouterr() == ("", "")


def test_traits_can_be_stated() -> None:
    assert images(traits=frozenset({"conv"})).traits == {"conv"}
    with pytest.raises(UnknownNameError, match=r"unknown trait 'convs'\. Did you mean 'conv'"):
        images(traits=frozenset({"convs"}))


def test_most_techniques_run_and_the_others_say_why() -> None:
    known = Matrix.load()
    refusals = known.refusals(images())
    assert len(known.techniques) - len(refusals) >= 60
    assert all(refusals.values())
    assert {"export", "openvino", "onnx-runtime"} & refusals.keys() == set()


def test_every_tensor_of_a_result_has_a_path() -> None:
    hidden = torch.ones(2)
    names = [(written(place), tensor) for place, tensor in tensors_of(Output(hidden, None, Cache(hidden)))]
    assert [path for path, _ in names] == ["out.cache.layers[0]", "out.cache.layers[1]", "out.scores"]
    assert [written(place) for place, _ in tensors_of({"a": (hidden, [hidden])})] == ["out['a'][0]", "out['a'][1][0]"]


def nothing_at_all(x: Tensor) -> None:
    del x


def fail(x: Tensor) -> Tensor:
    raise LookupError("no such row")


@pytest.mark.parametrize(
    ("model", "inputs", "more", "message"),
    [
        (Images(), torch.ones(1), {},
            r"inputs: expected a tuple of the positional arguments, got Tensor; for one argument give \(x,\)"),
        (Images(), (3,), {}, "inputs: expected tensors among the arguments, got none"),
        (3, (torch.ones(1),), {}, "model: expected a module or a function, got int"),
        (fail, (torch.ones(1),), {}, "model: raised LookupError with the inputs given: no such row"),
        (lambda x: {"text": "no", "x": x}, (torch.ones(1),), {},
            r"out\['text'\]: expected tensors, .* got str, which cannot be compared"),
        (nothing_at_all, (torch.ones(1),), {}, "out: expected tensors, got none in NoneType"),
        (lambda x: (y for y in x), (torch.ones(1),), {}, "out: expected tensors, .* got generator"),
        (Images().double(), (torch.ones(1, 3, 8, 8).double(),), {},
            "conv.weight: expected it on the CPU in float32, got float64 on cpu"),
        (Images(), (torch.ones(1, 3, 8, 8),), {"name": "My Model"},
            "name 'My Model': expected small letters and digits"),
        (Images(), (torch.ones(1, 3, 8, 8),), {"loss": functional.mse_loss},
            "training needs a loss, an optimizer, and a target or batches: give all three"),
    ],
)  # fmt: skip
def test_what_cannot_be_checked_is_named(model: Any, inputs: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(OwnModelError, match=message):
        workload_of(model, inputs, **more)


def test_a_model_that_cannot_be_copied_is_named() -> None:
    class Locked(nn.Module):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle '_thread.lock' object")

        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(OwnModelError, match=r"model: cannot be copied: TypeError: cannot pickle '_thread\.lock'"):
        workload_of(Locked(), (torch.ones(2),))


def test_a_model_that_is_random_is_named(fresh: Store) -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + torch.empty_like(x).normal_()

    record = erred(fresh, Eager(), workload_of(noisy, (torch.ones(3, 4),), name="noisy"), FORWARD)
    assert "is random" in record.reason


def test_a_model_that_keeps_state_is_not_called_random(fresh: Store) -> None:
    class Counting(nn.Module):
        calls = 0
        cache: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(0, 4), persistent=False)
            self._seen: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self._seen.append(x)
            self.cache = torch.cat([self.cache, x])
            return x * self.calls + self.cache.sum(0)

    record = erred(fresh, Eager(), workload_of(Counting(), (torch.ones(3, 4),), name="counting"), FORWARD)
    assert "keeps state between calls" in record.reason
    assert "calls (" in record.reason
    assert "cache (a tensor of shape" in record.reason
    assert "_seen (" in record.reason
    assert "random" not in record.reason


def test_the_module_that_draws_numbers_is_named_and_not_what_comes_after_it(fresh: Store) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(x + torch.empty_like(x).normal_())
            return out

    record = verdict_of(fresh, Eager(), workload_of(Noisy(), (torch.ones(3, 4),), name="noisy"), FORWARD)
    assert "what the module itself computes is random" in record.reason


class Spectral(nn.Module):
    """Complex parameters, buffers, inputs and outputs, as Fourier operators have them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))
        self.phase: Tensor
        self.register_buffer("phase", torch.randn(6, dtype=torch.complex64))

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        spectrum = (torch.fft.rfft(x) + z) @ self.weight * self.phase
        return torch.fft.irfft(spectrum, n=10), spectrum


def spectral() -> Workload:
    torch.manual_seed(0)
    return workload_of(
        Spectral(), (torch.randn(4, 10), torch.randn(4, 6, dtype=torch.complex64)), name="spectral", traits=frozenset()
    )


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("mode", [FORWARD, BACKWARD])
@pytest.mark.parametrize("technique", ["eager", "compile-aot-eager", "func-vmap-copies"])
def test_a_model_of_complex_numbers_is_judged(technique: str, mode: Mode, fresh: Store) -> None:
    passed(fresh, Matrix.load().techniques[technique], spectral(), mode)


@pytest.mark.parametrize(("technique", "verdict"), [("func-grad", Verdict.PASS), ("func-jacrev", Verdict.UNSUPPORTED)])
def test_transforms_take_complex_numbers_or_refuse_them(technique: str, verdict: Verdict, fresh: Store) -> None:
    record = verdict_of(fresh, Matrix.load().techniques[technique], spectral(), BACKWARD)
    assert record.verdict is verdict, record.why
    assert verdict is Verdict.PASS or "real numbers alone" in record.reason


def test_complex_results_of_timed_calls_are_judged(fresh: Store) -> None:
    passed(fresh, Matrix.load().techniques["jit-trace"], spectral(), Mode.SPEED)


@pytest.mark.slow
def test_the_memory_of_a_runtime_is_not_measured_and_its_parameters_are(fresh: Store) -> None:
    class Runtime(Planted):
        own_memory = True

    record = verdict_of(fresh, Runtime(lambda _: None), images(), Mode.SPEED)
    by_name = {measurement.name: measurement for measurement in record.measurements}
    assert by_name["peak-memory"].value is None
    assert "torch does not see" in by_name["peak-memory"].reason
    assert by_name["peak-memory-fp32-eager"].value
    assert by_name["parameters"].value == by_name["parameters-fp32-eager"].value != 0
    assert Matrix.load().techniques["onnxruntime"].own_memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
def test_parameters_in_fp32_may_be_complex(dtype: torch.dtype) -> None:
    program = Program(nn.Linear(2, 2, dtype=dtype), ())
    assert stored_in_float32(program).engaged is (dtype != torch.bfloat16)


def test_complex_numbers_are_compared_as_real_and_imaginary_parts_side_by_side() -> None:
    program = Program.of(own(spectral()))
    result = program.run(BACKWARD)
    assert set(result) == {"out[0]", "out[1]", "grad:weight", "grad:input[0]", "grad:input[1]", "buffer:phase"}
    assert not any(tensor.is_complex() for tensor in result.values())
    spectrum = program.module(*program.inputs)[1].detach()
    assert torch.equal(result["out[1]"], torch.stack([spectrum.real, spectrum.imag], -1).flatten(-2))


def test_complex_parameters_keep_their_imaginary_parts() -> None:
    program = Program.of(own(spectral()))
    weight = program.module.get_parameter("weight")
    assert weight.dtype == torch.complex64
    assert bool(weight.imag.any())
    exact = Program.of(own(spectral())).widened()
    assert exact.module.get_parameter("weight").dtype == exact.inputs[1].dtype == torch.complex128


@pytest.mark.parametrize("which", ["weight", "output"])
def test_an_imaginary_part_that_is_lost_fails(which: str, fresh: Store) -> None:
    def lost(program: Program) -> None:
        module = program.module

        def real(value: Tensor) -> Tensor:
            return torch.complex(value.real, torch.zeros_like(value.imag))

        def called(*inputs: Tensor) -> tuple[Tensor, Tensor]:
            if which == "weight":
                result: tuple[Tensor, Tensor] = torch.func.functional_call(
                    module, {"weight": real(module.get_parameter("weight"))}, inputs
                )
                return result
            signal, spectrum = module(*inputs)
            return signal, real(spectrum)

        program.call = called

    record = failed(fresh, Planted(lost), spectral(), FORWARD)
    assert {fault.path for fault in record.faults} == ({"out[0]", "out[1]"} if which == "weight" else {"out[1]"})


def test_complex_models_have_products_that_autocast_leaves_alone() -> None:
    product = torch.randn(4, 4, dtype=torch.complex64)
    assert "matmul" not in workload_of(lambda z: z @ z, (product,), name="products").traits
    assert "matmul" in workload_of(lambda x: x @ x, (product.real.clone(),), name="products").traits


def test_other_strides_are_a_remark_on_somebodys_own_model(fresh: Store) -> None:
    def turned(program: Program) -> None:
        module = program.module
        program.call = lambda *inputs: module(*inputs).t().contiguous().t()

    technique = Planted(turned, keeps_strides=True)
    workload = workload_of(nn.Linear(6, 5), (torch.randn(4, 6),), name="turned")
    record = passed(fresh, technique, workload, FORWARD)
    assert "expected (5, 1), got (1, 4)" in observed(record, STRIDES)


class Halved(Planted):
    """A scheme of its own: weights at half their numbers, in both outputs of `twofold`, of which one adds 1000."""

    oracle = "halved"

    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        with torch.no_grad():
            module.get_parameter("head.weight").mul_(0.5)
        return module


class Twofold(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.head(x)
        return out + 1000, out


def test_a_scheme_is_measured_against_the_model_without_it_too_where_that_is_worst(fresh: Store) -> None:
    def halved(program: Program) -> None:
        module = program.module

        def called(x: Tensor) -> tuple[Tensor, Tensor]:
            out = functional.linear(x, 0.5 * module.get_parameter("head.weight"))
            return out + 1000, out

        program.call = called

    torch.manual_seed(0)
    workload = workload_of(Twofold(), (torch.randn(16, 8),), name="scheme")
    record = passed(fresh, Halved(halved), workload, FORWARD)
    implementation = next(figure for figure in record.figures if figure.view == "row")
    (cost,) = (figure for figure in record.figures if figure.view == SCHEME)
    assert not cost.gates
    assert implementation.measured < 1e-5
    assert cost.path == "out[1]"
    assert 0.4 < cost.measured <= 0.5  # of the first output less than 0.002: it is near 1000


class Layer(nn.Module):
    """A block as language models have them: with keyword arguments, and tuples in its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor], *, mask: Tensor, cache: list[Tensor] | None) -> Any:
        keys = self.linear(x) * mask + positions[0]
        if cache is not None:
            cache.append(keys)
            keys = torch.stack(cache).sum(0)
        return torch.tanh(keys), positions


class Layers(nn.Module):
    """Blocks that are not named so, and a part of them under another name."""

    def __init__(self, *, caching: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])
        self.aliases = self.layers[:2]
        self.caching = caching

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        cache: list[Tensor] | None = [] if self.caching else None
        for layer in self.layers:
            x, _ = layer(x, (mask, mask), mask=mask, cache=cache)
        out: Tensor = self.heads[0](x)
        return out


def layers(*, caching: bool = False) -> Workload:
    torch.manual_seed(0)
    mask = torch.tensor([[1.0], [0.0], [1.0], [1.0]])
    return workload_of(Layers(caching=caching), (torch.randn(4, 8),), {"mask": mask}, name="layers")


def test_blocks_are_found_whatever_their_name_and_arguments() -> None:
    assert "blocks" in layers().traits
    assert "blocks" not in layers(caching=True).traits  # called again, they would append to the cache again
    assert "blocks" not in images().traits


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", ["checkpoint-reentrant", "checkpoint-non-reentrant"])
def test_blocks_with_keyword_arguments_and_tuples_are_checkpointed(name: str, fresh: Store) -> None:
    passed(fresh, Matrix.load().techniques[name], layers(), BACKWARD)


class Tied(nn.Module):
    """A table, and a head of the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(17, 16)
        self.head = nn.Linear(16, 17, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(tokens))
        return out


def test_a_head_that_shares_its_weight_with_a_table_is_quantized_all_the_same(fresh: Store) -> None:
    torch.manual_seed(0)
    workload = workload_of(Tied(), (tokens(),), name="tied")
    passed(fresh, Matrix.load().techniques["int8-torchao-weight-only"], workload, FORWARD)


def test_eager_that_alone_has_a_nan_fails_and_nothing_can_be_equal_to_it(fresh: Store) -> None:
    def undefined(x: Tensor) -> Tensor:
        return x if x.dtype == torch.float64 else torch.where(x > 0.5, torch.nan, x)

    workload = workload_of(undefined, (torch.linspace(0, 1, 8),), name="undefined")
    record = failed(fresh, Eager(), workload, FORWARD)
    assert {fault.view for fault in record.faults} == {"NaN"}
    record = erred(fresh, Matrix.load().techniques["compile-aot-eager"], workload, FORWARD)
    assert (
        "eager float32 on the CPU is wrong, so no technique can be equal to it: out: isnan holds for 0 and 4"
        in record.why
    )


def appended(cache: Tensor, x: Tensor) -> Tensor:
    """Adds to a row of a cache, and reads it: a second write leaves something else."""
    cache[1] += x.sum(0)
    return cache.cumsum(0) * 2


def appending() -> Workload:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(4, 6, generator=generator), torch.randn(3, 6, generator=generator)
    return workload_of(appended, inputs, name="appending")


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("mode", [FORWARD, BACKWARD])
@pytest.mark.parametrize("technique", ["eager", "compile-aot-eager", "jit-trace", "func-vmap-copies"])
def test_a_model_that_writes_to_its_input_is_judged(technique: str, mode: Mode, fresh: Store) -> None:
    workload = appending()
    assert own(workload).writes == {0}
    passed(fresh, Matrix.load().techniques[technique], workload, mode)


def test_an_output_that_is_an_input_keeps_what_was_written(fresh: Store) -> None:
    def moved(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x[0:, :] = y[0:, :]
        y.add_(1)
        return x, y

    workload = workload_of(moved, (torch.zeros(2, 3), torch.arange(6.0).reshape(2, 3)), name="moved")
    result = Program.of(own(workload)).run(FORWARD)
    assert result["out[0]"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert result["out[1]"].tolist() == [[1, 2, 3], [4, 5, 6]]
    passed(fresh, Eager(), workload, FORWARD)


def left(*args: Any) -> Tensor:
    """Returns the right result, and leaves the cache as it was."""
    module, cache, x = args
    out: Tensor = module(cache.clone(), x)
    return out


def elsewhere(*args: Any) -> Tensor:
    """Returns the right result, and writes to the row behind too."""
    module, cache, x = args
    out: Tensor = module(cache, x)
    cache[2] = cache[1]
    return out


@pytest.mark.parametrize("wrong", [left, elsewhere])
def test_what_is_left_in_an_input_is_judged(wrong: Callable[..., Any], fresh: Store) -> None:
    record = failed(fresh, Planted(calling(wrong)), appending(), FORWARD)
    assert {fault.path for fault in record.faults} == {"input[0]"}


def test_a_model_that_writes_to_its_input_is_not_timed() -> None:
    assert appending().modes == {FORWARD, BACKWARD}


def test_each_run_has_the_inputs_as_they_were() -> None:
    program = Program.of(own(appending()))
    before = program.inputs[0].clone()
    first, second = program.run(FORWARD), program.run(FORWARD)
    assert torch.equal(program.inputs[0], before)
    assert first.keys() == {"out", "input[0]"}
    assert all(torch.equal(first[path], second[path]) for path in first)
    assert not torch.equal(first["input[0]"], before)


def test_an_exception_of_the_model_names_its_line(fresh: Store) -> None:
    def summed(x: Tensor) -> Tensor:
        product = x @ x.mT  # in bfloat16 under autocast
        return torch.zeros_like(product).index_add(0, torch.arange(4), x)

    own = workload_of(summed, (torch.randn(4, 4),), name="summed", sizes=[])
    record = erred(fresh, Matrix.load().techniques["amp-bf16"], own, FORWARD)
    assert "must have the same scalar type (in summed, test_own_model.py, line" in record.headline


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_eps_of_rms_norm_is_that_of_float32(dtype: str, fresh: Store) -> None:
    own = workload_of(nn.RMSNorm(32), (torch.randn(4, 32) * 1e-3,), name="rms-norm", sizes=[])
    for mode in (FORWARD, BACKWARD):
        passed(fresh, Eager(), own, mode, dtype)
