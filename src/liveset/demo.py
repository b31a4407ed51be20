"""The main job on real data: handwritten digits become a dataset, in which wrong labels are found and fixed; it grows and is replaced."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import liveset
from liveset.errors import MissingDependency

FIRST = 1_500  # digits of the first batch; the other 297 come later
WRONG = 75  # of these have a wrong label
DOUBT = 0.2  # a label that a classifier finds less likely than this is looked at


def run(path: str | os.PathLike[str] | None = None, *, workers: int = 2, say: Callable[[str], Any] = print) -> dict[str, float]:
    """Run the demo in a directory (a temporary one by default) and return the figures that it printed."""
    started = time.perf_counter()
    if path is not None:
        figures = _run(path, workers, say)
        say(f"\n{'done':<10} in {time.perf_counter() - started:.1f} s; look around with: liveset log {path}")
        return figures
    with TemporaryDirectory(prefix="liveset-demo-") as folder:
        figures = _run(Path(folder) / "digits", workers, say)
    say(f"\n{'done':<10} in {time.perf_counter() - started:.1f} s; the dataset was temporary, `liveset demo PATH` keeps it")
    return figures


def digit(images: Any, labels: Any, number: int) -> dict[str, Any]:
    """Return one digit as a sample; the entity id names it for good, wherever it comes to stand."""
    return {"id": name_of(number), "image": images[number], "label": int(labels[number])}


def name_of(number: int) -> str:
    """Return the key of a digit."""
    return f"digit-{number:04}"


def scaled(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the same digit with pixels between 0 and 1."""
    return sample | {"image": (sample["image"] / 16).astype("float32")}


def _run(path: str | os.PathLike[str], workers: int, say: Callable[[str], Any]) -> dict[str, float]:
    images, truth = _load()
    total, given = len(truth), _with_mistakes(truth)
    optimize = partial(liveset.optimize, output_dir=path, num_workers=workers, chunk_size=256, verbose=False, key_fn="id")

    def tell(step: str, text: str, seconds: float | None = None) -> None:
        say(f"{step:<10} {text}{f', {seconds:.2f} s' if seconds is not None else ''}")

    def train() -> float:
        with _clock() as seconds:
            classifier = _train(liveset.StreamingDataset(path, shuffle=True, fields=["image", "label"]))
        accuracy = float(classifier.score(images[FIRST:].reshape(-1, 64), truth[FIRST:]))
        tell("train", f"on a shuffled stream: {accuracy:.1%} of the {total - FIRST} digits to come are told right", seconds[0])
        return accuracy

    with _clock() as seconds:
        optimize(fn=partial(digit, images, given), inputs=range(FIRST), message="first batch")
    info = liveset.StreamingDataset(path).info()
    tell("optimize", f"{info.samples:,} samples in {info.chunks} chunks, {info.size:,} bytes, {workers} workers", seconds[0])
    tell("", f"{WRONG} of the labels ({WRONG / FIRST:.0%}) are wrong, on purpose")
    before = train()

    with _clock() as seconds:
        doubtful = _doubtful(liveset.StreamingDataset(path))
    found = [key for key in doubtful if given[_number(key)] != truth[_number(key)]]
    tell("find", f"{len(doubtful)} labels look wrong to a classifier that has not seen them", seconds[0])
    tell("", f"a reviewer looks at these, and finds {len(found)} of the {WRONG} that are wrong")

    with liveset.dataset_update(path) as update:
        for key in found:
            update[key] = {**update[key], "label": int(truth[_number(key)])}
        fixed = update.commit(message=f"{len(found)} wrong labels")
    rewritten = f"{fixed.chunks} chunks with {fixed.bytes_written:,} bytes written anew in {fixed.seconds * 1000:.1f} ms"
    tell("fix", f"{fixed.keys} samples by key, in one commit: {rewritten}")
    after = train()

    first, one = (liveset.StreamingDataset(path, version=version)[found[0]] for version in (1, fixed.version))
    tell("look", f'ds["{one["id"]}"] is a {one["label"]} in version {fixed.version}, and was a {first["label"]} in version 1')
    for line in _drawing(one["image"]):
        tell("", line)

    with _clock() as seconds:
        optimize(fn=partial(digit, images, truth), inputs=range(FIRST, total), mode="append", message="second batch")
    grown = liveset.StreamingDataset(path)
    info = grown.info()
    tell("append", f"{total - FIRST} more: {info.samples:,} samples in {info.chunks} chunks, version {info.version}", seconds[0])
    some = ", ".join(sample["id"] for sample in grown[10:13])
    tell("read", f"ds[{FIRST}] is {grown[FIRST]['id']}, a {grown[FIRST]['label']}; ds[10:13] are {some}")

    with _clock() as seconds:
        optimize(fn=scaled, inputs=grown, mode="overwrite", message="pixels from 0 to 1")
    newest = liveset.StreamingDataset(path)
    tell("overwrite", f"version {newest.version} has {_pixels(newest)}, version {grown.version} still has {_pixels(grown)}", seconds[0])

    report = liveset.verify(path)
    tell("verify", f"{report.chunks} chunks, {report.samples:,} samples: {'all checksums fit' if report.ok else 'DAMAGED'}")
    for step, version in zip(("log", *[""] * newest.version), liveset.history(path), strict=False):
        tell(step, f"version {version.version}  {version.op:<9}  {version.samples:>5,} samples  {version.message}")
    return {
        "samples": report.samples,
        "chunks": report.chunks,
        "bytes": newest.info().size,
        "doubtful": len(doubtful),
        "fixed": fixed.keys,
        "chunks_rewritten": fixed.chunks,
        "bytes_rewritten": fixed.bytes_written,
        "accuracy_before": before,
        "accuracy": after,
        "version": newest.version,
    }


