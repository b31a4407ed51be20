from __future__ import annotations

import functools
import io
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveset.errors import Corrupt, MissingDependency, SampleError, UnsupportedFormat
from liveset.format import images, media
from liveset.format.media import File, Image, Jpeg, JpegArray, Pil, Text, decode_media, encode_media, media_format

PIL = pytest.importorskip("PIL.Image")

RNG = np.random.default_rng(0)
PIXELS = np.asarray(PIL.fromarray(RNG.integers(0, 255, (6, 9, 3), dtype=np.uint8)).resize((45, 30)))


def encoded(image: Any, kind: str = "JPEG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


PICTURE = PIL.fromarray(PIXELS)
JPEG = encoded(PICTURE, quality=80)
PNG = encoded(PICTURE, "PNG")


def opened(data: bytes = JPEG) -> Any:
    return PIL.open(io.BytesIO(data))


@pytest.fixture(autouse=True)
def close_files() -> Iterator[None]:
    yield
    while FILES:
        FILES.pop().close()


FILES: list[Any] = []


def opened_path(path: Path) -> Any:
    FILES.append(PIL.open(path))
    return FILES[-1]


def as_array(value: Any) -> np.ndarray[Any, Any]:
    assert value.dtype in (np.uint8, getattr(sys.modules.get("torch"), "uint8", None))
    return np.asarray(value)


def chw(data: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(opened(data).convert("RGB")).transpose(2, 0, 1)


# --- which leaf -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "fmt"),
    [
        (Image(path="a/b.PNG"), "image:png"),
        (Image(path="b.jpeg"), "image:jpeg"),
        (Image(path="b.tif"), "image:jpg"),
        (Image(bytes=JPEG), "image:jpg"),
        (Image(array=PIXELS), "image:png"),
        (Image(array=PIXELS, format="JPEG"), "image:jpg"),
        (Image(array=PIXELS, quality=50), "image:jpg"),
        (Image(image=PICTURE), "image:png"),
        (Image(image=opened()), "image:jpg"),
        (Image(path="a.jpg", format="webp"), "image:webp"),
        (Jpeg(path="a.jpg"), "image:jpg"),
        (Jpeg(path="a.bin"), "jpeg"),
        (Jpeg(bytes=JPEG), "jpeg"),
        (JpegArray([opened()]), "jpeg_array"),
        (Pil(image=PICTURE), "pil"),
        (Text(text="a"), "text"),
        (Text(path="a.jpg"), "text"),
        (File(path="a.JSON"), "file:json"),
        (File(path="a.jpg"), "file:jpg"),
        (File(bytes=b""), "file"),
        (opened(), "jpeg"),
        (opened(PNG), "pil"),
        (PICTURE, "pil"),
        ([opened(), opened()], "jpeg_array"),
        ((opened(),), "jpeg_array"),
    ],
    ids=range(25),
)
def test_format_of_media(value: Any, fmt: str) -> None:
    assert media_format(value) == fmt


@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        "a.jpg",
        __file__,
        JPEG,
        PNG,
        b"%PDF-1.4",
        [],
        (),
        [PICTURE],
        [opened(), PICTURE],
        [opened(), 1],
        {},
        PIXELS,
    ],
    ids=range(14),
)
def test_everything_else_is_no_media(value: Any) -> None:
    assert media_format(value) is None


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from liveset.format import media as m; m.media_format([1]); m.media_format('a'); m.encode_media(m.Text(text='a'), 'text');"
        "print([n for n in ('torch', 'PIL', 'pyarrow', 'torchvision') if n in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_wrappers_check_their_arguments() -> None:
    wrappers: tuple[Callable[..., object], ...] = (Image, Jpeg, Pil, Text, File)
    for make in wrappers:
        with pytest.raises(TypeError):
            make(bytes="text")
        with pytest.raises(ValueError, match="exactly one"):
            make()
        with pytest.raises(ValueError, match="exactly one"):
            make(path="a", bytes=b"a")
    wrappers = (functools.partial(Image, bytes=JPEG), functools.partial(Jpeg, bytes=JPEG), JpegArray)
    for make in wrappers:
        with pytest.raises(ValueError, match="mutually exclusive"):
            make(quality=50, max_quality=60)
        bad: Any
        for bad in (0, 101, 50.0, True):
            with pytest.raises(ValueError, match="1 to 100"):
                make(quality=bad)
    options: dict[str, Any] = {"text": b"a"}
    with pytest.raises(TypeError):
        Text(**options)
    assert Jpeg(bytes=JPEG).max_quality == 95
    assert Jpeg(bytes=JPEG, quality=50).max_quality is None
    assert JpegArray([]).max_quality == 95
    assert Image(bytes=JPEG).max_quality is None


