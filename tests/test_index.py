"""The index: what is read survives a rewrite, and what is damaged says so."""

from __future__ import annotations

import json
import pickle
import timeit
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveset.errors import Corrupt, UnsupportedFormat
from liveset.format.index import ChunkRecord, Index
from liveset.format.stamp import EditStamp, HistoryEntry

CONFIG = {"compression": None, "data_format": ["int"], "data_spec": "spec", "chunk_bytes": 64_000_000}
STAMP = EditStamp(
    2, "0123.0", "job", "append", "2030-01-01T00:00:00.000001+00:00", parent=(1, "ab.0"), history=(HistoryEntry(1, "ab.0", "append", "t"),)
)


def head(**changes: Any) -> dict[str, Any]:
    document = {"chunks": [{"filename": "chunk-0-0.bin", "chunk_size": 3, "chunk_bytes": 74, "dim": None}], "config": CONFIG}
    return {name: value for name, value in (document | changes).items() if value is not ...}


def parse(document: Any) -> Index:
    return Index.parse(json.dumps(document).encode(), "/data/index.json")


def stamped(**changes: Any) -> dict[str, Any]:
    edit: dict[str, Any] = STAMP.to_json() | changes
    return head(edit={name: value for name, value in edit.items() if value is not ...})


def test_an_index_of_the_old_tool_is_read() -> None:
    index = parse(head(updated_at="1796038781.0785484", keys={"num_shards": 1}))
    assert index.chunks == (ChunkRecord("chunk-0-0.bin", 3, 74),)
    assert (index.version, index.id, index.edit, index.samples, index.size) == (0, None, None, 3, 74)
    assert index.digest_matches()
    assert index.to_bytes() == json.dumps(head(updated_at="1796038781.0785484", keys={"num_shards": 1})).encode()


def test_a_dataset_without_chunks_is_valid() -> None:
    for config in (None, CONFIG):
        index = parse(head(chunks=[], config=config))
        assert (index.samples, index.size, index.config) == (0, 0, config)


def test_built_indexes_read_back_and_look_like_those_of_python() -> None:
    record = ChunkRecord("a-é😀.bin", 3, 74, None, "id.0", "xxh3:12", "xxh3:34", {"theirs": [1, 2.5, None]})
    index = Index.build(
        chunks=[record], config=CONFIG | {"big": 2**80}, attributes={"name": "größe"}, edit=STAMP, members={"updated_at": b'"1"'}
    )
    assert index.chunks == (record,)
    assert index.attributes == {"name": "größe"}
    assert index.edit is not None
    assert index.edit == STAMP.with_digest(index.digest)
    assert index.digest_matches()
    assert json.dumps(json.loads(index.to_bytes()), sort_keys=True).encode() == index.to_bytes()


def test_records_round_trip() -> None:
    entry = {
        "filename": "a.bin",
        "chunk_size": 1,
        "chunk_bytes": 2,
        "dim": 5,
        "id": "x",
        "check": "c",
        "head_check": "h",
        "column_sizes": [1],
        "extra": {},
    }
    record = ChunkRecord.from_json(entry)
    assert record.extra == {"column_sizes": [1], "extra": {}}
    assert record.to_json() == entry
    assert pickle.loads(pickle.dumps(record)) == record
    assert record.replace(samples=9).samples == 9
    assert "id" not in ChunkRecord("a.bin", 1, 2).to_json()


def test_members_of_one_record_do_not_hide_those_of_others() -> None:
    first, second = {"filename": "a", "chunk_size": 1, "chunk_bytes": 1, "x": 1}, {"filename": "b", "chunk_size": 1, "chunk_bytes": 1}
    assert [record.extra for record in parse(head(chunks=[first, second])).chunks] == [{"x": 1}, {}]


def test_the_digest_sees_every_member_but_stamp_and_keys() -> None:
    index = Index.build(chunks=[ChunkRecord("a", 1, 1)], config=CONFIG, edit=STAMP, members={"updated_at": b'"1"'})
    document = json.loads(index.to_bytes())
    # What an old tool does when it rebuilds its key index: it writes everything again, with `keys` changed.
    assert parse(document | {"keys": {"num_shards": 4}}).digest_matches()
    for change in (
        {"chunks": [*document["chunks"], {"filename": "b", "chunk_size": 1, "chunk_bytes": 1}]},
        {"updated_at": "2"},
        {"new": 1},
        {"config": CONFIG | {"x": 1}},
    ):
        assert not parse(document | change).digest_matches()
    assert not parse({name: value for name, value in document.items() if name != "updated_at"}).digest_matches()


def test_a_rewrite_renews_the_digest() -> None:
    index = Index.build(chunks=[], config=None, edit=STAMP)
    assert index.replace(attributes={"a": 1}).digest_matches()
    assert index.replace(attributes={"a": 1}).digest != index.digest


