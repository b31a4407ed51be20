"""Fields of a sample by name, such as ``meta.id`` or ``pair[0]``."""

from __future__ import annotations

import re
from typing import Any

_STEP = re.compile(r"\[(-?\d+)\]|\.?([^.\[\]]+)")


def field_value(sample: Any, field: str) -> Any:
    """Return what stands in a field of a sample; ``LookupError`` or ``TypeError`` when the sample has no such field."""
    if isinstance(sample, dict) and field in sample:
        return sample[field]
    value = sample
    for index, name in _STEP.findall(field):
        value = value[int(index)] if index else value[name]
    return value


def set_field(sample: Any, field: str, value: Any) -> None:
    """Put a value into a field of a sample; raises what ``field_value`` raises."""
    if isinstance(sample, dict) and field in sample:
        sample[field] = value
        return
    steps = [int(index) if index else name for index, name in _STEP.findall(field)]
    for step in steps[:-1]:
        sample = sample[step]
    sample[steps[-1]] = value
