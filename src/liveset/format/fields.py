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
