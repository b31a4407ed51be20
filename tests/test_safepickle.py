from __future__ import annotations

import collections
import contextlib
import copyreg
import datetime
import decimal
import enum
import fractions
import io
import json
import math
import os
import pathlib
import pickle
import struct
import subprocess
import sys
import typing
import uuid
import zoneinfo
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from liveset.errors import Corrupt, DatasetError, PickleRefused, SampleError
from liveset.format import picklenames, picklescalars, safepickle
from liveset.format.unpickle import strict_loads


class Point(typing.NamedTuple):
    x: int
    y: int


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


class Plain:
    pass


STRUCTURED = np.dtype([("a", "<i4"), ("b", ">f4", (2,)), ("c", [("d", "<U3"), ("e", "<M8[us]")])])
ALIGNED = np.dtype([("a", "i1"), ("b", "f8")], align=True)
GAPS = np.dtype({"names": ["a", "b"], "formats": ["<i2", "<i4"], "offsets": [6, 0], "itemsize": 16, "titles": ["first", None]})

VALUES = [
    *(
        None,
        True,
        5,
        2**100,
        1.5,
        1 + 2j,
        "é\ud800",
        b"\0b",
        bytearray(b"xb"),
        [1, [2]],
        (1, (2,)),
        {"a": {1: None}},
        {1, 2},
        frozenset("ab"),
    ),
    *(range(1, 9, 2), slice(None, 3), collections.OrderedDict(b=1, a=2), collections.deque([1, 2], 5), collections.Counter("aab")),
    *(collections.defaultdict(list, {"k": [1]}), collections.defaultdict(None, {1: 2}), decimal.Decimal("1.50"), fractions.Fraction(-1, 3)),
    *(uuid.UUID(int=5), pathlib.Path("a/b"), pathlib.PurePosixPath("/"), pathlib.PureWindowsPath("c:\\x"), datetime.date(2020, 2, 29)),
    *(
        datetime.datetime.fromisoformat("2020-01-01T02:00").replace(fold=1),
        datetime.time(1, 2, 3, 4),
        datetime.timedelta(-1, 5),
        datetime.UTC,
    ),
    *(datetime.datetime(2020, 7, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=2), "X")), zoneinfo.ZoneInfo("UTC")),
    datetime.datetime(2020, 7, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Paris")),
    *(kind(1) for kind in picklenames._NUMBERS),
    *(
        np.int64(-(2**62)),
        np.int64(-1),
        np.int64(300),
        np.uint64(2**64 - 1),
        np.float16("inf"),
        np.float32(0.1),
        np.float64("-0"),
        np.complex64(1 + 2j),
    ),
    *(
        np.str_("é"),
        np.bytes_(b"a\0"),
        np.str_("a\0"),
        np.longdouble(1) / 3,
        np.void(b"abc"),
        np.zeros((), STRUCTURED)[()],
        np.datetime64("2020-01-01T00", "ns"),
    ),
    *(
        np.datetime64("NaT", "D"),
        np.timedelta64(5, "s"),
        np.array(5, "m8[25s]")[()],
        np.dtype("f4"),
        np.dtype(">i8"),
        STRUCTURED,
        ALIGNED,
        GAPS,
    ),
    *(
        np.zeros(3),
        np.zeros((0, 3), "f4"),
        np.array(5),
        np.arange(6).reshape(2, 3).T,
        np.arange(9)[::-2],
        np.array(["a", "bé"]),
        np.array([b"a"]),
    ),
    *(
        np.arange(3, dtype=">i2"),
        np.array(["2020", "NaT"], "M8[s]"),
        np.zeros(2, "V5"),
        np.zeros((2, 1), STRUCTURED),
        np.zeros(2, ALIGNED),
        np.ones(2, GAPS),
    ),
    *([np.dtype("f4"), np.dtype(">f4"), np.dtype("f4"), np.zeros(1, ">f4")], {"x": np.arange(3), "y": None}, np.array([True, False])),
]


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if a.dtype.names:  # what stands in the gaps between fields has no meaning
            for name in a.dtype.names:
                same(np.ascontiguousarray(a[name]), np.ascontiguousarray(b[name]))
        else:
            assert a.tobytes() == b.tobytes()
    elif isinstance(a, list | tuple | collections.deque):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, set | frozenset):  # equal sets may give their members in different orders
        assert a == b
        theirs = {member: member for member in b}
        for member in a:
            same(member, theirs[member])
    elif isinstance(a, str | bytes):
        assert a == b
        assert len(a) == len(b)
    elif isinstance(a, np.longdouble):  # its bytes have gaps
        assert a == b
    elif isinstance(a, np.generic):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()
    elif isinstance(a, float):
        assert struct.pack("<d", a) == struct.pack("<d", b)
    else:
        assert repr(a) == repr(b)
        if not isinstance(a, decimal.Decimal | complex):  # where NaN is not equal to itself
            assert a == b


