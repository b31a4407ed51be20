"""What is expected of a golden dataset, as JSON: every version by position and by key, the history, the tags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

import liveset

_MARKS = {"array", "bytes", "datetime", "dict", "picture", "scalar", "set", "tuple"}


def told(value: Any) -> Any:
    """Return a value in terms of JSON, so that different values are told differently, down to dtypes and signs of zero."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is dict:
        if all(type(key) is str for key in value) and not _MARKS & value.keys():
            return {key: told(item) for key, item in value.items()}
        return {"dict": [[told(key), told(item)] for key, item in value.items()]}
    if type(value) is list:
        return [told(item) for item in value]
    if type(value) is tuple:
        return {"tuple": [told(item) for item in value]}
    if type(value) is set:
        return {"set": sorted(told(item) for item in value)}
    if type(value) is bytes:
        return {"bytes": value.hex()}
    if isinstance(value, datetime):
        return {"datetime": value.isoformat()}
    if isinstance(value, np.generic):
        return {"scalar": value.dtype.str, "data": value.tobytes().hex()}
    if type(value).__module__.startswith("PIL."):
        return {"picture": value.mode, "size": list(value.size), "data": value.tobytes().hex()}
    array = np.asarray(value)  # images are tensors where torch is installed
    return {"array": array.dtype.str, "shape": list(array.shape), "data": array.tobytes().hex()}


def version_told(path: Path, version: int, **options: Any) -> dict[str, Any]:
    """Read one version by position and by key; both must give the same samples."""
    with liveset.StreamingDataset(path, version=version, **options) as ds:
        assert ds.version == version
        samples = [told(sample) for sample in ds]
        assert same([told(ds[i]) for i in range(len(ds))], samples)
        keys: list[Any] | None = None
        if _has_keys(ds):
            keys = list(ds.keys)
            assert len(ds.keys) == len(keys) == len(samples)
            assert [ds.key_at(i) for i in range(len(keys))] == keys
            assert same([told(ds.get_by_key(key)) for key in keys], samples)
            assert same([told(sample) for sample in ds.get_by_keys(keys)], samples)
        return {"samples": samples, "keys": keys, "attributes": dict(ds.attributes)}


def _has_keys(ds: liveset.StreamingDataset) -> bool:
    try:
        return ds.keys is not None
    except KeyError:
        return False


def dataset_told(path: Path, **options: Any) -> dict[str, Any]:
    """Return all that can be read of a dataset."""
    listed = liveset.history(path)
    versions = {str(entry.version): version_told(path, entry.version, **options) for entry in listed if entry.available}
    history = [_known(asdict(entry)) for entry in listed]
    tags = {}
    for entry in listed:
        for tag in entry.tags:
            with liveset.StreamingDataset(path, version=tag) as ds:
                tags[tag] = ds.version
    return {"versions": versions, "history": history, "tags": tags}


def _known(entry: Mapping[str, Any]) -> dict[str, Any]:
    when = entry["when"]
    return {**entry, "tags": list(entry["tags"]), "when": None if when is None else when.isoformat()}


def same(a: Any, b: Any) -> bool:
    """Compare what was told; as texts, since 1, 1.0 and True are equal, and NaN is not."""
    return json.dumps(a) == json.dumps(b)


def write_expected(path: Path, file: Path) -> None:
    file.write_text(json.dumps(dataset_told(path)) + "\n")
