"""Copy: a dataset with its versions from one place to another, of whatever kind the two are.

The head is written last, so that nobody takes a copy that is not whole for a dataset. Until then a marker says what it is a copy of.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from liveset.edit.commit import new_token
from liveset.edit.keyfiles import KEYS
from liveset.edit.retention import QUARANTINE, Kind, kind_of
from liveset.errors import (
    Conflict,
    Corrupt,
    DatasetExists,
    DatasetNotFound,
    NotFound,
    StorageError,
    UnsafeStore,
    VersionExpired,
)
from liveset.format import codec
from liveset.format.index import Index
from liveset.format.keytable import KeyTable
from liveset.snapshot import Snapshot, archived, entries, redirects_of
from liveset.storage import HEAD, PRIVATE, VERSIONS, Head, Place, Store, Swap, has_listing, is_inside, open_store, version_name
from liveset.storage.clients import connect
from liveset.storage.held import HeldFile, Unusable, usable
from liveset.storage.location import Location
from liveset.storage.remote import RemoteStore
from liveset.storage.requests import PART
from liveset.storage.sink import DiskSink, MemorySink, fetched, matches, resize

__all__ = ["CopyReport", "cp"]

T = TypeVar("T")
R = TypeVar("R")

THREADS = 8
"""Files that are copied at once."""

_MARKER = PRIVATE + "copy."  # with a random part: a vacuum takes what is left of it for the temporary file that it is
_LOOKS = 3
_AGAIN = "Copy again: what was copied stays."
_SENDS = 4


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy did.

    Attributes:
        source: where the dataset is.
        target: where the copy is.
        version: the newest one of the copy.
        versions: numbers of all versions of the copy that can be read, oldest first.
        files: how many files were sent.
        bytes: their bytes.
        skipped: how many files were there already, of a copy that had been broken off.
        left: names of files of the source that were not copied, since they belong to no version: what ``repair`` has put aside, and what
            liveset does not know.
        seconds: how long it took.
    """

    source: str
    target: str
    version: int
    versions: tuple[int, ...]
    files: int
    bytes: int
    skipped: int
    left: tuple[str, ...]
    seconds: float


