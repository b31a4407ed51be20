"""Key tables whose checksums are right and whose numbers are not: an error that names the table, and never one of Python's own."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import liveset
from liveset.errors import Corrupt, UnsupportedFormat
from liveset.format import keyfront
from liveset.format.keyfront import CHECK, COLUMNS_HEADER, HEADER, HEADER_SIZE, checksum, room
from liveset.format.keyjoin import join_tables
from liveset.format.keytable import DELETED, Key, KeyColumn, KeyTable, Rows, hashed_key, pack_table
from liveset.format.remotetable import RangedKeyTable
from tests.support.writing import write_dataset
from tests.test_remotetable import in_parts, packed

KEYS: dict[type, list[Key]] = {str: [f"k{number}" for number in range(40)], int: [number * 7 for number in range(40)]}
NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2, 1 << 16, 1 << 20, 1 << 31, 1 << 32, 1 << 40, 1 << 60, 1 << 61, (1 << 62) + 5, 1 << 63, (1 << 64) - 1]),
    st.sampled_from([DELETED, (1 << 64) - 8, (1 << 63) - 1, (1 << 61) + 1]),
    st.integers(0, 300),
    st.integers(0, (1 << 64) - 1),
)


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many pages as a large table has."""
    monkeypatch.setattr(keyfront, "_PAGE", 128)


def table(kind: type) -> bytes:
    keys = KEYS[kind]
    return packed([keys[:10], keys[10:30]], keys[30:], {"z": [1, 4, 9]})


def sealed(data: bytes | bytearray) -> bytes:
    """Return a table with the checksums that what stands in it should have, as far as the parts can be told."""
    made = bytearray(data)
    bits, *_, directory = HEADER.unpack_from(made)[2:]
    pages = (1 << bits) + 1
    at = HEADER_SIZE + room(4 * pages)
    offsets = [int.from_bytes(made[at + 8 * i : at + 8 * i + 8], "little") for i in range(min(pages, 1000))]
    for start, end in pairwise(offsets):
        if 8 <= 8 * start < 8 * end - 8 < len(made) - 8:
            made[8 * end - 8 : 8 * end] = CHECK.pack(checksum([made[8 * start : 8 * end - 8]]))
    made[-8:] = CHECK.pack(checksum([made[-24:-8]]))  # the three free slots and their padding
    end = at + 8 * pages + room(directory)
    made[HEADER_SIZE - 8 : HEADER_SIZE] = CHECK.pack(checksum([made[: HEADER.size], made[HEADER_SIZE : min(end, len(made))]]))
    made[HEADER.size : HEADER.size + 8] = CHECK.pack(checksum([made[: HEADER.size], made[HEADER.size + 8 :]]))
    return bytes(made)


def ask(made: KeyTable | RangedKeyTable, keys: Sequence[Key]) -> None:
    """Look at everything that a table tells."""
    made.look_up_many(KeyColumn.of(keys))
    for key in keys:
        found = made.look_up(*hashed_key(key))
        assert found is None or found[0] == DELETED or made.directory[found[0]]
    for chunk, samples in made.directory:
        known = made.keys_of(chunk)
        assert len(known) == samples
        assert [made.key_at(chunk, slot) for slot in range(samples)] == known
    assert all(len(free) for free in made.removed.values())


def ask_whole(made: KeyTable, keys: Sequence[Key]) -> None:
    ask(made, keys)
    assert len(dict(made)) <= made.rows
    rows = made.to_rows()
    pack_table(rows)
    join_tables([made, made], ["c0", "c1", "z"])


def check(data: bytes, keys: Sequence[Key]) -> int:
    """Ask everything of a table in every way; return how often it was an error, which is always ours."""
    errors = 0
    for question in (
        lambda: ask_whole(KeyTable(data, "t.keys"), keys),
        lambda: ask_whole(KeyTable(data, "t.keys", checked=0), keys),
        lambda: KeyTable(data, "t.keys", checked=0).to_rows(),
        lambda: join_tables([KeyTable(data, "t.keys")], ["c0"], whole=True),
        lambda: ask(in_parts(data, len(data)), keys),
    ):
        try:
            question()
        except (Corrupt, UnsupportedFormat) as error:
            assert "t.keys" in str(error)  # noqa: PT017
            errors += 1
    return errors