def label(value: Any) -> str:
    """Name a case alike in every run: sets of text have no fixed order."""
    shown = sorted(value) if isinstance(value, set | frozenset) else value
    return f"{type(value).__name__}-{str(shown)[:20]}".encode("ascii", "replace").decode()


@pytest.mark.parametrize("value", VALUES, ids=label)
def test_values_read_back_equal(value: Any) -> None:
    data = safepickle.dumps(value)
    assert safepickle.is_safe(value)
    for read in (safepickle.loads, strict_loads, pickle.loads, lambda data: safepickle.loads(data, allow=True)):
        same(value, read(data))


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("value", VALUES, ids=label)
def test_what_the_standard_pickler_writes_is_read(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    if type(value) in (np.longlong, np.ulonglong):  # numpy's own pickles forget these names for a 64-bit integer
        value = np.array(value).astype(np.dtype(type(value)).str)[()]
    if type(value) in (np.bytes_, np.str_):  # and the zeros at the end of these
        value = pickle.loads(data)
    if isinstance(getattr(value, "tzinfo", value), zoneinfo.ZoneInfo):  # its own pickles ask for getattr
        with pytest.raises(PickleRefused, match="builtins.getattr"):
            safepickle.loads(data)
    else:
        same(value, safepickle.loads(data))
    renamed = _other_numpy(data)
    if renamed is not None:
        same(value, safepickle.loads(renamed))


def _other_numpy(data: bytes) -> bytes | None:
    """Return a pickle as the other generation of numpy names its modules."""
    new, old = b"\x8c\x16numpy._core.multiarray", b"\x8c\x15numpy.core.multiarray"
    here, there = (new, old) if new in data else (old, new)
    if here not in data or data[2:3] != b"\x95":
        return None
    frame = int.from_bytes(data[3:11], "little") + len(there) - len(here)
    return data[:3] + frame.to_bytes(8, "little") + data[11:].replace(here, there)


# What earlier releases wrote must be read for ever; what is written must not change by accident.
WRITTEN = [
    (np.int64(300), b"\x80\x05\x8c\x05numpy\x8c\x05int64\x93J,\x01\x00\x00\x85R."),
    (np.float32(0.5), b"\x80\x05\x8c\x05numpy\x8c\x07float32\x93G?\xe0\x00\x00\x00\x00\x00\x00\x85R."),
    (np.bool_(True), b"\x80\x05\x95\x18\0\0\0\0\0\0\0\x8c\x05numpy\x94\x8c\x05bool_\x94\x93\x94\x88\x85\x94R\x94."),
    (
        np.arange(2, dtype=">i2"),
        (
            b"\x80\x05\x95\x31\0\0\0\0\0\0\0\x8c\x05numpy\x94\x8c\x07ndarray\x94\x93\x94K\x02\x85\x94\x8c\x03>i2\x94"
            b"\x96\x04\0\0\0\0\0\0\0\0\0\0\x01\x94\x87\x94R\x94."
        ),
    ),
    (
        pathlib.PurePosixPath("a/b"),
        b"\x80\x05\x95\x27\0\0\0\0\0\0\0\x8c\x07pathlib\x94\x8c\rPurePosixPath\x94\x93\x94\x8c\x03a/b\x94\x85\x94R\x94.",
    ),
]


@pytest.mark.parametrize(("value", "data"), WRITTEN, ids=lambda value: type(value).__name__)
def test_bytes_are_pinned(value: Any, data: bytes) -> None:
    assert safepickle.dumps(value) == data
    same(value, safepickle.loads(data))
    same(value, pickle.loads(data))


def test_numpy_number_takes_the_short_cut_in_both_forms() -> None:
    for value in (np.int64(7), np.int64(-(2**40)), np.float32(2.5), np.uint8(200)):
        assert picklescalars.read_scalar(safepickle.dumps(value)) == value
        assert picklescalars.read_scalar(pickle.dumps(value, 4)) == value
    assert picklescalars.read_scalar(pickle.dumps(np.complex64(1))) is None


any_value = st.integers(0, len(VALUES) - 1).map(VALUES.__getitem__)  # some of them have no hash, which sampled_from() asks for
atoms = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.dates() | st.datetimes() | st.uuids() | st.fractions()
    | st.decimals() | st.complex_numbers() | nps.arrays(nps.scalar_dtypes() | nps.unicode_string_dtypes(max_len=4), nps.array_shapes(min_dims=0, min_side=0))
    | any_value
)  # fmt: skip
values = st.recursive(
    atoms,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    max_leaves=12,
)


