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
    from liveset.edit.compact import CompactReport, compact
    from liveset.edit.purge import PurgeReport, purge
    from liveset.edit.report import UpdatePreview, UpdateResult
    from liveset.edit.session import DatasetUpdate, dataset_update
    from liveset.edit.vacuum import VacuumReport, vacuum
    from liveset.errors import (
        AccessDenied,
        BadSample,
        CollateError,
        CommitInterrupted,
        CommitUnknown,
        Conflict,
        Corrupt,
        DatasetError,
        DatasetExists,
        DatasetNotFound,
        DuplicateKeys,
        Erased,
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
        StateMismatch,
        StorageError,
        UnsafeStore,
        UnsupportedFormat,
        VersionExpired,
        VersionNotFound,
        WorkerError,
    )
    from liveset.format.media import File, Image, Jpeg, JpegArray, Pil, Text
    from liveset.format.schema import Schema
    from liveset.read.bucketing import BucketBatchSampler
    from liveset.read.combined import CombinedStreamingDataset
    from liveset.read.dataset import StreamingDataset
    from liveset.read.info import DatasetInfo
    from liveset.read.joined import JoinedStreamingDataset
    from liveset.read.parallel import ParallelStreamingDataset
    from liveset.read.split import train_test_split
    from liveset.read.torchloader import StreamingDataLoader
    from liveset.storage.location import Place
    from liveset.tools.attributes import set_attributes
    from liveset.tools.copy import CopyReport, cp
    from liveset.tools.diff import Diff, diff
    from liveset.tools.export import export
    from liveset.tools.history import Version, history, restore, tag, untag, was_committed
    from liveset.tools.keys import build_keys_index
    from liveset.tools.repair import RepairReport, repair
    from liveset.tools.verify import VerifyReport, verify
    from liveset.write.optimize import optimize
    from liveset.write.transform import TransformResult, transform

_WHERE = {
    "BucketBatchSampler": "liveset.read.bucketing",
    "CombinedStreamingDataset": "liveset.read.combined",
    "CompactReport": "liveset.edit.compact",
    "CopyReport": "liveset.tools.copy",
    "DatasetInfo": "liveset.read.info",
    "DatasetUpdate": "liveset.edit.session",
    "Diff": "liveset.tools.diff",
    "File": "liveset.format.media",
    "Image": "liveset.format.media",
    "JoinedStreamingDataset": "liveset.read.joined",
    "Jpeg": "liveset.format.media",
    "JpegArray": "liveset.format.media",
    "ParallelStreamingDataset": "liveset.read.parallel",
    "Pil": "liveset.format.media",
    "Place": "liveset.storage.location",
    "PurgeReport": "liveset.edit.purge",
    "RepairReport": "liveset.tools.repair",
    "Schema": "liveset.format.schema",
    "StreamingDataLoader": "liveset.read.loader",
    "StreamingDataset": "liveset.read.dataset",
    "Text": "liveset.format.media",
    "TransformResult": "liveset.write.transform",
    "UpdatePreview": "liveset.edit.report",
    "UpdateResult": "liveset.edit.report",
    "VacuumReport": "liveset.edit.vacuum",
    "VerifyReport": "liveset.tools.verify",
    "Version": "liveset.tools.history",
    "adopt": "liveset.edit.adopt",
    "build_keys_index": "liveset.tools.keys",
    "compact": "liveset.edit.compact",
    "cp": "liveset.tools.copy",
    "dataset_update": "liveset.edit.session",
    "diff": "liveset.tools.diff",
    "export": "liveset.tools.export",
    "history": "liveset.tools.history",
    "optimize": "liveset.write.optimize",
    "purge": "liveset.edit.purge",
    "repair": "liveset.tools.repair",
    "restore": "liveset.tools.history",
    "set_attributes": "liveset.tools.attributes",
    "tag": "liveset.tools.history",
    "train_test_split": "liveset.read.split",
    "transform": "liveset.write.transform",
    "untag": "liveset.tools.history",
    "vacuum": "liveset.edit.vacuum",
    "verify": "liveset.tools.verify",
    "was_committed": "liveset.tools.history",
}
_WHERE.update(dict.fromkeys(_errors.__all__, "liveset.errors"))

__all__ = [
    "AccessDenied",
    "BadSample",
    "BucketBatchSampler",
    "CollateError",
    "CombinedStreamingDataset",
    "CommitInterrupted",
    "CommitUnknown",
    "CompactReport",
    "Conflict",
    "CopyReport",
    "Corrupt",
    "DatasetError",
    "DatasetExists",
    "DatasetInfo",
    "DatasetNotFound",
    "DatasetUpdate",
    "Diff",
    "DuplicateKeys",
    "Erased",
    "File",
    "ForeignEdit",
    "FormatError",
    "Image",
    "JoinedStreamingDataset",
    "Jpeg",
    "JpegArray",
    "KeyConflict",
    "KeyNotFound",
    "KeysExist",
    "MissingDependency",
    "NotFound",
    "OverwriteConflict",
    "ParallelStreamingDataset",
    "PickleRefused",
    "Pil",
    "Place",
    "PositionOutOfRange",
    "PurgeReport",
    "RepairReport",
    "SampleError",
    "Schema",
    "SchemaConflict",
    "SessionClosed",
    "SessionExpired",
    "StateMismatch",
    "StorageError",
    "StreamingDataLoader",
    "StreamingDataset",
    "Text",
    "TransformResult",
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
    "compact",
    "cp",
    "dataset_update",
    "diff",
    "export",
    "history",
    "optimize",
    "purge",
    "repair",
    "restore",
    "set_attributes",
    "tag",
    "train_test_split",
    "transform",
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
