"""The leaf types: how one value becomes bytes and comes back, as source templates for the code that ``sample`` generates.

A template names the value ``{v}``, the buffer ``{b}`` and the bounds ``{p}`` and ``{e}`` of the leaf in it. A buffer is ``bytes`` or an
``mmap``: slicing it gives ``bytes``.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from liveset.errors import Corrupt, UnsupportedFormat
from liveset.format import jsonleaf, media, safepickle
from liveset.format.dtypes import NUMPY_DTYPES, NUMPY_INDEX, TORCH_INDEX, import_torch, numpy_dtype, torch_dtype

_WORD = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class LeafCode:
    """Source templates of one leaf type.

    Attributes:
        check: condition that a value fits, or "" when ``encode`` itself refuses what does not fit.
        encode: expression for the stored bytes; "" when ``pack`` says it all.
        head: expression for bytes before those of ``encode``, so that large values are not copied once more to put them together.
        decode: expression for the value.
        stream: the same where a memoryview ``{m}`` of the buffer is at hand, or "" when that is no faster.
        pack: struct character of a fixed-size value, or "".
        unit: every size is a multiple of this; 1 means any.
        names: what the templates refer to.
    """

    check: str
    encode: str
    decode: str
    head: str = ""
    stream: str = ""
    pack: str = ""
    unit: int = 1
    names: Mapping[str, Any] = field(default_factory=dict)


FIXED_SIZES = {"q": 8, "d": 8, "?": 1}

# From this many bytes on, an array is copied straight into its item.
LARGE = 32_768

_SIMPLE = {
    "str": LeafCode("type({v}) is str", "{v}.encode()", "{b}[{p}:{e}].decode()"),
    "bool": LeafCode("type({v}) is bool", "", "", pack="?"),
    "int": LeafCode("type({v}) is int", "", "", pack="q"),
    "float": LeafCode("type({v}) is float", "", "", pack="d"),
    "bytes": LeafCode("type({v}) is bytes", "{v}", "{b}[{p}:{e}]"),
    "json": LeafCode("", "json_dumps({v})", "json_loads({b}[{p}:{e}])", names={"json_dumps": jsonleaf.dumps, "json_loads": jsonleaf.loads}),
}


def leaf_code(fmt: str, *, allow_pickle: bool = False, serializers: Mapping[str, Any] | None = None) -> LeafCode:
    """Return the templates of a ``data_format`` string.

    Args:
        fmt: such as ``int``, ``no_header_numpy:9`` or ``image:jpg``.
        allow_pickle: let ``pickle`` leaves hold objects of any type.
        serializers: readers for leaf types by name, before ours; each has ``deserialize(bytes)`` and may have ``setup(fmt)``.

    Raises:
        UnsupportedFormat: nothing here reads this leaf type.
    """
    name, _, argument = fmt.partition(":")
    if serializers and (custom := serializers.get(fmt, serializers.get(name))) is not None:
        if hasattr(custom, "setup"):
            custom.setup(fmt)
        read = _own("read_custom", fmt)
        return LeafCode("False", "None", f"{read}({{b}}[{{p}}:{{e}}])", names={read: custom.deserialize})
    if fmt in _SIMPLE:
        return _SIMPLE[fmt]
    if name in _BUILDERS:
        return _BUILDERS[name](argument)
    if fmt == "pickle":
        return LeafCode(
            "",
            "pickle_dumps({v})",
            "pickle_loads({b}[{p}:{e}])",
            names={
                "pickle_dumps": lambda value: safepickle.dumps(value, allow=allow_pickle),
                "pickle_loads": lambda data: safepickle.loads(data, allow=allow_pickle),
            },
        )
    if media.is_supported(fmt):
        fits, dumps, loads = (_own(name, fmt) for name in ("media_fits", "media_dumps", "media_loads"))
        return LeafCode(
            f"{fits}({{v}})",
            f"{dumps}({{v}})",
            f"{loads}({{b}}[{{p}}:{{e}}])",
            names={
                fits: lambda value: media_family(media.media_format(value)) == media_family(fmt),
                dumps: lambda value: media.encode_media(value, fmt),
                loads: lambda data: media.decode_media(fmt, data),
            },
        )
    raise UnsupportedFormat(
        f"the leaf type {fmt!r} is not supported: pass serializers={{{name!r}: ...}} to read it, or fields=[...] to read the others.",
        format=fmt,
    )


def _own(name: str, fmt: str) -> str:
    """Return a name that no other leaf type uses: the leaves of a sample share one namespace in the generated code."""
    return f"{name}_{fmt.encode().hex()}"


def media_family(fmt: str | None) -> str | None:
    """Return what two media formats must share to be stored in one field: extensions do not matter, since contents are recognised."""
    return fmt and fmt.partition(":")[0]


# --- arrays ---------------------------------------------------------------------------------------------------------


def array_format(value: Any) -> str | None:
    """Return the leaf type of a numpy array or a torch tensor, or None for other values and for dtypes without a number."""
    if type(value) is np.ndarray:
        if value.dtype not in NUMPY_INDEX:
            return None
        return f"no_header_numpy:{NUMPY_INDEX[value.dtype]}" if value.ndim == 1 else "numpy"
    if is_tensor(value):
        index = TORCH_INDEX.get(str(value.dtype).removeprefix("torch."))
        if index is None:
            return None
        return f"no_header_tensor:{index}" if value.ndim == 1 else "tensor"
    return None


def is_tensor(value: Any) -> bool:
    """Tell whether a value is a plain dense torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized


