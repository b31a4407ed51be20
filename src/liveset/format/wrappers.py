"""Wrappers that say how a value is to be stored: as an image, a text, a file or a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path as _File
from pathlib import PurePath
from typing import Any, TypeAlias

from liveset.errors import MissingDependency, SampleError

Path: TypeAlias = str | PurePath

# Most images lose nothing visible at this quality.
_CAP = 95


def file_bytes(value: Any) -> bytes:
    """Return the bytes that a wrapper holds or whose path it names; ``SampleError`` when they cannot be read."""
    if value.bytes is not None:
        return bytes(value.bytes)
    try:
        return _File(value.path).read_bytes()
    except OSError as error:
        raise SampleError(f"{type(value).__name__}({str(value.path)!r}) cannot be read: {error.strerror or error}.") from error


def _check(wrapper: Any, *, sources: tuple[str, ...]) -> None:
    """Refuse bytes of a wrong type, no source, two sources, and two ways to say the quality."""
    data = getattr(wrapper, "bytes", None)
    if data is not None and not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"{type(wrapper).__name__}(bytes=...) takes bytes, not {type(data).__name__}.")
    given = [name for name in sources if getattr(wrapper, name) is not None]
    if len(given) != 1:
        raise ValueError(f"{type(wrapper).__name__} takes exactly one of {', '.join(sources)}; given: {', '.join(given) or 'none'}.")
    _check_quality(wrapper)


def _check_quality(wrapper: Any) -> None:
    quality, cap = getattr(wrapper, "quality", None), getattr(wrapper, "max_quality", None)
    if quality is not None and cap is not None:
        raise ValueError("quality and max_quality are mutually exclusive.")
    for value in (quality, cap):
        if value is not None and (type(value) is not int or not 1 <= value <= 100):
            raise ValueError(f"the quality of an image is a whole number from 1 to 100, not {value!r}.")


@dataclass(frozen=True, slots=True)
class Image:
    """An image to be stored as a file and read as a uint8 RGB tensor; give one of path, bytes, array, image.

    Attributes:
        path: of an image file; its bytes are stored.
        bytes: of an image file.
        array: height x width (x channels), uint8; stored as PNG unless ``format`` or a quality says otherwise.
        image: a Pillow image; stored like an array, or unchanged if it is an unchanged JPEG file.
        mode: Pillow mode to convert to before storing.
        format: ``jpeg``, ``png``, ... to convert to.
        quality: store as JPEG of this quality, from 1 to 100.
        max_quality: like ``quality``, but a JPEG of at most this quality stays as it is.
    """

    path: Path | None = None
    bytes: bytes | None = None
    array: Any = None
    image: Any = None
    mode: str | None = None
    format: str | None = None
    quality: int | None = None
    max_quality: int | None = None

    def __post_init__(self) -> None:
        _check(self, sources=("path", "bytes", "array", "image"))


@dataclass(frozen=True, slots=True)
class Jpeg:
    """An image to be stored as JPEG and read as a uint8 RGB tensor; give one of path, bytes, array, image.

    A JPEG above ``max_quality`` (95 unless ``quality`` is given) is compressed again; pass ``max_quality=100`` to keep every file as it is.
    """

    path: Path | None = None
    bytes: bytes | None = None
    array: Any = None
    image: Any = None
    mode: str | None = None
    quality: int | None = None
    max_quality: int | None = None

    def __post_init__(self) -> None:
        _check(self, sources=("path", "bytes", "array", "image"))
        if self.quality is None and self.max_quality is None:
            object.__setattr__(self, "max_quality", _CAP)


@dataclass(frozen=True, slots=True)
class JpegArray:
    """Several images in one field, stored as JPEG like ``Jpeg``: Pillow images, arrays, bytes or ``Jpeg`` wrappers."""

    images: Sequence[Any] = ()
    quality: int | None = None
    max_quality: int | None = None

    def __post_init__(self) -> None:
        _check_quality(self)
        if self.quality is None and self.max_quality is None:
            object.__setattr__(self, "max_quality", _CAP)


@dataclass(frozen=True, slots=True)
class Pil:
    """An image to be stored as raw pixels and read as a Pillow image of the same mode; give one of path, bytes, array, image."""

    path: Path | None = None
    bytes: bytes | None = None
    array: Any = None
    image: Any = None
    mode: str | None = None

    def __post_init__(self) -> None:
        _check(self, sources=("path", "bytes", "array", "image"))


@dataclass(frozen=True, slots=True)
class Text:
    """A text, or a UTF-8 file, to be read as ``str``; give one of path, bytes, text."""

    path: Path | None = None
    bytes: bytes | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        _check(self, sources=("path", "bytes", "text"))
        if self.text is not None and not isinstance(self.text, str):
            raise TypeError(f"Text(text=...) takes str, not {type(self.text).__name__}.")


@dataclass(frozen=True, slots=True)
class File:
    """A file of any kind, to be read as ``bytes``; give one of path, bytes."""

    path: Path | None = None
    bytes: bytes | None = None

    def __post_init__(self) -> None:
        _check(self, sources=("path", "bytes"))


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array to be read as a torch tensor; give ``array``, or the path or bytes of raw C-order values with their ``dtype``."""

    path: Path | None = None
    bytes: bytes | None = None
    array: Any = None
    dtype: Any = None
    shape: tuple[int, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        _check(self, sources=("path", "bytes", "array"))
        if self.array is None and self.dtype is None:
            raise ValueError("Tensor(path=...) and Tensor(bytes=...) need dtype=.")
        if self.array is not None:
            object.__setattr__(self, "shape", tuple(self.array.shape))
            return
        size = _File(self.path).stat().st_size if self.path is not None else memoryview(self.bytes or b"").nbytes
        width = _torch_dtype(self.dtype).itemsize
        if size % width:
            raise ValueError(f"{size} bytes do not hold a whole number of {self.dtype} values.")
        object.__setattr__(self, "shape", (size // width,))

    def value(self) -> Any:
        """Return the torch tensor, which is what gets stored."""
        torch = _torch()
        if self.array is not None:
            return torch.as_tensor(self.array, dtype=None if self.dtype is None else _torch_dtype(self.dtype))
        data = bytearray(file_bytes(self))
        dtype = _torch_dtype(self.dtype)
        return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingDependency("storing a Tensor needs PyTorch: pip install torch", package="torch") from error
    return torch


def _torch_dtype(dtype: Any) -> Any:
    torch = _torch()
    if isinstance(dtype, torch.dtype):
        return dtype
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", str(dtype))
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{dtype!r} is not the dtype of a torch tensor.")
    return found
