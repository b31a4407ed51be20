"""The protocol, searched through every order of steps, and shown to need each of its rules."""

from __future__ import annotations

import pytest

from liveset.testing.lease_model import LeaseRules, search_leases
from liveset.testing.protocol_model import Rules, search


def test_no_order_of_two_writers_breaks_a_promise() -> None:
    result = search()
    assert result.broken is None, result.steps
    assert result.states == 15_091  # fewer would mean that the model lost a step, more that states are told apart that need not be


def test_one_writer_and_a_vacuum() -> None:
    result = search(writers=1, vacuum=True)
    assert result.broken is None, result.steps


MUTANTS = {
    "believes a refusal": (Rules(reads_back=False), False, "one session was applied twice"),
    "new id while the outcome is open": (Rules(resends_same=False), False, "one session was applied twice"),
    "vacuum without a fence": (Rules(fences=False), True, "the head names a file that was deleted"),
}


@pytest.mark.parametrize(("rules", "vacuum", "broken"), MUTANTS.values(), ids=MUTANTS.keys())
def test_each_missing_rule_is_noticed(rules: Rules, vacuum: bool, broken: str) -> None:
    result = search(rules, vacuum=vacuum)
    assert result.broken == broken
    assert result.steps


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_no_order_of_two_writers_and_a_vacuum_breaks_a_promise() -> None:
    result = search(vacuum=True)
    assert result.broken is None, result.steps


def test_no_order_of_pinned_readers_and_vacuums_breaks_a_promise() -> None:
    one = search_leases(readers=1, vacuums=1)
    assert one.broken is None, one.steps
    two = search_leases()
    assert two.broken is None, two.steps
    assert two.states > 1000


@pytest.mark.parametrize("rule", ["lists_again", "looks_at_fence", "lease_first"])
def test_each_missing_rule_of_leases_is_noticed(rule: str) -> None:
    result = search_leases(LeaseRules(**{rule: False}), readers=1, vacuums=1)
    assert result.broken == "a pinned reader lost its files"
    assert result.steps