def cp(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    versions: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> CopyReport:
    """Copy a dataset with all versions that are kept, tags and keys to another place: a folder, a bucket, a bucket elsewhere.

    The copy is of the version that is the newest one when it begins, whatever is committed meanwhile. It continues the same history. Every
    file that has a checksum is compared with it on its way; between two folders of one bucket the store copies by itself, unseen. The head
    comes last: until then there is no dataset in ``dst``. A copy that was broken off goes on where it stopped when it is called again. The
    place needs no conditional writes, but whoever edits the copy there does. Leases of readers and files of unfinished runs stay behind.

    Args:
        src: path or ``Place`` of the dataset.
        dst: where to: a place that is new or empty, or holds what an earlier call has left.
        versions: also copy the earlier versions; without, the history tells of them, and they cannot be opened.
        progress: called with the number of files done and their total.

    Returns:
        What was copied.

    Raises:
        DatasetNotFound: there is no dataset in ``src``.
        DatasetExists: ``dst`` holds a dataset or other files already.
        Corrupt: a file is damaged in ``src``; ``repair`` it.
        NotFound: a file of a version is missing in ``src``; ``VersionExpired`` where a vacuum or a purge has removed it meanwhile.
        ValueError: ``dst`` is the dataset itself, or in it.

    Example:
        >>> liveset.cp(path, tmp / "copy").versions
        (1, 2)
        >>> liveset.StreamingDataset(tmp / "copy", version=1)["play-7"]
        {'id': 'play-7', 'square': 49}
    """
    # What is read once is not worth a place in the cache.
    source, target = (open_store(Place.of(path, cache_dir=False)) for path in (src, dst))
    if _is_inside(target, source):
        raise ValueError(f"{target.url} is the dataset itself, or in it: copy to a place elsewhere.")
    return _Copy(source, target, progress).run(versions)


class _File(NamedTuple):
    """A file of the copy, and a version that needs it; a size below zero is not known."""

    name: str
    size: int
    check: str
    version: int


class _Copy:
    """One call."""

    def __init__(self, source: Store, target: Store, progress: Callable[[int, int], None] | None) -> None:
        self._source, self._target, self._progress = source, target, progress
        self._head, self._index = self._read_head()
        self._listed = _sizes(source)
        self._present: dict[str, int] = {}
        self._markers: list[str] = []
        self._files = self._bytes = self._skipped = 0

    def run(self, versions: bool) -> CopyReport:
        began = time.perf_counter()
        with suppress(UnsafeStore):
            self._target.probe()  # whether we may write at all should not be found out at the end
        finished = self._enter()
        with ThreadPoolExecutor(THREADS, thread_name_prefix="liveset cp") as pool:
            try:
                published = set() if finished else self._copy_published(pool)
                numbers, files = self._plan(pool, versions)
                for done, (size, sent) in enumerate(_each(pool, self._send, files), 1):
                    self._count(size, sent)
                    if self._progress is not None:
                        self._progress(done, len(files))
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        names = {file.name for file in files}
        if not finished:
            self._check_foreign()
            self._remove_others(names | published)
            self._write_head()
        self._count(len(self._head.data), not finished)
        with suppress(StorageError):  # there are stores that cannot delete; a marker beside a head means nothing
            self._target.delete(self._markers)
        return CopyReport(
            source=self._source.url,
            target=self._target.url,
            version=self._index.version,
            versions=tuple(sorted({*numbers, self._index.version})),
            files=self._files,
            bytes=self._bytes,
            skipped=self._skipped,
            left=tuple(sorted(name for name in self._listed or () if _is_left(name) and name not in names)),
            seconds=time.perf_counter() - began,
        )

    def _count(self, size: int, sent: bool) -> None:
        self._files, self._bytes, self._skipped = self._files + sent, self._bytes + size * sent, self._skipped + (not sent)

    # What is there

    def _read_head(self) -> tuple[Head, Index]:
        head = self._source.read_head()
        if head is None:
            missing = "doesn't contain any index.json file" if self._source.exists() else "does not exist"
            raise DatasetNotFound(f"{self._source.url} {missing}.", path=self._source.url)
        path = f"{self._source.url}/{HEAD}"
        index = Index.parse(head.data, path)
        if not index.digest_matches():
            raise Corrupt(f"{path} was changed by another program since version {index.version} was committed.", file=path)
        return head, index

    def _enter(self) -> bool:
        """Find out what the target holds, and mark it as an unfinished copy; True for one that has its head already."""
        self._present = {entry.name: entry.size for entry in self._target.list("")}
        self._markers = [name for name in self._present if name.startswith(_MARKER)]
        there = self._target.read_head() if HEAD in self._present else None
        if there is not None and there.data == self._head.data:
            return True
        if there is not None:
            # Without locks, a folder gets its head by a plain write, which may have been broken off.
            if not (self._markers and self._head.data.startswith(there.data)):
                raise DatasetExists(f"{self._target.url} holds a dataset already: copy to a new place.", path=self._target.url)
            self._delete([HEAD])
        elif not self._markers and any(kind_of(name) is not Kind.TEMPORARY for name in self._present):
            raise DatasetExists(f"{self._target.url} holds files already: copy to a place that is new or empty.", path=self._target.url)
        begun = {_begun(self._target, name) for name in self._markers}
        if not self._has_been(begun - {""}):
            raise DatasetExists(
                f"{self._target.url} holds the beginning of a copy of another dataset: copy to a new place, or remove it.",
                path=self._target.url,
            )
        if begun != {_identity(self._index)}:
            marker = f"{_MARKER}{new_token()}.tmp"
            self._target.write(marker, msgspec.json.encode({"of": _identity(self._index), "version": self._index.version}))
            self._delete(self._markers)
            self._markers = [marker]
        return False

    def _has_been(self, begun: set[str]) -> bool:
        """Whether all these are heads of this dataset, the newest or earlier ones."""
        known = {_identity(self._index)}
        if self._index.edit is not None and not known >= begun:
            with suppress(VersionExpired):
                known.update(entry.id for entry in entries(self._source, self._index))
        return known >= begun

    # What is to be copied

    def _copy_published(self, pool: ThreadPoolExecutor) -> set[str]:
        """Copy the keys as other tools read them: they are replaced under their names, so they must be those of the head."""
        for look in range(_LOOKS):
            if look:
                self._head, self._index = self._read_head()
                self._listed = _sizes(self._source)
                self._enter()
            files = self._published()
            with suppress(NotFound):  # withdrawn by the next commit
                for result in _each(pool, self._send, files):
                    self._count(*result)
                if (again := self._source.read_head()) is not None and again.tag == self._head.tag:
                    return {file.name for file in files}
        return set()  # others commit all the time; the next compaction publishes them

    def _published(self) -> list[_File]:
        if self._listed is not None:
            names = [name for name in self._listed if kind_of(name) is Kind.FIXED and name.endswith(".parquet")]
        else:
            layout = self._index.layout_of_keys
            names = [f"keys/shard-{number:05d}.parquet" for number in range(int(layout.get("num_shards", 1)) if layout else 0)]
            names = [name for name in names if _is_there(self._source, name)]
        return [_File(name, -1, "", self._index.version) for name in names]

    def _plan(self, pool: ThreadPoolExecutor, versions: bool) -> tuple[list[int], list[_File]]:
        """Return the earlier versions to copy, and all files but the head and what is published.

        Archived versions come last: they can be opened by number where there is no head, and must not be before their files are there.
        """
        files: dict[str, _File] = {}
        self._add(self._index, files)
        archives: dict[int, _File] = {}
        redirects = redirects_of(self._index)
        for index in _each(pool, lambda number: archived(self._source, number), self._candidates() if versions else []):
            if index is None or (index.version == self._index.version and index.source != self._index.source):
                continue
            self._add(index.redirected(redirects), files)
            data = index.source
            archives[index.version] = _File(version_name(index.version), len(data), codec.checksum([data]), index.version)
        numbers = sorted(archives)
        return numbers, [*files.values(), *(archives[number] for number in numbers)]

    def _candidates(self) -> list[int]:
        """Numbers of the versions that may be archived and have not expired; a purge archives its own at once."""
        edit, last = self._index.edit, self._index.version
        if edit is None:
            return []
        if self._listed is None:
            first, kept = (edit.fence.expired_before, edit.fence.kept) if edit.fence is not None else (0, ())
            return [*kept, *range(first, last + 1)]
        names = (name.removeprefix(VERSIONS).removesuffix(".json") for name in self._listed if kind_of(name) is Kind.VERSION)
        return sorted(n for n in map(int, names) if n <= last and (edit.fence is None or edit.fence.keeps(n)))

    def _add(self, index: Index, files: dict[str, _File]) -> None:
        """Add the files of a version."""
        for record in index.chunks:
            known = files.get(record.filename)
            if known is None or (not known.check and record.check):
                size = -1 if index.compressed_files else record.size
                found = self._found(_File(record.filename, size, record.check or "", index.version))
                if found is None and index.compressed_files:
                    # The old tool inflates such chunks where they lie.
                    inflated = record.filename.replace(f".{(index.config or {})['compression']}", "")
                    found = self._found(_File(inflated, record.size, "", index.version))
                if found is None:
                    raise self._gone(record.filename, index.version)
                files[found.name] = found
        tables = index.edit.key_files if index.edit is not None else None
        for name in tables.tables if tables is not None else ():
            if name not in files:
                assert tables is not None
                found = self._found(_File(name, tables.sizes.get(name, -1), "", index.version))
                if found is None:
                    raise self._gone(name, index.version)
                files[name] = found

    def _found(self, file: _File) -> _File | None:
        """Return a file of the source with its size; None where it is not there, as far as that can be known without a request."""
        if self._listed is None:
            return file if file.size >= 0 or _is_there(self._source, file.name) else None
        there = self._listed.get(file.name)
        if there is not None and there < file.size:
            path = f"{self._source.url}/{file.name}"
            raise Corrupt(f"{path} is truncated: it has {there} of {file.size} bytes. `liveset repair` puts it right.", file=path)
        return file._replace(size=there) if there is not None else None

    def _gone(self, name: str, version: int) -> NotFound:
        """The error for a file that is missing in the source, with the reason."""
        index = self._index if version == self._index.version else archived(self._source, version)
        if index is None:
            return VersionExpired(f"a vacuum has removed version {version} of {self._source.url} meanwhile. {_AGAIN}", version=version)
        error = Snapshot(self._source, index, redirects_of(self._index)).gone(name)
        return type(error)(f"{error} {_AGAIN}", **vars(error)) if isinstance(error, VersionExpired) else error

    # Sending

    def _send(self, file: _File) -> tuple[int, bool]:
        """Copy a file unless it is there; return its size, and whether it was sent."""
        there = self._present.get(file.name)
        if there is not None:
            if there == file.size and self._is_right(file):
                return there, False
            self._target.delete([file.name])
        try:
            return self._sent(file), True
        except NotFound as error:
            if file.size < 0:
                raise
            raise self._gone(file.name, file.version) from error

    def _sent(self, file: _File) -> int:
        source, target = self._source, self._target
        if isinstance(source, RemoteStore) and isinstance(target, RemoteStore) and _is_one(source.location, target.location):
            connect(source.location).copy(source.location.key(file.name), target.location.key(file.name))
            return max(file.size, (self._listed or {}).get(file.name, 0))
        with _content(source, file) as view:
            target.write(file.name, view)
            return len(view)

    def _is_right(self, file: _File) -> bool:
        """Whether a file of the right size has the right bytes; an object store takes it whole or not at all, so there the size tells."""
        if self._target.remote:
            return True
        try:
            _check(self._target.map(file.name, file.size), file, self._target.url)
        except Corrupt:
            return False
        return True

    def _delete(self, names: Iterable[str]) -> None:
        names = list(names)
        self._target.delete(names)
        for name in names:
            self._present.pop(name, None)

    def _check_foreign(self) -> None:
        """Other programs use the names of chunks again, so what was copied is one version only if none of them was at work."""
        if self._index.edit is None and ((now := self._source.read_head()) is None or now.tag != self._head.tag):
            raise Conflict(f"another program changed {self._source.url} while it was copied. Remove {self._target.url}, and copy again.")

    def _remove_others(self, wanted: set[str]) -> None:
        """Remove what an earlier call has copied and the dataset has given up since: it may be what a purge erased."""
        kinds = (Kind.CHUNK, Kind.KEYS, Kind.VERSION)
        others = self._present.keys() - wanted
        self._delete([name for name in others if kind_of(name) in kinds or name.endswith(".parquet")])

    def _write_head(self) -> None:
        data = self._head.data
        for _ in range(_SENDS):
            try:
                if self._target.swap_head(data, None) is Swap.SWAPPED:
                    return
            except UnsafeStore:
                if self._target.read_head() is None:
                    self._target.write(HEAD, data)
                    return
            there = self._target.read_head()
            if there is not None and there.data == data:
                return
            if there is not None:
                raise DatasetExists(f"somebody wrote another dataset to {self._target.url} meanwhile.", path=self._target.url)
        path = f"{self._target.url}/{HEAD}"
        raise StorageError(f"cannot write {path}: the store does not say whether it did. {_AGAIN}", file=path)


def _identity(index: Index) -> str:
    """What names one head of one dataset."""
    return index.id if index.edit is not None and index.id else codec.checksum([index.source])


def _begun(target: Store, marker: str) -> str:
    """What a marker says: of which head the copy is."""
    try:
        return str(msgspec.json.decode(target.read(marker))["of"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return ""  # its write was broken off


def _sizes(store: Store) -> dict[str, int] | None:
    """Return the files of a store; None where it does not list them."""
    return {entry.name: entry.size for entry in store.list("")} if has_listing(store) else None


def _is_there(store: Store, name: str) -> bool:
    try:
        store.read(name, 0, 1)
    except NotFound:
        return False
    return True


def _is_inside(target: Store, source: Store) -> bool:
    if isinstance(source, RemoteStore) and isinstance(target, RemoteStore) and _service(source) != _service(target):
        return False  # buckets of the same name
    return is_inside(target.url, source.url)


def _service(store: RemoteStore) -> tuple[object, ...]:
    location = store.location
    return location.kind, location.bucket, location.config.get("endpoint"), location.config.get("account_name")


def _is_one(a: Location, b: Location) -> bool:
    """Whether a store can copy from one place to the other by itself."""
    names = ("kind", "bucket", "config", "client", "profile", "credentials")
    return all(getattr(a, name) == getattr(b, name) for name in names)


def _is_left(name: str) -> bool:
    return kind_of(name) is None or name.startswith(QUARANTINE)


def _check(view: memoryview, file: _File, url: str) -> None:
    """Raise ``Corrupt`` for a file that differs from its checksum."""
    path = f"{url}/{file.name}"
    if not matches(view, file.check):
        raise Corrupt(f"{path} is damaged: its checksum differs from the index. `liveset repair` puts it right.", file=path)
    if file.name.startswith(KEYS):
        KeyTable(view, path).check()


@contextmanager
def _content(source: Store, file: _File) -> Iterator[memoryview]:
    """The bytes of a file, compared with what is known of them; those of a large one are in a temporary file."""
    size = max(file.size, 0)
    path = f"{source.url}/{file.name}"
    download = getattr(source, "download", None)
    with ExitStack() as opened:
        if download is None:
            view = source.map(file.name, size)
        else:

            def new() -> DiskSink | MemorySink:
                return MemorySink(size) if 0 < size <= PART else DiskSink(opened.enter_context(_temporary()), size, resize)

            try:
                view = fetched(new, path, size, file.check, partial(download, file.name, size=size))
            except Unusable as error:
                folder = tempfile.gettempdir()
                raise StorageError(f"{path} does not fit into {folder} ({error}); TMPDIR names another folder.", file=path) from error
        _check(view, file, source.url)
        yield view


def _temporary() -> HeldFile:
    """A file that has no name, and goes when it is closed."""
    path = os.path.join(tempfile.gettempdir(), f"liveset-{new_token()}.tmp")
    with usable():
        file = HeldFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.unlink(path)
    return file


def _each(pool: ThreadPoolExecutor, fn: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield what ``fn`` returns for each item, in order, while the next few are under way."""
    waiting: deque[Future[R]] = deque()
    for item in items:
        waiting.append(pool.submit(fn, item))
        if len(waiting) >= 2 * THREADS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
