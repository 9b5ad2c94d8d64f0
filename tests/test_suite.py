"""Makes ``pytest --accel-device=NAME`` in a checkout run the suite beside the tests; without it these are skipped."""

from accelcheck.suite.test_accuracy import test_accuracy, test_learning
from accelcheck.suite.test_numerics import test_equivalence, test_gradients, test_training
from accelcheck.suite.test_randomness import test_randomness

__all__ = ["test_accuracy", "test_equivalence", "test_gradients", "test_learning", "test_randomness", "test_training"]
