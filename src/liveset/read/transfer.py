"""Batches on their way from a worker to the training loop: the large ones in memory that both share and that is used again and again.

Torch's queue pickles bytes into a pipe of 64 KB, and sends a file descriptor with each tensor. Here all arrays and long texts and bytes of
a batch are laid side by side, and the queue has no more than what tells where they are. The memory has no name: it is gone with the last
process that has it, however that one ends.

A worker owns a few slots. The first byte of one says whether it is taken: the worker sets it when it fills the slot, the loop clears it
when nothing refers to the batch any more.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple, Self
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info

from liveset.read.reader import Fetched, keep_memory

# Batches up to this size go through the pipe at once; what is larger would be written to it bit by bit, as the loop reads.
_PIPE = 1 << 15
# Where there is no slot: up to this size the pipe is quicker than the files that torch makes of tensors.
_WITHOUT_SLOT = 1 << 18
# Texts and bytes that are shorter on average are quicker pickled.
_LONG = 1 << 10
# Where the first array of a slot begins, and what they all are aligned to.
_ALIGNED = 64
_ARRAYS = frozenset(map(np.dtype, ("?", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8")))
_SENT = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64})


class _Array(NamedTuple):
    """An array or a tensor that lies in the memory."""

    at: int
    dtype: str
    shape: tuple[int, ...]
    tensor: bool


class _Column(NamedTuple):
    """Texts or bytes that lie in the memory."""

    at: int
    sizes: tuple[int, ...]
    text: bool
    tupled: bool


class _Sent(NamedTuple):
    """Where the memory of a batch is.

    Attributes:
        content: the bytes themselves, of a small batch.
        worker, slot: where they are otherwise.
        file: of the slot, if the loop does not know it.
    """

    content: bytearray | None
    worker: int = 0
    slot: int = 0
    file: Any = None


class Packed:
    """What torch's queue carries in place of a batch."""

    __slots__ = ("_loop", "_process", "_sent", "_tree")

    def __init__(self, loop: int, sent: _Sent, tree: Any) -> None:
        self._loop, self._sent, self._tree = loop, sent, tree
        self._process = 0  # in which it has arrived

    def __reduce__(self) -> Any:
        return _arrived, (self._loop, self._sent, self._tree)

    def __del__(self, getpid: Any = os.getpid) -> None:
        if self._process == getpid():  # nobody wanted it: workers that stay were left by a loop
            with suppress(Exception):
                self._memory()

    def unpack(self, *, pin: bool = False) -> Any:
        """Return the batch; ``pin``: with tensors in pinned memory."""
        memory = self._memory()
        return None if memory is None else _taken(self._tree, memory, pin)

    def pin_memory(self) -> Any:
        """What torch's pinning thread calls."""
        return self.unpack(pin=True)

    def _memory(self) -> Any:
        self._process = 0
        content, *where = self._sent
        if content is not None:
            return content
        receiver = _receivers.get(self._loop)
        return None if receiver is None else receiver.lend(*where)  # None: the loop is over


def _arrived(loop: int, sent: _Sent, tree: Any) -> Packed:
    packed = Packed(loop, sent, tree)
    if sent.content is None:
        packed._process = os.getpid()  # noqa: SLF001 - its own
    return packed