def test_indexes_are_pickled_as_their_bytes() -> None:
    index = parse(head(updated_at="1", strange=[1]))
    copy = pickle.loads(pickle.dumps(index))
    assert copy == index
    assert (copy.chunks, copy.file, copy.members) == (index.chunks, index.file, index.members)


DAMAGED: dict[str, tuple[Any, str]] = {
    "no chunks": (head(chunks=...), "no member `chunks`"),
    "no config": (head(config=...), "no member `config`"),
    "chunks is null": (head(chunks=None), "chunks"),
    "config is a list": (head(config=[]), "config"),
    "null config with chunks": (head(config=None), "`config` is null"),
    "an array": ([], "object"),
    "no filename": (head(chunks=[{"chunk_size": 1, "chunk_bytes": 1}]), "filename"),
    "no chunk_size": (head(chunks=[{"filename": "a", "chunk_bytes": 1}]), "chunk_size"),
    "no chunk_bytes": (head(chunks=[{"filename": "a", "chunk_size": 1}]), "chunk_bytes"),
    "negative size": (head(chunks=[{"filename": "a", "chunk_size": -1, "chunk_bytes": 1}]), r"chunks\[0\]\.chunk_size"),
    "text as size": (head(chunks=[{"filename": "a", "chunk_size": "1", "chunk_bytes": 1}]), r"chunks\[0\]\.chunk_size"),
    "true as size": (head(chunks=[{"filename": "a", "chunk_size": True, "chunk_bytes": 1}]), r"chunks\[0\]\.chunk_size"),
    "same chunk twice": (head(chunks=head()["chunks"] * 2), "twice"),
    "attributes is a list": (head(attributes=[]), "attributes"),
    "edit is null": (head(edit=None), "edit"),
    "config.data_format is text": (head(config=CONFIG | {"data_format": "int"}), "data_format"),
    "config.data_spec is a number": (head(config=CONFIG | {"data_spec": 1}), "data_spec"),
    "config.compression is a number": (head(config=CONFIG | {"compression": 1}), "compression"),
    "edit.format is missing": (stamped(format=...), r"edit\.format"),
    "edit.version is 0": (stamped(version=0), r"edit\.version"),
    "edit.version is text": (stamped(version="1"), r"edit\.version"),
    "edit.id is missing": (stamped(id=...), r"edit\.id"),
    "edit.op is missing": (stamped(op=...), r"edit\.op"),
    "edit.committed_at is no time": (stamped(committed_at="yesterday"), r"edit\.committed_at"),
    "edit.committed_at has no zone": (stamped(committed_at="2030-01-01T00:00:00"), r"edit\.committed_at"),
    "edit.parent is a list": (stamped(parent=[1]), r"edit\.parent"),
    "edit.history is text": (stamped(history="x"), r"edit\.history"),
    "edit.history has a short entry": (stamped(history=[[1, "a"]]), r"edit\.history"),
    "edit.requires is a list": (stamped(requires=[]), r"edit\.requires"),
    "edit.requires.read is text": (stamped(requires={"read": "x"}), r"edit\.requires"),
    "edit.session is a number": (stamped(session=1), "session"),
}


@pytest.mark.parametrize(("document", "words"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_index_names_file_and_place(document: Any, words: str) -> None:
    with pytest.raises(Corrupt, match=words) as info:
        parse(document)
    assert info.value.file == "/data/index.json"
    assert "/data/index.json" in str(info.value)


@pytest.mark.parametrize("name", ["compression", "data_format", "data_spec"])
def test_each_needed_member_of_the_config_is_missed(name: str) -> None:
    with pytest.raises(Corrupt, match=f"`config` has no member `{name}`"):
        parse(head(config={key: value for key, value in CONFIG.items() if key != name}))


NAMES = ["", "/etc/passwd", "../x", "a/../../x", "..", ".", "a/./b", "./a", "a/.", "a//b", "a/", "a\\b", "..\\x", "a\0b", "\0"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("around", [0, 3])
def test_names_that_leave_the_dataset_are_refused(name: str, around: int) -> None:
    names = [*(f"a{i}" for i in range(around)), name, *(f"b{i}" for i in range(around))]
    with pytest.raises(Corrupt, match=rf"chunks\[{around}\]\.filename"):
        parse(head(chunks=[{"filename": name, "chunk_size": 1, "chunk_bytes": 1} for name in names]))


@pytest.mark.parametrize(
    "name", ["a", "..a", "a..b", "a...", "sub/chunk.bin", "...", ".hidden", "a/..b/c", "chunk-0-0.zstd:3.bin", "ünï😀"]
)
def test_plain_names_are_accepted(name: str) -> None:
    assert parse(head(chunks=[{"filename": name, "chunk_size": 1, "chunk_bytes": 1}])).chunks[0].filename == name


def test_every_truncation_is_corrupt() -> None:
    data = Index.build(chunks=[ChunkRecord("a", 1, 1, extra={"x": 1})], config=CONFIG, edit=STAMP).to_bytes()
    for length in range(len(data)):
        with pytest.raises(Corrupt, match=r"index\.json is damaged"):
            Index.parse(data[:length])
    with pytest.raises(Corrupt, match="truncated"):
        Index.parse(data[:100])


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xfe",
        b"\x00" * 50,
        b"[" * 100_000,
        b'{"chunks": ' + b"[" * 100_000,
        b'{"chunks": [], "config": null} x',
        b'{"chunks": [], "config": {"x": "\\ud800"}}',
    ],
)
def test_garbage_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        Index.parse(data)


def test_what_a_newer_liveset_wrote_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedFormat, match=r"index\.json.*edit\.format is 2"):
        parse(stamped(format=2))
    with pytest.raises(UnsupportedFormat, match=r"index\.json.*'paged_chunks'"):
        parse(stamped(requires={"read": ["paged_chunks"], "write": []}))
    # Even where the rest can no longer be understood.
    with pytest.raises(UnsupportedFormat, match="newer"):
        parse(stamped(format=2) | {"chunks": {"pages": []}})


