"""Streaming training datasets that can be edited in place.

Names are loaded on first use (PEP 562), so that ``import liveset`` costs nothing until something is needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from liveset import errors as _errors

__version__ = "0.1.0"

if TYPE_CHECKING:
    from liveset.edit.adopt import adopt
    from liveset.edit.session import DatasetUpdate, UpdatePreview, UpdateResult, dataset_update
    from liveset.edit.vacuum import VacuumReport, vacuum
    from liveset.errors import (
        CommitUnknown,
        Conflict,
        Corrupt,
        DatasetError,
        DatasetExists,
        DatasetNotFound,
        DuplicateKeys,
        ForeignEdit,
        FormatError,
        KeyConflict,
        KeyNotFound,
        KeysExist,
        MissingDependency,
        NotFound,
        OverwriteConflict,
        PickleRefused,
        PositionOutOfRange,
        SampleError,
        SchemaConflict,
        SessionClosed,
        SessionExpired,
        StorageError,
        UnsafeStore,
        UnsupportedFormat,
        VersionExpired,
        VersionNotFound,
        WorkerError,
    )
    from liveset.format.media import File, Image, Jpeg, JpegArray, Pil, Text
    from liveset.format.schema import Schema
    from liveset.read.dataset import StreamingDataset
    from liveset.read.info import DatasetInfo
    from liveset.tools.attributes import set_attributes
    from liveset.tools.export import export
    from liveset.tools.history import Version, history, restore, tag, untag, was_committed
    from liveset.tools.keys import build_keys_index
    from liveset.tools.verify import VerifyReport, verify
    from liveset.write.optimize import optimize

_WHERE = {
    "DatasetInfo": "liveset.read.info",
    "DatasetUpdate": "liveset.edit.session",
    "File": "liveset.format.media",
    "Image": "liveset.format.media",
    "Jpeg": "liveset.format.media",
    "JpegArray": "liveset.format.media",
    "Pil": "liveset.format.media",
    "Schema": "liveset.format.schema",
    "StreamingDataset": "liveset.read.dataset",
    "Text": "liveset.format.media",
    "UpdatePreview": "liveset.edit.session",
    "UpdateResult": "liveset.edit.session",
    "VacuumReport": "liveset.edit.vacuum",
    "VerifyReport": "liveset.tools.verify",
    "Version": "liveset.tools.history",
    "adopt": "liveset.edit.adopt",
    "build_keys_index": "liveset.tools.keys",
    "dataset_update": "liveset.edit.session",
    "export": "liveset.tools.export",
    "history": "liveset.tools.history",
    "optimize": "liveset.write.optimize",
    "restore": "liveset.tools.history",
    "set_attributes": "liveset.tools.attributes",
    "tag": "liveset.tools.history",
    "untag": "liveset.tools.history",
    "vacuum": "liveset.edit.vacuum",
    "verify": "liveset.tools.verify",
    "was_committed": "liveset.tools.history",
}
_WHERE.update(dict.fromkeys(_errors.__all__, "liveset.errors"))

__all__ = [
    "CommitUnknown",
    "Conflict",
    "Corrupt",
    "DatasetError",
    "DatasetExists",
    "DatasetInfo",
    "DatasetNotFound",
    "DatasetUpdate",
    "DuplicateKeys",
    "File",
    "ForeignEdit",
    "FormatError",
    "Image",
    "Jpeg",
    "JpegArray",
    "KeyConflict",
    "KeyNotFound",
    "KeysExist",
    "MissingDependency",
    "NotFound",
    "OverwriteConflict",
    "PickleRefused",
    "Pil",
    "PositionOutOfRange",
    "SampleError",
    "Schema",
    "SchemaConflict",
    "SessionClosed",
    "SessionExpired",
    "StorageError",
    "StreamingDataset",
    "Text",
    "UnsafeStore",
    "UnsupportedFormat",
    "UpdatePreview",
    "UpdateResult",
    "VacuumReport",
    "VerifyReport",
    "Version",
    "VersionExpired",
    "VersionNotFound",
    "WorkerError",
    "__version__",
    "adopt",
    "build_keys_index",
    "dataset_update",
    "export",
    "history",
    "optimize",
    "restore",
    "set_attributes",
    "tag",
    "untag",
    "vacuum",
    "verify",
    "was_committed",
]


def __getattr__(name: str) -> Any:
    try:
        module = _WHERE[name]
    except KeyError:
        raise AttributeError(f"module 'liveset' has no attribute {name!r}") from None
    value = getattr(importlib.import_module(module), name)
    value.__module__ = "liveset"  # tracebacks and docs show the public path; pickles stay valid because the name is found there
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
