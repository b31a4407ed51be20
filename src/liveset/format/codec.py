"""Compression and checksums: zstd frames in and out, and what an index says about them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import xxhash

from liveset.errors import Corrupt, MissingDependency, UnsupportedFormat

if TYPE_CHECKING:
    from typing_extensions import Buffer

    Buffers: TypeAlias = Buffer | Iterable[Buffer]

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# The format counts bytes of a chunk in u32.
MAX_INFLATED = (1 << 32) - 1
LEVELS = ("chunk", "batch", "sample")
DEFAULT_BATCH = 256

_NAME = re.compile(r"zstd(?::([1-9]|1[0-9]|2[0-2]))?\Z")
# What the name "zstd" alone means in this format.
_DEFAULT_ZSTD_LEVEL = 4
_local = threading.local()


@dataclass(frozen=True, slots=True)
class Compression:
    """How the chunks of a dataset are compressed.

    Attributes:
        name: ``zstd`` or ``zstd:1`` to ``zstd:22``.
        level: what one frame holds: a ``sample``, a ``batch`` of samples, or the whole ``chunk`` file.
        batch_size: samples per frame, for ``batch``.
    """

    name: str = "zstd"
    level: str = "batch"
    batch_size: int = DEFAULT_BATCH

    @property
    def zstd_level(self) -> int:
        """The level that zstd is called with."""
        return int(self.name.partition(":")[2] or _DEFAULT_ZSTD_LEVEL)

    @classmethod
    def parse(
        cls,
        compression: str | None,
        compression_level: str | None = None,
        compression_batch_size: int | None = None,
        *,
        item_loader: str = "PyTreeLoader",
        encrypted: bool = False,
    ) -> Compression | None:
        """Return the compression that arguments of ``optimize`` ask for, or None.

        Args:
            compression: codec name, or None for none.
            compression_level: ``batch`` (default), ``sample`` or ``chunk``.
            compression_batch_size: samples per frame for ``batch``; default 256.
            item_loader: name of the loader that the dataset needs.
            encrypted: whether the dataset is encrypted.

        Raises:
            ValueError: an argument has no meaning, or two do not go together.
        """
        if compression is not None:
            _check_name(compression)
        if isinstance(compression_level, int):
            raise ValueError(
                f"compression_level={compression_level} is granularity, not a zstd numeric level: "
                "choose 'chunk', 'batch' or 'sample' here, and the zstd level with compression='zstd:3'."
            )
        if compression_level is not None and compression_level not in LEVELS:
            raise ValueError(f"compression_level must be 'chunk', 'batch', or 'sample'. Found {compression_level!r}.")
        size = compression_batch_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_INFLATED):
            raise ValueError(f"compression_batch_size must be a positive integer. Found {size!r}.")
        if compression is None:
            return None
        simple = item_loader == "PyTreeLoader" and not encrypted
        level = compression_level or ("batch" if simple else "chunk")
        if level != "chunk" and item_loader != "PyTreeLoader":
            raise ValueError(f"compression_level={level!r} is only supported for pytree chunks; {item_loader} takes 'chunk'.")
        if level != "chunk" and encrypted:
            raise ValueError(f"compression_level={level!r} does not support encryption: use compression_level='chunk'.")
        return cls(compression, level, size or DEFAULT_BATCH)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Compression | None:
        """Return the compression that the ``config`` of an index describes, or None; ``UnsupportedFormat`` for what is unknown."""
        name = config.get("compression")
        if name is None:
            return None
        level = config.get("compression_level") or "chunk"
        if not isinstance(name, str) or not _NAME.match(name) or level not in LEVELS:
            raise UnsupportedFormat(f"the dataset is compressed with {name!r} by {level!r}: only zstd by chunk, batch or sample is read.")
        size = config.get("compression_batch_size")
        return cls(name, level, size if isinstance(size, int) and size > 0 else DEFAULT_BATCH)

    def to_config(self) -> dict[str, Any]:
        """Return the members of ``config`` that describe this compression, as the old tool writes them."""
        return {
            "compression": self.name,
            "compression_batch_size": self.batch_size if self.level == "batch" else None,
            "compression_level": None if self.level == "chunk" else self.level,
        }


def _check_name(name: object) -> None:
    if name == "zstd_framed":
        raise ValueError("'zstd_framed' is not a codec: use compression='zstd' with compression_level='batch'.")
    if not isinstance(name, str) or not _NAME.match(name):
        raise ValueError(f"The provided compression {name!r} isn't available in ['zstd', 'zstd:1', ..., 'zstd:22'].")


# --- frames -------------------------------------------------------------------------------------------------------------------------------


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise MissingDependency("No compression algorithms are installed. For zstd: pip install zstandard", package="zstandard") from error
    return zstandard


def is_frame(data: Buffer) -> bool:
    """Tell whether the bytes start like a zstd frame."""
    with memoryview(data) as view:
        return bytes(view[:4]) == ZSTD_MAGIC


def compress(data: Buffer, compression: Compression | None = None) -> bytes:
    """Return one zstd frame that states its content size."""
    level = compression.zstd_level if compression is not None else _DEFAULT_ZSTD_LEVEL
    compressors: dict[int, Any] = _local.__dict__.setdefault("compressors", {})
    if (compressor := compressors.get(level)) is None:  # contexts are costly to make and must not be shared by threads
        compressor = compressors[level] = _zstandard().ZstdCompressor(level=level, write_content_size=True)
    result: bytes = compressor.compress(data)
    return result


def decompress(data: Buffer, *, size: int | None = None, limit: int = MAX_INFLATED, file: str = "") -> bytes:
    """Return the content of one zstd frame.

    Args:
        data: exactly one frame.
        size: the exact size that the content must have, where it is known.
        limit: most bytes that the content may have, so that a damaged or hostile frame cannot fill the memory.
        file: named in errors.

    Raises:
        Corrupt: the frame is damaged, or the content has another size.
    """
    zstd = _zstandard()
    where = file or "a zstd frame"
    decompressor = getattr(_local, "decompressor", None)
    if decompressor is None:
        decompressor = _local.decompressor = zstd.ZstdDecompressor()
    limit = limit if size is None else size
    try:
        stated: int = zstd.frame_content_size(data)
        if stated > limit:  # the library would allocate whatever the header says
            raise Corrupt(f"{where}: a zstd frame of {stated:,} bytes stands where at most {limit:,} are expected.", file=file)
        if stated >= 0:
            result: bytes = decompressor.decompress(data, allow_extra_data=False)
        else:
            result = _decompress_unknown(decompressor, data, limit, where, file)
    except zstd.ZstdError as error:
        raise Corrupt(f"{where}: a zstd frame is damaged ({error}).", file=file) from error
    if size is not None and len(result) != size:
        raise Corrupt(f"{where}: a zstd frame holds {len(result):,} bytes instead of {size:,}.", file=file)
    return result


def _decompress_unknown(decompressor: Any, data: Buffer, limit: int, where: str, file: str) -> bytes:
    """Inflate a frame that does not state its size: piece by piece, since a one-shot call would allocate the whole limit."""
    stream = decompressor.decompressobj()
    with memoryview(data) as view:
        pieces, total = [], 0
        for start in range(0, len(view), 1 << 16):
            if stream.eof:
                break
            piece = stream.decompress(view[start : start + (1 << 16)])
            total += len(piece)
            if total > limit:
                raise Corrupt(f"{where}: a zstd frame inflates to more than the {limit:,} bytes that are expected.", file=file)
            pieces.append(piece)
    if not stream.eof or stream.unused_data:
        raise Corrupt(f"{where}: a zstd frame is cut short or followed by other bytes.", file=file)
    return b"".join(pieces)


def inflate(buffer: Buffer, *, size: int, file: str = "") -> bytes:
    """Return the plain bytes of a file that is one zstd frame.

    Args:
        buffer: the whole file.
        size: how long the plain file must at least be (``chunk_bytes`` of the index); the format allows more.
        file: named in errors.
    """
    result = decompress(buffer, file=file)
    if len(result) < size:
        raise Corrupt(f"{file}: the file inflates to {len(result):,} bytes, but the index says {size:,}.", file=file)
    return result


# --- checksums ----------------------------------------------------------------------------------------------------------------------------


def checksum(buffers: Buffers) -> str:
    """Return ``xxh3:`` and 16 hex digits over one buffer, or over several as if they were joined."""
    state = xxhash.xxh3_64()
    for view in _views(buffers):
        state.update(view)
    return f"xxh3:{state.hexdigest()}"


def verify(buffers: Buffers, check: str) -> bool:
    """Tell whether the bytes have the recorded checksum; ``UnsupportedFormat`` for an algorithm that is unknown."""
    if not check.startswith("xxh3:"):
        raise UnsupportedFormat(f"the checksum {check!r} is of a kind that this version of liveset does not know.")
    return checksum(buffers) == check


def _views(buffers: Buffers) -> Iterable[Any]:
    try:
        return (memoryview(buffers),)  # type: ignore[arg-type]
    except TypeError:
        return buffers  # type: ignore[return-value]