# --- images as files --------------------------------------------------------------------------------------------------------------------------


def test_file_bytes_are_stored_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(JPEG)
    webp = encoded(PICTURE, "WEBP")
    reopened = opened_path(path)
    for value, fmt, data in (
        (opened(), "jpeg", JPEG),
        (reopened, "jpeg", JPEG),
        (Image(path=path), "image:jpg", JPEG),
        (Image(path=str(path)), "image:jpg", JPEG),
        (Image(bytes=PNG), "image:jpg", PNG),
        (Image(bytes=webp), "image:webp", webp),
        (Image(bytes=JPEG, format="jpg"), "image:jpg", JPEG),
        (Image(image=opened()), "image:jpg", JPEG),
        (Jpeg(path=path), "image:jpg", JPEG),
        (Jpeg(bytes=memoryview(JPEG)), "jpeg", JPEG),
        (Jpeg(image=opened()), "jpeg", JPEG),
    ):
        assert encode_media(value, fmt) == data
        assert np.array_equal(as_array(decode_media(fmt, data)), chw(data))


def test_jpeg_that_was_loaded_from_a_path_keeps_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(JPEG)
    image = opened_path(path)
    image.load()
    assert media_format(image) == "jpeg"
    assert encode_media(image, "jpeg") == JPEG


def test_changed_jpeg_is_never_stored_as_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(JPEG)
    painted = opened_path(path)
    painted.putpixel((0, 0), (255, 0, 255))
    drafted = opened(path.read_bytes())
    drafted.draft("L", (10, 10))
    loaded = opened()
    loaded.load()  # its bytes are gone
    for image in (painted, drafted, loaded):
        assert media_format(image) == "pil"
        with pytest.raises(SampleError):
            encode_media(image, "jpeg")
        back = decode_media("pil", encode_media(image, "pil"))
        assert back.mode == image.mode
        assert back.tobytes() == image.tobytes()


def test_stream_position_does_not_matter() -> None:
    image = opened()
    position = image.fp.tell()
    assert encode_media(image, "jpeg") == JPEG
    assert image.fp.tell() == position
    assert np.array_equal(np.asarray(image), np.asarray(opened()))


@pytest.mark.parametrize(
    "image",
    [
        PICTURE.convert("L"),
        PICTURE.convert("1"),
        PICTURE.quantize(8),
        PICTURE.convert("RGBA"),
        PICTURE.convert("LA"),
    ],
    ids=lambda image: image.mode,
)
def test_every_png_reads_as_rgb(image: Any) -> None:
    data = encoded(image, "PNG")
    result = as_array(decode_media("image:jpg", data))
    assert result.shape == (3, 30, 45)
    assert np.array_equal(result, np.asarray(image.convert("RGB")).transpose(2, 0, 1))


def test_cmyk_and_grey_jpegs_read_as_rgb() -> None:
    for mode in ("CMYK", "L"):
        data = encode_media(opened(encoded(PICTURE.convert(mode))), "jpeg")
        result = as_array(decode_media("jpeg", data))
        assert np.array_equal(result, chw(data))
        assert abs(result.astype(int) - PIXELS.transpose(2, 0, 1)).mean() < (20 if mode == "CMYK" else 100)


def test_sixteen_bit_grey_is_scaled() -> None:
    grey = np.array([[0, 255, 256, 65535, 40000]], np.uint16)
    result = as_array(decode_media("image:png", encoded(PIL.fromarray(grey), "PNG")))
    assert result[:, 0].tolist() == [[0, 0, 1, 255, 156]] * 3


