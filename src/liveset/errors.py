"""Every error that liveset raises on purpose.

The tree, grouped by what a caller would do about it::

    DatasetError
    ├── NotFound (FileNotFoundError)
    │   ├── DatasetNotFound (ValueError)   no dataset at this path: check the path, or write one with optimize()
    │   ├── VersionNotFound                the dataset never had this version
    │   └── VersionExpired                 the version's files are gone: open a newer one
    ├── PositionOutOfRange (IndexError, ValueError)   no sample at this position
    ├── Erased (LookupError)               a purge erased this sample: leave it out, or read a newer version
    ├── BadSample (RuntimeError)           a loader could not read or transform a sample: mend it, or pass on_error="skip"
    ├── StateMismatch (ValueError)         the state of a loader is of other data: it says what changed, and how to start afresh
    ├── SampleError (ValueError)           a sample cannot be stored as it is: change what fn returns
    ├── DuplicateKeys (ValueError)     a key occurs more than once; `keys` names some of them
    ├── KeysExist (FileExistsError)    build_keys_index() found keys: pass overwrite=True
    ├── KeyNotFound (KeyError)         no sample has this key, or the dataset has no keys
    ├── SessionExpired (RuntimeError)      a vacuum removed what was prepared: start again
    ├── SessionClosed (RuntimeError)   this update was committed or left: open another one
    ├── CollateError (TypeError, RuntimeError)   samples do not fit into one batch: `field`
    ├── PickleRefused (ValueError)         a field needs allow_pickle=True to be written or read
    ├── DatasetExists (RuntimeError)       optimize() without a mode found a dataset: choose mode="append" or "overwrite"
    ├── WorkerError (RuntimeError)         fn raised or a worker process died; nothing was committed
    ├── Conflict                           somebody else's commit stands in the way; nothing was committed
    │   ├── KeyConflict (ValueError)       its keys are taken, or changed by another commit: `keys`
    │   ├── OverwriteConflict              the dataset was replaced, or appeared, meanwhile
    │   └── SchemaConflict                 samples do not fit the schema of the dataset
    ├── CommitUnknown                      nobody knows yet whether the commit landed; its files are kept
    ├── UnsafeStore                        no file locks here: commits cannot be made safe
    ├── ForeignEdit                        another program replaced index.json
    ├── FormatError (ValueError)
    │   ├── UnsupportedFormat              written by a newer liveset, or with a feature that is not supported
    │   └── Corrupt                        a file is damaged; `file` names it
    ├── MissingDependency (ModuleNotFoundError)   an optional package is needed; the message names it
    └── StorageError (OSError)             the disk or the network failed
        └── AccessDenied (PermissionError)     an object store refuses the credentials, or found none

    KeyboardInterrupt
    └── CommitInterrupted                  Ctrl-C came in a commit, or right after it: `version` tells whether it landed

Each error is also the builtin that a caller would catch. Keyword arguments become attributes, and errors survive pickling, so that they can
cross process boundaries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "AccessDenied",
    "BadSample",
    "CollateError",
    "CommitInterrupted",
    "CommitUnknown",
    "Conflict",
    "Corrupt",
    "DatasetError",
    "DatasetExists",
    "DatasetNotFound",
    "DuplicateKeys",
    "Erased",
    "ForeignEdit",
    "FormatError",
    "KeyConflict",
    "KeyNotFound",
    "KeysExist",
    "MissingDependency",
    "NotFound",
    "OverwriteConflict",
    "PickleRefused",
    "PositionOutOfRange",
    "SampleError",
    "SchemaConflict",
    "SessionClosed",
    "SessionExpired",
    "StateMismatch",
    "StorageError",
    "UnsafeStore",
    "UnsupportedFormat",
    "VersionExpired",
    "VersionNotFound",
    "WorkerError",
]


def name_some(keys: Sequence[Any], most: int = 10) -> str:
    """Return a phrase that names keys, the first few of many: ``the key 'a' occurs``."""
    listed = ", ".join(map(repr, keys[:most]))
    rest = f" and {len(keys) - most:,} more" if len(keys) > most else ""
    return f"the key {listed} occurs" if len(keys) == 1 else f"the keys {listed}{rest} occur"


class DatasetError(Exception):
    """Base of every error that liveset raises on purpose."""

    def __init__(self, message: str = "", **attributes: Any) -> None:
        super().__init__(message)
        self.__dict__.update(attributes)

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class NotFound(DatasetError, FileNotFoundError):
    """A file or a version that was asked for is not there."""


class DatasetNotFound(NotFound, ValueError):
    """The path holds no dataset (no ``index.json``)."""


class VersionNotFound(NotFound):
    """The dataset never had the version that was asked for."""


class VersionExpired(NotFound):
    """The version existed, but files that it needs have been removed."""


class PositionOutOfRange(DatasetError, IndexError, ValueError):
    """No sample stands at the position that was asked for."""


class Erased(DatasetError, LookupError):
    """A purge erased the sample from this version, and its bytes are gone for good.

    Attributes:
        version: that was read.
        position: of the sample in it.
        positions: of all samples that were erased from it.
    """

    version: int = 0
    position: int = 0
    positions: tuple[int, ...] = ()


class BadSample(DatasetError, RuntimeError):
    """A loader could not read a sample, or a transform failed on it.

    Attributes:
        position: of the sample in the version that is read.
        key: of the sample, or None where the dataset has no keys.
        chunk: name of the file that holds it.
        slot: its number in that file.
    """

    position: int = 0
    key: str | int | None = None
    chunk: str = ""
    slot: int = 0


class StateMismatch(DatasetError, ValueError):
    """The state of a loader does not fit what it was loaded into; nothing was changed."""


class SampleError(DatasetError, ValueError):
    """A sample cannot be stored so that it reads back equal; ``field`` names the place."""

    field: str = ""


class PickleRefused(DatasetError, ValueError):
    """A field holds objects that only pickle can carry, and pickle was not allowed; ``field`` names it."""

    field: str = ""


class CollateError(DatasetError, TypeError, RuntimeError):
    """Samples do not fit into one batch; ``field`` names the place."""

    field: str = ""


class DuplicateKeys(DatasetError, ValueError):
    """A key occurs more than once; ``keys`` names some of them."""

    keys: tuple[Any, ...] = ()

    @classmethod
    def naming(cls, keys: Iterable[Any]) -> DuplicateKeys:
        """Return the error for these keys."""
        found = tuple(dict.fromkeys(keys))
        text = f"Duplicate keys are not allowed in the keys sidecar: {name_some(found)} more than once. Nothing was changed."
        return cls(text, keys=found)


class KeysExist(DatasetError, FileExistsError):
    """The dataset has keys, and nothing said that they should be replaced."""


class KeyNotFound(DatasetError, KeyError):
    """No sample has the key, or the dataset has no keys at all."""


class SessionClosed(DatasetError, RuntimeError):
    """The update was committed or left; another one must be opened."""


class SessionExpired(DatasetError, RuntimeError):
    """A vacuum ran while the change was prepared, and may have removed its files or the version it was made for; start again."""


class DatasetExists(DatasetError, RuntimeError):
    """A dataset stands where a new one should be written, and no mode was given."""


class WorkerError(DatasetError, RuntimeError):
    """The user's function raised, or a worker process died; nothing was committed."""


