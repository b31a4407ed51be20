"""Wrappers that say how a value is to be stored: as an image, a text or a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as _File
from pathlib import PurePath
from typing import Any, TypeAlias

from liveset.errors import SampleError

Path: TypeAlias = str | PurePath
Data: TypeAlias = bytes | bytearray | memoryview

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
    bytes: Data | None = None
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
    bytes: Data | None = None
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
    bytes: Data | None = None
    array: Any = None
    image: Any = None
    mode: str | None = None

    def __post_init__(self) -> None:
        _check(self, sources=("path", "bytes", "array", "image"))


@dataclass(frozen=True, slots=True)
class Text:
    """A text, or a UTF-8 file, to be read as ``str``; give one of path, bytes, text."""

    path: Path | None = None
    bytes: Data | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        _check(self, sources=("path", "bytes", "text"))
        if self.text is not None and not isinstance(self.text, str):
            raise TypeError(f"Text(text=...) takes str, not {type(self.text).__name__}.")


@dataclass(frozen=True, slots=True)
class File:
    """A file of any kind, to be read as ``bytes``; give one of path, bytes."""

    path: Path | None = None
    bytes: Data | None = None

    def __post_init__(self) -> None:
        _check(self, sources=("path", "bytes"))
