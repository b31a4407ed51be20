"""What a commit says when an object store does not: lost answers, late refusals, and stores that do not keep their conditions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

import liveset
from liveset.errors import AccessDenied, CommitUnknown, DatasetError, StorageError, UnsafeStore
from liveset.storage import Place, Swap, remote, version_name
from liveset.testing.invariants import check_dataset
from tests.support.remote import place_at, store_at
from tests.support.services import RemoteFolder
from tests.support.stub_server import StubServer

LOST = ["500-after", "cut-after", "stall-after", "409-before", "503-before", "cut-before", "stall-before"]
FILES = {"chunk": r"chunk-.*\.bin$", "keys": r"_liveset/keys/", "archive": r"_liveset/versions/", "head": r"index\.json$"}
# Answers come at once here, so a client that waits no longer than this loses none
IMPATIENT = {"client_options": {"allow_http": True, "timeout": "400ms"}, "retry_timeout": 5}


def nightly(*values: Any) -> Any:
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


@pytest.fixture(params=["s3", "gs"])
def server(request: pytest.FixtureRequest) -> Iterator[StubServer]:
    with StubServer(request.param) as server:
        yield server


def make(number: int) -> dict[str, Any]:
    return {"id": f"k{number}", "x": number}


def write(place: Place, count: int = 6) -> Place:
    liveset.optimize(make, range(count), place, chunk_size=4, key_fn="id", num_workers=1, verbose=False, session="first")
    return place


@pytest.fixture
def place(server: StubServer) -> Place:
    return write(place_at(server.root / "plays", **IMPATIENT))


def contents(place: Place) -> dict[str | int, int]:
    dataset = liveset.StreamingDataset(place)
    return {key: sample["x"] for key, sample in zip(dataset.keys, dataset, strict=True)}


BEFORE: dict[str | int, int] = {f"k{number}": number for number in range(6)}
AFTER = {**BEFORE, "k3": -3, "new": 9}


def edit(place: Place, session: str | None = "job", value: int = -3) -> None:
    update = liveset.dataset_update(place, session=session)
    update["k3"] = {"id": "k3", "x": value}
    update.upsert("new", {"id": "new", "x": 9})
    update.commit()


def committed(place: Place, session: str = "job") -> int:
    """How often a session was committed, which `was_committed` has to know."""
    times = [version.session for version in liveset.history(place)].count(session)
    assert liveset.was_committed(place, session) == (times > 0)
    return times


def failure_of(act: Callable[[], object]) -> DatasetError | None:
    try:
        act()
    except DatasetError as error:
        return error
    return None


def settle(server: StubServer, place: Place) -> None:
    """Whatever was said: a retry of the same session makes it one commit, and everything is whole."""
    server.stop_acting()
    edit(place)
    assert committed(place) == 1
    assert contents(place) == AFTER
    assert liveset.verify(place).ok
    check_dataset(store_at(RemoteFolder(server.root.scheme, server.root.endpoint, "plays")))


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("act", LOST)
@pytest.mark.parametrize("times", [1, *nightly(2)])
def test_a_lost_answer_loses_nothing(server: StubServer, place: Place, act: str, file: str, times: int) -> None:
    server.act(act, match=FILES[file], times=times)
    edit(place, None)  # a name would keep a second commit from being made
    assert [version.version for version in liveset.history(place)] == [2, 1]
    assert contents(place) == AFTER
    assert server.acts_left < times
    assert liveset.verify(place).ok


@pytest.mark.parametrize(
    "act", ["503-before", "cut-after", "stall-before", *nightly("500-after", "stall-after", "409-before", "cut-before")]
)
@pytest.mark.parametrize("file", ["head", "chunk", *nightly("archive")])
def test_a_store_that_never_answers_is_not_taken_for_one_that_does(stub: StubServer, act: str, file: str) -> None:
    server, place = stub, write(place_at(stub.root / "plays", **IMPATIENT))
    server.act(act, match=FILES[file], times=1_000_000)
    limited = Place(place.url, storage_options={**(place.storage_options or {}), "retry_timeout": 1}, cache_dir=False)
    failure = failure_of(partial(edit, limited))
    server.stop_acting()
    if failure is None:  # the requests were carried out, and that was read back
        assert committed(place) == 1
        assert contents(place) == AFTER
    elif file != "head":
        assert committed(place) == 0
        assert contents(place) == BEFORE
    else:
        assert contents(place) == (AFTER if committed(place) else BEFORE)
    if failure is not None:
        assert "plays" in str(failure)
        assert isinstance(failure, CommitUnknown if file == "head" else StorageError), failure
    settle(server, place)


@pytest.mark.parametrize("act", LOST)
@pytest.mark.parametrize("file", ["head", "probe", *nightly("chunk", "keys")])
def test_a_first_commit_loses_nothing(server: StubServer, act: str, file: str) -> None:
    place = place_at(server.root / "plays", **IMPATIENT)
    server.act(act, match=FILES.get(file, file))
    try:
        write(place)
    except CommitUnknown:
        assert file == "head"
        write(place)
    assert server.acts_left == 0
    assert committed(place, "first") == 1
    assert contents(place) == BEFORE


def test_a_late_refusal_is_no_failure(server: StubServer, place: Place) -> None:
    """The request was carried out, its answer lost, and the one that repeats it meets rights that have ended."""
    server.act("500-after", match=FILES["head"])
    server.act("403-before", match=FILES["head"])
    edit(place)
    assert committed(place) == 1
    server.act("403-before", match=FILES["head"])
    with pytest.raises(AccessDenied):
        edit(place, "other", -4)
    assert committed(place, "other") == 0
    assert contents(place) == AFTER


def test_commits_of_others_between_the_sends_are_seen(server: StubServer, place: Place) -> None:
    """Our answer is lost, and somebody builds on our commit before we look."""
    store = store_at(server.root / "plays")
    head = store.read_head()
    assert head is not None
    server.act("cut-after", match=FILES["head"])
    edit(place)
    edit_again = liveset.dataset_update(place)
    edit_again["k1"] = {"id": "k1", "x": -1}
    edit_again.commit()
    assert store.swap_head(b"late", head.tag) is Swap.UNKNOWN, "the tag of a head that was replaced never matches again"
    assert contents(place) == {**AFTER, "k1": -1}
    assert committed(place) == 1


@pytest.mark.parametrize("act", ["short-body", "cut-body", "503-before", "stall-before", "cut-before"])
def test_reads_go_on(server: StubServer, place: Place, act: str) -> None:
    for match in FILES.values():
        server.act(act, method="GET", match=match)
    if act == "short-body":
        with pytest.raises(DatasetError):
            contents(place)
        for _ in range(4):  # each file is met anew
            try:
                found = contents(place)
            except DatasetError:
                continue
    else:
        found = contents(place)
    assert found == BEFORE


# --- stores that do not keep their conditions -------------------------------------------------------------------------

UNSAFE = r"overwrites an object although the request says not to.*Nothing was committed.*liveset cp"


def double(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "x": 2 * sample["x"]}


def writers(place: Place) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "optimize", partial(write, place)
    yield "append", partial(liveset.optimize, make, [7], place, mode="append", key_fn="id", num_workers=1, verbose=False)
    yield "update", partial(edit, place)
    yield "transform", partial(liveset.transform, place, double, num_workers=1)
    yield "compact", partial(liveset.compact, place)
    yield "tag", partial(liveset.tag, place, "paper")
    yield "purge", partial(liveset.purge, place, ["k1"])
    yield "vacuum", partial(liveset.vacuum, place, keep=0, grace=timedelta(0))
    yield "attributes", partial(liveset.set_attributes, place, {"name": "new"})


@pytest.mark.parametrize("dialect", ["s3", "gs"])
def test_no_commit_where_conditions_are_ignored(dialect: Any) -> None:
    with StubServer(dialect) as server:
        edit(write(place_at(server.root / "plays")))
        server.ignore_conditions = True
        before = dict(server.objects)
        # Another place, so far as a process that has probed this one knows
        place = place_at(server.root.at(server.root.endpoint.replace("127.0.0.1", "localhost")) / "plays")
        for name, act in writers(place):
            if name == "optimize":
                continue
            failure = failure_of(act)
            assert isinstance(failure, UnsafeStore), (name, failure)
            assert re.search(UNSAFE, str(failure))
            assert server.objects == before, name
        with pytest.raises(UnsafeStore, match=UNSAFE):
            write(Place(place.url.replace("plays", "other"), storage_options=place.storage_options, cache_dir=False))
        assert server.objects == before
        assert contents(place) == AFTER, "reading works"


def test_no_commit_on_careless_stores(careless_folder: RemoteFolder) -> None:
    place = place_at(careless_folder / "plays")
    with pytest.raises(UnsafeStore, match=UNSAFE):
        write(place)
    left = {entry.name for entry in store_at(careless_folder).list("")}
    assert not {name for name in left if "_liveset/probe." not in name}, "not even a chunk; LocalBucket cannot delete what was tried"


def test_a_probe_is_sent_once(server: StubServer, place: Place) -> None:
    server.forget()
    edit(place)
    edit(place, "again", -4)
    assert server.count(match="probe") == 0
    assert not [name for name in server.objects if re.search("probe|clock", name)]
    assert version_name(1) in {name.removeprefix("plays/") for name in server.objects}


def test_the_second_place_in_a_bucket_is_not_probed(server: StubServer, place: Place) -> None:
    server.forget()
    write(Place(place.url.replace("plays", "other"), storage_options=place.storage_options, cache_dir=False))
    assert server.count(match="probe") == 0


def test_a_condition_that_must_fail_differs_in_all_that_may_count() -> None:
    there = {"e_tag": '"a"', "version": "17"}
    other = json.loads(remote._other(json.dumps(there)))
    assert other.keys() == there.keys()
    assert not other.items() & there.items()


def test_a_refusal_after_a_lost_answer_tells_nothing(stub: StubServer) -> None:
    """The put landed, and then the credentials expired: for its second send, and for the look at the head."""
    store = store_at(stub.root / "plays", **IMPATIENT)
    store.swap_head(b"one", None)
    head = store.read_head()
    assert head is not None
    stub.act("500-after", match=FILES["head"])
    stub.act("403-before", match=FILES["head"])
    stub.act("403-before", method="GET", match=FILES["head"])
    assert store.swap_head(b"two", head.tag) is Swap.UNKNOWN
    assert stub.acts_left == 0
    stub.act("403-before", match=FILES["head"])
    assert store.swap_head(b"three", head.tag) is Swap.UNKNOWN, "another head stands there"
    now = store.read_head()
    assert now is not None
    assert now.data == b"two"
    stub.act("403-before", match=FILES["head"])
    with pytest.raises(AccessDenied):
        store.swap_head(b"three", now.tag)
