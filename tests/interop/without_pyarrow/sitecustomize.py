"""Hides pyarrow from a Python process and its children: this directory is put on PYTHONPATH, so it runs before anything else."""

import importlib.metadata
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any


class Hidden:
    """A finder that answers for pyarrow before others can."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] == "pyarrow":
            raise ModuleNotFoundError("No module named 'pyarrow'", name=name)
        return None


_distribution = importlib.metadata.distribution


def distribution(distribution_name: str) -> importlib.metadata.Distribution:
    if distribution_name.lower() == "pyarrow":
        raise importlib.metadata.PackageNotFoundError(distribution_name)
    return _distribution(distribution_name)


sys.meta_path.insert(0, Hidden)
importlib.metadata.distribution = distribution
