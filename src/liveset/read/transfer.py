"""Batches on their way from a worker to the training loop: the large ones in memory that both share and that is used again and again.

Torch's queue pickles bytes into a pipe of 64 KB, and sends a file descriptor with each tensor. Here all arrays and long texts and bytes of
a batch are laid side by side, and the queue has no more than what tells where they are. The memory has no name: it is gone with the last
process that has it, however that one ends.

A worker owns a few slots. The first byte of one says whether it is taken: the worker sets it when it fills the slot, the loop clears it
when nothing refers to the batches any more.

A message costs as much as decoding some batches of numbers. Where batches are small and made quickly, a worker therefore reads several of
its own, which lie in one slot and come as one ``Parcel``. And where they are hardly more than bytes as they are stored, which the loop has
to copy in any case, a worker only has the system fetch them.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple, Self
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch._utils import ExceptionWrapper  # what torch itself makes of an error in a worker
from torch.utils.data import default_collate, get_worker_info

from liveset.read.reader import BatchReader, Fetched, Task, keep_memory

# Batches up to this size go through the pipe at once; what is larger would be written to it bit by bit, as the loop reads.
_PIPE = 1 << 15
# Where there is no slot: up to this size the pipe is quicker than the files that torch makes of tensors.
_WITHOUT_SLOT = 1 << 18
# Texts and bytes that are shorter on average are quicker pickled.
_LONG = 1 << 10
# How many bytes of batches a worker sends at once, at most.
PARCEL = 1 << 20
LOST_WORKER = "a worker of the loader ended before its batch was read: see what it printed, or the system's log."
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


class _Lent:
    """A slot on its way: all batches in it share this.

    Args:
        loop: the number of the ``Receiver``.
        worker, slot: which one it is.
        file: of the slot, if the loop does not know it.
    """

    __slots__ = ("_memory", "_process", "_where")

    def __init__(self, loop: int, worker: int, slot: int, file: Any) -> None:
        self._where = (loop, worker, slot, file)
        self._memory: _Loan | None = None
        self._process = 0  # in which it has arrived

    def __reduce__(self) -> Any:
        return _arrived, self._where

    def __del__(self, getpid: Any = os.getpid) -> None:
        if self._process == getpid():  # nobody wanted it: workers that stay were left by a loop
            with suppress(Exception):
                self.memory()

    def memory(self) -> _Loan | None:
        """Return the memory; None if the loop is over."""
        if self._process:
            self._process = 0
            loop, *where = self._where
            receiver = _receivers.get(loop)
            self._memory = None if receiver is None else receiver.lend(*where)
        return self._memory


def _arrived(*where: Any) -> _Lent:
    lent = _Lent(*where)
    lent._process = os.getpid()  # noqa: SLF001 - its own
    return lent


class Packed:
    """What torch's queue carries in place of a batch: where its memory is, where in that it begins, and what is in it."""

    __slots__ = ("_base", "_memory", "_tree")

    def __init__(self, memory: _Lent | bytearray, base: int, tree: Any) -> None:
        self._memory, self._base, self._tree = memory, base, tree

    def __reduce__(self) -> Any:
        return Packed, (self._memory, self._base, self._tree)

    def unpack(self, *, pin: bool = False) -> Any:
        """Return the batch; ``pin``: with tensors in pinned memory."""
        memory = self._memory.memory() if type(self._memory) is _Lent else self._memory
        return None if memory is None else _taken(self._tree, memory, self._base, pin)

    def pin_memory(self) -> Any:
        """What torch's pinning thread calls."""
        return self.unpack(pin=True)


class Here:
    """Stands for a batch that the loop is to read itself."""


class Parcel(NamedTuple):
    """Batches that a worker sends at once.

    Attributes:
        batches: what became of the tasks; after an error there is nothing more.
        seconds: that it took to make them.
        size: bytes of them that wait in memory.
    """

    batches: list[Fetched | ExceptionWrapper]
    seconds: float
    size: int


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


def stacked(batch: Any) -> Any:
    """Return a batch without ``Stack``."""
    kind = type(batch)
    if kind is Stack:
        return torch.from_numpy(np.stack(batch.arrays))
    if isinstance(batch, dict):
        for key, value in batch.items():
            batch[key] = stacked(value)
    elif isinstance(batch, list | deque):
        for number, value in enumerate(batch):
            if type(value) not in (str, bytes):
                batch[number] = stacked(value)
    return batch


# --- in a worker --------------------------------------------------------------------------------------------------------------------------


