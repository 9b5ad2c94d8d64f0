"""Communication hooks that send less than the gradient: torch's own, and codecs with error feedback."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from accelcheck.techniques.distributed.ddp import Bucket, Exchange, Future

PLAIN_STEPS = 2
"""Steps before PowerSGD begins: torch's minimum, because buckets are rebuilt after the first step."""
POWER_SEED = 6
"""Seed of PowerSGD's first column spaces."""
LEVELS = 127
"""Largest magnitude of a symmetric 8-bit integer."""


class HalfPrecision(Exchange):
    """Hooks of torch that round to 16 bits, divide by the number of ranks, and add up in 16 bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, bucket: Bucket) -> Future:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        self.calls += 1
        hook = default_hooks.fp16_compress_hook if self.dtype == torch.float16 else default_hooks.bf16_compress_hook
        group = distributed.group.WORLD
        if group is None:
            raise RuntimeError("expected a process group: call init_process_group first")
        return hook(group, bucket)


class Account:
    """Sums of the gradients that a rank should send, and of its sent tensors: FP64 on the CPU, without the codec."""

    def __init__(self, elements: int) -> None:
        self.true, self.sent, self.size = (torch.zeros(elements, dtype=torch.float64) for _ in range(3))

    def add(self, gradient: Tensor, residual: Tensor, sent: Tensor) -> None:
        """Adds a step: the gradient, the residual before it, and the sent tensor."""
        true = gradient.cpu().double()
        self.true += true
        self.sent += sent.cpu().double()
        self.size += true.abs() + residual.cpu().double().abs()

    def unbalanced(self, residual: Tensor | None) -> Tensor:
        """Marks elements for which sent parts and residual do not add up to the gradients: bool, flat.

        A step adds gradient and residual in FP32, which rounds by at most 2**-24 of their sizes; twice that is
        allowed. If the codec's rounding error is no FP32 number, `size` counts the sent part too: see `Books`.
        """
        left = torch.zeros_like(self.true) if residual is None else residual.cpu().double()
        return (self.sent + left - self.true).abs() > 2 * 2.0**-24 * self.size


class Books:
    """`Account` of each parameter. With `rounding`, subtracting the sent part errs too, by 2**-24 of both operands."""

    def __init__(self, *, rounding: bool = False) -> None:
        self.rounding = rounding
        self._accounts: dict[Tensor, Account] = {}

    def add(self, parameters: Sequence[Tensor], gradient: Tensor, residual: Tensor, sent: Tensor) -> None:
        """Adds a step of a bucket: gradient, previous residual and sent tensor, all flat."""
        pieces = (split(tensor, parameters) for tensor in (gradient, residual, sent))
        for parameter, *noted in zip(parameters, *pieces, strict=True):
            account = self._accounts.setdefault(parameter, Account(parameter.numel()))
            account.add(*noted)
            if self.rounding:
                account.size += noted[-1].cpu().double().abs()

    def facts(self, names: Mapping[Tensor, str], residuals: Mapping[Tensor, Tensor]) -> Mapping[str, Any]:
        """Counts the parameters with an account and, by parameter, the `unbalanced` elements, where there are any."""
        unbalanced = ((names[own], account.unbalanced(residuals.get(own))) for own, account in self._accounts.items())
        lost = {name: int(elements.sum()) for name, elements in unbalanced if elements.any()}
        return {"lost": lost, "accounts": len(self._accounts)}


class Codec(Protocol):
    """Encodes a flat FP32 tensor as tensors that have the same sizes in all ranks, and decodes them."""

    def encode(self, wanted: Tensor) -> Sequence[Tensor]:
        """Returns the tensors to send."""
        ...

    def decode(self, parts: Sequence[Tensor], size: int) -> Tensor:
        """Restores the sent values as a flat FP32 tensor of `size` elements."""
        ...


class TopK:
    """Codec of the largest elements, a `share` of all, with their indices, 8 bytes each; the others become 0."""

    def __init__(self, share: float) -> None:
        self.share = share

    def encode(self, wanted: Tensor) -> Sequence[Tensor]:
        places = wanted.abs().topk(largest(self.share, wanted.numel())).indices
        return wanted[places], places.to(torch.int32)

    def decode(self, parts: Sequence[Tensor], size: int) -> Tensor:
        values, places = parts
        return values.new_zeros(size).scatter_(0, places.long(), values)


class Int8:
    """Codec of integer multiples of a scale that maps the largest element to 127: a byte an element, and the scale."""

    def encode(self, wanted: Tensor) -> Sequence[Tensor]:
        scale = (wanted.abs().amax() / LEVELS).clamp(min=torch.finfo(wanted.dtype).tiny)
        return (wanted / scale).round().clamp(-LEVELS, LEVELS).to(torch.int8), scale.reshape(1)

    def decode(self, parts: Sequence[Tensor], size: int) -> Tensor:
        integers, scale = parts
        return integers.to(scale.dtype) * scale


class ErrorFeedback(Exchange):
    """Gathers the encoded sums of gradient and residual; the encoding error is the next residual.

    A residual belongs to a parameter, not to an offset in a bucket: buckets are rebuilt after the first step.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.residuals: dict[Tensor, Tensor] = {}
        self.books = Books()

    def __call__(self, bucket: Bucket) -> Future:
        self.calls += 1
        parameters, gradient = bucket.parameters(), bucket.buffer()
        before = torch.cat([self.residuals.get(p, torch.zeros_like(p)).flatten() for p in parameters])
        wanted = gradient + before
        parts = self.codec.encode(wanted)
        sent = self.codec.decode(parts, wanted.numel())
        self.books.add(parameters, gradient, before, sent)
        self.keep(parameters, split(wanted - sent, parameters))
        world = distributed.get_world_size()
        theirs = [[torch.empty_like(part) for _ in range(world)] for part in parts]
        works = [distributed.all_gather(into, part, async_op=True) for into, part in zip(theirs, parts, strict=True)]

        def mean(_: Any) -> Tensor:
            decoded = [self.codec.decode(of_rank, wanted.numel()) for of_rank in zip(*theirs, strict=True)]
            return torch.stack(decoded).sum(0) / world

        return torch.futures.collect_all([work.get_future() for work in works]).then(mean)

    def keep(self, parameters: Sequence[Tensor], dropped: Sequence[Tensor]) -> None:
        """Keeps the unsent parts as residuals."""
        self.residuals.update(zip(parameters, dropped, strict=True))

    def facts(self, names: Mapping[Tensor, str]) -> Mapping[str, Any]:
        return {**super().facts(names), **self.books.facts(names, self.residuals)}


