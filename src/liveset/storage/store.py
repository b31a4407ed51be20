"""The store: what the protocol asks of the place where a dataset lives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, NewType, Protocol, TypeAlias, cast

from liveset.errors import ForeignEdit

if TYPE_CHECKING:
    from typing_extensions import Buffer
else:
    Buffer = bytes | bytearray | memoryview

__all__ = [
    "HEAD",
    "PRIVATE",
    "VERSIONS",
    "Ask",
    "Buffer",
    "Entry",
    "Head",
    "Sink",
    "Store",
    "Swap",
    "Tag",
    "as_buffers",
    "check_name",
    "checksum_in",
    "foreign_bytes",
    "version_name",
]

HEAD = "index.json"
"""The only file with a fixed name that anything depends on; published files, which are derived from it, are replaced too."""
PRIVATE = "_liveset/"
"""Where everything lies that only liveset knows."""
VERSIONS = PRIVATE + "versions/"
"""Where the heads of earlier versions lie."""

Tag = NewType("Tag", str)
"""Names one content of the head; opaque, only good for `swap_head`."""


def version_name(version: int) -> str:
    """Name of the file that keeps the head of an earlier version."""
    return f"{VERSIONS}{version:08d}.json"


def check_name(name: str) -> str:
    """The name, if it stays inside the dataset; ``ValueError`` otherwise."""
    if "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"{name!r} is not a plain relative path inside the dataset")
    return name


def as_buffers(data: Buffer | Sequence[Buffer]) -> Sequence[Buffer]:
    """What a store is given to write, as a list or tuple of buffers; bytes are a sequence too, so the type is what tells them apart."""
    return cast("Sequence[Buffer]", data if isinstance(data, (list, tuple)) else [data])


class Swap(Enum):
    """What is known about the outcome of a swap."""

    SWAPPED = "swapped"
    LOST = "lost"
    """Another head stands there; this request has not changed anything and never will."""
    UNKNOWN = "unknown"
    """Nobody can tell: the request may have arrived, or may still arrive. Read the head."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head as one request saw it."""

    data: bytes
    tag: Tag


@dataclass(frozen=True, slots=True)
class Entry:
    """One file in a listing."""

    name: str
    size: int
    modified: datetime


def foreign_bytes(path: str) -> ForeignEdit:
    """The error for an archived version whose file holds other bytes."""
    return ForeignEdit(
        f"{path} holds other bytes than the version it is named after: another program replaced index.json, or an old one was copied back "
        "by hand.",
        file=path,
    )


def checksum_in(content: str) -> str:
    """The checksum that tells a file from others of its name (``Store.map``); empty where something else does."""
    return content if content.startswith("xxh3:") else ""


class Sink(Protocol):
    """Where a download puts its bytes."""

    def write(self, data: Buffer, offset: int) -> None:
        """Puts bytes at a place of the file; from any thread, and in any order."""


Ask: TypeAlias = "Callable[[Head | None], Head | None]"
"""Asks a store for the head as it is now, given the one that is known: the same object where that is still the head."""


class Store(Protocol):
    """The place where one dataset lives.

    Names are relative, with forward slashes. All files but the head have unique names, are written once and never changed. A missing file
    is ``NotFound``, other failures are ``StorageError``; both name the file.
    """

    @property
    def url(self) -> str:
        """Where this is, for messages and for opening the same store in another process."""

    @property
    def remote(self) -> bool:
        """Whether a whole file costs a transfer, so that parts of it are worth asking for."""

    def probe(self) -> None:
        """Finds out before long work whether commits are possible here, as far as that can be told; ``UnsafeStore`` where they are not."""

    def exists(self) -> bool:
        """Whether the place itself is there (a directory; always true where there are none); ``DatasetNotFound`` where a file is."""

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """The bytes of a file from ``start``; fewer than ``length`` where the file ends earlier."""

    def write(self, name: str, data: Buffer | Sequence[Buffer]) -> None:
        """Writes a file under a name that nothing else ever uses; its bytes are durable on return, its name after the next swap."""

    def copy(self, source: str, name: str) -> None:
        """Gives the bytes of a file that never changes another unique name too; as durable as ``write``. May share the bytes."""

    def write_once(self, name: str, data: bytes) -> None:
        """Creates a file whole; equal bytes under the name are fine, others are ``ForeignEdit``."""

    def read_head(self) -> Head | None:
        """The head and its tag, seen at one moment; None where no dataset is."""

    def swap_head(self, data: bytes, expected: Tag | None, withdraw: Sequence[str] = ()) -> Swap:
        """Replaces the head if it is the expected one (None: if there is none).

        The new bytes must differ from every head before. Raises only when it is certain that nothing was and will be changed.
        ``withdraw`` names published files that would be wrong beside the new head: they are gone before it is seen.
        """

    def publish(self, name: str, data: Buffer | Sequence[Buffer], head: Tag) -> bool:
        """Puts a derived file under a fixed name, whole, if the head is still the given one; False otherwise."""

    def list(self, prefix: str) -> Iterator[Entry]:
        """All files whose names begin with ``prefix``, in any order."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Keeps other writers from swapping the head meanwhile, where the store can; fairness only, nothing depends on it."""

    def delete(self, names: Iterable[str]) -> None:
        """Removes files; those that are not there are fine."""

    def now(self) -> datetime:
        """The time on the clock that dates the files."""

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """Parts of a file, each given by its start and length, at once; ``Corrupt`` where the file ends earlier."""

    def map(self, name: str, size: int, content: str = "", *, fresh: bool = False) -> memoryview:
        """Read-only view of a whole file; ``Corrupt`` when it is shorter than ``size`` bytes.

        ``content`` tells files apart that had this name at different times: the checksum of the bytes where it is known. With ``fresh``, a
        copy that is kept on this machine is not trusted: it is fetched again unless it has its checksum.
        """

    def cached(self, name: str, size: int, content: str = "") -> memoryview | None:
        """The same if it costs no transfer; None otherwise."""
