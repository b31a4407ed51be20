"""What an update would do, and what it did."""

from __future__ import annotations

from dataclasses import dataclass

from liveset.format.keytable import Key

__all__ = ["UpdatePreview", "UpdateResult"]


@dataclass(frozen=True, slots=True)
class UpdatePreview:
    """What a commit would touch.

    Attributes:
        keys: number of samples that would be replaced, patched, added or removed.
        chunks: number of chunk files that would be written anew; fewer where the edits of one change nothing.
        bytes_to_rewrite: size of these files now.
        missing: staged keys that the dataset does not have; the commit would refuse them.
        inserted: number of samples that would be added.
        deleted: number of samples that would be removed.
    """

    keys: int
    chunks: int
    bytes_to_rewrite: int
    missing: tuple[Key, ...]
    inserted: int = 0
    deleted: int = 0


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What a commit did.

    Attributes:
        version: that has the changes; where these change nothing, the newest one.
        keys: number of samples that were replaced, patched, added or removed, also by what they were before.
        chunks: number of chunk files that were written anew, or went with all their samples.
        bytes_written: size of all files that were written for it.
        seconds: that the commit took.
        inserted: number of samples that were added.
        deleted: number of samples that were removed.
    """

    version: int
    keys: int
    chunks: int
    bytes_written: int
    seconds: float
    inserted: int = 0
    deleted: int = 0
