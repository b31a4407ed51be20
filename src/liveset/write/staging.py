"""The files that a run has made and no version names: found again by their names, removed when the run fails."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

from liveset.edit.keyfiles import KEYS
from liveset.edit.retention import STAGED
from liveset.format.stamp import tokens_of
from liveset.storage import PRIVATE, VERSIONS, Store


class Staging:
    """Knows which files and folders are ours, and removes them; never anything else.

    The names of a run's files hold its random token, so that files of a worker that died unheard are known too.

    Args:
        store: where the dataset is.
        token: of the run.
    """

    def __init__(self, store: Store, token: str) -> None:
        self._store = store
        self._tokens = {token}
        self._stems: set[str] = set()
        # Whatever of these is missing now is ours if it is there, and empty, later.
        self._folders = [] if store.remote else [path for path in _folders(store.url) if not os.path.lexists(path)]

    def track(self, stem: str) -> None:
        """Note the name, but for its suffix, of a file that is about to be written."""
        self._stems.add(stem)

    def adopt(self, tokens: Iterable[str]) -> None:
        """Count files with these tokens as ours, too."""
        self._tokens.update(tokens)

    def discard(self, keep: Iterable[str] = ()) -> None:
        """Remove our chunk files but those in ``keep``, and folders that we made and that are empty."""
        kept = set(keep)
        ours = [entry.name for entry in self._store.list("chunk-") if entry.name not in kept and self._ours(entry.name)]
        tables = [entry.name for entry in self._store.list(KEYS) if not self._tokens.isdisjoint(tokens_of(entry.name))]
        self._store.delete(ours + [name for name in tables if name not in kept])
        self.prune()

    def prune(self, folder: str | None = None) -> None:
        """Remove the folders that we made, as far as they are empty.

        Args:
            folder: another folder of the dataset that is ours.
        """
        ours = [] if folder is None else [os.path.join(self._store.url, folder), os.path.join(self._store.url, STAGED)]
        for path in ours + self._folders:
            with suppress(OSError):
                os.rmdir(path)

    def _ours(self, name: str) -> bool:
        stem = name.partition(".")[0]
        return stem in self._stems or stem.rpartition("-")[2] in self._tokens


def _folders(root: str) -> list[str]:
    """Return the folders that writing below ``root`` may make, inner ones first."""
    folders = [os.path.join(root, folder.rstrip("/")) for folder in (KEYS, STAGED, VERSIONS, PRIVATE)]
    while root != os.path.dirname(root):
        folders.append(root)
        root = os.path.dirname(root)
    return folders
