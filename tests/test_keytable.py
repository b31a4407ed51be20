"""Key tables: every key is found where it was put, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from liveset.errors import Corrupt, DuplicateKeys, UnsupportedFormat
from liveset.format import keyfront, keytable
from liveset.format.keyjoin import join_tables
from liveset.format.keytable import (
    DELETED,
    Key,
    KeyColumn,
    KeyTable,
    Place,
    Rows,
    hashed_key,
    normalize_key,
    pack_table,
    shard_of,
)

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
_INT = st.integers(-(1 << 63), (1 << 63) - 1)
CHUNKS = st.one_of(
    st.lists(st.lists(_TEXT, max_size=5), max_size=5),
    st.lists(st.lists(_INT, max_size=5), max_size=5),
).filter(lambda chunks: len({key for keys in chunks for key in keys}) == sum(map(len, chunks)))


@pytest.fixture(autouse=True, params=[4096, 40])
def _pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with as many pages as a large table has."""
    monkeypatch.setattr(keyfront, "_PAGE", request.param)


def table(chunks: list[list[Key]]) -> KeyTable:
    rows = Rows.of_chunks([(f"c{number}", KeyColumn.of(keys)) for number, keys in enumerate(chunks)])
    return KeyTable(b"".join(pack_table(rows)), "t.keys")


@given(CHUNKS)
def test_every_key_is_found_and_every_sample_knows_its_key(chunks: list[list[Key]]) -> None:
    made = table(chunks)
    flat = [(key, Place(f"c{number}", slot)) for number, keys in enumerate(chunks) for slot, key in enumerate(keys)]
    for key, place in flat:
        row = made.find(key)
        assert row is not None
        assert made.place(row) == place
        assert made.key_at(*place) == key
    for number, keys in enumerate(chunks):
        assert made.keys_of(f"c{number}") == keys
    assert dict(made) == dict(flat)
    column = KeyColumn.of([key for key, _ in flat])
    numbers, slots = made.look_up_many(column)
    assert [(made.directory[number][0], slot) for number, slot in zip(numbers.tolist(), slots.tolist(), strict=True)] == [
        p for _, p in flat
    ]
    for key, (chunk, slot) in flat:
        found = made.look_up(*hashed_key(key))
        assert found is not None
        assert (made.directory[found[0]][0], found[1]) == (chunk, slot)
    assert list(column) == [key for key, _ in flat]


@given(CHUNKS, _TEXT, _INT)
def test_what_was_not_put_in_is_not_found(chunks: list[list[Key]], text: str, number: int) -> None:
    made = table(chunks)
    for key in (text, number):
        if all(key != other or type(key) is not type(other) for keys in chunks for other in keys):
            assert made.find(key) is None
            assert made.look_up_many(KeyColumn.of([key]))[0].tolist() == [-1]


@given(CHUNKS, st.data())
def test_a_table_read_back_is_the_same(chunks: list[list[Key]], data: st.DataObject) -> None:
    made = table(chunks)
    rows = made.to_rows()
    assert b"".join(pack_table(rows)) == b"".join(pack_table(made.to_rows()))
    assert dict(KeyTable(b"".join(pack_table(rows)))) == dict(made)
    order = data.draw(st.permutations(range(len(rows.keys))))
    taken = rows.keys.take(np.array(order, np.int64))
    assert list(taken) == [rows.keys[row] for row in order]


@given(CHUNKS)
def test_joined_tables_hold_what_each_held(chunks: list[list[Key]]) -> None:
    if not any(chunks):
        return
    parts = []
    for number, keys in enumerate(chunks):
        parts.append(KeyTable(b"".join(pack_table(Rows.of_chunks([(f"c{number}", KeyColumn.of(keys))])))))
    assert dict(KeyTable(b"".join(pack_table(join_tables(parts, [f"c{n}" for n in range(len(chunks))]))))) == dict(table(chunks))