class Worker:
    """A map-style dataset whose indices are the tasks of a parcel, and whose items are parcels.

    Args:
        reader: reads the batches.
        sender: packs them.
    """

    def __init__(self, reader: BatchReader, sender: Sender) -> None:
        self._reader, self._sender = reader, sender

    def __getitem__(self, tasks: Sequence[Task]) -> Parcel:
        began = time.perf_counter()
        found: list[Fetched | ExceptionWrapper] = []
        sender, read = self._sender, self._reader.__getitem__
        fetched = read(tasks[0])
        if self._reader.copies(tasks[0]) and sender.is_bytes(fetched.batch):
            for task in tasks:
                self._reader.touch(task)
            return Parcel([Fetched(Here, 0)] * len(tasks), time.perf_counter() - began, 0)
        batches = [fetched]
        for task in tasks[1:]:
            if fetched.error is not None:
                break
            try:
                fetched = read(task)
            except Exception:  # what comes before it is whole
                found.append(ExceptionWrapper(where=f"in DataLoader worker process {_worker()}"))  # type: ignore[no-untyped-call]
                break
            batches.append(fetched)
        sent, size = sender(batches)
        return Parcel([*sent, *found], time.perf_counter() - began, size)


def _worker() -> int:
    info = get_worker_info()
    return info.id if info is not None else 0