def test_result_is_a_tensor_that_owns_its_memory() -> None:
    torch = pytest.importorskip("torch")
    result = decode_media("jpeg", JPEG)
    assert isinstance(result, torch.Tensor)
    assert result.dtype == torch.uint8
    assert result.is_contiguous()
    result[:] = 0


def test_arrays_and_options() -> None:
    assert np.array_equal(as_array(decode_media("image:png", encode_media(Image(array=PIXELS), "image:png"))), PIXELS.transpose(2, 0, 1))
    grey = as_array(decode_media("image:png", encode_media(Image(array=PIXELS[:, :, :1]), "image:png")))
    assert np.array_equal(grey[0], PIXELS[:, :, 0])
    data = encode_media(Image(bytes=PNG, format="jpeg", mode="L"), "image:jpg")
    assert opened(data).format == "JPEG"
    assert opened(data).mode == "L"
    data = encode_media(Image(bytes=JPEG, mode="L"), "image:png")
    assert (opened(data).format, opened(data).mode) == ("PNG", "L")
    data = encode_media(Image(image=PICTURE, format="webp"), "image:webp")
    assert np.array_equal(as_array(decode_media("image:webp", data)), PIXELS.transpose(2, 0, 1))
    assert opened(encode_media(Jpeg(image=PICTURE.convert("RGBA")), "jpeg")).mode == "RGB"
    assert opened(encode_media(Jpeg(bytes=PNG), "jpeg")).format == "JPEG"
    with pytest.raises(SampleError, match="stores JPEG"):
        encode_media(Image(bytes=JPEG, format="png", quality=5), "image:png")
    with pytest.raises(SampleError, match="can be stored as"):
        encode_media(Image(bytes=JPEG, format="tiff"), "image:tiff")
    with pytest.raises(SampleError, match="cannot be converted"):
        encode_media(Image(bytes=JPEG, mode="nonsense"), "image:png")
    with pytest.raises(SampleError, match="is no image"):
        encode_media(Image(array=np.zeros((2, 2, 7), np.uint8)), "image:png")
    with pytest.raises(SampleError, match="Pillow image is expected"):
        encode_media(Image(image=5), "image:png")


@pytest.mark.parametrize("quality", [1, 10, 30, 49, 50, 51, 75, 90, 95, 100])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_quality_is_estimated_exactly_for_usual_tables(quality: int, mode: str) -> None:
    assert images.estimate_quality(encoded(PICTURE.convert(mode), quality=quality)) == quality


def test_quality_and_cap() -> None:
    high, low = encoded(PICTURE, quality=98), encoded(PICTURE, quality=60)
    assert images.estimate_quality(encode_media(Jpeg(bytes=high), "jpeg")) == 95
    assert encode_media(Jpeg(bytes=high, max_quality=100), "jpeg") == high
    assert encode_media(Jpeg(bytes=low), "jpeg") == low
    assert images.estimate_quality(encode_media(Jpeg(bytes=low, max_quality=40), "jpeg")) == 40
    assert images.estimate_quality(encode_media(Jpeg(bytes=low, quality=80), "jpeg")) == 80
    assert images.estimate_quality(encode_media(Image(bytes=PNG, quality=70), "image:jpg")) == 70
    assert encode_media(Image(bytes=low, max_quality=70), "image:jpg") == low
    assert images.estimate_quality(encode_media(Image(bytes=high, max_quality=70), "image:jpg")) == 70


# --- lists of images --------------------------------------------------------------------------------------------------------------------------


