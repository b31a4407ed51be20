"""What must hold for a dataset beside its model; each check stands for itself, so that a failure has a name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

import liveset
from liveset.edit.changes import HISTORY
from liveset.errors import DatasetError, KeyNotFound, PositionOutOfRange, VersionExpired, VersionNotFound
from liveset.storage import HEAD, version_name
from liveset.testing.model import DatasetModel, ModelVersion
from tests.support.old_view import old_keys, old_samples
from tests.support.places import Place

_LEASE = re.compile(r"_liveset/leases/[0-9a-f]{16}-v(\d+)-\d+\.json")
_MIRROR = re.compile(r"keys/shard-\d{5}\.parquet")


@contextmanager
def raises(kind: type[BaseException]) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def again(error: Exception | None) -> None:
    """Raise an error that was caught before."""
    if error is not None:
        raise error


def same_outcome(expected: Exception | None, actual: Exception | None) -> None:
    if expected is None or actual is None:
        if actual is not None:
            raise AssertionError(f"this should have worked: {actual!r}") from actual
        assert expected is None, f"{expected!r} was expected, and nothing was raised"
        return
    fits = isinstance(actual, type(expected)) and (isinstance(expected, DatasetError) or not isinstance(actual, DatasetError))
    if not fits:
        raise AssertionError(f"{expected!r} was expected, not {actual!r}") from actual
    if keys := getattr(expected, "keys", ()):
        assert set(getattr(actual, "keys", ())) == set(keys), f"{keys} should be named: {actual}"


# --- versions ---------------------------------------------------------------------------------------------------------


def version_equals(ds: liveset.StreamingDataset, version: ModelVersion) -> None:
    """Compare by position, by slice and by iteration, then by key."""
    expected = list(version.samples)
    count = len(expected)
    assert len(ds) == ds.samples == count
    assert list(ds) == expected
    assert ds[:] == expected
    assert [ds[position] for position in range(count)] == expected
    assert ds[1::2] == expected[1::2]
    assert dict(ds.attributes) == dict(version.attributes)
    if count:
        assert ds[-1] == expected[-1]
    with raises(PositionOutOfRange):
        ds[count]
    if version.number:
        keys_equal(ds, version)
    elif version.keys is not None:
        no_wrong_sample(ds, version)


def keys_equal(ds: liveset.StreamingDataset, version: ModelVersion) -> None:
    if version.keys is None:
        with raises(KeyNotFound):
            ds.get_by_key("k1")
        return
    keys = list(version.keys)
    assert list(ds.keys) == keys
    assert len(ds.keys) == len(keys)
    assert [ds.key_at(position) for position in range(len(keys))] == keys
    assert [ds.get_by_key(key) for key in keys] == list(version.samples)
    assert ds.get_by_keys(keys[::-1]) == list(version.samples)[::-1]
    for key in (*(f"k{number}" for number in range(12)), *range(100, 112)):
        assert (key in ds.keys) == (key in keys), key
    with raises(KeyNotFound):
        ds.get_by_key("absent")
    part = ds.subset(range(0, len(keys), 2))
    assert list(part.keys) == keys[::2]
    assert [key in part.keys for key in keys] == [position % 2 == 0 for position in range(len(keys))]


def no_wrong_sample(ds: liveset.StreamingDataset, version: ModelVersion) -> None:
    """The keys of another program are not kept with its version: they may be gone, but never lead to another sample."""
    for key, sample in version.by_key.items():
        try:
            assert ds.get_by_key(key) == sample
        except DatasetError:
            continue


def one_version(path: str, model: DatasetModel, number: int) -> None:
    if number in model.readable:
        with liveset.StreamingDataset(path, version=number, verify_reads=True) as ds:
            assert ds.version == number
            version_equals(ds, model.versions[number])
    else:
        try:
            liveset.StreamingDataset(path, version=number)
        except VersionExpired:
            return
        raise AssertionError(f"version {number} has expired, but can be opened")


def every_version(path: str, model: DatasetModel) -> None:
    for number in model.versions:
        one_version(path, model, number)
    for name, number in model.tags.items():
        with liveset.StreamingDataset(path, version=name) as ds:
            assert ds.version == number
    for listed in liveset.history(path):
        if listed.available and listed.when is not None:
            with liveset.StreamingDataset(path, version=listed.when) as ds:
                assert ds.version == listed.version
    with raises(VersionNotFound):
        liveset.StreamingDataset(path, version=max(model.versions) + 1)


def history(path: str, model: DatasetModel) -> None:
    """Every version is listed as what it was, without a gap, as far back as one can be opened."""
    listed = {version.version: version for version in liveset.history(path)}
    numbers = list(listed)
    reach = 1 + HISTORY  # behind what the newest version remembers, a vacuum may have cut the history
    assert numbers[:reach] == list(range(numbers[0], numbers[:reach][-1] - 1, -1)), f"a gap in {numbers}"
    assert numbers == sorted(set(numbers), reverse=True)
    assert numbers[0] == model.number
    assert model.readable <= listed.keys()
    for number, version in listed.items():
        known = model.versions[number]
        assert version.op == known.op
        assert version.available == (number in model.readable)
        assert set(version.tags) == {name for name, tagged in model.tags.items() if tagged == number}
        if version.available:
            assert version.samples == len(known.samples)


# --- the old tool -----------------------------------------------------------------------------------------------------


def old_view(place: Place, model: DatasetModel) -> None:
    newest = model.newest
    assert old_samples(place.read) == list(newest.samples), "the old tool reads other samples"
    mirror = sorted(name for name in place.entries() if _MIRROR.fullmatch(name))
    for key, position in old_keys(place.read, mirror).items():
        assert newest.keys is not None, "keys are published for a dataset that has none"
        assert position < len(newest.keys), f"{key!r} is published for a position that is not there"
        assert newest.keys[position] == key, f"the old tool takes {newest.keys[position]!r} for {key!r}"


# --- files ------------------------------------------------------------------------------------------------------------


def named_files(data: bytes) -> set[str]:
    """Return the files that an index names; parsed here, not by the library."""
    index = json.loads(data)
    keys = index.get("edit", {}).get("key_files") or {}
    return {chunk["filename"] for chunk in index["chunks"]} | {*keys.get("base", ()), *keys.get("deltas", ())}


def needed_files(place: Place, model: DatasetModel) -> set[str]:
    """Return the files that the readable versions need, and the published keys."""
    needed = {HEAD} | {name for name in place.entries() if _MIRROR.fullmatch(name)}
    for number in model.readable:
        name = HEAD if number == model.number else version_name(number)
        needed |= {name} | named_files(place.read(name))
    return needed


def leases(place: Place) -> dict[str, int]:
    return {name: int(found[1]) for name in place.entries() if (found := _LEASE.fullmatch(name))}


def ghosts(place: Place, live: set[int]) -> set[int]:
    """Return versions that a reader that is no more seems to hold."""
    return set(leases(place).values()) - live


def files(place: Place, model: DatasetModel, leftovers: set[str], leased: set[int]) -> None:
    entries = place.entries()
    needed = needed_files(place, model)
    assert needed <= entries.keys(), f"missing: {needed - entries.keys()}"
    held = {name for name, version in leases(place).items() if version in leased}
    surplus = entries.keys() - needed - held - leftovers
    assert not surplus, f"left behind: {sorted(surplus)}"
    leftovers &= entries.keys()


def plain_chunks(place: Place) -> set[str]:
    """Return chunks without a token in their names: another program made them, so a vacuum that cannot tell leaves them alone."""
    return {name for name in place.entries() if re.fullmatch(r"chunk-\d+-\d+(\.\w+)?\.bin", name)}


def nothing_old_is_left(place: Place, model: DatasetModel, cutoff: datetime) -> None:
    """After a vacuum: what nobody needs is younger than the grace, or a reader seems to need it."""
    entries = place.entries()
    # A commit that ended early may have archived the newest version already.
    needed = needed_files(place, model) | set(leases(place)) | {version_name(model.newest.number)}
    for number in set(leases(place).values()):
        if (name := version_name(number)) in entries:
            needed |= {name} | named_files(place.read(name))
    old = {name for name, entry in entries.items() if entry.modified <= cutoff} - needed - plain_chunks(place)
    assert not old, f"a vacuum has left {sorted(old)}"
