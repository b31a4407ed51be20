"""The main job on real data: 1,797 handwritten digits become a dataset, train a classifier, grow, and are replaced."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import liveset
from liveset.errors import MissingDependency

FIRST = 1_500  # digits of the first batch; the other 297 come later
EPOCHS = 5
BATCH = 50


def run(path: Path | None = None, *, workers: int = 2, say: Callable[[str], Any] = print) -> dict[str, float]:
    """Run the demo in a directory (a temporary one by default) and return the figures that it printed."""
    started = time.perf_counter()
    if path is not None:
        figures = _run(path, workers, say)
        say(f"\n{'done':<10} in {time.perf_counter() - started:.1f} s; look around with: liveset info {path}")
        return figures
    with TemporaryDirectory(prefix="liveset-demo-") as folder:
        figures = _run(Path(folder) / "digits", workers, say)
    say(f"\n{'done':<10} in {time.perf_counter() - started:.1f} s; the dataset was temporary, `liveset demo PATH` keeps it")
    return figures


def digit(images: Any, labels: Any, number: int) -> dict[str, Any]:
    """Return one digit as a sample; the entity id names it for good, wherever it comes to stand."""
    return {"id": f"digit-{number:04}", "image": images[number], "label": int(labels[number])}


def scaled(images: Any, labels: Any, number: int) -> dict[str, Any]:
    """Return the same digit with pixels between 0 and 1."""
    sample = digit(images, labels, number)
    return sample | {"image": (sample["image"] / 16).astype("float32")}


def _run(path: Path, workers: int, say: Callable[[str], Any]) -> dict[str, float]:
    images, labels = _load()
    total = len(labels)
    optimize = partial(liveset.optimize, output_dir=path, num_workers=workers, chunk_size=256, verbose=False)

    def tell(step: str, text: str, seconds: float | None = None) -> None:
        say(f"{step:<10} {text}{f', {seconds:.2f} s' if seconds is not None else ''}")

    with _clock() as seconds:
        optimize(fn=partial(digit, images, labels), inputs=range(FIRST))
    info = liveset.StreamingDataset(path).info()
    tell("optimize", f"{info.samples:,} samples in {info.chunks} chunks, {info.size:,} bytes, {workers} workers", seconds[0])

    with _clock() as seconds:
        classifier = _train(liveset.StreamingDataset(path, shuffle=True, fields=["image", "label"]))
    accuracy = float(classifier.score(images[FIRST:].reshape(-1, 64), labels[FIRST:]))
    speed = f"{EPOCHS} shuffled epochs at {EPOCHS * FIRST / seconds[0]:,.0f} samples/s"
    tell("train", f"{speed}, accuracy {accuracy:.1%} on the {total - FIRST} digits to come", seconds[0])

    with _clock() as seconds:
        optimize(fn=partial(digit, images, labels), inputs=range(FIRST, total), mode="append")
    grown = liveset.StreamingDataset(path)
    info = grown.info()
    tell("append", f"{total - FIRST} more: {info.samples:,} samples in {info.chunks} chunks, version {info.version}", seconds[0])

    one, some = grown[FIRST], grown[10:13]
    tell("read", f"ds[{FIRST}] is {one['id']}, a {one['label']}; ds[10:13] are {', '.join(sample['id'] for sample in some)}")
    for line in _drawing(one["image"]):
        tell("", line)

    with _clock() as seconds:
        optimize(fn=partial(scaled, images, labels), inputs=range(total), mode="overwrite")
    newest = liveset.StreamingDataset(path)
    tell("overwrite", f"version {newest.version} has {_pixels(newest)}", seconds[0])
    tell("", f"version {grown.version} still has {_pixels(liveset.StreamingDataset(path, version=grown.version))}")

    report = liveset.verify(path)
    tell("verify", f"{report.chunks} chunks, {report.samples:,} samples: {'all checksums fit' if report.ok else 'DAMAGED'}")
    return {
        "samples": report.samples,
        "chunks": report.chunks,
        "bytes": newest.info().size,
        "accuracy": accuracy,
        "version": newest.version,
    }


def _load() -> tuple[Any, Any]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDependency("The demo needs scikit-learn: pip install 'liveset[demo]'", name="sklearn") from error
    bunch = load_digits()
    return bunch.images.astype("uint8"), bunch.target


def _train(dataset: liveset.StreamingDataset) -> Any:
    """Train on the stream, batch by batch, as one would with data that does not fit into memory."""
    import numpy as np
    from sklearn.linear_model import SGDClassifier

    classifier = SGDClassifier(loss="log_loss", alpha=1e-3, average=True, random_state=0)
    for _ in range(EPOCHS):
        batch: list[Any] = []
        for sample in dataset:
            batch.append(sample)
            if len(batch) == BATCH:
                pixels = np.stack([row["image"].reshape(-1) for row in batch])
                classifier.partial_fit(pixels, [row["label"] for row in batch], classes=range(10))
                batch.clear()
    return classifier


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
