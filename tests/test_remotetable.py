"""Key tables read in parts: the same answers as from the whole file, with few requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from liveset.errors import Corrupt, UnsupportedFormat
from liveset.format import keyfront, keytable, remotetable
from liveset.format.keyfront import HEADER, HEADER_SIZE, MAGIC, Front, checksum
from liveset.format.keyjoin import join_tables
from liveset.format.keytable import DELETED, Key, KeyColumn, KeyTable, Rows, hashed_key, pack_table
from liveset.format.remotetable import RangedKeyTable

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
_INT = st.integers(-(1 << 63), (1 << 63) - 1)


@dataclass
class Remote:
    """A file of which parts are read, and what that cost."""

    data: bytes
    trips: list[Sequence[tuple[int, int]]] = field(default_factory=list)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self.trips.append(list(ranges))
        return [self.data[start : start + length] for start, length in ranges]

    def table(self) -> RangedKeyTable:
        return RangedKeyTable(self.read, len(self.data), "t.keys")

    def cost(self, look: Callable[[], object]) -> tuple[int, int, int]:
        """Round trips, ranges and bytes of something."""
        self.trips.clear()
        look()
        return len(self.trips), sum(map(len, self.trips)), sum(length for trip in self.trips for _, length in trip)


def packed(chunks: Sequence[Sequence[Key]], gone: Sequence[Key] = (), removed: dict[str, list[int]] | None = None) -> bytes:
    rows = Rows.of_chunks([(f"c{number}", KeyColumn.of(keys)) for number, keys in enumerate(chunks)])
    whole = Rows(
        KeyColumn.join([rows.keys, KeyColumn.of(gone)]),
        np.concatenate([rows.chunks, np.full(len(gone), DELETED, np.uint32)]),
        np.concatenate([rows.slots, np.zeros(len(gone), np.uint32)]),
        rows.directory,
        {chunk: np.array(slots, np.uint32) for chunk, slots in (removed or {}).items()},
    )
    return b"".join(pack_table(whole))


@st.composite
def tables(draw: st.DrawFn) -> tuple[bytes, list[Key]]:
    """A table, and keys that it may or may not have."""
    keys: list[Key] = draw(st.one_of(st.lists(_TEXT, unique=True, max_size=40), st.lists(_INT, unique=True, max_size=40)))
    ends = sorted(draw(st.lists(st.integers(0, len(keys)), max_size=6)))
    parts = [keys[start:end] for start, end in zip([0, *ends], [*ends, len(keys)], strict=True)]
    gone = parts.pop() if draw(st.booleans()) else []
    slots = st.lists(st.integers(0, 100), min_size=1, max_size=8, unique=True).map(sorted)
    removed = draw(st.dictionaries(st.sampled_from(["x0", "x1", "x2"]), slots, max_size=3))
    return packed(parts, gone, removed), [*keys, *draw(st.lists(st.one_of(_TEXT, _INT), max_size=5))]


def same(whole: KeyTable, parts: RangedKeyTable, keys: Sequence[Key]) -> None:
    """Assert that both tables give the same answers."""
    assert (parts.kind, parts.rows, parts.directory) == (whole.kind, whole.rows, whole.directory)
    assert {chunk: free.tolist() for chunk, free in parts.removed.items()} == {
        chunk: free.tolist() for chunk, free in whole.removed.items()
    }
    for column in (KeyColumn.of([key for key in keys if type(key) is kind]) for kind in (str, int)):
        found = [part.tolist() for part in parts.look_up_many(column)]
        assert found == [part.tolist() for part in whole.look_up_many(column)]
        for key, chunk, slot in zip(column, *found, strict=True):
            row = whole.find(key)
            assert (row is None) == (chunk < 0)
            if column.kind is whole.kind:
                place = (chunk, slot) if chunk >= 0 else None
                assert parts.look_up(*hashed_key(key)) == whole.look_up(*hashed_key(key)) == place
    for chunk, samples in whole.directory[:20]:
        assert parts.has_chunk(chunk)
        assert parts.keys_of(chunk) == whole.keys_of(chunk)
        for slot in {0, samples - 1} if samples else ():
            assert parts.key_at(chunk, slot) == whole.key_at(chunk, slot)
        with pytest.raises(KeyError):
            parts.key_at(chunk, samples)
    assert not parts.has_chunk("other")


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many pages as a large table has."""
    monkeypatch.setattr(keyfront, "_PAGE", 40)


