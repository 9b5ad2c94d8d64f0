"""Known answers of the operators that the judge itself computes with, on the CPU.

A judge whose own products or sums are wrong finds anything right. All answers follow from integers or from symmetry.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelcheck.verify.views import Yardstick

_DOUBLE = torch.float64
_NEAR = 2.0**-50
"""Relative error granted to functions that are not exact, and to sums of squares under a root."""


class KnownAnswerError(RuntimeError):
    """Wrong operator of the judge's own, so that nothing can be judged; the message names it."""


def _made(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=_DOUBLE)


def _gradient() -> Tensor:
    with torch.enable_grad():
        x = _made(1.0, -2.0, 3.0).requires_grad_()
        return torch.autograd.grad((x * x * x).sum(), x)[0]


_A, _B = ((1.0, 2.0), (3.0, 4.0)), ((5.0, 6.0), (7.0, 8.0))
_AB = [[19.0, 22.0], [43.0, 50.0]]

_ANSWERS: tuple[tuple[str, Callable[[], Tensor], Any], ...] = (
    ("matmul", lambda: _made(*_A) @ _made(*_B), _AB),
    ("addmm", lambda: torch.addmm(_made(1.0, 2.0), _made(*_A), _made(*_B)), [[20.0, 24.0], [44.0, 52.0]]),
    ("bmm", lambda: torch.bmm(_made(_A, _B), _made(_B, _A)), [_AB, [[23.0, 34.0], [31.0, 46.0]]]),
    ("linear", lambda: functional.linear(_made(*_A), _made(*_B)), [[17.0, 23.0], [39.0, 53.0]]),
    (
        "conv2d",
        lambda: functional.conv2d(
            torch.arange(16, dtype=_DOUBLE).view(1, 1, 4, 4), torch.ones(1, 1, 3, 3, dtype=_DOUBLE)
        ),
        [[[[45.0, 54.0], [81.0, 90.0]]]],
    ),
    ("add", lambda: _made(1.0, -2.0) + _made(0.5, 2.0), [1.5, 0.0]),
    ("sub", lambda: _made(1.0, -2.0) - _made(0.5, 2.0), [0.5, -4.0]),
    ("mul", lambda: _made(1.5, -2.0) * _made(0.5, 2.0), [0.75, -4.0]),
    ("div", lambda: _made(1.5, -2.0) / _made(0.5, 4.0), [3.0, -0.5]),
    ("sum", lambda: torch.arange(5000, dtype=_DOUBLE).sum(), 12497500.0),
    ("mean", lambda: torch.arange(5001, dtype=_DOUBLE).mean(), 2500.0),
    ("amax", lambda: _made(*_B).amax(1), [6.0, 8.0]),
    ("sqrt", lambda: _made(49.0, 2.25).sqrt(), [7.0, 1.5]),
    ("exp", lambda: _made(0.0, -math.inf, 1.0).exp(), [1.0, 0.0, math.e]),
    ("tanh", lambda: _made(0.0, math.inf, -math.inf).tanh(), [0.0, 1.0, -1.0]),
    ("relu", lambda: functional.relu(_made(-1.0, 2.0)), [0.0, 2.0]),
    ("gelu", lambda: functional.gelu(_made(-40.0, 0.0, 40.0)), [0.0, 0.0, 40.0]),
    ("softmax", lambda: functional.softmax(_made(3.0, 3.0, 3.0, 3.0), 0), [0.25] * 4),
    ("layer_norm", lambda: functional.layer_norm(_made(1.0, 3.0), (2,), eps=0.0), [-1.0, 1.0]),
    (
        "scaled_dot_product_attention",
        lambda: functional.scaled_dot_product_attention(_made([[0.0, 0.0]]), _made(_A), _made(_B)),
        [[[6.0, 7.0]]],
    ),
    ("index_select", lambda: _made(*_B).index_select(0, torch.tensor([1, 0])), [[7.0, 8.0], [5.0, 6.0]]),
    ("the gradient of x ** 3", _gradient, [3.0, 12.0, 27.0]),
    ("a cast to float32", lambda: _made(1 + 2.0**-30, 2.0**-140).float().double(), [1.0, 2.0**-140]),
    ("a cast to bfloat16", lambda: _made(1 + 2.0**-9, 1 + 3 * 2.0**-8).bfloat16().double(), [1.0, 1 + 2.0**-6]),
)
"""Known answers: name, computation, and result."""


def check() -> None:
    """Compares all known answers, in less than 1 ms.

    Raises:
        KnownAnswerError: A result is wrong, or an operator raised.
    """
    for name, compute, answer in _ANSWERS:
        try:
            _compare(name, compute().tolist(), answer)
        except Exception as error:
            if isinstance(error, KnownAnswerError):
                raise
            raise KnownAnswerError(f"{name}: expected {answer}, got {type(error).__name__}: {error}") from error


def check_views() -> None:
    """Compares the views of ones with one element wrong by 1/2, through NumPy and through torch.

    Raises:
        KnownAnswerError: See `check`.
    """
    for stick, candidate, answer in _sticks():
        reading = stick.read(candidate)
        _compare("the views of one wrong element", [*reading.values[:5]], answer)
        _compare("where one wrong element is", [*reading.places[:2]], [1.0, 2.0])


_STICKS: list[tuple[Yardstick, Tensor, list[float]]] = []


def _sticks() -> list[tuple[Yardstick, Tensor, list[float]]]:
    if not _STICKS:
        for rows, columns in ((4, 8), (96, 128)):  # through NumPy, and through torch
            truth = torch.ones(rows, columns, dtype=_DOUBLE)
            candidate = truth.clone()
            candidate[1, 2] += 0.5
            answer = [0.5 / math.sqrt(2 * n) for n in (columns, rows, min(16, rows) * min(16, columns))]
            if rows < 16:
                answer[2] = 0.5 / math.sqrt(2 * rows * columns)
            _STICKS.append((Yardstick(truth, 2.0**-24), candidate, [*answer, 0.5, 0.5 / (rows * columns)]))
    return _STICKS


def _compare(name: str, got: Any, answer: Any) -> None:
    flat, expected = _flat(got), _flat(answer)
    if len(flat) != len(expected) or not all(
        a == b or math.isclose(a, b, rel_tol=_NEAR) for a, b in zip(flat, expected, strict=True)
    ):
        raise KnownAnswerError(
            f"{name}, on the CPU: expected {answer}, got {got}: the judge's own operators are wrong here"
        )


def _flat(value: Any) -> list[float]:
    return [number for item in value for number in _flat(item)] if isinstance(value, (list, tuple)) else [float(value)]