def test_sealing_a_table_again_changes_nothing() -> None:
    for kind in (str, int):
        assert sealed(table(kind)) == table(kind)
        assert check(table(kind), KEYS[kind]) == 0


@given(st.data(), st.sampled_from([str, int]))
def test_numbers_anywhere_are_an_error_of_ours_or_change_nothing(data: st.DataObject, kind: type) -> None:
    made = bytearray(table(kind))
    for _ in range(data.draw(st.integers(1, 4))):
        size = data.draw(st.sampled_from([1, 4, 8]))
        most = data.draw(st.sampled_from([HEADER_SIZE, 200, len(made)]))
        at = size * data.draw(st.integers(1, most // size - 1))
        made[at : at + size] = (data.draw(NUMBERS) % (1 << 8 * size)).to_bytes(size, "little")
    check(sealed(made), KEYS[kind])


def sections(data: bytes | bytearray) -> dict[str, int]:
    """Return where in a table of the text keys what stands."""
    bits, *_ = HEADER.unpack_from(data)[2:]
    pages = (1 << bits) + 1
    offsets = HEADER_SIZE + room(4 * pages)
    firsts = np.frombuffer(data, "<u4", pages, HEADER_SIZE)
    number = int(np.argmax(np.diff(firsts)))
    page = 8 * int.from_bytes(data[offsets + 8 * number : offsets + 8 * number + 8], "little")
    held = int(np.diff(firsts)[number])
    return {
        "rows": 16,
        "live": 24,
        "directory": 32,
        "firsts": HEADER_SIZE + 8,
        "offsets": offsets + 8,
        "chunk": page + 8 * held,
        "first bound": page + 16 * held,
        "bound": page + 16 * held + 8,
        "last bound": page + 24 * held,
    }


@pytest.mark.parametrize("number", [0, 1 << 31, 1 << 32, 1 << 40, 1 << 61, 1 << 63, (1 << 64) - 1, (1 << 64) - 8, (1 << 32) - 2])
@pytest.mark.parametrize("what", sections(packed([KEYS[str]], [], {"z": [1]})))
def test_numbers_that_are_far_away_are_an_error_in_every_way(what: str, number: int) -> None:
    made = bytearray(table(str))
    at = sections(made)[what]
    size = 4 if what in ("firsts", "chunk") else 8
    if (what == "chunk" and number % (1 << 32) in (0, DELETED)) or (what == "firsts" and number % (1 << 32) == 0):
        return  # these may be right
    made[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, "little")
    tracemalloc.start()
    try:
        assert check(sealed(made), KEYS[str]) == 5
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("bits", [9, 16, 24, 32, 40, 255])
def test_more_pages_than_the_file_has_room_for_are_an_error(bits: int) -> None:
    made = bytearray(table(str))
    made[9] = bits
    assert check(sealed(made), KEYS[str]) == 5


def test_rows_of_another_chunk_than_the_directory_counts_are_an_error() -> None:
    made = bytearray(table(str))
    at = sections(made)["chunk"]
    chunk = int.from_bytes(made[at : at + 4], "little")
    made[at : at + 4] = (1 - chunk if chunk < 2 else 0).to_bytes(4, "little")
    with pytest.raises(Corrupt, match="directory"):
        KeyTable(sealed(made), "t.keys").to_rows()


def test_steps_that_overflow_are_no_order() -> None:
    """Each step between the pages is positive in 64 bits, and they end where the pages end."""
    made = bytearray(packed([list(range(200))]))
    bits = HEADER.unpack_from(made)[2]
    at = HEADER_SIZE + room(4 * ((1 << bits) + 1))
    for i, offset in ((1, 1 << 62), (2, 1 << 63), (3, 3 << 62)):
        made[at + 8 * i : at + 8 * i + 8] = (offset).to_bytes(8, "little")
    assert bits >= 2
    assert check(sealed(made), [1]) == 5
    for key in range(200):
        with pytest.raises(Corrupt, match="do not fit its rows"):
            KeyTable(sealed(made), "t.keys").look_up(*hashed_key(key))


def test_keys_that_are_no_text_are_an_error_when_they_are_told() -> None:
    made = bytearray(table(str))
    made[made.index(b"k1")] = 0xFF
    opened = KeyTable(sealed(made), "t.keys")
    with pytest.raises(Corrupt, match=r"t\.keys"):
        dict(opened)
    with pytest.raises(Corrupt, match=r"t\.keys"):
        [opened.keys_of(chunk) for chunk in ("c0", "c1")]
    join_tables([opened, opened], ["c0"])


# --- tables of earlier versions -----------------------------------------------------------------------------------------


def columns(kind: type, wrong: dict[str, dict[int, int]] | None = None) -> bytes:
    """Return a table of an earlier version, in which some numbers of some columns are others."""
    keys = KeyColumn.of(KEYS[kind])
    keys = keys.take(np.argsort(keys.hashes))
    count, directory = len(keys), b'[["c0",%d,0],["z",0,2]]' % len(keys)
    slots = np.arange(count, dtype="<u4")
    stored = keys.bounds if kind is str else np.frombuffer(keys.heap, "<u8")
    parts = {"hashes": keys.hashes, "bounds": stored, "chunks": np.zeros(count, "<u4"), "slots": slots, "order": slots}
    made, wrong = {name: part.copy() for name, part in parts.items()}, wrong or {}
    for name, numbers in wrong.items():
        if name != "header":
            for i, number in numbers.items():
                made[name][i] = number % (1 << 8 * made[name].itemsize)
    heap = bytes(keys.heap) if kind is str else b""
    fields = [int(kind is int), count, count, len(directory), len(heap)]
    for i, number in wrong.get("header", {}).items():
        fields[i] = number
    body = [part.tobytes() for part in made.values()] + [directory, heap, np.array([3, 5], "<u4").tobytes()]
    header, body = COLUMNS_HEADER.pack(b"LSKEYS03", *fields), [part + bytes(-len(part) % 8) for part in body]
    return header + CHECK.pack(checksum([header, *body])) + b"".join(body)


@pytest.mark.parametrize("kind", [str, int])
def test_tables_of_earlier_versions_are_read(kind: type) -> None:
    made = KeyTable(columns(kind), "t.keys")
    assert sorted(key for key, _ in made) == sorted(KEYS[kind])
    assert {name: free.tolist() for name, free in made.removed.items()} == {"z": [3, 5]}
    made.check()
    ask_whole(made, KEYS[kind])


@pytest.mark.parametrize(
    "wrong",
    [
        *({"bounds": {5: far}} for far in (1 << 29, 1 << 34, 1 << 62, 1 << 63, (1 << 64) - 1)),
        *({"bounds": {5: far, 6: far}} for far in (1 << 29, 0)),
        *({"bounds": {40: far}} for far in (0, 1 << 29, 1 << 63)),
        {"bounds": {0: 1}},
        *({"chunks": {3: number}} for number in (1, 7, DELETED, DELETED - 1)),
        *({"hashes": {3: number}} for number in (0, (1 << 64) - 1)),
        {"header": {0: 2}},
        *({"header": {i: number}} for i in (1, 2, 3, 4) for number in (0, 39, 41, 1 << 32, 1 << 63, (1 << 64) - 1)),
    ],
)
def test_wrong_numbers_in_tables_of_earlier_versions_are_an_error(wrong: dict[str, dict[int, int]]) -> None:
    made = columns(str, wrong)
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt, match=r"t\.keys"):
            KeyTable(made, "t.keys")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@given(
    st.sampled_from([str, int]),
    st.dictionaries(st.sampled_from(["bounds", "chunks", "hashes", "slots"]), st.dictionaries(st.integers(0, 39), NUMBERS)),
)
def test_numbers_anywhere_in_tables_of_earlier_versions_are_an_error_of_ours(kind: type, wrong: dict[str, dict[int, int]]) -> None:
    try:
        made = KeyTable(columns(kind, wrong), "t.keys")
    except Corrupt as error:
        assert error.file == "t.keys"  # noqa: PT017
    else:
        made.to_rows()
        dict(made)


def test_keys_that_stand_twice_in_a_table_of_an_earlier_version_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KEYS, int, [1, 1, 2])
    with pytest.raises(Corrupt, match=r"t\.keys: .*twice"):
        KeyTable(columns(int), "t.keys")


