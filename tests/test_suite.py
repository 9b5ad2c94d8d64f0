"""Makes ``pytest --accel-device=NAME`` in a checkout run the suite beside the tests; without it these are skipped."""

from accelcheck.suite.test_numerics import test_equivalence, test_gradients, test_training

__all__ = ["test_equivalence", "test_gradients", "test_training"]