@given(values)
def test_nested_values_round_trip(value: Any) -> None:
    data = safepickle.dumps(value)
    same(value, safepickle.loads(data))
    same(value, strict_loads(data))


@given(nps.arrays(nps.nested_dtypes(max_leaves=6, max_itemsize=200), nps.array_shapes(min_dims=0, min_side=0, max_dims=2)))
def test_arrays_of_any_dtype_round_trip(array: np.ndarray[Any, Any]) -> None:
    same(array, safepickle.loads(safepickle.dumps(array)))
    same(array, safepickle.loads(pickle.dumps(array, 4)))


def test_shared_and_cyclic_values_keep_their_shape() -> None:
    shared = [1]
    cyclic: list[Any] = [shared, shared]
    cyclic.append(cyclic)
    result = safepickle.loads(safepickle.dumps(cyclic))
    assert result[0] is result[1]
    assert result[2] is result
    array = np.arange(3)
    for data in (safepickle.dumps([array, array]), pickle.dumps([array, array], 4)):
        first, second = safepickle.loads(data)
        assert first is second


def test_arrays_own_writable_memory() -> None:
    for array in (np.arange(3.0), np.array(5), np.zeros((0, 2))):
        for data in (safepickle.dumps(array), pickle.dumps(array, 4), pickle.dumps(array, 5)):
            result = safepickle.loads(data)
            assert result.flags.writeable
            assert result.flags.owndata
            result[...] = 1


# --- refused on writing -----------------------------------------------------------------------------------------------------------------------

REFUSED = [
    *(Colour.RED, Point(1, 2), Text("a"), Plain(), Plain, len, json.dumps, Ellipsis, NotImplemented, memoryview, object(), os.environ, sys),
    *(np.array([{}], dtype=object), np.ma.zeros(2), np.zeros(2).view(np.recarray), np.zeros(2, [("a", "O")]), np.dtype("O"), int, np.ndarray),
    *(collections.defaultdict(lambda: 1), collections.defaultdict(Plain), collections.ChainMap(), collections.UserDict(), lambda: 1),
    *([1, {"a": (Plain(),)}], {Point(1, 2): 1}, uuid.SafeUUID.safe, io.BytesIO(b"a"), decimal.Context(), array := np.memmap),
]  # fmt: skip


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_other_types_are_refused(value: Any) -> None:
    assert not safepickle.is_safe(value)
    with pytest.raises(PickleRefused, match="pass allow_pickle=True or convert"):
        safepickle.dumps(value)


def test_refusal_names_the_type_inside() -> None:
    with pytest.raises(PickleRefused, match=r"test_safepickle\.Point"):
        safepickle.dumps({"a": [Point(1, 2)]})


