"""StoreTests: what every store must do. Subclass it in a test module, with a fixture ``store`` that gives an empty one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, ClassVar

import pytest

from liveset.errors import Corrupt, ForeignEdit, NotFound, StorageError
from liveset.storage import HEAD, Store, Swap, version_name

__all__ = ["StoreTests"]


class StoreTests:
    """The contract of a store, as tests.

    Attributes:
        refusals: what a swap may answer whose condition does not hold. A store that may have been asked twice cannot say more than UNKNOWN.
        overwrites: whether `write` and `copy` replace a file of the same name, as they must where a request may be repeated.
        turns: how often threads race; some object stores take a second for each lost race.
    """

    refusals: ClassVar[Collection[Swap]] = (Swap.LOST,)
    overwrites: ClassVar[bool] = False
    turns: ClassVar[int] = 10

    def test_an_empty_store_has_no_head_and_no_files(self, store: Store) -> None:
        assert store.read_head() is None
        assert list(store.list("")) == []

    def test_what_is_written_is_read(self, store: Store) -> None:
        store.write("a.bin", b"0123456789")
        assert store.read("a.bin") == b"0123456789"
        assert store.read("a.bin", 3) == b"3456789"
        assert store.read("a.bin", 3, 4) == b"3456"
        assert store.read("a.bin", 8, 100) == b"89"
        assert store.read("a.bin", 10) == b""
        assert bytes(store.map("a.bin", 10)) == b"0123456789"

    def test_many_buffers_make_one_file(self, store: Store) -> None:
        parts: list[Any] = [bytes([i % 256]) * (i % 7) for i in range(3000)]
        parts[5] = bytearray(b"xyz")
        parts[6] = memoryview(b"uvw")[1:]
        store.write("many.bin", parts)
        assert store.read("many.bin") == b"".join(parts)
        store.write("none.bin", [])
        assert store.read("none.bin") == b""

    def test_wide_items_count_as_bytes(self, store: Store) -> None:
        store.write("wide.bin", memoryview(b"abcdefgh").cast("I"))
        assert store.read("wide.bin") == b"abcdefgh"

    def test_an_empty_file_can_be_mapped(self, store: Store) -> None:
        store.write("empty.bin", b"")
        assert bytes(store.map("empty.bin", 0)) == b""

    def test_maps_are_read_only(self, store: Store) -> None:
        store.write("a.bin", b"abc")
        with pytest.raises(TypeError):
            store.map("a.bin", 3)[0] = 1

    def test_a_missing_file_is_named(self, store: Store) -> None:
        for look in (lambda: store.read("absent.bin"), lambda: store.map("absent.bin", 1)):
            with pytest.raises(NotFound, match=r"absent\.bin") as info:
                look()
            assert isinstance(info.value, FileNotFoundError)
            assert "absent.bin" in str(copy.copy(info.value))

    def test_a_short_file_is_corrupt_and_named(self, store: Store) -> None:
        store.write("short.bin", b"abc")
        with pytest.raises(Corrupt, match=r"short\.bin.*3 of 4"):
            store.map("short.bin", 4)
        assert bytes(store.map("short.bin", 2)) == b"abc"

    def test_a_name_is_written_once(self, store: Store) -> None:
        store.write("a.bin", b"first")
        with nullcontext() if self.overwrites else pytest.raises(StorageError, match=r"a\.bin"):
            store.write("a.bin", b"second")
        assert store.read("a.bin") == (b"second" if self.overwrites else b"first")

    @pytest.mark.parametrize("name", ["../out.bin", "/etc/out.bin", "a/../../out", "", ".", "a//b", "a\\b", "a\0b", "./a", "a/"])
    def test_names_cannot_leave_the_store(self, store: Store, name: str) -> None:
        store.write("inside.bin", b"1")
        for act in (
            lambda: store.write(name, b""),
            lambda: store.read(name),
            lambda: store.map(name, 0),
            lambda: store.write_once(name, b""),
            lambda: store.delete([name]),
        ):
            with pytest.raises(ValueError, match="inside the dataset"):
                act()

    def test_write_once_accepts_equal_bytes_only(self, store: Store) -> None:
        store.write_once("_liveset/versions/00000001.json", b"one")
        store.write_once("_liveset/versions/00000001.json", b"one")
        with pytest.raises(ForeignEdit, match="00000001"):
            store.write_once("_liveset/versions/00000001.json", b"two")
        assert store.read("_liveset/versions/00000001.json") == b"one"

    def test_a_copy_has_the_bytes_and_outlives_the_original(self, store: Store) -> None:
        store.write("chunk-0-0.bin", b"bytes")
        store.copy("chunk-0-0.bin", "chunk-0-0-00ff.bin")
        with nullcontext() if self.overwrites else pytest.raises(StorageError):
            store.copy("chunk-0-0.bin", "chunk-0-0-00ff.bin")
        store.delete(["chunk-0-0.bin"])
        assert store.read("chunk-0-0-00ff.bin") == b"bytes"
        with pytest.raises(NotFound):
            store.copy("absent.bin", "chunk-0-1-00ff.bin")

    def test_archiving_the_head_keeps_its_bytes(self, store: Store) -> None:
        store.swap_head(b"head 1", None)
        head = store.read_head()
        assert head is not None
        store.write_once(version_name(1), head.data)
        assert store.swap_head(b"head 2", head.tag) is Swap.SWAPPED
        assert store.read(version_name(1)) == b"head 1"
        # Another head stands there now: the bytes given count, not the file.
        store.write_once(version_name(0), b"head 0")
        assert store.read(version_name(0)) == b"head 0"

    def test_the_head_is_swapped_only_if_it_is_the_expected_one(self, store: Store) -> None:
        assert store.swap_head(b"one", None) is Swap.SWAPPED
        assert store.swap_head(b"other", None) in self.refusals
        one = store.read_head()
        assert one is not None
        assert one.data == b"one"
        assert store.swap_head(b"two", one.tag) is Swap.SWAPPED
        assert store.swap_head(b"three", one.tag) in self.refusals
        two = store.read_head()
        assert two is not None
        assert two.data == b"two"
        assert two.tag != one.tag

    def test_a_tag_for_no_head_does_not_create_one(self, store: Store) -> None:
        store.swap_head(b"one", None)
        head = store.read_head()
        assert head is not None
        store.delete(["index.json"])
        assert store.swap_head(b"two", head.tag) in self.refusals
        assert store.read_head() is None

    def test_published_files_are_replaced_only_beside_their_head(self, store: Store) -> None:
        store.swap_head(b"one", None)
        one = store.read_head()
        assert one is not None
        assert store.publish("keys/shard-00000.parquet", b"first", one.tag)
        assert store.publish("keys/shard-00000.parquet", [b"sec", b"ond"], one.tag)
        assert store.read("keys/shard-00000.parquet") == b"second"
        store.swap_head(b"two", one.tag)
        assert not store.publish("keys/shard-00000.parquet", b"late", one.tag)
        assert store.read("keys/shard-00000.parquet") == b"second"

    def test_a_swap_withdraws_published_files_only_when_it_succeeds(self, store: Store) -> None:
        store.swap_head(b"one", None)
        one = store.read_head()
        assert one is not None
        store.publish("keys/shard-00000.parquet", b"keys", one.tag)
        names = ["keys/shard-00000.parquet", "keys/absent.parquet"]
        assert store.swap_head(b"lost", None, names) in self.refusals
        assert store.read("keys/shard-00000.parquet") == b"keys"
        assert store.swap_head(b"two", one.tag, names) is Swap.SWAPPED
        assert list(store.list("keys/")) == []

    def test_a_head_that_was_removed_is_put_back(self, store: Store) -> None:
        store.swap_head(b"one", None)
        one = store.read_head()
        assert one is not None
        store.publish("keys/shard-00000.parquet", b"keys", one.tag)
        store.delete([HEAD])
        names = ["keys/shard-00000.parquet", "keys/absent.parquet"]
        assert store.swap_head(b"lost", one.tag, names) in self.refusals
        assert store.read("keys/shard-00000.parquet") == b"keys"
        assert store.swap_head(b"two", None, names) is Swap.SWAPPED
        assert list(store.list("keys/")) == []
        two = store.read_head()
        assert two is not None
        assert two.data == b"two"
        store.publish("keys/shard-00000.parquet", b"keys", two.tag)
        assert store.swap_head(b"three", None, names) in self.refusals
        assert store.read("keys/shard-00000.parquet") == b"keys"

    def test_listing_goes_by_prefix(self, store: Store) -> None:
        before = store.now()
        for name in ("a-1.bin", "a-2.bin", "b.bin", "_liveset/staged/r/a-3.bin", "_liveset/x.json"):
            store.write(name, b"123")
        assert {entry.name for entry in store.list("a-")} == {"a-1.bin", "a-2.bin"}
        assert {entry.name for entry in store.list("_liveset/")} == {"_liveset/staged/r/a-3.bin", "_liveset/x.json"}
        assert {entry.name for entry in store.list("_liveset/staged/r/a")} == {"_liveset/staged/r/a-3.bin"}
        assert len(list(store.list(""))) == 5
        assert list(store.list("nothing/here")) == []
        after = store.now()
        for entry in store.list(""):
            assert entry.size == 3
            assert before - timedelta(seconds=1) <= entry.modified <= after + timedelta(seconds=1)

    def test_deleting_what_is_not_there_is_fine(self, store: Store) -> None:
        store.write("a.bin", b"1")
        store.delete(["absent.bin", "a.bin", "no/such/folder.bin"])
        assert list(store.list("a")) == []

    def test_one_of_many_threads_wins_each_swap(self, store: Store) -> None:
        assert store.swap_head(b"start", None) is Swap.SWAPPED
        start = threading.Barrier(4)
        won: list[str] = []

        def writer(number: int) -> None:
            for turn in range(self.turns):
                start.wait(30)
                head = store.read_head()
                assert head is not None
                start.wait(30)
                if store.swap_head(f"{number}.{turn}".encode(), head.tag) is Swap.SWAPPED:
                    won.append(f"{turn}")

        threads = [threading.Thread(target=writer, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(won, key=int) == [str(turn) for turn in range(self.turns)]
