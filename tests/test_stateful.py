"""The stateful model: whatever users do to a dataset in whatever order, it is what plain Python says it should be."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from tests.support.machine import DatasetMachine
from tests.support.places import LocalPlace, MemoryPlace

pytest.importorskip("pyarrow", exc_type=ImportError)

# Sequences and their steps, by the profile of the run.
_SIZES = {"dev": (20, 20), "ci": (60, 40), "nightly": (60, 40)}
_EXAMPLES, _STEPS = _SIZES.get(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"), _SIZES["dev"])


class LocalMachine(DatasetMachine):
    make_place = LocalPlace


class MemoryMachine(DatasetMachine):
    make_place = MemoryPlace


TestLocal = LocalMachine.TestCase
TestLocal.settings = settings(max_examples=_EXAMPLES // 3, stateful_step_count=_STEPS, deadline=None)

TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(max_examples=_EXAMPLES, stateful_step_count=_STEPS, deadline=None)