def test_jpeg_arrays() -> None:
    other = encoded(PICTURE.resize((8, 4)))
    data = encode_media([opened(), opened(other)], "jpeg_array")
    assert data == struct.pack("<3I", 2, len(JPEG), len(other)) + JPEG + other
    assert encode_media(JpegArray([opened(), Jpeg(bytes=other)]), "jpeg_array") == data
    first, second = decode_media("jpeg_array", data)
    assert np.array_equal(as_array(first), chw(JPEG))
    assert np.array_equal(as_array(second), chw(other))
    assert decode_media("jpeg_array", encode_media(JpegArray([]), "jpeg_array")) == []
    mixed = encode_media(JpegArray([PICTURE, PIXELS, JPEG], quality=70), "jpeg_array")
    assert [images.estimate_quality(blob) for blob in images.split_blobs(mixed)] == [70] * 3
    for bad in (b"", data[:-1], data + b"x", struct.pack("<I", 2**32 - 1), struct.pack("<2I", 1, 2**32 - 1) + JPEG):
        with pytest.raises(Corrupt):
            decode_media("jpeg_array", bad)


# --- raw pixels -------------------------------------------------------------------------------------------------------------------------------


def test_pil_vector() -> None:
    image = PIL.frombytes("RGB", (3, 2), bytes(range(18)))
    data = encode_media(image, "pil")
    assert data == bytes.fromhex("03000000 02000000 03000000") + b"RGB" + bytes(range(18))
    assert encode_media(Pil(image=image), "pil") == data


MODES = "1 L LA La RGB RGBA RGBa RGBX CMYK YCbCr LAB HSV I F I;16 I;16B".split()


@given(st.sampled_from(MODES), st.integers(0, 9), st.integers(0, 5), st.randoms(use_true_random=False))
def test_pixels_of_every_mode_round_trip(mode: str, width: int, height: int, random: random.Random) -> None:
    empty = PIL.new(mode, (width, height))
    image = PIL.frombytes(mode, (width, height), random.randbytes(len(empty.tobytes())))
    result = decode_media("pil", encode_media(image, "pil"))
    assert (result.mode, result.size) == (mode, (width, height))
    assert result.tobytes() == image.tobytes()
    assert result == image


def test_pil_wrapper_sources(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    for value in (Pil(path=path), Pil(bytes=PNG), Pil(array=PIXELS), Pil(image=PICTURE), opened(PNG)):
        result = decode_media("pil", encode_media(value, "pil"))
        assert np.array_equal(np.asarray(result), PIXELS)
    assert decode_media("pil", encode_media(Pil(bytes=PNG, mode="L"), "pil")) == PICTURE.convert("L")


def test_palettes_are_refused_rather_than_lost() -> None:
    for image in (PICTURE.quantize(8), PICTURE.quantize(8).convert("PA")):
        with pytest.raises(SampleError, match="palette"):
            encode_media(image, "pil")
    data = encode_media(Image(image=PICTURE.quantize(8)), "image:png")  # the way out that the message names
    assert np.array_equal(as_array(decode_media("image:png", data)), np.asarray(PICTURE.quantize(8).convert("RGB")).transpose(2, 0, 1))


def test_damaged_pixels() -> None:
    data = encode_media(PICTURE, "pil")
    for bad in (
        b"",
        data[:11],
        data[:-1],
        data + b"x",
        data[:8] + b"\xff\xff\xff\xff" + data[12:],
        b"\xff\xff\xff\x7f" + data[4:],
        data[:12] + b"XYZ" + data[15:],
    ):
        with pytest.raises(Corrupt):
            decode_media("pil", bad)


# --- text, files ------------------------------------------------------------------------------------------------------------------------------


def test_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("é\r\n".encode())
    for value in (Text(text="é\r\n"), Text(bytes="é\r\n".encode()), Text(path=path)):
        assert decode_media("text", encode_media(value, "text")) == "é\r\n"
    for value in (Text(text="\ud800"), Text(bytes=b"\xff")):
        with pytest.raises(SampleError, match="UTF-8"):
            encode_media(value, "text")
    with pytest.raises(Corrupt):
        decode_media("text", b"\xff")


def test_files_are_bytes_whatever_their_name(tmp_path: Path) -> None:
    for name in ("a.json", "a.pickle", "a.jpg", "a"):
        path = tmp_path / name
        path.write_bytes(b'{"a": 1}')
        value = File(path=path)
        fmt = media_format(value)
        assert fmt is not None
        assert decode_media(fmt, encode_media(value, fmt)) == b'{"a": 1}'
    assert type(decode_media("file", memoryview(b"a"))) is bytes
    with pytest.raises(SampleError, match="cannot be read"):
        encode_media(File(path=tmp_path / "missing"), "file")
    with pytest.raises(SampleError, match="cannot be read"):
        encode_media(Image(path=tmp_path), "image:jpg")


# --- what cannot be -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fmt", ["video:mp4", "audio:wav", "nifti:nii", "mesh:glb", "pdf", "graph", "graph:pickle", "tifffile", "tiff", "strange:x"]
)
def test_unsupported_leaves_say_what_to_do(fmt: str) -> None:
    assert not media.is_supported(fmt)
    for call in (lambda: decode_media(fmt, b""), lambda: encode_media(File(bytes=b""), fmt)):
        with pytest.raises(UnsupportedFormat, match=rf"'{fmt}'.*serializers=.*fields="):
            call()