def test_keys_whose_hashes_collide_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keytable, "_hash", lambda data: xxhash.xxh3_64_intdigest(data) & 3)
    chunks: list[list[Key]] = [[f"k{i}" for i in range(50)], [f"m{i}" for i in range(50)]]
    made = table(chunks)
    for number, keys in enumerate(chunks):
        for slot, key in enumerate(keys):
            row = made.find(key)
            assert row is not None
            assert made.place(row) == Place(f"c{number}", slot)
    assert made.find("other") is None
    assert [part.tolist() for part in made.look_up_many(KeyColumn.of(["m3", "other", "k7"]))] == [[1, -1, 0], [3, 0, 7]]
    with pytest.raises(DuplicateKeys) as caught:
        table([["a", "b", "c", "d", "a"], ["c"]])
    assert set(caught.value.keys) == {"a", "c"}


def test_duplicates_are_named() -> None:
    with pytest.raises(DuplicateKeys, match=r"Duplicate keys are not allowed in the keys sidecar.*'x'") as caught:
        table([["x", "y"], ["z", "x"]])
    assert caught.value.keys == ("x",)


def test_mixed_keys_are_refused() -> None:
    with pytest.raises(TypeError, match="Unsupported key type"):
        KeyColumn.of(["a", 1])
    with pytest.raises(TypeError, match="Unsupported key type"):
        table([["a"], [1]])


def test_deleted_keys_have_no_place() -> None:
    rows = Rows(KeyColumn.of(["gone", "here"]), np.array([DELETED, 0], np.uint32), np.array([0, 0], np.uint32), [("c", 1)])
    made = KeyTable(b"".join(pack_table(rows)))
    gone = made.find("gone")
    assert gone is not None
    assert made.place(gone) is None
    assert made.look_up(*hashed_key("gone")) == (DELETED, 0)
    assert made.look_up_many(KeyColumn.of(["here", "gone"]))[0].tolist() == [0, DELETED]
    assert made.keys_of("c") == ["here"]
    assert dict(made) == {"gone": None, "here": Place("c", 0)}


def test_a_damaged_table_is_an_error_or_unchanged() -> None:
    whole = bytearray(b"".join(pack_table(Rows.of_chunks([("c", KeyColumn.of(["aa", "b", "ccc"]))]))))
    for length in range(len(whole)):
        with pytest.raises(Corrupt, match=r"t\.keys"):
            KeyTable(bytes(whole[:length]), "t.keys")
    for position in range(len(whole)):
        damaged = whole.copy()
        damaged[position] ^= 0x55
        try:
            made = KeyTable(bytes(damaged), "t.keys")
            found = {key: made.find(key) for key in ("aa", "b", "ccc")}
            places = {key: made.place(row) for key, row in found.items() if row is not None}
        except Corrupt:
            continue
        assert set(places) <= {"aa", "b", "ccc"}


# Facts of the file format.
@pytest.mark.parametrize(
    ("key", "shards", "expected"),
    [
        ("k0", 3, 2),
        ("user-1", 16, 10),
        (7, 2, 1),
        (-1, 16, 15),
        ("", 16, 4),
        ("é", 16, 11),
        (1099511627776, 16, 6),
        ("7", 8, 7),
        ("x", 1, 0),
    ],
)
def test_published_shards_are_those_of_the_format(key: Key, shards: int, expected: int) -> None:
    assert shard_of(key, shards) == expected


def test_keys_are_normalized() -> None:
    assert normalize_key(b"caf\xc3\xa9") == "café"
    assert normalize_key(memoryview(b"x")) == "x"
    assert normalize_key(np.int32(7)) == 7
    assert type(normalize_key(np.uint8(7))) is int
    assert type(normalize_key(np.str_("x"))) is str
    for wrong in (True, np.bool_(True), 1.0, None, (1, 2), 1 << 63, b"\xff", np.float32(1), "\ud800", np.str_("\ud800")):
        with pytest.raises(TypeError, match="Unsupported key type"):
            normalize_key(wrong)


def test_a_table_of_a_newer_format_says_so() -> None:
    data = b"".join(pack_table(Rows.of_chunks([("c", KeyColumn.of(["a"]))])))
    with pytest.raises(UnsupportedFormat, match="newer liveset"):
        KeyTable(b"LSKEYS05" + data[8:], "t.keys")
