"""Remarks of other packages that are left out, and those that are not."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

from accelcheck.core.quiet import copied_trees, without

if TYPE_CHECKING:
    import pytest


def test_a_logger_leaves_out_messages_with_these_words_alone_and_only_within(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("other.package")
    with without("other.package", "is an Enum", "no kernels"):
        log.warning("it has no kernels")
        log.warning("%s is an Enum subclass", "Kind")
        log.warning("something else")
    log.warning("Kind is an Enum subclass")
    assert caplog.messages == ["something else", "Kind is an Enum subclass"]


def test_copies_of_trees_do_not_warn_of_leaves_and_warn_of_all_else() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with copied_trees():
            warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated", FutureWarning, stacklevel=1)
            warnings.warn("another thing is deprecated", FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["another thing is deprecated"]
