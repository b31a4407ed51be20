"""The error tree is pinned: callers catch by these classes."""

from __future__ import annotations

import copy
import pickle

import pytest

from liveset import errors
from liveset.errors import DatasetError

ALL = [getattr(errors, name) for name in errors.__all__]

TREE = {
    "AccessDenied": ("StorageError", "PermissionError"),
    "BadSample": ("DatasetError", "RuntimeError"),
    "CollateError": ("DatasetError", "TypeError", "RuntimeError"),
    "CommitInterrupted": ("KeyboardInterrupt",),
    "CommitUnknown": ("DatasetError",),
    "Conflict": ("DatasetError",),
    "Corrupt": ("FormatError",),
    "DatasetError": ("Exception",),
    "DatasetExists": ("DatasetError", "RuntimeError"),
    "DatasetNotFound": ("NotFound", "ValueError"),
    "DuplicateKeys": ("DatasetError", "ValueError"),
    "Erased": ("DatasetError", "LookupError"),
    "ForeignEdit": ("DatasetError",),
    "FormatError": ("DatasetError", "ValueError"),
    "KeyConflict": ("Conflict", "ValueError"),
    "KeyNotFound": ("DatasetError", "KeyError"),
    "KeysExist": ("DatasetError", "FileExistsError"),
    "MissingDependency": ("DatasetError", "ModuleNotFoundError"),
    "NotFound": ("DatasetError", "FileNotFoundError"),
    "OverwriteConflict": ("Conflict",),
    "PickleRefused": ("DatasetError", "ValueError"),
    "PositionOutOfRange": ("DatasetError", "IndexError", "ValueError"),
    "SampleError": ("DatasetError", "ValueError"),
    "SchemaConflict": ("Conflict", "ValueError"),
    "SessionClosed": ("DatasetError", "RuntimeError"),
    "SessionExpired": ("DatasetError", "RuntimeError"),
    "StateMismatch": ("DatasetError", "ValueError"),
    "StorageError": ("DatasetError", "OSError"),
    "UnsafeStore": ("DatasetError",),
    "UnsupportedFormat": ("FormatError",),
    "VersionExpired": ("NotFound",),
    "VersionNotFound": ("NotFound",),
    "WorkerError": ("DatasetError", "RuntimeError"),
}


def test_tree() -> None:
    assert {error.__name__: tuple(base.__name__ for base in error.__bases__) for error in ALL} == TREE


def test_every_error_of_the_module_is_exported() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, BaseException)}
    assert defined == set(errors.__all__)


def test_the_drawn_tree_names_every_error() -> None:
    assert errors.__doc__ is not None
    drawn = {line.split("── ")[-1].split()[0] for line in errors.__doc__.splitlines() if "── " in line}
    assert drawn | {"DatasetError"} == set(TREE)


@pytest.mark.parametrize("error", ALL)
def test_has_a_sentence_of_its_own(error: type[DatasetError]) -> None:
    assert error.__dict__["__doc__"].rstrip().endswith(".")


@pytest.mark.parametrize("error", ALL)
def test_pickles_with_message_and_attributes(error: type[DatasetError]) -> None:
    raised = error("chunk-0-0.bin is damaged: offset 7 of 9", file="chunk-0-0.bin", position=7)
    raised.add_note("a note")
    for copied in (pickle.loads(pickle.dumps(raised)), copy.copy(raised), copy.deepcopy(raised)):
        assert type(copied) is error
        assert str(copied) == "chunk-0-0.bin is damaged: offset 7 of 9"
        assert vars(copied)["file"] == "chunk-0-0.bin"
        assert vars(copied)["position"] == 7
        assert copied.__notes__ == ["a note"]


@pytest.mark.parametrize("error", ALL)
def test_message_is_shown_as_it_is(error: type[DatasetError]) -> None:
    assert str(error("no quotes, no [Errno]")) == "no quotes, no [Errno]"
    assert str(error()) == ""
