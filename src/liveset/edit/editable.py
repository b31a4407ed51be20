"""What can be edited: what every operation that writes chunks anew asks first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from liveset.errors import Corrupt, UnsupportedFormat
from liveset.format import codec
from liveset.format.chunk import Buffer
from liveset.format.index import ChunkRecord

__all__ = ["check_editable", "check_intact"]


def check_editable(config: Mapping[str, Any], url: str, done: str) -> None:
    """Raise ``UnsupportedFormat`` for a dataset whose chunks cannot be written; ``done`` says what was to be done to it."""
    if config.get("encryption") is not None:
        raise UnsupportedFormat(f"{url} is encrypted: it cannot be {done} yet.")
    if config.get("item_loader") not in (None, "PyTreeLoader"):
        raise UnsupportedFormat(f"{url} needs the loader {config['item_loader']}: it cannot be {done} yet.")


def check_intact(record: ChunkRecord, name: str, buffer: Buffer) -> None:
    """Raise ``Corrupt`` for a file, found under ``name``, that is damaged: what is copied gets a checksum, which must not vouch for it."""
    if record.check is not None and name == record.filename and not codec.verify(buffer, record.check):
        raise Corrupt(f"{name} is damaged: its checksum differs from the index. Nothing was changed; repair it first.", file=name)