def _no_header_numpy(argument: str) -> LeafCode:
    dtype = numpy_dtype(_index(argument))
    dt, size = f"dt_{dtype.name}", dtype.itemsize
    return LeafCode(
        f"type({{v}}) is ndarray and ({{v}}.dtype is {dt} or {{v}}.dtype == {dt}) and {{v}}.ndim == 1",
        f"{{v}}.tobytes() if {{v}}.nbytes < {LARGE} else array_view({{v}})",
        f"frombuffer({{b}}, {dt}, ({{e}} - {{p}}) // {size}, {{p}}).copy()",
        # A bytearray of its own is writable memory that nobody else has, and making it is quicker than an array's copy().
        stream=f"ndarray(({{e}} - {{p}}) // {size}, {dt}, bytearray({{m}}[{{p}}:{{e}}]))",
        unit=size,
        names={dt: dtype, "ndarray": np.ndarray, "frombuffer": np.frombuffer, "array_view": _array_view},
    )


def _numpy(_: str) -> LeafCode:
    return LeafCode(
        "array_fits({v})",
        f"{{v}}.tobytes() if {{v}}.nbytes < {LARGE} else array_view({{v}})",
        "array_loads({b}, {p}, {e})",
        head="array_head({v})",
        names=_ARRAY_NAMES,
    )


def _array_view(value: np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of an array in C order, without a copy where they lie so already."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data


def _array_head(value: np.ndarray[Any, Any]) -> bytes:
    return struct.pack(f"<{value.ndim + 2}I", NUMPY_INDEX[value.dtype], value.ndim, *value.shape)


def _load_array(buffer: Any, begin: int, end: int) -> np.ndarray[Any, Any]:
    index, ndim = struct.unpack_from("<II", buffer, begin)
    start = begin + 8 + 4 * ndim
    if start > end:
        raise Corrupt("an array leaf is shorter than its own header")
    shape = struct.unpack_from(f"<{ndim}I", buffer, begin + 8)
    dtype = numpy_dtype(index)
    count = math.prod(shape)
    if count * dtype.itemsize != end - start:
        raise Corrupt(f"an array leaf of shape {shape} and dtype {dtype} has {end - start} bytes of data")
    return np.frombuffer(buffer, dtype, count, start).reshape(shape).copy() if count else np.empty(shape, dtype)


_ARRAY_NAMES = {
    "array_fits": lambda value: type(value) is np.ndarray and value.dtype in NUMPY_INDEX,
    "array_head": _array_head,
    "array_view": _array_view,
    "array_loads": _load_array,
}


def _no_header_tensor(argument: str) -> LeafCode:
    index = _index(argument)

    def load(data: bytes) -> Any:
        dtype = torch_dtype(index)
        torch = import_torch("Reading a tensor")
        return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)

    def fits(value: Any) -> bool:
        return is_tensor(value) and value.ndim == 1 and TORCH_INDEX.get(str(value.dtype)[6:]) == _written(index)

    name = f"tensor_{index}"
    return LeafCode(
        f"{name}_fits({{v}})",
        "tensor_bytes({v})",
        f"{name}_loads({{b}}[{{p}}:{{e}}])",
        names={f"{name}_fits": fits, f"{name}_loads": load, "tensor_bytes": _tensor_bytes},
    )


def _written(index: int) -> int:
    """Return the alias of a torch index that writers use."""
    from liveset.format.dtypes import TORCH_NAMES

    return TORCH_INDEX[TORCH_NAMES[index]] if index < len(TORCH_NAMES) else -1


def _tensor(_: str) -> LeafCode:
    return LeafCode(
        "tensor_fits({v})",
        "tensor_dumps({v})",
        "tensor_loads({b}[{p}:{e}])",
        names={
            "tensor_fits": lambda value: is_tensor(value) and str(value.dtype)[6:] in TORCH_INDEX,
            "tensor_dumps": _dump_tensor,
            "tensor_loads": _load_tensor,
        },
    )


def _tensor_bytes(value: Any) -> bytes:
    """Return the elements of a tensor in C order; bfloat16 has no numpy dtype, so its bytes are taken as int16."""
    plain = value.detach().cpu().contiguous()
    if str(plain.dtype) == "torch.bfloat16":
        plain = plain.view(sys.modules["torch"].int16)
    data: bytes = plain.resolve_conj().resolve_neg().numpy().tobytes()
    return data


def _dump_tensor(value: Any) -> bytes:
    header = struct.pack(f">{value.ndim + 2}I", TORCH_INDEX[str(value.dtype)[6:]], value.ndim, *value.shape)
    return header + _tensor_bytes(value)


def _load_tensor(data: bytes) -> Any:
    index, ndim = struct.unpack_from(">II", data)
    start = 8 + 4 * ndim
    if start > len(data):
        raise Corrupt("a tensor leaf is shorter than its own header")
    shape = struct.unpack_from(f">{ndim}I", data, 8)
    dtype = torch_dtype(index)
    if int(np.prod(shape, dtype=np.uint64)) * dtype.itemsize != len(data) - start:
        raise Corrupt(f"a tensor leaf of shape {shape} and {dtype} has {len(data) - start} bytes of data")
    torch = import_torch("Reading a tensor")
    if start == len(data):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data[start:]), dtype=dtype).reshape(shape)


def _index(argument: str) -> int:
    if not argument.isdecimal():
        raise Corrupt(f"an array leaf type ends in {argument!r} instead of a dtype number", file="index.json")
    return int(argument)


_BUILDERS: dict[str, Callable[[str], LeafCode]] = {
    "no_header_numpy": _no_header_numpy,
    "numpy": _numpy,
    "no_header_tensor": _no_header_tensor,
    "tensor": _tensor,
}

__all__ = ["FIXED_SIZES", "NUMPY_DTYPES", "LeafCode", "array_format", "is_tensor", "leaf_code", "media_family"]