def test_what_only_writers_must_know_does_not_keep_readers_out() -> None:
    index = parse(stamped(requires={"read": [], "write": ["seals"]}, seals={"version": 1}))
    assert index.edit is not None
    assert index.edit.requires_write == ("seals",)
    assert index.edit.extra == {"seals": {"version": 1}}
    assert json.loads(index.replace().to_bytes())["edit"]["seals"] == {"version": 1}


def test_longer_entries_of_history_are_understood() -> None:
    index = parse(stamped(history=[[1, "a", "append", "t", "s", "m", "who", "more"], [0, "b", "append", "t"]]))
    assert index.edit is not None
    assert index.edit.history == (HistoryEntry(1, "a", "append", "t", "s", "m", "who"), HistoryEntry(0, "b", "append", "t"))


def test_a_mosaic_index_is_told_apart() -> None:
    with pytest.raises(UnsupportedFormat, match="MosaicML"):
        parse({"shards": [], "version": 2})


@pytest.mark.parametrize(("level", "whole"), [(None, True), ("chunk", True), ("batch", False), ("sample", False)])
def test_sizes_of_files_are_unknown_where_whole_files_are_compressed(level: str | None, whole: bool) -> None:
    assert parse(head(config=CONFIG | {"compression": "zstd", "compression_level": level})).compressed_files is whole
    assert not parse(head()).compressed_files


def test_parsing_many_chunks_costs_no_more_than_reading_the_json() -> None:
    records = [
        ChunkRecord(f"chunk-0-{i}-{i:016x}.bin", 100, i, id=f"{i:016x}.0", check=f"xxh3:{i:016x}", head_check=f"xxh3:{i:016x}")
        for i in range(20_000)
    ]
    data = Index.build(chunks=records, config=CONFIG).to_bytes()

    def best(work: Callable[[bytes], object]) -> float:
        return min(timeit.repeat(lambda: work(data), number=1, repeat=5))

    # A ratio within one run, so that a slow machine changes nothing. It is about 1; a dict for each chunk would make it 2.2.
    assert best(Index.parse) < 1.7 * best(json.loads)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3),
    max_leaves=6,
)


def members(*known: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])).filter(lambda name: name not in known), JSON, max_size=3)


@given(
    top=members("chunks", "config", "attributes", "edit", "shards"),
    config=members("compression", "data_format", "data_spec"),
    chunks=st.lists(members("filename", "chunk_size", "chunk_bytes", "dim", "id", "check", "head_check"), max_size=3),
    edit=members(*STAMP.to_json()),
    attributes=members(),
)
def test_unknown_members_survive_a_rewrite(top: Any, config: Any, chunks: Any, edit: Any, attributes: Any) -> None:
    entries = [{"filename": f"{i}", "chunk_size": i, "chunk_bytes": 1, "dim": None, **extra} for i, extra in enumerate(chunks)]
    document = {**top, "chunks": entries, "config": CONFIG | config, "edit": STAMP.to_json() | edit, "attributes": attributes}
    index = parse(document)
    again = index.replace()
    written = json.loads(again.to_bytes())
    wanted = document if attributes else {name: value for name, value in document.items() if name != "attributes"}
    written["edit"].pop("digest")
    wanted["edit"].pop("digest")
    assert _exact(written) == _exact(wanted)
    assert again.digest_matches()
    assert again.replace() == again


def _exact(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
