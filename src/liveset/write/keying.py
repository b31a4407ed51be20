"""How the key of a sample is found: by a function of the user, or in a field that the dataset remembers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from liveset.errors import SampleError
from liveset.format.fields import field_value
from liveset.format.keytable import Key, normalize_key

KeyFunction: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class KeyRule:
    """Returns the key of a sample; ``field`` is set where it stands in a field.

    Raises (when called):
        SampleError: the sample has no such field, or what stands there cannot be a key.
    """

    function: KeyFunction | None
    field: str | None = None

    @classmethod
    def of(cls, key_fn: KeyFunction | str) -> KeyRule:
        """Return the rule for a ``key_fn`` argument: a function, or the name of a field such as ``id`` or ``meta.id``."""
        if isinstance(key_fn, str):
            return cls(None, key_fn)
        if not callable(key_fn):
            raise ValueError(f"`key_fn` should be a function of one sample, or the name of a field. Found {type(key_fn).__name__}.")
        return cls(key_fn)

    def __call__(self, sample: Any) -> Key:
        try:
            found = self.function(sample) if self.function is not None else field_value(sample, self.field or "")
        except (LookupError, TypeError) as error:
            if self.function is not None:
                raise
            raise SampleError(f"the sample has no field {self.field!r}, which holds the key.", field=self.field or "") from error
        try:
            return normalize_key(found)
        except TypeError as error:
            where = f"field {self.field!r}" if self.field is not None else "key_fn"
            raise SampleError(f"the key from {where} cannot be used: {error}", field=self.field or "") from error
