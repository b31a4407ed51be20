"""What the arguments of ``optimize`` mean, checked before any work is done."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from liveset.format.config import parse_size
from liveset.storage import Place

# Offsets inside a chunk are u32.
MAX_CHUNK_BYTES = 1 << 32


@dataclass(frozen=True, slots=True)
class Sizes:
    """When a chunk is full; at most one of the two is set, and neither means: as the dataset has it, else 64 MB."""

    samples: int | None
    size: int | None


@dataclass(frozen=True, slots=True)
class Workers:
    """Where the work is done."""

    count: int | None  # None: start in the calling process and take all CPUs when the work turns out not to be tiny
    start_method: str | None

    @property
    def forced(self) -> bool:
        """Whether worker processes were asked for."""
        return self.start_method is not None or (self.count is not None and self.count > 1)

    @property
    def most(self) -> int:
        """How many processes may work at once."""
        return usable_cpus() if self.count is None else max(self.count, 1)


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_sizes(chunk_size: int | None, chunk_bytes: int | str | None, *, align: bool) -> Sizes:
    """Return when a chunk is full."""
    if chunk_size is not None and chunk_bytes is not None:
        raise ValueError("Either one of the `chunk_size` or the `chunk_bytes` need to be provided. Both were.")
    if align and chunk_size is None:
        raise ValueError("When `align_chunking` is set to True, `chunk_size` needs to be defined.")
    if chunk_size is not None:
        if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
            raise ValueError(f"`chunk_size` is a number of samples, at least 1. Found {chunk_size!r}.")
        return Sizes(chunk_size, None)
    if chunk_bytes is None:
        return Sizes(None, None)
    size = parse_size(chunk_bytes)
    if size < 1:
        raise ValueError(f"`chunk_bytes` must be at least 1. Found {chunk_bytes!r}.")
    if size >= MAX_CHUNK_BYTES:
        raise ValueError(f"`chunk_bytes` must be below 4 GiB ({MAX_CHUNK_BYTES:,} bytes), where the format ends. Found {chunk_bytes!r}.")
    return Sizes(None, size)


def check_mode(mode: str | None) -> None:
    """Refuse a mode that is not known."""
    if mode not in (None, "append", "overwrite"):
        raise ValueError(f"The provided `mode` should be either `append` or `overwrite`. Found {mode}.")


def check_force(force: bool, mode: str | None) -> None:
    """Refuse ``force`` where there is nothing to force."""
    if force and mode != "overwrite":
        raise ValueError(f"`force` replaces what others commit meanwhile, so it needs mode='overwrite'. Found mode={mode!r}.")


def check_duplicates(on_duplicate: str, *, keyed: bool) -> None:
    """Refuse what cannot be done about keys that occur twice."""
    if on_duplicate not in ("error", "replace", "skip"):
        raise ValueError(f"`on_duplicate` should be 'error', 'replace' or 'skip'. Found {on_duplicate!r}.")
    if on_duplicate != "error" and not keyed:
        raise ValueError(
            f"on_duplicate={on_duplicate!r} says what to do about keys that occur twice, and these samples have none: "
            "say what they are with key_fn=, a function of a sample or the name of a field."
        )


def check_workers(num_workers: int | None, start_method: str | None) -> Workers:
    """Return where the work is done."""
    import multiprocessing

    if num_workers is not None and (isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0):
        raise ValueError(f"`num_workers` is a number of processes, 0 or more, or None. Found {num_workers!r}.")
    known = multiprocessing.get_all_start_methods()
    if start_method is not None and start_method not in known:
        raise ValueError(f"`start_method` should be one of {', '.join(known)}. Found {start_method!r}.")
    if multiprocessing.current_process().daemon and (start_method is not None or (num_workers or 0) > 1):
        raise ValueError("This process is daemonic and cannot start others: use num_workers=1, or start it with daemon=False.")
    return Workers(num_workers, start_method)


def check_order(
    keep_data_ordered: bool | None,
    *,
    align_chunking: bool,
    use_checkpoint: bool,
) -> bool:
    """Return whether the samples come in the order of the inputs."""
    if keep_data_ordered is None or keep_data_ordered:
        return True
    if align_chunking:
        raise ValueError("align_chunking requires keep_data_ordered=True.")
    if use_checkpoint:
        raise ValueError("Checkpoint feature is not supported for Queue based data processing, yet. Use keep_data_ordered=True.")
    return False


def check_dev_run(fast_dev_run: bool | int) -> int | None:
    """Return how many inputs each worker gets, or None for all of them."""
    if not isinstance(fast_dev_run, int) or fast_dev_run < 0:
        raise ValueError(f"`fast_dev_run` is a number of inputs for each worker, or True for 1. Found {fast_dev_run!r}.")
    return int(fast_dev_run) or None


def check_batch_size(batch_size: int | None) -> int | None:
    """Return how many inputs ``fn`` gets at once, or None for one that is not in a list."""
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(f"`batch_size` is a number of inputs, at least 1. Found {batch_size!r}.")
    return batch_size


def check_weights(weights: Sequence[float] | None, count: int, batch_size: int | None) -> list[float] | None:
    """Return one weight for each call of ``fn``."""
    if weights is None:
        return None
    values = [float(weight) for weight in weights]
    if len(values) != count:
        raise ValueError(f"`weights` needs one number for each of the {count} inputs. Found {len(values)}.")
    if any(not math.isfinite(value) or value < 0 for value in values):
        raise ValueError("`weights` should be finite numbers, 0 or more.")
    if batch_size is None:
        return values
    return [sum(values[start : start + batch_size]) for start in range(0, count, batch_size)]


def output_place(output_dir: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> str | os.PathLike[str]:
    """Return where the dataset goes: the path of ``output_path``, and how to reach it."""
    path = output_path(output_dir)
    whole = replace(output_dir, url=path) if isinstance(output_dir, Place) else path
    return Place.of(whole, storage_options=storage_options or None)


def output_path(output_dir: str | os.PathLike[str]) -> str:
    """Return the absolute path of the dataset, with braces such as ``{%Y-%m-%d}`` filled in.

    Raises:
        ValueError: nobody can write there.
    """
    text = os.fspath(output_dir)
    if not isinstance(text, str) or not text:
        raise ValueError(f"`output_dir` should be a path. Found {output_dir!r}.")
    if re.match(r"(hf|https?)://", text, re.IGNORECASE):
        raise ValueError(f"Cannot write optimized data to {text}: such addresses can only be read.")
    now = datetime.now().astimezone()
    filled = re.sub(r"\{([^{}]*%[^{}]*)\}", lambda found: now.strftime(found[1]), text)
    if "://" in filled or filled.startswith("local:"):
        return filled
    # Workers and clean-up must not depend on the current directory, which fn may change.
    return os.path.abspath(filled)


def check_input_dir(input_dir: str | os.PathLike[str] | None, *, sequence: bool) -> None:
    """Refuse a place of the inputs that cannot be used.

    Raises:
        ValueError: it is not a place, or the inputs that lie there come one after another.
    """
    if input_dir is None:
        return
    if not isinstance(input_dir, str | os.PathLike):
        raise ValueError(f"`input_dir` should be a URL or a path. Found {input_dir!r}.")
    url = os.fspath(input_dir)
    if "://" in url and not sequence:
        raise ValueError(f"`input_dir` ({url}) needs a sequence of inputs, such as a list of URLs: files are fetched before their turn.")


def refuse_unsupported(values: Mapping[str, Any]) -> None:
    """Refuse arguments of the old tool that would change the result and do nothing here.

    Args:
        values: what was given, by argument name.

    Raises:
        ValueError: it needs a platform.
        NotImplementedError: it is not supported yet.
    """
    if values["num_nodes"] is not None or values["machine"] is not None:
        raise ValueError(
            "Only https://lightning.ai/ supports multiple nodes or selecting a machine. "
            "To use several machines, run optimize(mode='append') on each with its share of the inputs."
        )
    for name in ("encryption", "reader", "item_loader"):
        if values[name] is not None:
            raise NotImplementedError(f"`{name}` is not supported yet.")


def dataset_exists_message(path: str) -> str:
    """Return the text of the error for a dataset that stands where a new one should be written."""
    return (
        f"The provided output_dir `{path}` already contains an optimized immutable datasets.\n"
        "HINT: Did you consider changing the `output_dir` with your own versioning as a suffix?\n"
        "HINT: If you want to append/overwrite to the existing dataset, use `mode='append | overwrite'`."
    )


def check_shards(num_shards: int) -> None:
    """Check the number of files that keys are published in."""
    if isinstance(num_shards, bool) or not isinstance(num_shards, int) or not 1 <= num_shards <= 99_999:
        raise ValueError(f"num_shards must be >= 1. Found {num_shards!r}.")
