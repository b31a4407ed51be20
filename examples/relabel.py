"""Fix labels while a training loop runs: the epoch that runs stays as it is, the next one has them.

python examples/relabel.py runs/relabel
"""

from __future__ import annotations

import argparse
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import liveset

WRONG = 100


def make_dataset(path: Path) -> None:
    """Turn scikit-learn's digits into a dataset, in which the first hundred labels are wrong."""
    digits = load_digits()
    images = digits.images.astype("uint8")

    def sample(number: int) -> dict[str, Any]:
        label = int(digits.target[number])
        return {"id": f"digit-{number:04}", "image": images[number], "label": (label + 1) % 10 if number < WRONG else label}

    liveset.optimize(sample, range(len(images)), path, num_workers=1, chunk_size=256, mode="overwrite", key_fn="id", verbose=False)


def fix_labels(path: Path) -> None:
    """Do what an annotator does meanwhile, in another process, or on another machine: set labels by key, in one commit."""
    truth = load_digits().target
    with liveset.dataset_update(path) as update:
        for number in range(WRONG):
            update.patch(f"digit-{number:04}", label=int(truth[number]))
        result = update.commit(message="labels of the second annotator")
    print(f"  version {result.version}: {result.keys} labels set, {result.chunks} of 8 chunks written anew", flush=True)


def main() -> None:
    """Train for two epochs, with an annotator at work in the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the dataset is kept")
    path = parser.parse_args().folder / "data"
    make_dataset(path)
    truth = {f"digit-{number:04}": int(label) for number, label in enumerate(load_digits().target)}

    ds = liveset.StreamingDataset(path, shuffle=True, seed=1)
    loader = liveset.StreamingDataLoader(ds, batch_size=32)
    weights = np.zeros((64, 10))
    annotator = multiprocessing.get_context("spawn").Process(target=fix_labels, args=(path,))
    for epoch in (1, 2):
        wrong = 0
        for step, batch in enumerate(loader):
            labels = np.asarray(batch["label"])
            pixels = np.asarray(batch["image"]).reshape(len(labels), 64) / 16
            wrong += sum(int(label) != truth[key] for key, label in zip(batch["id"], labels, strict=True))
            likely = np.exp(pixels @ weights)
            likely /= likely.sum(1, keepdims=True)
            weights -= 0.5 / len(labels) * pixels.T @ (likely - np.eye(10)[labels])
            if (epoch, step) == (1, 10):
                annotator.start()
                annotator.join()  # only so that the example tells the same each time: a loop need not wait
        print(f"epoch {epoch}: version {ds.version}, {wrong} wrong labels, last batch {(likely.argmax(1) == labels).mean():.0%} right")
        if ds.refresh():  # moves on to the newest version, if there is a newer one
            print(f"  refreshed to version {ds.version}")


if __name__ == "__main__":
    main()