class Conflict(DatasetError):
    """Another commit made this one impossible; nothing was changed."""


class KeyConflict(Conflict, ValueError):
    """Another commit changed or added the same keys; ``keys`` names them."""

    keys: tuple[Any, ...] = ()


class OverwriteConflict(Conflict):
    """The dataset was replaced, or came into being, while this change was prepared."""


class SchemaConflict(Conflict, ValueError):
    """Samples do not fit the schema of the dataset; ``field`` names the place where known."""

    field: str = ""


class CommitUnknown(DatasetError):
    """The store did not say whether the commit landed; ``session`` identifies it, and its files are kept."""

    session: str = ""


class CommitInterrupted(KeyboardInterrupt):
    """Ctrl-C came while a commit was on its way, so that it may have landed or land yet, or when it had landed and the rest was not done.

    It ends programs as any Ctrl-C does: neither ``except Exception`` nor ``except DatasetError`` catches it.

    Attributes:
        version: that was committed; None where nobody knows yet whether it was.
        session: identifies the commit: ``was_committed(path, error.session)`` tells what became of it.
    """

    version: int | None = None
    session: str = ""

    def __init__(self, message: str = "", **attributes: Any) -> None:
        super().__init__(message)
        self.__dict__.update(attributes)


class UnsafeStore(DatasetError):
    """The storage offers no lock or compare-and-swap, so a commit could lose another one."""


class ForeignEdit(DatasetError):
    """Another program replaced ``index.json`` or a version file; ``file`` names it."""

    file: str = ""


class FormatError(DatasetError, ValueError):
    """The bytes on disk are not what the format asks for."""


class UnsupportedFormat(FormatError):
    """The dataset needs a feature that this version of liveset does not have."""


class Corrupt(FormatError):
    """A file of the dataset is damaged; ``file`` names it."""

    file: str = ""


class MissingDependency(DatasetError, ModuleNotFoundError):
    """An optional package is not installed; the message says which one and how to get it."""


class StorageError(DatasetError, OSError):
    """The disk or the network failed; the message names the file."""


class AccessDenied(StorageError, PermissionError):
    """An object store refuses the credentials, or there are none; nothing was changed."""