def test_instance_attributes_are_not_lost_silently() -> None:
    value = collections.Counter("a")
    vars(value)["note"] = "x"
    with pytest.raises(PickleRefused, match="attributes"):
        safepickle.dumps(value)


def test_allow_takes_everything_that_pickles() -> None:
    value = {"p": Point(1, 2), "c": Colour.RED, "o": np.array([{}], dtype=object), "b": np.bool_(True), "cls": Plain}
    data = safepickle.dumps(value, allow=True)
    with pytest.raises(PickleRefused):
        safepickle.loads(data)
    result = safepickle.loads(data, allow=True)
    assert result["p"] == Point(1, 2)
    assert type(result["c"]) is Colour
    assert result["o"][0] == {}
    assert result["cls"] is Plain
    with pytest.raises(SampleError, match="cannot be pickled"):
        safepickle.dumps(lambda: 1, allow=True)


def test_too_deep_is_a_clear_error() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(SampleError):
        safepickle.dumps(value)
    while value:  # freeing it in one go would overflow the C stack on some versions
        value = value.pop()


# --- torch ------------------------------------------------------------------------------------------------------------------------------------


def test_tensors_round_trip() -> None:
    torch = pytest.importorskip("torch")
    for tensor in (
        *(
            torch.arange(3.0),
            torch.tensor(5),
            torch.empty(0, 2),
            torch.ones(2, 3).T,
            torch.tensor([True]),
            torch.ones(1, dtype=torch.complex64).conj(),
        ),
        *(
            torch.ones(2, dtype=getattr(torch, name))
            for name in "float16 float64 int8 uint8 int16 int32 int64 uint16 uint32 uint64".split()
        ),
    ):
        data = safepickle.dumps({"t": tensor, "n": None})
        for read in (safepickle.loads, strict_loads, pickle.loads):
            result = read(data)["t"]
            assert result.dtype == tensor.dtype
            assert result.shape == tensor.shape
            assert torch.equal(result, tensor.resolve_conj())
        assert b"getattr" not in data


def test_tensors_without_an_equal_are_refused() -> None:
    torch = pytest.importorskip("torch")
    for tensor, why in (
        (torch.ones(2, dtype=torch.bfloat16), "bfloat16"),
        (torch.ones(2, requires_grad=True), "gradient"),
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.nn.Parameter(torch.ones(2)), "Parameter"),
        (torch.ones(2, device="meta"), "meta"),
    ):
        with pytest.raises(PickleRefused, match=why):
            safepickle.dumps(tensor)
    value = torch.ones(2, dtype=torch.bfloat16)
    assert torch.equal(safepickle.loads(safepickle.dumps(value, allow=True), allow=True), value)


def test_nothing_heavy_is_imported() -> None:
    code = "import sys; from liveset.format import safepickle as s; s.loads(s.dumps({'a': 1})); print([m for m in ('torch', 'PIL', 'pyarrow') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# --- hostile pickles --------------------------------------------------------------------------------------------------------------------------


class Reduce:
    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


def text(value: str) -> bytes:
    data = value.encode()
    return b"\x8c" + bytes([len(data)]) + data


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


RAN: list[int] = []


def touch(*_: object) -> dict[str, Any]:
    RAN.append(1)
    return {}