class Stack:
    """Arrays of one dtype and shape that are going to be one tensor: a worker copies them to where that will be."""

    __slots__ = ("arrays",)

    def __init__(self, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        self.arrays = arrays


def hold(values: Any) -> Any:
    """Collate values in a worker: a ``Stack`` of large arrays or tensors, what ``default_collate`` returns of all others."""
    arrays = _alike(values)
    return default_collate(values) if arrays is None else Stack(arrays)


def stack(values: Any) -> Any:
    """Collate values as ``default_collate`` does, but large ones without its threads, which cost more than they gain beside a decoder."""
    arrays = _alike(values)
    return default_collate(values) if arrays is None else np.stack(arrays)


def _alike(values: Sequence[Any]) -> Sequence[np.ndarray[Any, Any]] | None:
    """Return large values of one dtype and shape as arrays."""
    if type(values[0]) is torch.Tensor:
        if not all(type(value) is torch.Tensor and _is_plain(value) for value in values):
            return None
        values = [value.numpy() for value in values]
    first = values[0]
    if type(first) is not np.ndarray or first.dtype not in _ARRAYS or first.nbytes < _LONG:
        return None
    shape, dtype = first.shape, first.dtype
    alike = all(type(value) is np.ndarray and value.shape == shape and value.dtype == dtype for value in values)
    return values if alike else None


def _stacked(batch: Any) -> Any:
    """Return a batch without ``Stack``."""
    kind = type(batch)
    if kind is Stack:
        return torch.from_numpy(np.stack(batch.arrays))
    if isinstance(batch, dict):
        for key, value in batch.items():
            batch[key] = _stacked(value)
    elif isinstance(batch, list | deque):
        for number, value in enumerate(batch):
            if type(value) not in (str, bytes):
                batch[number] = _stacked(value)
    return batch


# --- in a worker --------------------------------------------------------------------------------------------------------------------------


class Sender:
    """What makes a small message of a batch.

    Args:
        loop: the number of the ``Receiver``.
        slots: how many batches a worker may have in shared memory; further ones go through the pipe, so that a loop that keeps all batches
            does not run out of files.
        pin: the batches are going to be pinned, which only torch can do with containers of other types.
    """

    def __init__(self, loop: int, slots: int, *, pin: bool) -> None:
        self._loop, self._limit, self._pin = loop, slots, pin
        self._slots: list[mmap.mmap] = []

    def __call__(self, fetched: Fetched) -> Fetched:
        """Return it with a ``Packed`` batch, where that is quicker."""
        layout = _Layout()
        tree = layout.laid(fetched.batch)
        if not layout.parts or layout.others:
            fetched = fetched._replace(batch=_stacked(fetched.batch))
            if not layout.parts or self._pin:
                return fetched
            layout = _Layout()
            tree = layout.laid(fetched.batch)
        if layout.end <= _PIPE:
            sent = self._plain(layout)
        else:
            found = self._slot(layout)
            if found is None and layout.end > _WITHOUT_SLOT:
                return fetched._replace(batch=_stacked(fetched.batch))
            sent = found or self._plain(layout)
        return fetched._replace(batch=Packed(self._loop, sent, tree))

    def _plain(self, layout: _Layout) -> _Sent:
        content = bytearray(layout.end)
        layout.fill(content)
        return _Sent(content)

    def _slot(self, layout: _Layout) -> _Sent | None:
        slots, file = self._slots, None
        free = [number for number, slot in enumerate(slots) if not slot[0]]
        number = next((number for number in free if len(slots[number]) >= layout.end), -1)
        if number < 0:
            if not free and len(slots) >= self._limit:
                return None
            made = _new_slot(layout.end + layout.end // 4)
            if made is None:
                return None
            slot, file = made
            if free:
                number = free[0]
                slots[number] = slot
            else:
                number = len(slots)
                slots.append(slot)
        layout.fill(slots[number])
        slots[number][0] = 1
        info = get_worker_info()
        return _Sent(None, info.id if info is not None else 0, number, file)


def _new_slot(size: int) -> tuple[mmap.mmap, Any] | None:
    """Return new memory, and its file to be sent; None where the system has no such memory."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        file = os.memfd_create("liveset-batch")
        try:
            os.ftruncate(file, size)
            return mmap.mmap(file, size), DupFd(file)
        finally:
            os.close(file)
    except OSError:
        return None


class _Layout:
    """What goes where in the memory."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, Any]] = []
        self.end, self.others = _ALIGNED, False

    def laid(self, batch: Any) -> Any:
        """Return the batch with places for what goes into the memory."""
        kind = type(batch)
        if kind is torch.Tensor:
            return self._array(batch.numpy(), tensor=True) if _is_plain(batch) else batch
        if kind is np.ndarray:
            return self._array(batch, tensor=False) if batch.dtype.kind in "biufc" and batch.flags.c_contiguous else batch
        if kind is Stack:
            first = batch.arrays[0]
            place = _Array(self.end, first.dtype.str, (len(batch.arrays), *first.shape), tensor=True)
            self._put(batch.arrays, first.nbytes * len(batch.arrays))
            return place
        if kind is dict:
            return {key: self.laid(value) for key, value in batch.items()}
        if kind is list or kind is tuple:
            return self._column(batch) if batch and type(batch[0]) in (str, bytes) else kind(map(self.laid, batch))
        self.others |= kind not in (str, bytes, int, float, bool)
        return batch

    def _array(self, array: np.ndarray[Any, Any], *, tensor: bool) -> _Array:
        place = _Array(self.end, array.dtype.str, array.shape, tensor)
        self._put(array, array.nbytes)
        return place

    def _column(self, batch: Any) -> Any:
        kind = type(batch[0])
        if any(type(value) is not kind for value in batch) or sum(map(len, batch)) < _LONG * len(batch):
            return batch
        values = [value.encode("utf-8", "surrogatepass") for value in batch] if kind is str else batch
        place = _Column(self.end, tuple(map(len, values)), kind is str, type(batch) is tuple)
        self._put(values, sum(place.sizes))
        return place

    def _put(self, part: Any, size: int) -> None:
        self.parts.append((self.end, part))
        self.end += -(-size // _ALIGNED) * _ALIGNED

    def fill(self, memory: Any) -> None:
        with memoryview(memory) as view:
            for at, part in self.parts:
                if isinstance(part, np.ndarray):
                    np.ndarray(part.shape, part.dtype, view, at)[...] = part
                    continue
                if isinstance(part[0], np.ndarray):
                    np.stack(part, out=np.ndarray((len(part), *part[0].shape), part[0].dtype, view, at))
                    continue
                begin = at
                for value in part:
                    view[begin : begin + len(value)] = value
                    begin += len(value)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is nothing but numbers in memory of this process: what is shared already is sent by torch, which copies nothing."""
    if tensor.dtype not in _SENT or tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.requires_grad:
        return False
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_shared()  # type: ignore[no-untyped-call]


# --- in the training loop -----------------------------------------------------------------------------------------------------------------


class Receiver:
    """Knows the slots of the workers of a loop."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self._slots: dict[tuple[int, int], mmap.mmap] = {}
        _receivers[self.number] = self

    def lend(self, worker: int, slot: int, file: Any) -> _Loan:
        """Return the memory of a slot."""
        if file is not None:
            try:
                opened = file.detach()
            except (OSError, EOFError) as error:
                raise RuntimeError(
                    "a worker of the loader ended before its batch was read: see what it printed, or the system's log."
                ) from error
            try:
                self._slots[worker, slot] = mmap.mmap(opened, os.fstat(opened).st_size)
            finally:
                os.close(opened)
            if len(self._slots) == 1:
                keep_memory()
        return _Loan(self._slots[worker, slot])


_numbers = count()
_receivers: WeakValueDictionary[int, Receiver] = WeakValueDictionary()


class _Loan(np.ndarray[Any, Any]):
    """The memory of a slot as long as a batch is in it: the arrays of the batch refer to it."""

    slot: mmap.mmap
    process: int

    def __new__(cls, slot: mmap.mmap) -> Self:
        loan = super().__new__(cls, (len(slot),), np.uint8, slot)
        loan.slot, loan.process = slot, os.getpid()
        return loan

    def __del__(self, getpid: Any = os.getpid) -> None:
        if getpid() == self.process:  # a process that was forked from this one has got nothing to give back
            self.slot[0] = 0


def _taken(tree: Any, memory: Any, pin: bool) -> Any:
    kind = type(tree)
    if kind is _Array:
        array: Any = np.ndarray(tree.shape, tree.dtype, memory, tree.at)
        if not tree.tensor:
            return array
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if pin else tensor
    if kind is _Column:
        return _column(tree, memory.slot if type(memory) is _Loan else memory)
    if kind is dict:
        return {key: _taken(value, memory, pin) for key, value in tree.items()}
    if (kind is list or kind is tuple) and not (tree and type(tree[0]) in (str, bytes)):
        return kind(_taken(value, memory, pin) for value in tree)
    return tree.pin_memory() if pin and isinstance(tree, torch.Tensor) else tree


def _column(place: _Column, memory: Any) -> Any:
    at = place.at
    values: list[Any] = []
    for size in place.sizes:
        value = bytes(memory[at : at + size])
        values.append(value.decode("utf-8", "surrogatepass") if place.text else value)
        at += size
    return tuple(values) if place.tupled else values
