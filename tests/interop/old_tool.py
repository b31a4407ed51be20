"""The old tool as a process of its own environment: reads requests from stdin, answers on stdout, one pickle each.

Run as ``python -m tests.interop.old_tool`` by the Python of .venv-litdata; never imports liveset.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.interop.kinds import make
from tests.interop.plain import Plain, plain


def write(directory: str, kind: str, count: int = 20, chunk_size: int | None = 8, **options: Any) -> None:
    """Write samples of a kind in this process, with the class that the old tool's workers write with."""
    from litdata.streaming import Cache

    shutil.rmtree(directory, ignore_errors=True)
    cache = Cache(directory, chunk_size=chunk_size, **options)
    sample = make(kind)
    for position in range(count):
        cache[position] = sample(position)
    cache.done()
    cache.merge()


def optimize(directory: str, kind: str, start: int = 0, stop: int = 20, **options: Any) -> None:
    """Write, append or overwrite with worker processes, as users do."""
    import litdata

    settings = {"num_workers": 1, "chunk_size": 8, "keep_data_ordered": True, "verbose": False} | options
    litdata.optimize(fn=make(kind), inputs=list(range(start, stop)), output_dir=directory, **settings)


def update(directory: str, key: Any, kind: str, position: int) -> None:
    """Replace the sample of a key."""
    import litdata

    with litdata.dataset_update(directory) as editor:
        editor[key] = make(kind)(position)
        editor.commit()


def read(directory: str, how: str = "position", **options: Any) -> list[Plain]:
    """Read all samples: by position, by slice, by iterating, or through the data loader."""
    import litdata

    dataset = litdata.StreamingDataset(directory, **options)
    if how == "position":
        return [plain(dataset[position]) for position in range(len(dataset))]
    if how == "slice":
        return [plain(sample) for sample in dataset[:]]
    if how == "loader":
        batches = litdata.StreamingDataLoader(dataset, batch_size=3, num_workers=0, collate_fn=list)
        return [plain(sample) for batch in batches for sample in batch]
    return [plain(sample) for sample in dataset]


@contextlib.contextmanager
def one_of(grid: dict[str, Any]) -> Iterator[None]:
    """Be the rank of a grid."""
    multiprocessing.set_start_method("fork", force=True)  # optimize() has made it "spawn", with a second of imports per worker
    os.environ |= {"WORLD_SIZE": str(grid["world"]), "GLOBAL_RANK": str(grid["rank"]), "NNODES": "1"}
    try:
        yield
    finally:
        for name in ("WORLD_SIZE", "GLOBAL_RANK", "NNODES"):
            del os.environ[name]


def order(directory: str, grid: dict[str, Any], epochs: int = 2) -> list[list[list[Any]]]:
    """Return the samples of some epochs of one rank's data loader, batch by batch."""
    import litdata

    with one_of(grid):
        dataset = litdata.StreamingDataset(directory, **grid["dataset"])
        loader = litdata.StreamingDataLoader(dataset, batch_size=grid["batch"], num_workers=grid["workers"], collate_fn=list)
        return [[list(batch) for batch in loader] for _ in range(epochs)]


def mix(kind: str, grid: dict[str, Any], epochs: int = 2) -> list[list[list[Plain]]] | None:
    """Return the batches of some epochs of one rank's data loader over several datasets; None where the old tool fails."""
    import litdata

    make = {"combined": litdata.CombinedStreamingDataset, "parallel": litdata.ParallelStreamingDataset}[kind]
    with one_of(grid):
        try:
            datasets = [litdata.StreamingDataset(directory, **grid["dataset"]) for directory in grid["directories"]]
            mix = make(datasets, **grid["mix"])
            loader = litdata.StreamingDataLoader(mix, batch_size=grid["batch"], num_workers=grid["workers"], collate_fn=list)
            return [[[plain(sample) for sample in batch] for batch in loader] for _ in range(epochs)]
        except AssertionError:
            return None
        except RuntimeError as error:
            if "exited unexpectedly" not in str(error):  # what becomes of its assertion in a worker, now and then
                raise
            return None


def splits(directory: str, splits: list[float], mixed: bool = True, **options: Any) -> list[list[Plain]]:
    """Return the samples of each part, in order."""
    import litdata

    parts = litdata.train_test_split(litdata.StreamingDataset(directory, **options), splits, shuffle=mixed)
    return [[plain(sample) for sample in part] for part in parts]


def key(directory: str, key: Any) -> Plain:
    """Read the sample of a key."""
    import litdata

    return plain(litdata.StreamingDataset(directory)[key])


def has_pyarrow() -> bool:
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def provide_jpeg_decoder() -> None:
    """Stand in for what the old tool calls of torchvision for JPEG leaves; the package itself is not installed."""
    import enum
    import io

    import numpy as np
    import torch
    from PIL import Image

    def decode_jpeg(data: Any, *args: Any, **kwargs: Any) -> Any:
        image = Image.open(io.BytesIO(bytes(data.numpy().tobytes()))).convert("RGB")
        return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy())

    torchvision, io_module = types.ModuleType("torchvision"), types.ModuleType("torchvision.io")
    ImageReadMode = enum.Enum("ImageReadMode", ["UNCHANGED", "GRAY", "RGB"])  # noqa: N806
    vars(io_module).update(decode_jpeg=decode_jpeg, decode_image=decode_jpeg, ImageReadMode=ImageReadMode)
    vars(torchvision).update(io=io_module)
    sys.modules.update({"torchvision": torchvision, "torchvision.io": io_module})


COMMANDS = {command.__name__: command for command in (write, optimize, update, read, order, mix, splits, key, has_pyarrow)}


def serve() -> None:
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Whatever the old tool prints goes to the log, and its workers get neither of our pipes
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    provide_jpeg_decoder()
    while True:
        try:
            command, arguments = pickle.load(requests)
        except EOFError:
            return
        answer: tuple[Any, ...]
        try:
            answer = ("done", COMMANDS[command](**arguments))
        except (Exception, SystemExit) as error:
            answer = ("failed", [kind.__name__ for kind in type(error).__mro__], str(error))
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    # Workers import this module again, from the same root
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
    serve()
