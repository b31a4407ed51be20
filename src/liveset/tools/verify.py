"""Verify: is every byte that a version needs there, and as it was written?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from liveset.errors import Corrupt, DatasetError, DatasetNotFound, MissingDependency, PickleRefused, UnsupportedFormat
from liveset.format import codec
from liveset.format.fields import field_value
from liveset.format.index import ChunkRecord, Index
from liveset.format.keytable import Key, KeyTable, normalize_key
from liveset.format.schema import Decoder, Schema
from liveset.keystore import open_keys
from liveset.read.chunks import OpenChunks
from liveset.snapshot import Snapshot, Version, archived, open_snapshot
from liveset.storage import HEAD, VERSIONS, Head, Place, Store, has_listing, open_store, version_name
from liveset.tools.search import Found, Wanted, search

__all__ = ["Damage", "Found", "VerifyReport", "verify"]

_ARCHIVED_AT_ONCE = ("purge", "repair")
"""Commits whose versions are archived although no other one follows them."""
COMMITS_TAKE = 1.0
"""Seconds after which a commit that has archived its parent counts as dead; it is a matter of one file."""
# So many keys of a damaged chunk are named; their number is that of the positions.
MOST_KEYS = 100


class Damage(NamedTuple):
    """A file that is not as it should be, and what is wrong with it.

    Attributes:
        file: name of the file.
        problem: what is wrong.
        positions: of the samples in it, all that a damaged chunk holds; empty for files that hold no samples.
        keys: of the first hundred of these samples, where the dataset has keys and they can be read.
    """

    file: str
    problem: str
    positions: range = range(0)
    keys: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What ``verify`` found.

    Attributes:
        path: of the dataset.
        version: that was checked.
        chunks: number of chunk files looked at.
        samples: number of samples in them.
        unchecked: chunk files without a checksum (another program wrote them); they were decoded instead.
        damaged: the files that are missing, cut short or changed, and the samples that they hold.
        searched: number of files in which ``absent`` was looked for.
        found: what of it was found, and where.
        notes: what is no damage, but may be a sign that a version was lost.
    """

    path: str
    version: int
    chunks: int
    samples: int
    unchecked: int
    damaged: tuple[Damage, ...]
    searched: int = 0
    found: tuple[Found, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged, and nothing was found that should be absent."""
        return not self.damaged and not self.found


def verify(
    path: str | os.PathLike[str],
    *,
    version: Version | None = None,
    absent: Iterable[Wanted] = (),
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Read every chunk and key table of a version and compare it with its checksum; a chunk without one is decoded instead.

    Where the dataset knows the field that holds the keys, each key is compared with it.

    With ``absent`` every file in the folder is searched as well, those of all versions and those that nothing names: what zstd, Parquet and
    Arrow have packed is unpacked first. A text counts as found where it is a whole word of a field (``play-1`` is not in ``play-10``), and
    anywhere in fields that hold no text and in files that are not known; bytes count wherever they stand. An integer is looked for in key
    tables, published keys and the field that holds the keys. What is packed otherwise, such as text in an image or a zip file, is not seen.

    Args:
        path: of the dataset.
        version: to check: number, tag or time; None is the newest.
        absent: keys, texts and bytes that no file may hold.
        progress: called with the number of chunks done and their total.

    Raises:
        DatasetNotFound, VersionNotFound, VersionExpired: there is nothing to check.
        Corrupt: the index itself cannot be read.
        MissingDependency: ``absent`` cannot be looked for without a package that is not installed.

    Example:
        >>> liveset.verify(path).ok
        True
        >>> [found.place for found in liveset.verify(path, absent=["play-7"]).found]
        ['row 53 of the key table', "sample 7, field 'id'", "column 'key'"]
    """
    if isinstance(absent, str | bytes):
        raise TypeError("absent= takes a list of keys, texts or bytes, not one of them alone.")
    # What the cache holds says nothing about the files where they lie.
    snapshot = _opened(open_store(Place.of(path, cache_dir=False)), version)
    index = snapshot.index
    damaged = []
    if index.edit is not None and not index.digest_matches():
        damaged.append(Damage(HEAD, "another program changed it after its last commit"))
    damaged += damaged_files(snapshot, progress=progress)
    damaged += _wrong_keys(snapshot, skip={damage.file for damage in damaged})
    beside, notes = _beside_archives(snapshot) if version is None and has_listing(snapshot.store) else ([], [])
    damaged += beside
    unchecked = sum(record.check is None for record in index.chunks)
    wanted = list(absent)
    found, searched = search(snapshot.store, wanted) if wanted else ([], 0)
    counts = len(index.chunks), len(snapshot), unchecked
    return VerifyReport(snapshot.store.url, index.version, *counts, tuple(damaged), searched, tuple(found), tuple(notes))


def _opened(store: Store, version: Version | None) -> Snapshot:
    """Open a version; the error for a lost or damaged index says what brings it back."""
    try:
        return open_snapshot(store, version)
    except (Corrupt, DatasetNotFound) as error:
        if not (has_listing(store) and archived_numbers(store)):
            raise
        raise type(error)(f"{error} Versions are archived: `liveset repair` puts the newest of them in its place.", **vars(error)) from None


def archived_numbers(store: Store) -> list[int]:
    """Return the numbers of the versions that are archived, readable or not."""
    names = (entry.name.removeprefix(VERSIONS).removesuffix(".json") for entry in store.list(VERSIONS))
    return [int(name) for name in names if name.isdecimal()]


def _beside_archives(snapshot: Snapshot) -> tuple[list[Damage], list[str]]:
    """Return what is wrong with the newest version beside those that are archived, and what may be."""
    store, index = snapshot.store, snapshot.named
    newest = max(archived_numbers(store), default=-1)
    if newest < index.version or (newest == 0 and index.edit is None):
        return [], []
    name = version_name(newest)
    times = {entry.name: entry.modified for at in (HEAD, VERSIONS) for entry in store.list(at)} if newest == index.version else {}
    try:
        same = newest == index.version and archived(store, newest) == index
    except Corrupt as error:
        return [Damage(name, str(error).removeprefix(f"{store.url}/{name} is damaged: "))], []
    head = store.read_head()
    if head is None or head.data != index.source:
        return [], []  # others have committed since it was opened
    if not same:
        here = f"is version {index.version}" if index.edit is not None else "was written by another program"
        there = f"version {newest}" if newest > index.version else "another version of that number"
        return [Damage(HEAD, f"it {here}, but {there} is archived: it was put back or replaced")], []
    # A commit archives the version that it follows. Of one that did not land, the archive is a second name of the index, or younger.
    if index.edit is None or index.edit.op in _ARCHIVED_AT_ONCE or times.get(HEAD, times[name]) < times[name] or _replaced(store, head):
        return [], []
    note = (
        f"a version after {index.version} was begun: its commit did not land, or it did and {HEAD} was put back, so that its changes are "
        "lost. The history ends with the last commit that is there; a repair takes a lost one from a copy of the dataset that has it"
    )
    return [], [note]


def _replaced(store: Store, head: Head) -> bool:
    """Whether a head is replaced by the commit that has archived it, if that is under way."""
    until = time.monotonic() + COMMITS_TAKE
    while (now := store.read_head()) is not None and now.tag == head.tag:
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def damaged_files(
    snapshot: Snapshot, *, skip: Collection[str] = (), progress: Callable[[int, int], None] | None = None
) -> Iterator[Damage]:
    """Yield the damaged chunks and key tables of a version, but those in ``skip``."""
    chunks = _open(snapshot)
    listed = snapshot.index.chunks
    for number, record in enumerate(listed):
        try:
            if record.filename not in skip:
                _check(snapshot, chunks, number, record)
        except (MissingDependency, PickleRefused, UnsupportedFormat):
            pass  # nothing says that the bytes are wrong: they cannot be decoded here
        except DatasetError as error:
            positions = range(snapshot.starts[number], snapshot.starts[number + 1])
            yield Damage(record.filename, _problem(error, snapshot, record.filename), positions, _keys(snapshot, number))
        if progress is not None:
            progress(number + 1, len(listed))
    files = snapshot.index.edit.key_files if snapshot.index.edit is not None else None
    for name in files.tables if files is not None else ():
        try:
            if name not in skip:
                check_table(snapshot.store, snapshot.index, name)
        except DatasetError as error:
            problem = _problem(error, snapshot, name)
            hint = "" if "build_keys_index" in problem else " Build the keys again with build_keys_index."
            yield Damage(name, problem + hint)


def check_table(store: Store, index: Index, name: str) -> None:
    """Raise ``Corrupt`` where a key table of a version is damaged, or another one has its name."""
    buffer = store.map(name, 0)
    KeyTable(buffer, name).check()
    files = index.edit.key_files if index.edit is not None else None
    size = files.sizes.get(name, 0) if files is not None else 0
    if size and len(buffer) != size:
        raise Corrupt(f"{name} is another key table: it has {len(buffer)} of {size} bytes.", file=name)


def _wrong_keys(snapshot: Snapshot, skip: set[str]) -> Iterator[Damage]:
    """Yield the chunks whose samples have no keys, or others than their key field says, where the dataset knows such a field."""
    index = snapshot.index
    field = index.layout_of_keys.get("field")
    files = index.edit.key_files if index.edit is not None else None
    if not isinstance(field, str) or files is None or not skip.isdisjoint(files.tables) or (keys := open_keys(snapshot)) is None:
        return
    if index.config is None:
        return  # no sample was ever written
    schema = Schema.from_config(index.config, index.file)
    if field not in schema.fields:
        return  # the key is a part of a value, or a later schema has dropped it
    chunks = OpenChunks(snapshot, Decoder(schema, fields=[field], strict=not index.has_foreign_chunks))
    for number, record in enumerate(index.chunks):
        if record.filename in skip or record.erased:
            continue
        held: list[Key] = []
        with suppress(DatasetError, LookupError):
            held = keys.keys_of(number)
        text, named = "", held
        if len(held) != record.samples:
            text = f"the key tables know {len(held)} keys of its {record.samples} samples"
        else:
            with suppress(DatasetError, LookupError, TypeError):
                said = [field_value(sample, field) for sample in chunks[number].iterate(0, record.samples)]
                wrong = [(key, value) for key, value in zip(held, said, strict=True) if key != normalize_key(value)]
                if wrong:
                    named = [key for key, _ in wrong]
                    told = f"such as {named[0]!r} where it says {wrong[0][1]!r}"
                    text = f"{len(wrong)} samples have other keys than their field {field!r} says, {told}"
        if text:
            positions = range(snapshot.starts[number], snapshot.starts[number + 1])
            yield Damage(record.filename, f"{text}; build_keys_index makes the keys anew", positions, tuple(named[:MOST_KEYS]))


def _problem(error: DatasetError, snapshot: Snapshot, name: str) -> str:
    """Return what is wrong with a file, without its name, which stands beside it."""
    text = str(error).removeprefix(f"{snapshot.store.url}/").removeprefix(f"{name}: ").removeprefix(f"{name} ")
    return text.removeprefix("is damaged: ")


def _keys(snapshot: Snapshot, number: int) -> tuple[Key, ...]:
    """Return the first keys of a chunk, as far as they can be told."""
    with suppress(DatasetError, LookupError):  # an index that is damaged may list more samples than there are keys
        keys = open_keys(snapshot)
        if keys is not None:
            count = min(snapshot.index.chunks[number].samples, MOST_KEYS)
            return tuple(keys.key_at(number, slot) for slot in range(count))
    return ()


def _open(snapshot: Snapshot) -> OpenChunks | None:
    config = snapshot.index.config
    if config is None:
        return None
    schema = Schema.from_config(config, snapshot.index.file)
    return OpenChunks(snapshot, Decoder(schema, strict=not snapshot.index.has_foreign_chunks))


def _check(snapshot: Snapshot, chunks: OpenChunks | None, number: int, record: ChunkRecord) -> None:
    assert chunks is not None  # an index without a config has no chunks
    if record.check is not None:
        # Checked before anything is taken from the file, so that the message is about the file and not about a consequence.
        name, buffer = snapshot.chunk_file(number)
        if name == record.filename and not codec.verify(buffer, record.check):
            header = _header_problem(chunks, number)
            raise DatasetError(header or "the bytes differ from the checksum in the index")
        chunks[number]
        if name == record.filename:
            return
    for _ in chunks[number].iterate(0, record.samples):
        pass


def _header_problem(chunks: OpenChunks, number: int) -> str:
    try:
        chunks[number]
    except DatasetError as error:
        return str(error)
    return ""