# --- datasets -----------------------------------------------------------------------------------------------------------


def crafted(folder: Path, change: Callable[[Rows, KeyTable], Rows]) -> str:
    """Write a dataset of twenty samples in two chunks, replace its key table by another one, and return its name."""
    write_dataset(folder, [{"id": f"k{number}", "n": number} for number in range(20)], key="id", chunk_size=10)
    head = json.loads((folder / "index.json").read_bytes())
    head["edit"]["key_files"].pop("sizes")
    (folder / "index.json").write_text(json.dumps(head))
    (name,) = head["edit"]["key_files"]["base"]
    made = KeyTable((folder / name).read_bytes())
    (folder / name).unlink()
    (folder / name).write_bytes(b"".join(pack_table(change(made.to_rows(), made))))
    return str(name)


def other_slot(slot: int) -> Callable[[Rows, KeyTable], Rows]:
    def change(rows: Rows, made: KeyTable) -> Rows:
        slots = rows.slots.copy()
        slots[made.find("k3")] = slot
        return Rows(rows.keys, rows.chunks, slots, rows.directory)

    return change


def other_chunks(rows: Rows, made: KeyTable) -> Rows:
    """Eight samples of the first chunk, and twelve of the second one."""
    chunks, slots = rows.chunks.copy(), rows.slots.copy()
    for number in range(20):
        row = made.find(f"k{number}")
        chunks[row], slots[row] = (0, number) if number < 8 else (1, number - 8)
    (first, _), (second, _) = rows.directory
    return Rows(rows.keys, chunks, slots, [(first, 8), (second, 12)])


