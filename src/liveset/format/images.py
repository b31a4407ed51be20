"""Image files and raw pixels, by Pillow, or torchvision where Pillow is missing."""

from __future__ import annotations

import functools
import io
import struct
import sys
from typing import Any

import numpy as np

from liveset.errors import Corrupt, MissingDependency, SampleError, UnsupportedFormat

# Bits per pixel of the modes whose pixels are all there is; a palette would be lost. Rows of mode "1" end at a whole byte.
_RAW_BITS = (
    {"1": 1, "L": 8, "LA": 16, "La": 16, "RGB": 24, "RGBA": 32, "RGBa": 32, "RGBX": 32, "CMYK": 32, "YCbCr": 24, "LAB": 24, "HSV": 24}
    | {"I": 32, "F": 32}
    | dict.fromkeys(("I;16", "I;16L", "I;16B", "I;16N"), 16)
)
# The old tool writes these, too, but not their palette.
_READ_BITS = {**_RAW_BITS, "P": 8, "PA": 16}
_FORMATS = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WEBP", "bmp": "BMP", "gif": "GIF"}
_SIGNATURES = ((b"\xff\xd8\xff", "JPEG"), (b"\x89PNG\r\n\x1a\n", "PNG"), (b"BM", "BMP"), (b"GIF8", "GIF"))
# Luminance table of quality 50 (JPEG standard, annex K), whose scaled copies most encoders use.
_LUMINANCE = np.array(
    "16 11 10 16 24 40 51 61 12 12 14 19 26 58 60 55 14 13 16 24 40 57 69 56 14 17 22 29 51 87 80 62 "
    "18 22 37 56 68 109 103 77 24 35 55 64 81 104 113 92 49 64 78 87 103 121 120 101 72 92 95 98 112 100 103 99".split(),
    np.int64,
)
_DEFAULT_QUALITY = 95


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError as error:
        raise MissingDependency("images need Pillow: pip install pillow", package="pillow") from error
    return PIL.Image


def is_image(value: Any) -> bool:
    """Tell whether a value is a Pillow image, without importing Pillow."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def is_jpeg_file(value: Any) -> bool:
    """Tell whether a value is a Pillow image that was opened from a JPEG file, without importing Pillow."""
    module = sys.modules.get("PIL.JpegImagePlugin")
    return module is not None and isinstance(value, module.JpegImageFile)


def check_image(value: Any) -> Any:
    """Return a Pillow image, or raise ``SampleError`` for anything else."""
    if not is_image(value):
        raise SampleError(f"a Pillow image is expected, not a {type(value).__name__}.")
    return value


# --- the file behind a Pillow image -------------------------------------------------------------------------------------------------------


def has_source(value: Any) -> bool:
    """Tell whether a value is an unchanged JPEG file whose bytes can be had."""
    return is_jpeg_file(value) and _source(value) is not None


def source(image: Any) -> bytes:
    """Return the bytes of the JPEG file that an image was opened from.

    Raises:
        SampleError: there are none, or the pixels were changed since.
    """
    data = _source(image) if is_jpeg_file(image) else None
    if data is None:
        raise SampleError(
            "the bytes of this JPEG are not at hand (it is no file, was loaded, or was changed after it was opened): "
            "store Pil(image=...) to keep the pixels, or Jpeg(bytes=...) for the file."
        )
    return data


def _source(image: Any) -> bytes | None:
    if image.tell() != 0:
        return None  # a later picture of a file with several
    stream = image.fp
    if stream is not None:  # nothing was decoded yet, so nothing was changed; only draft() changes size or mode
        try:
            position = stream.tell()
            stream.seek(0)
            data: bytes = stream.read()
            stream.seek(position)
        except (OSError, ValueError):
            return None
        return data if data[:2] == b"\xff\xd8" and _same_head(data, image) else None
    try:
        with open(image.filename, "rb") as file:
            data = file.read()
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    try:
        original = open_image(data)
        same = original.mode == image.mode and original.size == image.size and original.tobytes() == image.tobytes()
    except (SampleError, OSError, SyntaxError):
        return None
    return data if same else None


def _same_head(data: bytes, image: Any) -> bool:
    try:
        original = open_image(data)
    except SampleError:
        return False
    return bool(original.mode == image.mode and original.size == image.size)


# --- encoding -----------------------------------------------------------------------------------------------------------------------------


def pillow_format(name: str) -> str:
    """Return Pillow's name of an image format; ``SampleError`` for one that is not offered."""
    kind = _FORMATS.get(name.lower().removeprefix("."))
    if kind is None:
        raise SampleError(f"images can be stored as {', '.join(sorted(_FORMATS))}, not {name!r}.")
    return kind


