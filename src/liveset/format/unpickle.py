"""The strict unpickler: every opcode that could do more than build plain values is checked or refused.

It runs in Python and is slow; ``safepickle`` comes here for what its fast path does not understand, and for the reason of a failure.
"""

from __future__ import annotations

import collections
import functools
import io
import pickle
import uuid
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from liveset.errors import Corrupt, DatasetError
from liveset.format import picklenames

# The standard library keeps the Python version of its unpickler under this name in every supported release.
_Base: Any = pickle._Unpickler  # noqa: SLF001

_LISTS = frozenset({list, collections.deque})
_DICTS = frozenset({dict, collections.OrderedDict, collections.Counter, collections.defaultdict})


class StrictUnpickler(_Base):  # type: ignore[misc]
    """Builds values from allowed names only, and never runs ``__setstate__``.

    Arrays, dtypes and UUIDs get their content from a state that follows them. They are replaced by a value made from it, on the stack and
    in the memo.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_Base.dispatch)

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)
        super().__init__(self._file)
        # By id: the object itself (so that the id stays taken), what makes the final value of its state, and where the memo holds it.
        self._unfinished: dict[int, tuple[Any, Callable[[Any], Any], list[int]]] = {}

    def load_all(self) -> Any:
        """Return the value; ``Corrupt`` when bytes follow it."""
        value = self.load()
        if self._file.read(1):
            raise Corrupt("a pickle is damaged: bytes follow its end.")
        return value

    def find_class(self, module: str, name: str) -> Any:
        return picklenames.find(module, name)

    def _unfinish(self, value: Any, finish: Callable[[Any], Any]) -> Any:
        self._unfinished[id(value)] = (value, finish, [])
        return value

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        if type(arguments) is not tuple:
            raise Corrupt("a pickle is damaged: a call without arguments.")
        value = picklenames.call_for(function)(*arguments)
        if function is np.dtype and len(arguments) == 3:
            copy = np.dtype(value, copy=True)  # the shared dtype objects may stand at other places of the pickle as well
            value = self._unfinish(copy, functools.partial(picklenames.build_dtype, value))
        elif function is picklenames.RECONSTRUCT:
            value = self._unfinish(value, picklenames.build_array)
        self.stack[-1] = value

    def load_newobj(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if kind is not uuid.UUID or arguments != ():
            raise picklenames.refuse(f"the pickle makes a {getattr(kind, '__qualname__', 'value')} of an unusual kind")
        self.stack.append(self._unfinish(uuid.UUID(int=0), picklenames.uuid_from_state))

    def load_build(self) -> None:
        state = self.stack.pop()
        value = self.stack[-1]
        known = self._unfinished.pop(id(value), None)
        if known is None:
            raise picklenames.refuse(f"the pickle sets the inner state of a {type(value).__qualname__}")
        _, finish, slots = known
        final = self.stack[-1] = finish(state)
        for slot in slots:
            self.memo[slot] = final

    def _remember(self, slot: int) -> None:
        known = self._unfinished.get(id(self.stack[-1]))
        if known is not None:
            known[2].append(slot)

    def load_memoize(self) -> None:
        self._remember(len(self.memo))
        _Base.load_memoize(self)

    def load_binput(self) -> None:
        slot = self.read(1)[0]
        self.memo[slot] = self.stack[-1]
        self._remember(slot)

    def load_long_binput(self) -> None:
        slot = int.from_bytes(self.read(4), "little")
        self.memo[slot] = self.stack[-1]
        self._remember(slot)

    def load_put(self) -> None:
        slot = int(self.readline()[:-1])
        self.memo[slot] = self.stack[-1]
        self._remember(slot)

    def _check_target(self, value: Any, kinds: frozenset[type]) -> None:
        if type(value) not in kinds:
            raise picklenames.refuse(f"the pickle adds items to a {type(value).__qualname__}")

    def load_append(self) -> None:
        value = self.stack.pop()
        self._check_target(self.stack[-1], _LISTS)
        self.stack[-1].append(value)

    def load_appends(self) -> None:
        items = self.pop_mark()
        self._check_target(self.stack[-1], _LISTS)
        self.stack[-1].extend(items)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._check_target(self.stack[-1], _DICTS)
        self.stack[-1][key] = value

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._check_target(self.stack[-1], _DICTS)
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][key] = value

    def load_additems(self) -> None:
        items = self.pop_mark()
        self._check_target(self.stack[-1], frozenset({set}))
        self.stack[-1].update(items)

    def load_refused(self) -> None:
        raise picklenames.refuse("the pickle uses an instruction that plain values do not need")

    for _name in "reduce newobj build memoize binput long_binput put append appends setitem setitems additems".split():
        dispatch[getattr(pickle, _name.upper())[0]] = locals()[f"load_{_name}"]
    for _name in "NEWOBJ_EX INST OBJ EXT1 EXT2 EXT4 PERSID BINPERSID NEXT_BUFFER READONLY_BUFFER".split():
        dispatch[getattr(pickle, _name)[0]] = load_refused
    del _name


def strict_loads(data: bytes) -> Any:
    """Return the value of a pickle that holds plain values only.

    Raises:
        PickleRefused: it names or does something else.
        Corrupt: it is damaged.
    """
    try:
        return StrictUnpickler(data).load_all()
    except DatasetError:
        raise
    except (Exception, MemoryError) as error:  # whatever the standard library raises over damaged bytes
        raise Corrupt(f"a pickle is damaged ({type(error).__name__}: {error}).") from error
