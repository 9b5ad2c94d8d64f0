"""A classifier of bags of words: a sparse embedding gradient, and a batch of 13 that no number of ranks divides."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, integers, learned

WORDS = 41


class BagClassifier(nn.Module):
    """Weighted sum of three word embeddings, then two linear layers with a GELU in between.

    ``(batch, 3)`` int64 to ``(batch, classes)``. The weights differ, since with equal ones the words of a bag would
    have equal gradients, and the choice of the largest elements (top-k compression) would be arbitrary.
    """

    def __init__(self, width: int = 24, hidden: int = 33, classes: int = 7) -> None:
        super().__init__()
        self.weights = nn.Buffer(torch.tensor([[0.75], [0.5], [0.375]]))
        self.words = nn.Embedding(WORDS, width)
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.fc2(functional.gelu(self.fc1((self.weights * self.words(words)).sum(1))))
        return out


def _train(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(BagClassifier(), generator)
    del extent  # 13 bags for ranks of different sizes
    batch = 13
    words = integers(generator, 0, WORDS, batch, 3)
    return learned(module, words, integers(generator, 0, 7, batch), rate=0.1, steps=6)


WORKLOADS = (
    Workload("train-bags",
        "Six steps of SGD with momentum on 13 bags of 3 words: ranks get parts of different sizes, and miss some "
        "words.",
        _train, 2, frozenset({Mode.TRAIN}), frozenset({"linear", "matmul", "scriptable", "training"}),
        dtypes=frozenset({"float32"})),
)  # fmt: skip