@pytest.mark.parametrize("slot", [10, 77, (1 << 32) - 1])
@pytest.mark.parametrize(
    "look",
    [
        lambda dataset: dataset["k3"],
        lambda dataset: dataset.get_by_keys(["k4", "k3"]),
        lambda dataset: dataset.keys.positions(["k3"]),
        lambda dataset: dataset.key_at(3),
        lambda dataset: list(dataset.keys),
    ],
)
def test_a_slot_that_its_chunk_does_not_have_is_damage(tmp_path: Path, slot: int, look: Callable[[Any], Any]) -> None:
    name = crafted(tmp_path, other_slot(slot))
    dataset = liveset.StreamingDataset(tmp_path)
    with pytest.raises(Corrupt) as caught:
        look(dataset)
    assert caught.value.file == name
    assert dataset["k5"]["n"] == 5


@pytest.mark.parametrize(
    "look",
    [
        lambda dataset: dataset["k19"],
        lambda dataset: dataset.key_at(9),
        lambda dataset: list(dataset.keys),
        lambda dataset: dataset.keys.to_arrow(),
    ],
)
def test_a_table_with_other_samples_of_a_chunk_is_damage(tmp_path: Path, look: Callable[[Any], Any]) -> None:
    name = crafted(tmp_path, other_chunks)
    with pytest.raises(Corrupt, match="other samples") as caught:
        look(liveset.StreamingDataset(tmp_path))
    assert caught.value.file == name