@pytest.mark.usefixtures("small_pages")
@given(tables())
def test_parts_answer_as_the_whole(made: tuple[bytes, list[Key]]) -> None:
    data, keys = made
    same(KeyTable(data), Remote(data).table(), keys)


@pytest.mark.parametrize("kind", [str, int])
def test_parts_of_a_large_table_answer_as_the_whole(kind: Callable[[int], Key]) -> None:
    chunks = [[kind(number) for number in range(start, start + 5000)] for start in range(0, 200_000, 5000)]
    gone = [kind(number) for number in range(200_000, 201_000)]
    data = packed(chunks, gone, {"x": [1, 5, 6]})
    keys = [kind(number) for number in range(0, 202_000, 401)]
    whole = KeyTable(data)
    same(whole, Remote(data).table(), keys)
    # Each on its own, when nothing was read before.
    for key in keys[::10]:
        assert Remote(data).table().look_up(*hashed_key(key)) == whole.look_up(*hashed_key(key))


@pytest.mark.parametrize("mask", [3, (1 << 40) - 1, ((1 << 64) - 1) ^ ((1 << 24) - 1), ((1 << 30) - 1) << 34 | 1])
def test_hashes_that_collide_or_are_not_spread_evenly_are_found(monkeypatch: pytest.MonkeyPatch, mask: int) -> None:
    monkeypatch.setattr(keytable, "_hash", lambda data: xxhash.xxh3_64_intdigest(data) & mask)
    data = packed([[f"k{i}" for i in range(1000)], [f"m{i}" for i in range(9000)]])
    same(KeyTable(data), Remote(data).table(), [*(f"m{i}" for i in range(0, 9100, 700)), *(f"k{i}" for i in range(0, 1100, 90))])