def test_supported_leaves() -> None:
    assert all(map(media.is_supported, ["image:jpg", "image", "jpeg", "jpeg_array", "pil", "text", "file", "file:json"]))
    assert not any(map(media.is_supported, ["str", "int", "json", "pickle", "numpy", "no_header_tensor:1"]))


def test_values_that_do_not_fit_the_leaf() -> None:
    for value, fmt in (
        (PICTURE, "jpeg"),
        (JPEG, "jpeg"),
        ("a", "text"),
        (Text(text="a"), "file"),
        (5, "pil"),
        ([PICTURE], "jpeg_array"),
        (PICTURE, "image:png"),
    ):
        with pytest.raises(SampleError):
            encode_media(value, fmt)


@pytest.mark.parametrize("fmt", ["jpeg", "image:png"])
def test_damaged_images_are_corrupt(fmt: str) -> None:
    for data in (
        b"",
        b"no image",
        JPEG[: len(JPEG) // 2],
        JPEG[:100],
        PNG[: len(PNG) // 2],
        PNG[:30],
        PNG[:-20] + b"\0" * 20 if fmt == "jpeg" else PNG[:40],
    ):
        with pytest.raises(Corrupt):
            decode_media(fmt, data)
    with pytest.raises(SampleError, match="no image"):
        encode_media(Image(bytes=b"no image"), "image:jpg")


@given(st.sampled_from([JPEG, PNG]), st.data())
def test_damage_gives_pixels_or_corrupt(good: bytes, source: st.DataObject) -> None:
    data = bytearray(good)
    for _ in range(source.draw(st.integers(1, 4))):
        data[source.draw(st.integers(0, len(data) - 1))] = source.draw(st.integers(0, 255))
    try:
        result = as_array(decode_media("image:jpg", bytes(data)))
    except (Corrupt, UnsupportedFormat):  # the second for sizes beyond what Pillow takes
        return
    assert result.shape[0] == 3


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "PIL" or name.startswith("PIL.")] + ["torchvision"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependency, match="Pillow or torchvision"):
        decode_media("jpeg", JPEG)
    with pytest.raises(MissingDependency, match="pip install pillow"):
        decode_media("pil", b"")
    assert encode_media(Image(bytes=JPEG), "image:jpg") == JPEG  # known by its first bytes


def test_torchvision_in_place_of_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    for name in [name for name in sys.modules if name == "PIL" or name.startswith("PIL.")]:
        monkeypatch.setitem(sys.modules, name, None)
    stand_in: Any = type(sys)("torchvision.io")
    stand_in.ImageReadMode = type("Mode", (), {"RGB": "rgb"})

    def decode_image(data: Any, mode: str) -> Any:
        if bytes(data.numpy()) != JPEG:
            raise RuntimeError("no image")
        assert mode == "rgb"
        return torch.full((3, 2, 2), 7, dtype=torch.uint8)

    stand_in.decode_image = decode_image
    monkeypatch.setitem(sys.modules, "torchvision", type(sys)("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.io", stand_in)
    assert decode_media("jpeg", JPEG).tolist() == torch.full((3, 2, 2), 7).tolist()
    with pytest.raises(Corrupt):
        decode_media("jpeg", b"x")