H = b"\x80\x04"
COMMAND = text("echo hacked") + b"\x85R."
HOSTILE = {
    "os.system": H + named("os", "system") + COMMAND,
    "posix.system": H + named("posix", "system") + COMMAND,
    "global opcode": b"cos\nsystem\n(S'echo'\ntR.",
    "eval": H + named("builtins", "eval") + text("touch()") + b"\x85R.",
    "exec": H + named("builtins", "exec") + text("1") + b"\x85R.",
    "import": H + named("builtins", "__import__") + text("os") + b"\x85R.",
    "open": H + named("builtins", "open") + text("x") + b"\x85R.",
    "getattr": H + named("builtins", "getattr") + named("builtins", "int") + text("real") + b"\x86R.",
    "type": H + named("builtins", "type") + text("x") + b"\x85R.",
    "dotted name": H + named("datetime", "datetime.now") + b")R.",
    "dotted into a module": H + named("uuid", "os.system") + COMMAND,
    "dotted numpy": H + named("numpy", "ndarray.tofile") + COMMAND,
    "dotted dtypes": H + named("numpy.dtypes", "Float32DType.__new__") + COMMAND,
    "dunder": H + named("collections", "__builtins__") + b".",
    "submodule": H + named("collections", "abc") + b".",
    "inst": b"(S'echo'\nios\nsystem\n.",
    "obj": b"(cos\nsystem\nS'echo'\no.",
    "newobj": H + named("subprocess", "Popen") + text("echo") + b"\x85\x81.",
    "newobj of an allowed class": H + named("decimal", "Decimal") + b")\x81.",
    "newobj_ex": H + named("decimal", "Decimal") + b")}\x92.",
    "ext1": H + b"\x82\x07)R.",
    "ext2": H + b"\x83\x07\x00)R.",
    "ext4": H + b"\x84\x07\x00\x00\x00)R.",
    "persistent id": b"Pabc\n.",
    "binary persistent id": H + text("abc") + b"Q.",
    "out-of-band buffer": b"\x80\x05\x97.",
    "build on a class": H + named("collections", "Counter") + b"}" + text("update") + b"Ks" + b"b.",
    "build with slots on a class": H + named("fractions", "Fraction") + b"N}" + text("limit_denominator") + named("builtins", "int") + b"s\x86b.",
    "build on a builtin class": H + named("builtins", "int") + b"}" + text("x") + b"K\x01sb.",
    "build on a list": H + b"]}b.",
    "build on a path": H + named("pathlib", "PurePosixPath") + text("a") + b"\x85RN}" + text("_str") + text("x") + b"s\x86b.",
    "build on a date": H + named("datetime", "date") + b"M\xe4\x07K\x01K\x01\x87R}b.",
    "setstate of a function": H + named("_codecs", "encode") + b"N}" + text("__module__") + text("x") + b"s\x86b.",
    "call of a value": H + b"K\x01)R.",
    "call of an array": H + named("numpy", "dtype") + text("<f4") + b"\x85R)R.",
    "array of pointers": H + named("numpy", "ndarray") + b"K\x01\x85" + text("O") + b"C\x08AAAAAAAA\x87R.",
    "array of pointers in a dict": H + named("numpy", "ndarray") + b"K\x01\x85}(" + text("names") + b"]" + text("a") + b"a" + text("formats")
    + b"]" + text("O") + b"a" + text("offsets") + b"]K\x00au" + b"C\x08AAAAAAAA\x87R.",
    "array from an array": pickle.dumps(Reduce(np.ndarray, ((1,), "<f4", np.zeros(1, "f4")))),
    "index of a list": pickle.dumps(Reduce(__import__("operator").getitem, ([1], 0))),
    "object array": pickle.dumps(np.array([1, "a"], dtype=object)),
    "object dtype": pickle.dumps(np.dtype("O")),
    "object field": pickle.dumps(np.zeros(1, [("a", "O")])),
    "subclass of an array": pickle.dumps(np.ma.zeros(2)),
    "recarray": pickle.dumps(np.zeros(2).view(np.recarray)),
    "defaultdict with a factory": pickle.dumps(collections.defaultdict(touch)),
    "user class": pickle.dumps(Plain()),
    "user reduce": pickle.dumps(Reduce(touch, (1,))),
    "enum": pickle.dumps(Colour.RED),
    "namedtuple": pickle.dumps(Point(1, 2)),
    "reconstructor": H + named("copyreg", "_reconstructor") + named("builtins", "int") + named("builtins", "object") + b"N\x87R.",
    "codec": H + named("_codecs", "encode") + text("a") + text("rot13") + b"\x86R.",
    "build on None": H + b"N)b.",
    "list call": H + named("builtins", "list") + text("ab") + b"\x85R.",
    "str with a codec": H + named("numpy", "str_") + b"C\x01a" + text("idna") + b"\x86R.",
    "partial": H + named("functools", "partial") + named("os", "system") + b"\x85R.",
    "torch load": H + named("torch.storage", "_load_from_bytes") + b"C\x00\x85R.",
    "numpy load": H + named("numpy", "load") + text("x") + b"\x85R.",
    "numpy old module": H + named("numpy.core.multiarray", "fromfile") + text("x") + b"\x85R.",
    "append to a date": H + named("datetime", "date") + b"M\xe4\x07K\x01K\x01\x87RK\x01a.",
    "item of bytes": H + named("builtins", "bytearray") + b"C\x02ab\x85RK\x00K\x01s" + b"0N}b.",
}  # fmt: skip


