"""Fine-tune a vision transformer of timm that runs where the lesion is: one folder per class.

    python examples/finetune_wrapped.py photos --name vit_small_patch14_dinov2.lvd142m --budget 0.3

The weights come from the hub; `--random` starts from random ones. The checkpoint is that of the plain model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import timm
import torch
from safetensors.torch import save_file
from timm.data import create_transform, resolve_model_data_config
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

import medtokenbudget as mtb


def main(
    images: Path,
    name: str,
    out: Path,
    budget: float = 0.3,
    epochs: int = 5,
    size: int = 224,
    lr: float = 1e-4,
    pretrained: bool = True,
) -> float:
    """Return the training accuracy of the last epoch."""
    torch.manual_seed(0)
    folder = ImageFolder(str(images))
    model = timm.create_model(name, pretrained=pretrained, num_classes=len(folder.classes), img_size=size)
    # The images are normalized as the model expects them; the router's own normalization is converted inside.
    about = {**resolve_model_data_config(model), "input_size": (3, size, size), "crop_pct": 1.0}
    folder.transform = create_transform(**about)
    loader = DataLoader(folder, batch_size=16, shuffle=True)

    fast = mtb.wrap(model, router="dermoscopy", budget=budget).train()
    optimizer = torch.optim.AdamW(fast.parameters(), lr=lr)
    accuracy = 0.0
    for epoch in range(epochs):
        right = 0
        for batch, labels in loader:
            logits = fast(batch)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits, labels).backward()
            optimizer.step()
            right += int((logits.argmax(1) == labels).sum())
        accuracy = right / len(folder)
        kept, n = int(fast.routing.kept[0].sum()), fast.routing.kept.shape[1]
        print(f"epoch {epoch + 1}: accuracy {accuracy:.0%} on the training images, {kept} of {n} patches")

    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(mtb.unwrap(fast).state_dict(), out)
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("--name", default="vit_small_patch14_dinov2.lvd142m")
    parser.add_argument("--out", type=Path, default=Path("runs/finetuned.safetensors"))
    parser.add_argument("--budget", type=float, default=0.3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--random", action="store_true")
    given = parser.parse_args()
    main(given.images, given.name, given.out, given.budget, given.epochs, pretrained=not given.random)
