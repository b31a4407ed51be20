"""Train a small network on handwritten digits, with checkpoints; run it again after it was stopped, or killed, and it goes on exactly.

python examples/digits.py runs/digits --epochs 3
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import liveset


def make_dataset(path: Path) -> None:
    """Turn scikit-learn's digits into a dataset: 1,797 images of 8 x 8 pixels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = digits.images.astype("uint8")

    def sample(number: int) -> dict[str, Any]:
        return {"id": f"digit-{number:04}", "image": images[number], "label": int(digits.target[number])}

    liveset.optimize(sample, range(len(images)), path, num_workers=1, chunk_size=256, key_fn="id", verbose=False)


def train(folder: Path, *, epochs: int, batch_size: int, workers: int, every: int) -> list[float]:
    """Train for some epochs, from the last checkpoint on if there is one, and return the loss of each step."""
    ds = liveset.StreamingDataset(folder / "data", shuffle=True, seed=1)
    loader = liveset.StreamingDataLoader(ds.subset(range(1500)), batch_size=batch_size, num_workers=workers)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses: list[float] = []
    first = 0

    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        losses, first = state["losses"], state["epoch"]
        print(f"goes on after step {len(losses)}, in epoch {first + 1}", flush=True)

    def save(epoch: int) -> None:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
        torch.save(states | {"losses": losses, "epoch": epoch}, checkpoint.with_suffix(".new"))
        os.replace(checkpoint.with_suffix(".new"), checkpoint)  # so that a kill leaves the old one or the new one

    for epoch in range(first, epochs):
        for batch in loader:  # the rest of the epoch, if the checkpoint was made in it
            loss = nn.functional.cross_entropy(model(batch["image"].float() / 16), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            print(f"epoch {epoch + 1} step {len(losses)} loss {losses[-1]:.4f}", flush=True)
            if len(losses) % every == 0:
                save(epoch)
        save(epoch + 1)

    with torch.no_grad():
        unseen = ds[1500:]
        images, labels = (torch.stack([torch.as_tensor(sample[name]) for sample in unseen]) for name in ("image", "label"))
        right = (model(images.float() / 16).argmax(1) == labels).float().mean().item()
    print(f"{right:.1%} of {len(labels)} unseen digits are told right")
    return losses


def main() -> None:
    """Read the arguments, make the dataset if there is none yet, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the dataset and the checkpoint are kept")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    given = parser.parse_args()
    if not (given.folder / "data" / "index.json").exists():
        make_dataset(given.folder / "data")
    losses = train(given.folder, epochs=given.epochs, batch_size=given.batch_size, workers=given.workers, every=given.every)
    (given.folder / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
