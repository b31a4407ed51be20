"""The same digits with a trainer of Lightning, which saves and restores the loader by itself; run it again and it goes on.

python examples/lightning_digits.py runs/lightning --epochs 3
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from digits import make_dataset
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import liveset


class Model(lightning.LightningModule):
    """A small network, and what it learns from a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: dict[str, Any], number: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = nn.functional.cross_entropy(self.layers(batch["image"].float() / 16), batch["label"])
        print(f"epoch {self.current_epoch + 1} step {self.global_step + 1} loss {loss.item():.6f} first {batch['id'][0]}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    """Read the arguments, make the dataset if there is none yet, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the dataset and the checkpoints are kept")
    parser.add_argument("--epochs", type=int, default=3)
    given = parser.parse_args()
    if not (given.folder / "data" / "index.json").exists():
        make_dataset(given.folder / "data")
    lightning.seed_everything(1)
    loader = liveset.StreamingDataLoader(liveset.StreamingDataset(given.folder / "data", shuffle=True, seed=1), batch_size=32)
    saver = ModelCheckpoint(given.folder, every_n_train_steps=10, save_last=True)
    trainer = lightning.Trainer(
        max_epochs=given.epochs, accelerator="cpu", callbacks=[saver], logger=False, enable_progress_bar=False, enable_model_summary=False
    )
    last = given.folder / "last.ckpt"
    trainer.fit(Model(), loader, ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main()
