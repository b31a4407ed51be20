"""Facts and samples as text for people and as JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from liveset.read.info import DatasetInfo

LONG = 64  # elements of an array, or bytes, up to which they are printed in full as JSON
WIDE = 100  # characters of a value for people


def info_as_dict(info: DatasetInfo) -> dict[str, Any]:
    """Return the facts as JSON values."""
    return {
        "path": str(info.path),
        "version": info.version,
        "versions": list(info.versions),
        "committed_at": info.committed_at,
        "samples": info.samples,
        "chunks": info.chunks,
        "bytes": info.size,
        "compression": info.compression,
        "schema": info.schema.fields if info.schema is not None else None,
        "attributes": as_json_value(info.attributes),
    }


def print_info(info: DatasetInfo) -> None:
    """Print the facts as a table."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def row(name: str, value: object) -> None:
        table.add_row(name, Text(str(value)))

    row("path", info.path)
    row("samples", f"{info.samples:,}")
    row("chunks", f"{info.chunks:,}")
    row("bytes", f"{info.size:,}{_in_words(info.size)}")
    row("compression", info.compression or "none")
    row("version", f"{info.version}{f', committed {info.committed_at}' if info.committed_at else ' (written by another program)'}")
    if len(info.versions) > 1:
        row("versions", _ranges(info.versions))
    row("schema", info.schema if info.schema is not None else "none yet")
    for name, value in info.attributes.items():
        row(name, value)
    _console().print(table)


def print_sample(place: int | str, sample: Any) -> None:
    """Print a sample under its position or key, a line for each field of a dict."""
    console = _console()
    console.print(Text(f"[{place}]", style="bold"), soft_wrap=True)
    fields = sample.items() if isinstance(sample, Mapping) and sample else [("", sample)]
    width = max(len(str(name)) for name, _ in fields)
    for name, value in fields:
        console.print(Text(f"  {name!s:<{width}}  {describe(value)}" if name != "" else f"  {describe(value)}"), soft_wrap=True)


def describe(value: Any) -> str:
    """Return a value in a few words: arrays by type and shape, bytes by size, long text cut."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        first = f"  {bytes(value[:12]).hex(' ')}" if len(value) else ""
        return f"{len(value):,} bytes{first}{' …' if len(value) > 12 else ''}"
    if _is_array(value):
        some = " ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in _flat(value, 8))
        more = " …" if math.prod(value.shape) > 8 else ""
        return f"{_dtype(value)} {tuple(value.shape)}  {some}{more}".rstrip()
    if isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key}: {describe(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(describe(item) for item in value[:20]) + (", …" if len(value) > 20 else "") + "]"
    elif hasattr(value, "getbands"):  # a PIL image
        return f"{value.mode} image, {value.size[0]} x {value.size[1]}"
    else:
        text = value if isinstance(value, str) else repr(value)
    text = " ".join(text.splitlines())
    return text if len(text) <= WIDE else f"{text[:WIDE]} …"


def as_json_value(value: Any) -> Any:
    """Return a value as something that JSON can hold; large arrays and bytes are told by type, shape and size."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): as_json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_json_value(item) for item in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        told: dict[str, Any] = {"bytes": len(value)}
        return told | {"hex": bytes(value).hex()} if len(value) <= LONG else told
    if _is_array(value):
        if math.prod(value.shape) <= LONG and not _dtype(value).startswith("complex"):
            return as_json_value(value.tolist())
        return {"dtype": _dtype(value), "shape": list(value.shape)}
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return describe(value)


def _is_array(value: Any) -> bool:
    """Tell numpy arrays, numpy scalars and torch tensors, without importing either."""
    return hasattr(value, "dtype") and hasattr(value, "shape") and hasattr(value, "tolist")


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def _flat(value: Any, count: int) -> list[Any]:
    items = value.reshape(-1)[:count].tolist()
    return items if isinstance(items, list) else [items]


def _ranges(numbers: tuple[int, ...]) -> str:
    """Return ``1-5, 8`` for ``1, 2, 3, 4, 5, 8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _in_words(size: int) -> str:
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if size >= 10**power:
            return f" ({size / 10**power:.1f} {unit})"
    return ""


def _console() -> Console:
    return Console(highlight=False, emoji=False)
