"""Media leaves: images, texts and files as blobs, with the wrappers that mark a value as one.

A plain ``str`` or ``bytes`` is never media: what a value becomes does not depend on which files happen to exist. JPEG and other file bytes
are stored unchanged unless a wrapper asks for another quality, mode or format.
"""

from __future__ import annotations

import importlib.util
import struct
import sys
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

import numpy as np

from liveset.errors import SampleError, UnsupportedFormat
from liveset.format import images
from liveset.format.wrappers import Data, File, Image, Jpeg, JpegArray, Path, Pil, Text, file_bytes

__all__ = [
    "IMAGE_EXTENSIONS",
    "MEDIA_PREFIXES",
    "UNSUPPORTED_PREFIXES",
    "File",
    "Image",
    "Jpeg",
    "JpegArray",
    "Pil",
    "Text",
    "decode_media",
    "encode_media",
    "is_supported",
    "media_format",
]

IMAGE_EXTENSIONS = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "gif"})
# Leaf types by the part of the format string before the colon.
MEDIA_PREFIXES = frozenset({"image", "jpeg", "jpeg_array", "pil", "text", "file"})
UNSUPPORTED_PREFIXES = frozenset({"video", "audio", "nifti", "mesh", "pdf", "graph", "tifffile", "tiff"})


def is_supported(fmt: str) -> bool:
    """Tell whether a ``data_format`` string names a media leaf that can be read and written here."""
    return fmt.partition(":")[0] in MEDIA_PREFIXES


# --- which leaf ---------------------------------------------------------------------------------------------------------------------------


def media_format(value: Any) -> str | None:
    """Return the ``data_format`` string of a value that is a wrapper or a Pillow image, else None."""
    kind = type(value)
    if kind in _WRAPPERS:
        return _wrapper_format(value)
    if "PIL.Image" not in sys.modules:  # then no value can be a Pillow image
        return None
    if images.is_image(value):
        return "jpeg" if images.has_source(value) else "pil"
    if (kind is list or kind is tuple) and value and images.is_jpeg_file(value[0]) and all(map(images.has_source, value)):
        return "jpeg_array"
    return None


def _wrapper_format(value: Any) -> str:
    if isinstance(value, Image):
        if value.format is not None:
            return f"image:{_extension_of_format(value.format)}"
        if value.quality is not None or value.max_quality is not None:
            return "image:jpg"
        if value.array is not None or (value.image is not None and not images.has_source(value.image)) or value.mode is not None:
            return "image:png"
        extension = _extension(value.path)
        return f"image:{extension if extension in IMAGE_EXTENSIONS else 'jpg'}"
    if isinstance(value, Jpeg):
        # The old tool files a Jpeg by the extension of its path, so an append to its datasets needs the same.
        extension = _extension(value.path)
        return f"image:{extension}" if extension in IMAGE_EXTENSIONS else "jpeg"
    if isinstance(value, File):
        extension = _extension(value.path)
        return f"file:{extension}" if extension else "file"
    return {JpegArray: "jpeg_array", Pil: "pil", Text: "text"}[type(value)]


def _extension(path: Path | None) -> str:
    return "" if path is None else PurePath(path).suffix[1:].lower()


def _extension_of_format(name: str) -> str:
    lowered = name.lower().removeprefix(".")
    return "jpg" if lowered in {"jpeg", "jpg"} else lowered


_WRAPPERS = frozenset({Image, Jpeg, JpegArray, Pil, Text, File})


# --- bytes --------------------------------------------------------------------------------------------------------------------------------


def encode_media(value: Any, fmt: str) -> bytes:
    """Return the bytes of a media leaf.

    Args:
        value: a wrapper or Pillow image that ``media_format`` gives this leaf type.
        fmt: ``data_format`` string of the field; the extension after the colon does not matter, since readers look at the content.

    Raises:
        SampleError: the value does not fit the leaf type, cannot be read, or would not read back equal.
        MissingDependency: Pillow is not installed.
        UnsupportedFormat: the leaf type is one that is not supported.
    """
    name = _name(fmt)
    if name == "text" and isinstance(value, Text):
        return _text_bytes(value)
    if name == "file" and isinstance(value, File):
        return file_bytes(value)
    if name == "pil":
        if isinstance(value, Pil):
            return images.pack_pil(_load(value, value.mode))
        if images.is_image(value):
            return images.pack_pil(value)
    if name == "image" and isinstance(value, Image):
        return _image_bytes(value)
    if name in {"image", "jpeg"}:
        if isinstance(value, Jpeg):
            return _jpeg_bytes(value)
        if images.is_jpeg_file(value):
            return images.source(value)
    if name == "jpeg_array" and isinstance(value, JpegArray | list | tuple):
        return _pack_blobs(_jpeg_blobs(value))
    raise SampleError(f"a {type(value).__name__} cannot be stored as {fmt!r}.")


