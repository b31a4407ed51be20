"""Errors that name the input they belong to."""

from __future__ import annotations

import reprlib
import signal
import traceback
from typing import Any

from liveset.errors import DatasetError, SampleError, SchemaConflict, StorageError, WorkerError

# What code written for the old tool looks for.
FOUND = "We found the following error"
FAILED = "Failed processing item"
INCONSISTENT = "The config isn't consistent between chunks. This shouldn't have happened."

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 160
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = 6


def describe(item: Any) -> str:
    """Return a short ``repr`` that never fails."""
    try:
        text = _short.repr(item)
    except Exception as error:
        text = f"<{type(item).__name__}, whose repr fails: {error!r}>"
    return text if len(text) <= 300 else text[:297] + "..."


def fn_failed(index: int, item: Any, error: BaseException, *, with_traceback: bool) -> WorkerError:
    """Return the error for an exception that ``fn`` raised.

    Args:
        index: which input, by its position.
        item: the input.
        error: what was raised.
        with_traceback: put the traceback into the text, where the error itself cannot go along.
    """
    line = f"{FAILED} {index} ({describe(item)}): {_told(error)}"
    if with_traceback:
        line = f"{line}\n\n{''.join(traceback.format_exception(error)).rstrip()}"
    return WorkerError(f"{FOUND}. Nothing was committed.\n{line}", input_index=index)


def sample_refused(index: int, item: Any, error: Exception, *, fixed: bool) -> Exception:
    """Return an error of storing a sample, with the input named and the same type.

    Args:
        index: which input, by its position.
        item: the input.
        error: what storing the sample raised.
        fixed: whether the schema is that of a dataset that stands already.
    """
    where = f"input {index} ({describe(item)})"
    if fixed and isinstance(error, SampleError | SchemaConflict):
        text = f"{where}: {error} The dataset was not changed. ({INCONSISTENT})"
        return SchemaConflict(text, field=error.field, input_index=index)
    if isinstance(error, DatasetError):
        return _same(error, f"{where}: {error}", index)
    if isinstance(error, OSError):
        return StorageError(f"{where}: {_told(error)}", input_index=index, errno=error.errno)
    return WorkerError(f"{FOUND}. Nothing was committed.\nStoring a sample of {where}: {_told(error)}", input_index=index)


def storing_failed(error: Exception, index: int | None) -> Exception:
    """Return an error of writing chunks after the last sample was added."""
    where = "the last samples" if index is None else f"the samples up to input {index}"
    if isinstance(error, DatasetError):
        return _same(error, f"While writing {where}: {error}", index)
    if isinstance(error, OSError):
        return StorageError(f"While writing {where}: {_told(error)}", input_index=index, errno=error.errno)
    return WorkerError(f"{FOUND}. Nothing was committed.\nWhile writing {where}: {_told(error)}", input_index=index)


def worker_died(exit_code: int | None, index: int | None, item: str | None) -> WorkerError:
    """Return the error for a worker process that is gone.

    Args:
        exit_code: as ``multiprocessing`` gives it.
        index: the input that it was working on, if any.
        item: how that input looks.
    """
    if index is None:
        where = "between two inputs"
    else:
        where = f"while working on input {index}" + (f" ({item})" if item is not None else "")
    return WorkerError(
        f"{FOUND}. Nothing was committed.\n{FAILED}: a worker process {_exit(exit_code)} {where}.",
        input_index=index,
        exit_code=exit_code,
    )


def _exit(code: int | None) -> str:
    if code is None:
        return "is gone"
    if code >= 0:
        return f"ended by itself with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (the system does that when memory runs out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _same(error: DatasetError, text: str, index: int | None) -> DatasetError:
    attributes = {**error.__dict__, "input_index": index}
    attributes.pop("__notes__", None)
    return type(error)(text, **attributes)


def _told(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as again:
        return f"{type(error).__name__}, whose text fails: {again!r}"