class Sender:
    """What makes a small message of batches.

    Args:
        loop: the number of the ``Receiver``.
        slots: how many parcels a worker may have in shared memory; further batches go through the pipe, so that a loop that keeps all of
            them does not run out of files.
        pin: the batches are going to be pinned, which only torch can do with containers of other types.
    """

    def __init__(self, loop: int, slots: int, *, pin: bool) -> None:
        self._loop, self._limit, self._pin = loop, slots, pin
        self._slots: list[mmap.mmap] = []
        self._files: dict[int, _File] = {}  # of the slots, until those are given up

    def is_bytes(self, batch: Any) -> bool:
        """Whether a batch is large, and hardly anything but texts and bytes."""
        if self._pin:
            return False
        layout = _Layout()
        layout.laid(batch)
        return layout.end > _WITHOUT_SLOT and layout.copied * 4 > layout.end * 3

    def __call__(self, batches: Sequence[Fetched]) -> tuple[list[Fetched], int]:
        """Return them as they are sent, ``Packed`` where that is quicker, and how many bytes of them there are."""
        laid = [self._laid(fetched) for fetched in batches]
        layouts = [layout for layout, _, _ in laid if layout is not None]
        size = sum(layout.end for layout in layouts)
        lent = self._slot(layouts, size) if size > _PIPE else None
        base, last, sent = _ALIGNED, None, []
        for layout, own, fetched in laid:
            if layout is None:
                sent.append(fetched)
                continue
            tree = last if layout.alike and own == last else own  # those that are equal are sent once
            last = tree if layout.alike else None
            if lent is not None:
                packed = Packed(lent, base, tree)
            elif layout.end <= _WITHOUT_SLOT:
                content = bytearray(layout.end)
                layout.fill(content, 0)
                packed = Packed(content, 0, tree)
            else:
                sent.append(fetched._replace(batch=stacked(fetched.batch)))
                continue
            sent.append(fetched._replace(batch=packed))
            base += layout.end
        return sent, size

    def _laid(self, fetched: Fetched) -> tuple[_Layout | None, Any, Fetched]:
        """Return what is to be packed of a batch, what is sent then, and the batch; None if torch is to send it."""
        layout = _Layout()
        tree = layout.laid(fetched.batch)
        if layout.parts and not layout.others:
            return layout, tree, fetched
        fetched = fetched._replace(batch=stacked(fetched.batch))
        if not layout.parts or self._pin:
            return None, None, fetched
        layout = _Layout()
        return layout, layout.laid(fetched.batch), fetched

    def _slot(self, layouts: Sequence[_Layout], size: int) -> _Lent | None:
        slots, file, size = self._slots, None, size + _ALIGNED
        free = [number for number, slot in enumerate(slots) if not slot[0]]
        number = next((number for number in free if len(slots[number]) >= size), -1)
        if number < 0:
            if not free and len(slots) >= self._limit:
                return None
            made = _new_slot(max(size + size // 4, PARCEL + PARCEL // 4))
            if made is None:
                return None
            slot, file = made
            if free:
                number = free[0]
                slots[number] = slot
            else:
                number = len(slots)
                slots.append(slot)
            self._files[number] = file
        base = _ALIGNED
        for layout in layouts:
            layout.fill(slots[number], base)
            base += layout.end
        slots[number][0] = 1
        return _Lent(self._loop, _worker(), number, file)


def _new_slot(size: int) -> tuple[mmap.mmap, Any] | None:
    """Return new memory, and its file to be sent; None where the system has no such memory."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        file = os.memfd_create("liveset-batch")
        try:
            os.ftruncate(file, size)
            return mmap.mmap(file, size), _File(file)
        finally:
            os.close(file)
    except OSError:
        return None


class _File:
    """A file on its way to another process: opened there by its name in /proc, which is far quicker than handing it over.

    It can be opened as long as this object lives.
    """

    def __init__(self, file: int) -> None:
        self._sent: Any = None
        with suppress(OSError):
            os.listdir(f"/proc/{os.getppid()}/fd")  # what this process may see of another one, that one may see of this
            if os.readlink("/proc/self") == str(os.getpid()):  # /proc may be that of other numbers than those of this container
                self._kept, self._sent = os.dup(file), os.getpid()
        if self._sent is None:
            self._sent = DupFd(file)

    def __reduce__(self) -> Any:
        return _opener, (self._sent, getattr(self, "_kept", -1))

    def __del__(self, close: Any = os.close) -> None:
        if (kept := getattr(self, "_kept", -1)) >= 0:
            close(kept)


def _opener(sent: Any, file: int) -> Any:
    return partial(os.open, f"/proc/{sent}/fd/{file}", os.O_RDWR) if file >= 0 else sent.detach


class _Layout:
    """What goes where in the memory of a batch.

    Attributes:
        parts: where each one begins, and what it is.
        end: the size of them all.
        copied: bytes of texts and bytes among them.
        others: whether there is anything of another type.
        alike: whether the batch has no more than what is in the memory.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[int, Any]] = []
        self.end, self.copied, self.others, self.alike = 0, 0, False, True

    def laid(self, batch: Any) -> Any:
        """Return the batch with places for what goes into the memory."""
        kind = type(batch)
        if kind is torch.Tensor:
            return self._array(batch.numpy(), tensor=True) if _is_plain(batch) else self._left(batch)
        if kind is np.ndarray:
            return self._array(batch, tensor=False) if batch.dtype.kind in "biufc" and batch.flags.c_contiguous else self._left(batch)
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
        return self._left(batch)

    def _left(self, value: Any) -> Any:
        self.alike = False
        return value

    def _array(self, array: np.ndarray[Any, Any], *, tensor: bool) -> _Array:
        place = _Array(self.end, array.dtype.str, array.shape, tensor)
        self._put(array, array.nbytes)
        return place

    def _column(self, batch: Any) -> Any:
        kind = type(batch[0])
        if set(map(type, batch)) != {kind} or sum(map(len, batch)) < _LONG * len(batch):
            return self._left(batch)
        values = [value.encode("utf-8", "surrogatepass") for value in batch] if kind is str else batch
        place = _Column(self.end, tuple(map(len, values)), kind is str, type(batch) is tuple)
        size = sum(place.sizes)
        self.copied += size
        self._put(values, size)
        return place

    def _put(self, part: Any, size: int) -> None:
        self.parts.append((self.end, part))
        self.end += -(-size // _ALIGNED) * _ALIGNED

    def fill(self, memory: Any, base: int) -> None:
        """Copy the parts to where the memory of the batch begins."""
        with memoryview(memory)[base : base + self.end] as view:
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
                opened = file()
            except (OSError, EOFError) as error:
                raise RuntimeError(LOST_WORKER) from error
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


def _taken(tree: Any, memory: Any, base: int, pin: bool) -> Any:
    kind = type(tree)
    if kind is _Array:
        at, dtype, shape, tensor = tree
        array: Any = np.ndarray(shape, dtype, memory, base + at)
        if not tensor:
            return array
        made = torch.from_numpy(array)
        return made.pin_memory() if pin else made
    if kind is _Column:
        return _column(tree, memory.slot if type(memory) is _Loan else memory, base)
    if kind is dict:
        return {key: _taken(value, memory, base, pin) for key, value in tree.items()}
    if (kind is list or kind is tuple) and not (tree and type(tree[0]) in (str, bytes)):
        return kind(_taken(value, memory, base, pin) for value in tree)
    return tree.pin_memory() if pin and isinstance(tree, torch.Tensor) else tree


def _column(place: _Column, memory: Any, base: int) -> Any:
    at = base + place.at
    values: list[Any] = []
    for size in place.sizes:
        value = bytes(memory[at : at + size])
        values.append(value.decode("utf-8", "surrogatepass") if place.text else value)
        at += size
    return tuple(values) if place.tupled else values