class PowerSgd(Exchange):
    """PowerSGD of torch: a product of two thin matrices approximates each gradient that is large enough.

    A matrix is compressed if it has more than `rate` times the elements of the two thin ones of `rank` columns. With
    `feedback`, the error of the product is added to the next gradient.
    """

    def __init__(self, rank: int, rate: float, *, feedback: bool = True) -> None:
        self.rank, self.rate, self.feedback = rank, rate, feedback
        self.books = Books(rounding=True)
        self.state: Any = None
        self.buckets: dict[int, Sequence[Tensor]] = {}

    def __call__(self, bucket: Bucket) -> Future:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

        self.calls += 1
        if self.state is None:
            self.state = power.PowerSGDState(
                None,
                matrix_approximation_rank=self.rank,
                start_powerSGD_iter=PLAIN_STEPS,
                min_compression_rate=self.rate,
                use_error_feedback=self.feedback,
            )
        if self.state.iter < PLAIN_STEPS:
            return power.powerSGD_hook(self.state, bucket)
        parameters, gradient = bucket.parameters(), bucket.buffer().clone()
        if bucket.index() not in self.buckets:
            self.buckets[bucket.index()] = parameters
            self._begin(bucket)
        before = self.state.error_dict.get(bucket.index(), torch.zeros_like(gradient))

        def note(done: torch.futures.Future[Tensor]) -> Tensor:
            self.books.add(parameters, gradient, before, done.value())
            return done.value()

        return power.powerSGD_hook(self.state, bucket).then(note)

    def _begin(self, bucket: Bucket) -> None:
        """Sets the first columns of matrices, as a warm start does: torch's own depend on the order in the bucket."""
        thin = [p.shape for p in bucket.parameters() if worthwhile(p.shape, self.rank, self.rate)]
        groups = list(dict.fromkeys(map(matrix, thin)))  # the hook keeps matrices of one shape together
        bases = [first_basis(shape, self.rank) for shape in sorted(thin, key=lambda s: groups.index(matrix(s)))]
        left = sum(worthwhile(shape, self.rank, self.rate) for shape in thin) - sum(basis.numel() for basis in bases)
        empty = bucket.buffer().new_empty
        self.state.p_memory_dict[bucket.index()] = empty(left)
        flat = [empty(0), *(basis.flatten().to(empty(0)) for basis in bases)]
        self.state.q_memory_dict[bucket.index()] = torch.cat(flat)

    def facts(self, names: Mapping[Tensor, str]) -> Mapping[str, Any]:
        residuals = {
            parameter: piece
            for index, parameters in self.buckets.items()
            if index in self.state.error_dict
            for parameter, piece in zip(parameters, split(self.state.error_dict[index], parameters), strict=True)
        }
        return {**super().facts(names), **self.books.facts(names, residuals)}


def split(flat: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """Splits a flat bucket into the flat pieces of its parameters."""
    return torch.split(flat, [parameter.numel() for parameter in parameters])


def largest(share: float, size: int) -> int:
    """Returns the number of elements in a share of `size`; at least 1."""
    return max(1, int(share * size))


def matrix(shape: torch.Size) -> tuple[int, int]:
    """Returns rows and columns of a gradient as PowerSGD sees it."""
    return shape[0], shape[1:].numel()


def worthwhile(shape: torch.Size, rank: int, rate: float) -> int:
    """Counts the elements of the two thin matrices that PowerSGD sends for a gradient; 0 if it sends the gradient.

    Follows torch's ``_should_compress``, documented with ``min_compression_rate``.
    """
    rows, columns = matrix(shape)
    thin = (rows + columns) * min(rows, columns, rank)
    return thin if thin * rate < rows * columns else 0


def first_basis(shape: torch.Size, rank: int) -> Tensor:
    """Draws PowerSGD's first columns, ``(columns, rank)``, FP32; the same for all matrices of one shape."""
    rows, columns = matrix(shape)
    generator = torch.Generator().manual_seed(POWER_SEED)
    return torch.randn(columns, min(rows, columns, rank), generator=generator)
