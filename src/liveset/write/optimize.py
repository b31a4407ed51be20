"""optimize(): inputs in, one new version of a dataset out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from liveset.edit.commit import check_texts
from liveset.format.fields import check_names
from liveset.storage import Place, open_store
from liveset.write import options
from liveset.write.checkpoint import fingerprint
from liveset.write.duplicates import OnDuplicate
from liveset.write.execution import Job
from liveset.write.fetching import fetching
from liveset.write.inputs import Indexed, Inputs, Stream, open_inputs
from liveset.write.landing import CommitWishes
from liveset.write.run import Run, Wishes, settle
from liveset.write.signals import unwinding
from liveset.write.target import Asked, Target

_log = logging.getLogger("liveset")


def optimize(
    fn: Callable[[Any], Any],
    inputs: Sequence[Any] | Iterable[Any] | None = None,
    output_dir: str | os.PathLike[str] = "optimized_data",
    queue: Any = None,
    input_dir: str | os.PathLike[str] | None = None,
    weights: Sequence[float] | None = None,
    chunk_size: int | None = None,
    chunk_bytes: int | str | None = None,
    align_chunking: bool = False,
    compression: str | None = None,
    compression_level: str | None = None,
    compression_batch_size: int | None = None,
    encryption: Any = None,
    num_workers: int | None = None,
    fast_dev_run: bool | int = False,
    num_nodes: int | None = None,
    machine: Any = None,
    num_downloaders: int | None = None,
    num_uploaders: int | None = None,
    reorder_files: bool = True,
    reader: Any = None,
    batch_size: int | None = None,
    mode: Literal["append", "overwrite"] | None = None,
    use_checkpoint: bool = False,
    item_loader: Any = None,
    start_method: str | None = None,
    optimize_dns: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
    keep_data_ordered: bool | None = True,
    verbose: bool = True,
    broadcast_paths: bool = False,
    key_fn: Callable[[Any], Any] | str | None = None,
    *,
    on_duplicate: OnDuplicate = "error",
    num_shards: int = 1,
    nullable: Iterable[str] = (),
    allow_pickle: bool = False,
    session: str | None = None,
    message: str = "",
    author: str = "",
    force: bool = False,
) -> None:
    """Call ``fn`` for every input and make a dataset of the samples.

    The samples are written to chunk files beside the dataset that stands in ``output_dir``, if any, and become part of it in one commit at
    the end. Until then, and if anything fails, readers see what was there before; the files of a failed run are removed, also after Ctrl-C
    and SIGTERM (unless the program handles that itself). What SIGKILL leaves behind, a ``vacuum`` removes.

    Args:
        fn: called with each input. It returns a sample, or None to skip the input, or is a generator function that yields several
            samples. Lambdas, closures and functions of notebooks and scripts work with any number of workers.
        inputs: a sequence (list, tuple, range, array, anything with ``len()`` and positions), another iterable, or a generator. Parts of
            a sequence are done by different workers from beginning to end; from other inputs workers only call ``fn``, and this process
            writes.
        output_dir: directory of the dataset. Braces such as ``data-{%Y-%m-%d}`` are filled in with the current time.
        queue: a multiprocessing queue instead of ``inputs``; the text ``"ALL_DONE"`` in it ends it.
        input_dir: a URL, such as ``s3://bucket/videos``, that inputs begin with: ``fn`` gets the path of a local copy in their place, also
            for texts in lists, tuples and dicts. A few are fetched ahead, and each copy is deleted when its samples are stored. The inputs
            must be a sequence then. Other inputs are passed as they are, and so are all where this is a path.
        weights: how much work each input is, to give workers equal work; the order stays the same.
        chunk_size: samples in a chunk file.
        chunk_bytes: bytes in a chunk file, as a number or like ``"64MB"`` (the default if neither is given). A larger sample gets a chunk
            of its own.
        align_chunking: each worker but the last writes only chunks of exactly ``chunk_size`` samples, as one process would. Holds where
            ``fn`` makes one sample of each input.
        compression: ``"zstd"`` or ``"zstd:1"`` to ``"zstd:22"``.
        compression_level: what is compressed as one: ``"batch"`` (default), ``"sample"`` or ``"chunk"``.
        compression_batch_size: samples in a batch (256).
        encryption: not supported yet.
        num_workers: worker processes; 0 and 1 mean the calling process. Without it the work begins in the calling process, and goes on in
            as many processes as there are CPUs if it turns out to take long enough.
        fast_dev_run: try with the first inputs only: this many for each worker (``True``: one).
        num_nodes: not supported; run with ``mode="append"`` on each machine instead.
        machine: not supported.
        num_downloaders: accepted for compatibility; has no effect.
        num_uploaders: accepted for compatibility; has no effect.
        reorder_files: accepted for compatibility; has no effect, since inputs keep their order.
        reader: not supported yet.
        batch_size: ``fn`` gets lists of this many inputs.
        mode: what to do if ``output_dir`` holds a dataset: None refuses, ``"append"`` adds the samples behind its own, ``"overwrite"``
            replaces it (the earlier version stays readable with ``StreamingDataset(..., version=N)``). Without a dataset both write a new
            one. Files that are not the dataset's are never touched.
        use_checkpoint: keep what is finished if the run breaks; the same call then goes on from there, also with other workers, or
            returns at once if the broken run had committed. ``fn`` may have been repaired in between; it should give the same samples for
            an input again.
        item_loader: not supported yet.
        start_method: ``"spawn"``, ``"fork"`` or ``"forkserver"``; asks for worker processes even if ``num_workers`` does not. Default
            spawn.
        optimize_dns: accepted for compatibility; has no effect.
        storage_options: how to reach object stores, that of the inputs, too; see ``Place``.
        keep_data_ordered: keep the order of the inputs (default). ``False`` gives the next inputs to whichever worker is free.
        verbose: show progress, if this is a terminal.
        broadcast_paths: accepted for compatibility; has no effect.
        key_fn: gives each sample a key, so that it can be read, and edited, by name: a function of the sample, or the name of the field
            that holds the key, which the dataset remembers. Keys are text (preferred) or integers, and each occurs once.
        on_duplicate: what to do when a key occurs twice: ``"error"`` refuses and changes nothing. ``"skip"`` keeps what is there: samples
            whose keys the dataset has, or an earlier sample of this run, are left out. ``"replace"`` keeps the newest: a sample takes the
            place of the one that the dataset has for its key, and of several in this run the last one counts. All of it is one commit,
            and what others commit meanwhile is treated alike. With ``mode="overwrite"`` only the samples of this run are compared.
        num_shards: into how many files the keys are published for other tools.
        nullable: names of fields that may be None in later versions, though they are not in this one.
        allow_pickle: store objects of any type with pickle. Reading them needs ``allow_pickle=True``, too.
        session: name of this piece of work. If a commit with this name is in the history already, nothing is committed again.
        message: a text for the history.
        author: who did it, for the history.
        force: with ``mode="overwrite"``: also replace what others commit while this runs, which is an ``OverwriteConflict`` otherwise.

    Raises:
        DatasetExists: a dataset stands in ``output_dir`` and ``mode`` is None.
        WorkerError: ``fn`` raised, or a worker process died; the message names the input.
        SampleError: a sample cannot be stored so that it reads back equal.
        PickleRefused: a sample needs ``allow_pickle=True``.
        SchemaConflict: samples do not fit the dataset that they should be appended to.
        DuplicateKeys, KeyConflict: a key occurs twice, or is in the dataset already; ``on_duplicate`` allows that.
        OverwriteConflict: the dataset was changed by others while it was about to be overwritten; ``force=True`` replaces that, too.
        StorageError: the disk is full or failed.
        ValueError: an argument has no meaning.

    Example:
        >>> import tempfile
        >>> from liveset import StreamingDataset, optimize
        >>> folder = tempfile.mkdtemp()
        >>> optimize(fn=lambda i: {"number": i, "square": i * i}, inputs=range(100), output_dir=folder)
        >>> optimize(fn=lambda i: {"number": i, "square": i * i}, inputs=range(100, 150), output_dir=folder, mode="append")
        >>> dataset = StreamingDataset(folder)
        >>> len(dataset), dataset[120]
        (150, {'number': 120, 'square': 14400})
    """
    del num_downloaders, num_uploaders, reorder_files, optimize_dns, broadcast_paths
    if not callable(fn):
        raise ValueError(f"`fn` should be a function of one input. Found {type(fn).__name__}.")
    options.check_mode(mode)
    options.check_force(force, mode)
    options.check_duplicates(on_duplicate, keyed=True)  # whether there are keys is for the dataset to say
    check_texts(session=session, message=message, author=author)
    options.refuse_unsupported(
        {
            "encryption": encryption,
            "num_nodes": num_nodes,
            "machine": machine,
            "reader": reader,
            "item_loader": item_loader,
        }
    )
    options.check_shards(num_shards)
    sizes = options.check_sizes(chunk_size, chunk_bytes, align=align_chunking)
    workers = options.check_workers(num_workers, start_method)
    ordered = options.check_order(keep_data_ordered, align_chunking=align_chunking, use_checkpoint=use_checkpoint)
    width, first = options.check_batch_size(batch_size), options.check_dev_run(fast_dev_run)
    limit = None if first is None else first * max(workers.count or 1, 1) * (width or 1)
    opened = open_inputs(inputs, queue, batch_size=width, limit=limit)
    if isinstance(opened, Stream) and use_checkpoint:
        kind = "generators" if queue is None else "Queue based data processing"
        raise ValueError(f"Checkpoint feature is not supported for {kind}, yet.")
    options.check_input_dir(input_dir, sequence=isinstance(opened, Indexed))
    asked = Asked(sizes, compression, compression_level, compression_batch_size, check_names("nullable", nullable))
    store = open_store(options.output_place(output_dir, storage_options))
    facts: dict[str, Any] = {}
    if use_checkpoint and isinstance(opened, Indexed):
        facts = {
            "mode": mode,
            "chunk_size": sizes.samples,
            "chunk_bytes": sizes.size,
            "compression": [compression, compression_level, compression_batch_size],
            "batch_size": batch_size,
            "align_chunking": align_chunking,
            "nullable": list(asked.nullable),
            "allow_pickle": allow_pickle,
            "keys": key_fn if key_fn is None or isinstance(key_fn, str) else "a function",
            "inputs": fingerprint(opened),
        }
        if settle(store, facts):
            return
    target = Target(store, mode, session)
    if target.done:
        _log.info("%s: session %r is committed already; there is nothing to do.", store.url, session)
        return
    rule = target.key_rule(key_fn)
    options.check_duplicates(on_duplicate, keyed=rule is not None)
    place = None if input_dir is None else Place.of(input_dir, storage_options=storage_options or None)
    with unwinding(), fetching(fn, place) as called:
        job = Job(
            fn=called,
            inputs=opened,
            settings=target.settings(asked, allow_pickle=allow_pickle, whole=align_chunking, keys=rule),
            workers=workers,
            ordered=ordered,
            weights=_weights(weights, opened, width),
            align=chunk_size if align_chunking else None,
        )
        wishes = CommitWishes(session, message, author, num_shards, force, on_duplicate=on_duplicate, verbose=verbose)
        Run(job, target, Wishes(use_checkpoint, verbose, wishes, facts))()


def _weights(weights: Sequence[float] | None, inputs: Inputs, batch_size: int | None) -> list[float] | None:
    if weights is None:
        return None
    if isinstance(inputs, Stream):
        raise ValueError("weights isn't supported for inputs that come one after another.")
    return options.check_weights(weights, inputs.items, batch_size)