def test_what_was_read_is_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(packed([[f"k{number}" for number in range(200_000)]]))
    table = remote.table()
    first, page = (remote.cost(lambda key=key: table.look_up(*hashed_key(key)))[2] for key in ("k5", "k6"))  # type: ignore[misc]
    assert first > page > 0
    monkeypatch.setattr(remotetable, "_KEPT", 2 * page + page // 2)
    costs = [remote.cost(lambda key=f"k{number}": table.look_up(*hashed_key(key)))[1] for number in (5, 6, 7, 8, 9, 10, 9, 5)]  # type: ignore[misc]
    assert costs == [0, 0, 1, 1, 1, 1, 0, 1]


@pytest.fixture(scope="module")
def million() -> bytes:
    return packed([[f"play-{number:07d}" for number in range(start, start + 1000)] for start in range(0, 1_000_000, 1000)])


def look(table: RangedKeyTable, number: int) -> None:
    assert table.look_up(*hashed_key(f"play-{number:07d}")) == divmod(number, 1000)


def test_a_lookup_among_a_million_keys_is_one_request_once_the_pages_are_known(million: bytes) -> None:
    remote = Remote(million)
    table = remote.table()
    numbers = range(7, 1_000_000, 33_333)
    # Two where nobody said how long the directory is.
    trips, ranges, size = remote.cost(lambda: look(table, numbers[0]))
    assert trips == ranges <= 3
    assert size < 80_000
    for number in numbers[1:]:
        trips, ranges, size = remote.cost(lambda number=number: look(table, number))  # type: ignore[misc]
        assert (trips, ranges) == (1, 1)
        assert size < 30_000
    assert remote.cost(lambda: look(table, numbers[-1])) == (0, 0, 0)
    assert remote.cost(lambda: table.look_up(*hashed_key("none")))[:2] == (1, 1)
    assert remote.cost(lambda: table.key_at("c7", 7))[0] <= 2


def test_what_comes_before_the_pages_is_one_request_when_its_size_is_about_known(million: bytes) -> None:
    directory = sum(len(f'["c{number}",1000],') for number in range(1000))
    for known, requests in ((directory, 1), (directory // 2, 2), (10 * directory, 1)):
        remote = Remote(million)
        table = RangedKeyTable(remote.read, len(million), "t.keys", known)
        assert remote.cost(lambda: table.rows)[:2] == (requests, requests)  # noqa: B023
        assert remote.cost(lambda: look(table, 7))[:2] == (1, 1)  # noqa: B023


def test_many_keys_cost_as_many_round_trips_as_one(million: bytes) -> None:
    remote = Remote(million)
    table = remote.table()
    assert table.rows == 1_000_000
    keys = KeyColumn.of([f"play-{number:07d}" for number in range(0, 1_000_000, 25_000)])

    def look_up() -> None:
        chunks, slots = table.look_up_many(keys)
        assert [table.directory[chunk] for chunk in chunks.tolist()] == [(f"c{number}", 1000) for number in range(0, 1000, 25)]
        assert not slots.any()

    trips, ranges, _ = remote.cost(look_up)
    assert trips == 1
    assert ranges <= len(keys)
    assert remote.cost(look_up) == (0, 0, 0)
    assert remote.cost(lambda: table.keys_of("c0"))[0] == 2


def in_parts(data: bytes, size: int) -> RangedKeyTable:
    return RangedKeyTable(Remote(data).read, size, "t.keys")


def mapped(data: bytes, _size: int) -> KeyTable:
    """As one that is too large to be compared with its checksum when it is opened."""
    return KeyTable(data, "t.keys", checked=0)


@pytest.mark.parametrize("kind", [str, int])
@pytest.mark.parametrize("opened", [in_parts, mapped])
def test_damage_is_an_error_or_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, opened: Callable[[bytes, int], KeyTable | RangedKeyTable], kind: Callable[[int], Key]
) -> None:
    monkeypatch.setattr(keyfront, "_PAGE", 128)  # so that there are some
    keys = [kind(number) for number in range(30)]
    whole = packed([keys[:10], keys[10:20]], keys[20:], {"x": [1, 4]})
    column, more = KeyColumn.of(keys), KeyColumn.of([kind(number) for number in range(25, 50)])

    def questions(data: bytes, size: int) -> list[Callable[[], object]]:
        """Each is asked of a table that nobody has looked at."""
        asked: list[Callable[[Any], object]] = [
            lambda table: [table.look_up(*hashed_key(key)) for key in keys],
            lambda table: [part.tolist() for part in table.look_up_many(column)],
            lambda table: [part.tolist() for part in table.look_up_many(more)],
            lambda table: (table.rows, table.directory, table.keys_of("c0")),
            lambda table: [table.key_at("c1", slot) for slot in range(10)],
            lambda table: {name: free.tolist() for name, free in table.removed.items()},
        ]
        if opened is mapped:
            asked += [dict, lambda table: list(join_tables([table], ["c0", "c1"]).keys)]
        return [lambda ask=ask: ask(opened(data, size)) for ask in asked]  # type: ignore[misc]

    def answers(data: bytes, size: int) -> list[object]:
        return [question() for question in questions(data, size)]

    right = answers(whole, len(whole))
    for size in range(len(whole)):
        with pytest.raises(Corrupt, match=r"t\.keys") as caught:
            answers(whole[:size], size)
        assert caught.value.file == "t.keys"
        if opened is in_parts:
            with pytest.raises(Corrupt, match=r"t\.keys"):
                answers(whole[:size], len(whole))
            with pytest.raises(Corrupt, match=r"t\.keys"):
                answers(whole, size)
    with pytest.raises(Corrupt, match=r"t\.keys"):
        answers(whole + bytes(8), len(whole) + 8)
    files, found = set[Any](), 0
    for at, bits in product(range(len(whole)), (0x01, 0x55, 0x80)):
        damaged = bytearray(whole)
        damaged[at] ^= bits
        for question, answer in zip(questions(bytes(damaged), len(whole)), right, strict=True):
            try:
                assert question() == answer
            except (Corrupt, UnsupportedFormat) as error:
                found += 1
                files.add(getattr(error, "file", None))
    assert files == {"t.keys"}
    assert found > len(whole)


def test_a_damaged_page_is_nothing_to_the_keys_of_others(small_pages: None) -> None:
    whole = packed([[f"k{number}" for number in range(300)]])
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    table, errors = mapped(bytes(damaged), 0), 0
    for number in range(300):
        for _ in range(2):  # it is not taken for checked after the first time
            try:
                assert table.look_up(*hashed_key(f"k{number}")) == (0, number)
            except Corrupt:
                errors += 1
    assert 0 < errors < 100
    assert errors % 2 == 0
    with pytest.raises(Corrupt, match="checksum differs"):
        table.check()
    with pytest.raises(Corrupt, match="checksum differs"):
        KeyTable(bytes(damaged))


def test_a_header_that_lies_is_damage() -> None:
    data = packed([[f"k{number}" for number in range(100)]])

    def answer(header: bytes, offset: int = 0) -> None:
        changed = bytearray(header + data[len(header) :])
        if offset:
            changed[HEADER_SIZE + 8 : HEADER_SIZE + 16] = (offset).to_bytes(8, "little")
        end = Front.size(bytes(changed), len(changed), "t.keys")
        changed[HEADER.size + 8 : HEADER_SIZE] = checksum([changed[: HEADER.size], changed[HEADER_SIZE:end]]).to_bytes(8, "little")
        RangedKeyTable(Remote(bytes(changed)).read, len(data), "t.keys").look_up(*hashed_key("k1"))

    kind, bits, rows, live, directory = HEADER.unpack_from(data)[1:]
    good = (kind, bits, rows, live, directory)
    answer(HEADER.pack(MAGIC, *good))
    for wrong in ((2, *good[1:]), (kind, 40, *good[2:]), (kind, bits, rows + 1, *good[3:]), (kind, bits, rows, live - 1, directory)):
        with pytest.raises(Corrupt, match=r"t\.keys"):
            answer(HEADER.pack(MAGIC, *wrong))
    for offset in (1, 1 << 40, (1 << 64) - 1):
        with pytest.raises(Corrupt, match=r"t\.keys"):
            answer(HEADER.pack(MAGIC, *good), offset)


def test_a_header_that_lies_does_not_make_anybody_read_the_whole_table(million: bytes) -> None:
    for at, number in ((32, 30_000_000), (9, 21)):  # bytes of the directory, pages
        remote = Remote(million[:at] + number.to_bytes(4, "little") + million[at + 4 :])
        table = remote.table()

        def ask(table: RangedKeyTable = table) -> None:
            with pytest.raises(Corrupt, match=r"t\.keys"):
                look(table, 7)

        assert remote.cost(ask)[2] < 100_000


def test_an_order_that_does_not_fit_the_rows_is_damage() -> None:
    data = bytearray(packed([list(range(100)), list(range(100, 200))]))
    order = np.frombuffer(data, "<u4", 200, len(data) - 800)
    order[[3, 4, 103]] = order[[4, 3, 3]]
    table = Remote(bytes(data)).table()
    assert (table.key_at("c0", 5), table.key_at("c1", 5)) == (5, 105)
    for chunk, slot in (("c0", 3), ("c0", 4), ("c1", 3)):
        with pytest.raises(Corrupt, match="does not fit its rows"):
            table.key_at(chunk, slot)
    with pytest.raises(Corrupt, match="does not fit its rows"):
        table.keys_of("c0")


def test_a_table_of_an_earlier_version_is_not_read_in_parts() -> None:
    old = next((Path(__file__).parent / "golden" / "v1").rglob("*.keys")).read_bytes()
    assert old[:8] == b"LSKEYS02"
    assert not RangedKeyTable(Remote(old).read, len(old)).readable
    assert Remote(packed([["a"]])).table().readable


def test_a_table_of_a_newer_format_says_so() -> None:
    data = packed([["a"]])
    with pytest.raises(UnsupportedFormat, match="newer liveset"):
        Remote(b"LSKEYS05" + data[8:]).table().look_up(*hashed_key("a"))