@pytest.fixture
def extension() -> Iterator[None]:
    copyreg.add_extension("test_safepickle" if __name__ == "test_safepickle" else __name__, "touch", 7)
    yield
    copyreg.remove_extension("test_safepickle" if __name__ == "test_safepickle" else __name__, "touch", 7)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused(name: str, extension: None, monkeypatch: pytest.MonkeyPatch) -> None:
    RAN.clear()
    for dangerous in ("system", "popen"):
        monkeypatch.setattr(os, dangerous, touch)
    for read in (safepickle.loads, strict_loads):
        with pytest.raises(PickleRefused):
            read(HOSTILE[name])
    assert not RAN
    assert collections.Counter("aa") == {"a": 2}


def test_the_hostile_examples_are_hostile(extension: None) -> None:
    RAN.clear()
    for name in ("ext1", "user reduce"):
        pickle.loads(HOSTILE[name])
    assert len(RAN) == 2


def test_a_pickled_dtype_cannot_lie_about_its_flags() -> None:
    # A dtype of Python objects whose state says that it holds none would make numpy read pointers from bytes.
    state: tuple[Any, ...] = (3, "|", None, None, None, -1, -1, 0)
    array = Reduce(
        picklenames.RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, (1,), Reduce(np.dtype, ("O8", False, True), state), False, b"A" * 8)
    )
    with pytest.raises(PickleRefused):
        safepickle.loads(pickle.dumps(array))
    # A structured one, whose flags are in its state as well.
    fields = {"a": (np.dtype("O"), 0)}
    state = (3, "|", None, ("a",), fields, 8, 1, 0)
    array = Reduce(
        picklenames.RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, (1,), Reduce(np.dtype, ("V8", False, True), state), False, b"A" * 8)
    )
    with pytest.raises(PickleRefused):
        safepickle.loads(pickle.dumps(array))


def test_classes_do_not_leak_stand_ins() -> None:
    data = pickle.dumps([np.ndarray, np.zeros(2), np.dtype, uuid.UUID])
    assert safepickle.loads(data)[0] is np.ndarray
    ours = H + b"(" + named("uuid", "UUID") + text("0" * 32) + b"\x85R" + named("uuid", "UUID") + b"l."
    plain = H + b"](" + named("uuid", "UUID") + text("0" * 32) + b"\x85R" + named("uuid", "UUID") + b"e."
    assert safepickle._is_plain(plain)
    for data in (ours, plain):
        assert safepickle.loads(data) == [uuid.UUID(int=0), uuid.UUID]


def test_allowed_names_are_what_they_say() -> None:
    for (module, name), found in picklenames.NAMES.items():
        assert "." not in name
        assert module.split(".")[0] in {
            "builtins",
            "collections",
            "datetime",
            "decimal",
            "fractions",
            "uuid",
            "pathlib",
            "numpy",
            "_codecs",
            "_operator",
        }
        assert found in picklenames.CALLS or found in picklenames.SAFE_FACTORIES
    assert not {"getattr", "eval", "exec", "open", "__import__", "type", "object", "compile", "input", "map", "filter"} & {
        n for _, n in picklenames.NAMES
    }


# --- damaged pickles --------------------------------------------------------------------------------------------------------------------------