def kind_of(data: bytes) -> str | None:
    """Return Pillow's name of an image format by the first bytes of a file, or None."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return next((kind for magic, kind in _SIGNATURES if data.startswith(magic)), None)


def check_file(data: bytes) -> None:
    """Raise ``SampleError`` unless bytes start like an image file that can be read back."""
    if kind_of(data) is None:
        open_image(data)


def open_image(data: bytes) -> Any:
    """Return image file bytes as a Pillow image (pixels are read later); ``SampleError`` when they are none."""
    pillow = _pillow()
    try:
        return pillow.open(io.BytesIO(data))
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise SampleError(f"the bytes are no image that Pillow can read ({error}).") from error


def from_array(array: Any) -> Any:
    """Return an array of height x width (x channels) as a Pillow image."""
    if hasattr(array, "detach"):  # a torch tensor
        array = array.detach().cpu().numpy()
    array = np.ascontiguousarray(array)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    try:
        return _pillow().fromarray(array)
    except (TypeError, ValueError, KeyError) as error:
        raise SampleError(
            f"an array of shape {array.shape} and dtype {array.dtype} is no image: uint8 of height x width (x channels) is expected."
        ) from error


def convert(image: Any, mode: str) -> Any:
    """Return an image in another Pillow mode."""
    try:
        return image.convert(mode)
    except (ValueError, OSError, SyntaxError) as error:
        raise SampleError(f"an image of mode {image.mode} cannot be converted to {mode!r} ({error}).") from error


def encode(image: Any, kind: str, quality: int | None = None) -> bytes:
    """Return an image as file bytes; a mode that the format does not have becomes RGB for JPEG and is refused elsewhere."""
    if kind == "JPEG" and image.mode not in {"L", "RGB", "CMYK"}:
        image = convert(image, "L" if image.mode == "1" else "RGB")
    stream = io.BytesIO()
    options: dict[str, Any] = {"quality": quality or _DEFAULT_QUALITY} if kind == "JPEG" else {"lossless": True} if kind == "WEBP" else {}
    try:
        image.save(stream, kind, **options)
    except (OSError, ValueError, KeyError, SyntaxError) as error:
        raise SampleError(f"an image of mode {image.mode} cannot be stored as {kind} ({error}): pass mode=.") from error
    return stream.getvalue()


@functools.cache
def _table_sums() -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the sum of the luminance table for each quality from 1 to 100."""
    quality = np.arange(1, 101)[:, None]
    scale = np.where(quality < 50, 5000 // quality, 200 - 2 * quality)
    sums: np.ndarray[Any, np.dtype[np.int64]] = np.clip((_LUMINANCE * scale + 50) // 100, 1, 255).sum(axis=1)
    return sums


def estimate_quality(data: bytes) -> int:
    """Return the quality (1 to 100) whose luminance table is closest to that of a JPEG file."""
    tables = getattr(open_image(data), "quantization", None)
    if not tables:
        return 100
    total = int(sum(tables[min(tables)]))
    return int(np.abs(_table_sums() - total).argmin()) + 1


# --- raw pixels ---------------------------------------------------------------------------------------------------------------------------


def pack_pil(image: Any) -> bytes:
    """Return the ``pil`` leaf of an image; ``SampleError`` for modes that raw pixels do not describe. Metadata is not kept."""
    mode = image.mode
    if mode not in _RAW_BITS:
        raise SampleError(
            f"an image of mode {mode!r} cannot be stored as raw pixels, since its palette would be lost: "
            "convert it (image.convert('RGB')), or store Image(image=..., format='png')."
        )
    try:
        pixels: bytes = image.tobytes()
    except (OSError, SyntaxError, ValueError) as error:
        raise SampleError(f"an image cannot be decoded ({error}).") from error
    name: bytes = mode.encode()
    return struct.pack("<III", *image.size, len(name)) + name + pixels


def unpack_pil(data: bytes) -> Any:
    """Return the image of a ``pil`` leaf."""
    pillow = _pillow()
    try:
        width, height, size = struct.unpack_from("<III", data)
        mode = data[12 : 12 + size].decode("ascii")
        pixels = data[12 + size :]
        if mode not in _READ_BITS:
            raise Corrupt(f"a pil leaf is damaged: its mode is {mode[:20]!r}.")
        if len(pixels) != (width * _READ_BITS[mode] + 7) // 8 * height:
            raise Corrupt(f"a pil leaf is damaged: {len(pixels)} bytes are not {width} x {height} pixels of mode {mode}.")
        return pillow.frombytes(mode, (width, height), pixels)
    except (struct.error, ValueError, OverflowError, MemoryError) as error:
        raise Corrupt(f"a pil leaf is damaged ({error}).") from error


# --- reading ------------------------------------------------------------------------------------------------------------------------------


def read_text(data: bytes) -> str:
    """Return the text of a ``text`` leaf."""
    try:
        return bytes(data).decode()
    except UnicodeDecodeError as error:
        raise Corrupt(f"a text leaf is not UTF-8: {error}.") from error


def split_blobs(data: bytes) -> list[bytes]:
    """Return the files in a ``jpeg_array`` leaf."""
    try:
        (count,) = struct.unpack_from("<I", data)
        if 4 + 4 * count > len(data):
            raise Corrupt("a jpeg_array leaf is cut short.")
        sizes = struct.unpack_from(f"<{count}I", data, 4)
    except struct.error as error:
        raise Corrupt(f"a jpeg_array leaf is damaged ({error}).") from error
    at = 4 + 4 * count
    if at + sum(sizes) != len(data):
        raise Corrupt(f"a jpeg_array leaf is damaged: its images should take {sum(sizes)} bytes, but {len(data) - at} are there.")
    blobs = []
    for size in sizes:
        blobs.append(data[at : at + size])
        at += size
    return blobs


def decode(data: bytes, into: np.ndarray[Any, Any] | None = None) -> np.ndarray[Any, Any]:
    """Return image file bytes as uint8 RGB of channels x height x width: in ``into`` if it has that shape, else in memory of its own."""
    try:
        from PIL import Image
    except ImportError:
        found = _decode_torchvision(data)
        if into is None or into.shape != found.shape:
            return found
        into[...] = found
        return into
    try:
        image: Any = Image.open(io.BytesIO(data))
        if image.mode.startswith("I;16"):  # convert() would clip 16-bit grey instead of scaling it
            bands = [(np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8).tobytes()] * 3
        else:
            image = image if image.mode == "RGB" else image.convert("RGB")
            bands = [image.tobytes("raw", band) for band in "RGB"]  # quicker than moving the channels of an array to the front
    except Image.DecompressionBombError as error:
        raise UnsupportedFormat(f"{error} Raise PIL.Image.MAX_IMAGE_PIXELS to read it.") from error
    except (OSError, ValueError, SyntaxError, struct.error, IndexError, OverflowError, EOFError, TypeError) as error:
        raise Corrupt(f"an image is damaged ({error}).") from error
    if into is None or into.shape != (3, image.height, image.width):
        into = np.empty((3, image.height, image.width), np.uint8)
    for channel, band in zip(into, bands, strict=True):
        channel[...] = np.frombuffer(band, np.uint8).reshape(channel.shape)
    return into


def _decode_torchvision(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    try:
        import torch
        from torchvision.io import ImageReadMode, decode_image
    except ImportError as error:
        raise MissingDependency("reading images needs Pillow or torchvision: pip install pillow", package="pillow") from error
    try:
        tensor = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
    except (RuntimeError, ValueError) as error:
        raise Corrupt(f"an image is damaged ({error}).") from error
    result: np.ndarray[Any, np.dtype[np.uint8]] = tensor.numpy()
    return result