def decode_media(fmt: str, data: Data) -> Any:
    """Return the value of a media leaf: a tensor, a list of tensors, a Pillow image, ``str`` or ``bytes``.

    Tensors are uint8 RGB of channels x height x width; torch tensors where torch is installed, numpy arrays elsewhere.

    Raises:
        Corrupt: the bytes are not what the leaf type says.
        MissingDependency: neither Pillow nor torchvision is installed.
        UnsupportedFormat: the leaf type is one that is not supported.
    """
    name = _name(fmt)
    data = bytes(data)
    if name == "file":
        return data
    if name == "text":
        return images.read_text(data)
    if name == "pil":
        return images.unpack_pil(data)
    if name == "jpeg_array":
        return [_as_tensor(images.decode(blob)) for blob in images.split_blobs(data)]
    return _as_tensor(images.decode(data))


def is_picture(fmt: str) -> bool:
    """Tell whether the values of a media leaf are images that ``decode_media`` returns as one tensor each."""
    return fmt.partition(":")[0] in {"image", "jpeg"}


def decode_pictures(files: Iterable[tuple[int, bytes]], count: int) -> Any:
    """Decode images where they stand in a batch, which saves copying them.

    Args:
        files: the number of each one in the batch, and its bytes.
        count: how many there are.

    Returns:
        What stacking the results of ``decode_media`` gives; None if the images have different sizes.
    """
    batch: Any = None
    for number, data in files:
        place = None if batch is None else batch[number]
        found = images.decode(data, place)
        if batch is None:
            batch = np.empty((count, *found.shape), found.dtype)
            batch[number] = found
        elif found is not place:
            return None
    return _as_tensor(batch)


def _name(fmt: str) -> str:
    name = fmt.partition(":")[0]
    if name not in MEDIA_PREFIXES:
        what = "is not supported" if name in UNSUPPORTED_PREFIXES else "is unknown"
        raise UnsupportedFormat(
            f"the leaf type {fmt!r} {what}: pass serializers={{{name!r}: ...}} to read it, or fields=[...] to skip it.", format=fmt
        )
    return name


def _as_tensor(array: Any) -> Any:
    if "torch" not in sys.modules and importlib.util.find_spec("torch") is None:
        return array
    import torch

    return torch.from_numpy(array)


def _text_bytes(value: Text) -> bytes:
    try:
        if value.text is not None:
            return value.text.encode()
        data = file_bytes(value)
        data.decode()
    except UnicodeError as error:
        raise SampleError(f"a Text must be valid UTF-8: {error}.") from error
    return data


def _load(value: Any, mode: str | None) -> Any:
    """Return what a wrapper holds as a Pillow image."""
    if value.image is not None:
        image = images.check_image(value.image)
    elif value.array is not None:
        image = images.from_array(value.array)
    else:
        image = images.open_image(file_bytes(value))
    return image if mode is None or image.mode == mode else images.convert(image, mode)


def _original(value: Any) -> bytes | None:
    """Return the file bytes that a wrapper holds, or None for arrays and images that are no file."""
    if value.path is not None or value.bytes is not None:
        return file_bytes(value)
    return images.source(value.image) if value.image is not None and images.has_source(value.image) else None


def _image_bytes(value: Image) -> bytes:
    data = _original(value)
    if value.quality is not None or value.max_quality is not None:
        kind = "JPEG" if value.format is None else images.pillow_format(value.format)
        if kind != "JPEG":
            raise SampleError(f"Image(quality=...) stores JPEG, not {value.format}.")
        return _jpeg_with_quality(value, data)
    if data is not None and value.mode is None and value.format is None:
        images.check_file(data)
        return data
    kind = "PNG" if value.format is None else images.pillow_format(value.format)
    if data is not None and value.mode is None and images.kind_of(data) == kind:
        return data
    return images.encode(_load(value, value.mode), kind)


def _jpeg_bytes(value: Jpeg) -> bytes:
    return _jpeg_with_quality(value, _original(value))


def _jpeg_with_quality(value: Image | Jpeg, data: bytes | None) -> bytes:
    keeps = value.quality is None and value.mode is None
    if data is not None and keeps and images.kind_of(data) == "JPEG" and images.estimate_quality(data) <= (value.max_quality or 100):
        return data
    return images.encode(_load(value, value.mode), "JPEG", value.quality or value.max_quality)


def _jpeg_blobs(value: Any) -> list[bytes]:
    if not isinstance(value, JpegArray):
        return [images.source(item) for item in value]
    options: dict[str, Any] = {"quality": value.quality, "max_quality": value.max_quality}
    blobs = []
    for item in value.images:
        if isinstance(item, Jpeg):
            blobs.append(_jpeg_bytes(item))
        elif isinstance(item, bytes | bytearray | memoryview):
            blobs.append(_jpeg_bytes(Jpeg(bytes=bytes(item), **options)))
        elif isinstance(item, str | PurePath):
            blobs.append(_jpeg_bytes(Jpeg(path=item, **options)))
        elif images.is_image(item):
            blobs.append(_jpeg_bytes(Jpeg(image=item, **options)))
        else:
            blobs.append(_jpeg_bytes(Jpeg(array=item, **options)))
    return blobs


def _pack_blobs(blobs: list[bytes]) -> bytes:
    return struct.pack(f"<{len(blobs) + 1}I", len(blobs), *map(len, blobs)) + b"".join(blobs)