DAMAGED = [
    *(b"", b".", b"N", b"N.N.", H, H + b"K", H + b"]K\x01", H + b"\x8c\x05ab.", H + b"h\x05.", H + b"a.", H + b"R.", H + b"K\x01K\x02\x93.", H + b")\x8c\x01a\x93."),
    *(b"\x80\x09N.", H + b"}]Ns.", H + b"}N.Ku.", b"I12x\n.", b"Fabc\n.", b"S'abc\n.", H + b"\x8c\x01\xff.", b"\xff\xff.", b"garbage that is no pickle"),
    H + b"Nr\xff\xff\xff\x7f" + b".."[:0],  # a memo slot that would take gigabytes
    b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",
    H + named("datetime", "date") + b"C\x01a\x85R.",
    H + named("fractions", "Fraction") + text("1e999999999") + b"\x85R.",  # would take all memory
    H + named("decimal", "Decimal") + text("x") + b"\x85R.",
    H + named("uuid", "UUID") + text("x") + b"\x85R.",
    H + named("zoneinfo", "ZoneInfo") + text("../../etc/passwd") + b"\x85R.",
    H + named("numpy", "ndarray") + b"K\x05\x85" + text("<f4") + b"C\x02ab\x87R.",
    H + named("numpy", "ndarray") + b"J\xff\xff\xff\xff\x85" + text("<f4") + b"C\x00\x87R.",
    H + named("numpy", "ndarray") + b"\x8a\x09\0\0\0\0\0\0\0\0\x01\x85" + text("|V0") + b"C\x00\x87R.",
]  # fmt: skip


@pytest.mark.parametrize("data", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_pickles_are_corrupt(data: bytes) -> None:
    for read in (safepickle.loads, strict_loads):
        with pytest.raises(Corrupt):
            read(data)


def test_every_truncation_is_corrupt() -> None:
    for value in VALUES:
        for data in (safepickle.dumps(value), pickle.dumps(value, 4)):
            for end in range(0, len(data) - 1, max(1, len(data) // 30)):
                with pytest.raises((Corrupt, PickleRefused)):
                    safepickle.loads(data[:end])


@given(any_value, st.data(), st.booleans())
def test_damage_gives_a_value_or_our_error(value: Any, source: st.DataObject, ours: bool) -> None:
    data = bytearray(safepickle.dumps(value) if ours else pickle.dumps(value, 4))
    for _ in range(source.draw(st.integers(1, 3))):
        data[source.draw(st.integers(0, len(data) - 1))] = source.draw(st.integers(0, 255))
    with contextlib.suppress(DatasetError):
        safepickle.loads(bytes(data))


@given(st.binary(max_size=40))
@example(b"]}b.")
def test_random_bytes_give_a_value_or_our_error(data: bytes) -> None:
    with contextlib.suppress(DatasetError):
        safepickle.loads(data)


def test_allow_reports_what_is_missing() -> None:
    with pytest.raises(Corrupt):
        safepickle.loads(b"\x80\x04]K", allow=True)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        safepickle.loads(H + named("no_such_module", "X") + b".", allow=True)


def test_paths_of_any_python_are_read() -> None:
    data = H + named("pathlib._local", "PurePosixPath") + text("a") + text("b") + b"\x86R."
    assert safepickle.loads(data) == pathlib.PurePosixPath("a/b")
    assert safepickle.loads(data, allow=True) == pathlib.PurePosixPath("a/b")
    assert b"pathlib._local" not in safepickle.dumps([pathlib.PurePosixPath("a"), pathlib.PurePosixPath("a")])
    other = H + named("pathlib", "WindowsPath" if os.name == "posix" else "PosixPath") + text("a") + b"\x85R."
    assert type(safepickle.loads(other)) in (pathlib.PureWindowsPath, pathlib.PurePosixPath)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_times_without_a_unit_round_trip() -> None:
    for value in (np.datetime64("NaT"), np.timedelta64(5), np.array(["NaT"], "M8")):
        same(value, safepickle.loads(safepickle.dumps(value)))
        same(value, safepickle.loads(pickle.dumps(value, 4)))


def test_nan_keeps_its_bits() -> None:
    assert math.isnan(safepickle.loads(safepickle.dumps(np.float32("nan"))))