def _load() -> tuple[Any, Any]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDependency("The demo needs scikit-learn: pip install 'liveset[demo]'", package="scikit-learn") from error
    bunch = load_digits()
    return bunch.images.astype("uint8"), bunch.target


def _with_mistakes(truth: Any) -> Any:
    """Return the labels with some wrong ones in the first batch, always the same."""
    import numpy as np

    random, labels = np.random.default_rng(0), truth.copy()
    chosen = random.choice(FIRST, WRONG, replace=False)
    labels[chosen] = (truth[chosen] + random.integers(1, 10, WRONG)) % 10
    return labels


def _train(samples: Iterable[Any]) -> Any:
    """Train on a stream. One neighbour decides, so that each wrong label does harm."""
    from sklearn.neighbors import KNeighborsClassifier

    pixels, labels, _ = _arrays(samples)
    return KNeighborsClassifier(1).fit(pixels, labels)


def _doubtful(samples: Iterable[Any]) -> list[str]:
    """Return the keys of samples whose label is unlikely, as judged by classifiers that were trained on others."""
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.neighbors import KNeighborsClassifier

    pixels, labels, keys = _arrays(samples)
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    judged = cross_val_predict(KNeighborsClassifier(10, weights="distance"), pixels, labels, cv=folds, method="predict_proba")
    return [key for key, label, likely in zip(keys, labels, judged, strict=True) if likely[label] < DOUBT]


def _arrays(samples: Iterable[Any]) -> tuple[Any, list[int], list[str]]:
    import numpy as np

    rows = list(samples)
    return np.stack([row["image"].reshape(-1) for row in rows]), [row["label"] for row in rows], [row.get("id", "") for row in rows]


def _number(key: str) -> int:
    return int(key.removeprefix("digit-"))


def _pixels(dataset: liveset.StreamingDataset) -> str:
    image = dataset[0]["image"]
    return f"pixels of {image.dtype} up to {image.max():g}"


def _drawing(image: Any) -> list[str]:
    return ["".join(" .:-=+*#@"[pixel // 2] * 2 for pixel in row).rstrip() for row in image.tolist()]


@contextmanager
def _clock() -> Iterator[list[float]]:
    seconds: list[float] = []
    started = time.perf_counter()
    yield seconds
    seconds.append(time.perf_counter() - started)
