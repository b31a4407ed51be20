"""Test doubles and suites for stores and protocols; nothing in the product imports it."""

from __future__ import annotations

from liveset.testing.faults import FaultyStore, LossyStore, SimulatedCrash, WrappedStore
from liveset.testing.memory import MemoryStore

__all__ = ["FaultyStore", "LossyStore", "MemoryStore", "SimulatedCrash", "WrappedStore"]
