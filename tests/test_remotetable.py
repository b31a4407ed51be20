"""Key tables read in parts: the same answers as from the whole file, with few requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from liveset.errors import Corrupt, UnsupportedFormat
from liveset.format import keytable, remotetable
from liveset.format.keytable import DELETED, HEADER_SIZE, Key, KeyColumn, KeyTable, Rows, hashed_key, pack_table
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
    for key in keys:
        row = parts.find(key)
        assert row == whole.find(key)
        if row is not None:
            assert parts.place(row) == whole.place(row)
    for column in (KeyColumn.of([key for key in keys if type(key) is kind]) for kind in (str, int)):
        rows = parts.find_many(column)
        assert rows.tolist() == whole.find_many(column).tolist()
        assert [part.tolist() for part in parts.places(rows[rows >= 0])] == [part.tolist() for part in whole.places(rows[rows >= 0])]
    for chunk, samples in whole.directory[:20]:
        assert parts.has_chunk(chunk)
        assert parts.keys_of(chunk) == whole.keys_of(chunk)
        for slot in {0, samples - 1} if samples else ():
            assert parts.key_at(chunk, slot) == whole.key_at(chunk, slot)
        with pytest.raises(KeyError):
            parts.key_at(chunk, samples)
    assert not parts.has_chunk("other")


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
        assert Remote(data).table().find(key) == whole.find(key)


@pytest.mark.parametrize("mask", [3, (1 << 40) - 1, ((1 << 64) - 1) ^ ((1 << 24) - 1), ((1 << 30) - 1) << 34 | 1])
def test_hashes_that_collide_or_are_not_spread_evenly_are_found(monkeypatch: pytest.MonkeyPatch, mask: int) -> None:
    monkeypatch.setattr(keytable, "_hash", lambda data: xxhash.xxh3_64_intdigest(data) & mask)
    data = packed([[f"k{i}" for i in range(1000)], [f"m{i}" for i in range(9000)]])
    same(KeyTable(data), Remote(data).table(), [*(f"m{i}" for i in range(0, 9100, 700)), *(f"k{i}" for i in range(0, 1100, 90))])


def test_a_search_ends_however_the_hashes_lie() -> None:
    """The expected row is as wrong as can be: half of the hashes are at one end, the other half close to it."""
    hashes = np.array([*range(1 << 17), *range(1 << 20, (1 << 20) + (1 << 17)), (1 << 64) - 1], np.uint64)
    rows = Rows(KeyColumn(str, hashes, np.zeros(len(hashes) + 1, np.uint64), b""), *_columns(len(hashes)), [("c", len(hashes))])
    data = _packed_unchecked(rows)
    for row in (0, 1, 70_000, (1 << 17) - 1, 1 << 17, 200_000, len(hashes) - 1):
        remote = Remote(data)
        assert remote.table().find_stored(b"", int(hashes[row])) == row
        assert len(remote.trips) < 25


def test_a_run_of_equal_hashes_that_is_longer_than_the_window_is_found_whole() -> None:
    spread = np.linspace(0, (1 << 64) - 4096, 100_000).astype(np.uint64)
    for first, last in ((20_000, 50_500), (49_500, 80_000)):
        hashes = spread.copy()
        hashes[first : last + 1] = spread[50_000]
        bounds = np.zeros(len(hashes) + 1, np.uint64)
        bounds[last + 1 :] = 1  # the last one of the run has a key, all others are empty
        keys = KeyColumn(str, hashes, bounds, b"x")
        data = _packed_unchecked(Rows(keys, *_columns(len(hashes)), [("c", len(hashes))]))
        for stored, row in ((b"", first), (b"x", last), (b"y", None)):
            assert Remote(data).table().find_stored(stored, int(spread[50_000])) == row


def test_what_was_read_is_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remotetable, "_KEPT", 20)
    remote = Remote(packed([[f"k{number}" for number in range(200_000)]]))
    table = remote.table()
    costs = [remote.cost(lambda key=f"k{number}": table.find(key))[1] for number in (5, 6, 5, 6, 7, 8, 9, 10, 5)]  # type: ignore[misc]
    assert [cost > 0 for cost in costs] == [True, True, False, False, True, True, True, True, True]


def _columns(count: int) -> tuple[Any, Any]:
    return np.zeros(count, np.uint32), np.arange(count, dtype=np.uint32)


def _packed_unchecked(rows: Rows) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keytable, "_refuse_repeated", lambda *_: None)
        return b"".join(pack_table(rows))


@pytest.fixture(scope="module")
def million() -> bytes:
    return packed([[f"play-{number:07d}" for number in range(start, start + 1000)] for start in range(0, 1_000_000, 1000)])


def test_a_lookup_among_a_million_keys_costs_few_requests(million: bytes) -> None:
    remote = Remote(million)
    table = remote.table()
    keys = [f"play-{number:07d}" for number in range(7, 1_000_000, 33_333)]

    def look(key: str) -> None:
        row = table.find_stored(*hashed_key(key))
        assert row is not None
        assert table.place(row) == (f"c{int(key[5:]) // 1000}", int(key[5:]) % 1000)

    # The header; a window of hashes; bounds, chunk and slot of the row, and the directory; the key.
    trips, ranges, size = remote.cost(lambda: look(keys[0]))
    assert (trips, ranges) == (4, 7)
    assert size < 100_000
    for key in keys[1:]:
        trips, ranges, size = remote.cost(lambda key=key: look(key))  # type: ignore[misc]
        assert (trips, ranges) <= (4, 6)  # one more where the window was missed
        assert size < 100_000
    assert remote.cost(lambda: look(keys[-1])) == (0, 0, 0)
    # A key that is not there costs the window alone.
    trips, ranges, size = remote.cost(lambda: table.find("none"))
    assert (trips, ranges) == (1, 1)
    assert size < 50_000
    assert remote.cost(lambda: table.key_at("c7", 7))[0] == 3


def test_many_keys_cost_as_many_round_trips_as_one(million: bytes) -> None:
    remote = Remote(million)
    table = remote.table()
    keys = KeyColumn.of([f"play-{number:07d}" for number in range(0, 1_000_000, 25_000)])

    def look() -> None:
        rows = table.find_many(keys)
        chunks, slots = table.places(rows)
        assert [table.directory[chunk] for chunk in chunks.tolist()] == [(f"c{number}", 1000) for number in range(0, 1000, 25)]
        assert not slots.any()

    trips, ranges, _ = remote.cost(look)
    assert trips <= 5
    assert ranges < 1 + 5 * len(keys)


def test_what_lies_close_together_is_read_at_once() -> None:
    remote = Remote(packed([[f"k{number}" for number in range(3000)]]))
    table = remote.table()
    assert remote.cost(lambda: table.keys_of("c0"))[1] < 10


@pytest.mark.parametrize("kind", [str, int])
def test_damage_is_an_error_or_changes_nothing_else(kind: Callable[[int], Key]) -> None:
    keys = [kind(number) for number in range(30)]
    whole = packed([keys[:10], keys[10:20]], keys[20:], {"x": [1, 4]})

    def answers(data: bytes, size: int) -> list[object]:
        table = RangedKeyTable(Remote(data).read, size, "t.keys")
        rows = [table.find(key) for key in keys]
        places = [table.place(row) if row is not None else None for row in rows]
        return [places, table.directory, [table.keys_of("c0"), table.key_at("c1", 3)] if table.has_chunk("c0") else None]

    right = answers(whole, len(whole))
    for size in range(len(whole)):
        with pytest.raises(Corrupt, match=r"t\.keys") as caught:
            answers(whole[:size], size)
        assert caught.value.file == "t.keys"
        with pytest.raises(Corrupt, match=r"t\.keys"):
            answers(whole[:size], len(whole))
        with pytest.raises(Corrupt, match=r"t\.keys"):
            answers(whole, size)
    with pytest.raises(Corrupt, match=r"t\.keys"):
        answers(whole + bytes(8), len(whole) + 8)
    differs, files = 0, set[Any]()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x55
        try:
            differs += answers(bytes(damaged), len(whole)) != right
        except (Corrupt, UnsupportedFormat) as error:
            files.add(getattr(error, "file", None))
        except KeyError:
            assert b"c1" not in damaged
    assert files == {"t.keys"}
    assert differs < len(whole) // 2


def test_hashes_out_of_order_are_damage() -> None:
    data = bytearray(packed([[f"k{number}" for number in range(100)]]))
    data[HEADER_SIZE : HEADER_SIZE + 800] = np.frombuffer(data, np.uint64, 100, HEADER_SIZE)[::-1].tobytes()
    with pytest.raises(Corrupt, match="not in order") as caught:
        Remote(bytes(data)).table().find("k1")
    assert caught.value.file == "t.keys"


def test_a_place_that_the_directory_lacks_is_damage() -> None:
    for column, value in ((2, 1), (3, 100)):
        data = bytearray(packed([list(range(100))]))
        start = HEADER_SIZE + 800 * 2 + 400 * (column - 2)
        data[start : start + 400] = np.full(100, value, "<u4").tobytes()
        table = Remote(bytes(data)).table()
        row = table.find(7)
        assert row is not None
        with pytest.raises(Corrupt, match="directory lacks"):
            table.place(row)


def test_a_table_of_a_newer_format_says_so() -> None:
    data = packed([["a"]])
    with pytest.raises(UnsupportedFormat, match="newer liveset"):
        Remote(b"LSKEYS04" + data[8:]).table().find("a")
