"""Distill a large vision transformer (the teacher) into a small backbone (the student). This made the embedded backbone.

    python tools/distill.py embedded.parquet --weights teacher.safetensors --license Apache-2.0 --out small

The student learns the tokens of the teacher on the training images of a manifest; labels and masks are not used. The defaults are
the settings of the embedded backbone. `--out` becomes a folder for `--backbone`: `config.json`, `weights.safetensors` (fp16) and a
card. The slow part, the tokens of the teacher, is kept in `--out/teacher-cache`: after an interruption, the same command uses them.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from safetensors.torch import save
from timm.layers import PatchEmbed
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.backbone.attention import AttentionTap
from medtokenbudget.backbone.backbone import WEIGHTS_FILE, Backbone, Recipe, build
from medtokenbudget.config import NOTICE, BackboneConfig
from medtokenbudget.data import Manifest, decode_image
from medtokenbudget.errors import MedTokenBudgetError, MismatchError, RequestError, WorkError
from medtokenbudget.files import load_tensors, read_json, save_tensors, sha256_json, write_bytes, write_json, write_text
from medtokenbudget.runtime import progress, say

BASE = "vit_tiny_patch16_224"
"""The timm model whose width, depth and patches are changed to those of the student."""
WARMUP, WEIGHT_DECAY = 0.05, 0.05
CLS_WEIGHT, ATTENTION_WEIGHT = 0.3, 0.1
"""Weights of the losses of the class token and the class attention; that of the patches is 1."""
SAMPLE_ROWS, STATISTICS_ROWS, SHARD_ROWS = 320, 512, 128
AREA, ASPECT, COLOR = (0.35, 1.0), (0.8, 1.25), 0.2


def draw_view(image: Image.Image, image_id: str, view: int, seed: int) -> Image.Image:
    """Draw a view: 0 is the whole image, the others are crops with random flips, quarter turns and colors.

    The random numbers depend on seed, view and image id only, so a view does not depend on the other images.
    """
    if view == 0:
        return image
    rng = np.random.default_rng([seed, view, int.from_bytes(hashlib.sha256(image_id.encode()).digest()[:8], "big")])
    width, height = image.size
    area, aspect = rng.uniform(*AREA), np.exp(rng.uniform(*np.log(ASPECT)))
    w, h = min(1.0, np.sqrt(area * aspect)) * width, min(1.0, np.sqrt(area / aspect)) * height
    left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
    image = image.crop((round(left), round(top), round(left + w), round(top + h))).rotate(90 * int(rng.integers(4)), expand=True)
    image = ImageOps.mirror(image) if rng.integers(2) else image
    for change in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = change(image).enhance(rng.uniform(1 - COLOR, 1 + COLOR))
    gains = rng.uniform(1 - COLOR / 4, 1 + COLOR / 4, size=3)
    return Image.fromarray(np.clip(np.asarray(image) * gains, 0, 255).astype(np.uint8))


class TeacherCache:
    """The pixels and the teacher's tokens of every view, in shards on disk.

    The teacher sees each view, not each image: tokens of a turned image are not turned tokens (cosine 0.33 for a quarter turn).
    A shard contains `pixels` uint8 [n, S, S, 3], and in fp16 `patches` [n, N, D], `cls` [n, D] and `cls_attention` [n, N]. Row r is
    view `r % views` of image `r // views`.
    """

    def __init__(self, folder: Path, manifest: Manifest, teacher: Backbone, views: int, seed: int) -> None:
        self.folder, self.manifest, self.teacher, self.views, self.seed = folder, manifest, teacher, views, seed
        self.rows = len(manifest) * views
        self._open: dict[int, dict[str, Tensor]] = {}
        identity = {"manifest": manifest.data_hash, "teacher": sha256_json(teacher.fingerprint), "views": views, "seed": seed}
        if not (folder / "cache.json").exists():
            write_json(folder / "cache.json", identity)
        elif (found := read_json(folder / "cache.json")) != identity:
            raise MismatchError.between(f"The teacher cache {folder}", identity, found, "Choose another --out.")

    def _path(self, shard: int) -> Path:
        return self.folder / f"views-{shard:05d}.safetensors"

    def fill(self) -> None:
        """Run the teacher on all views that are not stored yet."""
        shards = [range(first, min(first + SHARD_ROWS, self.rows)) for first in range(0, self.rows, SHARD_ROWS)]
        missing = {shard: rows for shard, rows in enumerate(shards) if not self._path(shard).exists()}
        done = self.rows - sum(map(len, missing.values()))
        with progress(total=self.rows, initial=done, what="Running the teacher", unit="view") as bar, ThreadPoolExecutor(2) as pool:
            for shard, rows in missing.items():
                pixels = torch.from_numpy(np.stack(list(pool.map(self._pixels, rows))))
                save_tensors(self._path(shard), {"pixels": pixels, **self._tokens(pixels)}, {"rows": len(rows)})
                bar.update(len(rows))

    def _pixels(self, row: int) -> np.ndarray:
        index, view = divmod(row, self.views)
        image = decode_image(self.manifest.image_path(index))
        return self.teacher.prepare(draw_view(image, self.manifest.ids[index], view, self.seed))

    def _tokens(self, pixels: Tensor) -> dict[str, Tensor]:
        batches = [self.teacher(self.teacher.normalize(part)).to("cpu") for part in pixels.split(16)]
        tokens = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in ("patches", "cls", "cls_attention")}
        half = {name: value.half().contiguous() for name, value in tokens.items()}
        if not all(bool(torch.isfinite(value).all()) for value in half.values()):
            raise WorkError("The tokens of the teacher are not finite in fp16. Check its weights.")
        return half

    def read(self, rows: Tensor) -> dict[str, Tensor]:
        """Stack the stored tensors of `rows` on the teacher's device."""
        parts = [self._row(int(row)) for row in rows]
        return {name: torch.stack([part[name] for part in parts]).to(self.teacher.device) for name in parts[0]}

    def _row(self, row: int) -> dict[str, Tensor]:
        shard, place = divmod(row, SHARD_ROWS)
        if shard not in self._open:
            self._open[shard] = load_tensors(self._path(shard))[0]
        return {name: value[place] for name, value in self._open[shard].items()}

    def sample(self) -> dict[str, Tensor]:
        """Read random views, the same for the same seed."""
        generator = torch.Generator().manual_seed(self.seed)
        return self.read(torch.randperm(self.rows, generator=generator)[:SAMPLE_ROWS])

    def statistics(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Compute mean and standard deviation [D] of the teacher's patch and class tokens over evenly spaced views."""
        tokens = self.read(torch.linspace(0, self.rows - 1, min(STATISTICS_ROWS, self.rows)).long())
        values = {name: tokens[name].cpu().float().flatten(0, -2) for name in ("patches", "cls")}
        moments = {name: (x.mean(0), x.std(0, correction=0).clamp_min(1e-4)) for name, x in values.items()}
        return {name: (mean.to(self.teacher.device), std.to(self.teacher.device)) for name, (mean, std) in moments.items()}

    def batches(self, epoch: int, batch_size: int) -> Iterator[dict[str, Tensor]]:
        """Yield one pass over the images in random order, with one stored view of each."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.manifest), generator=generator)
        views = torch.randint(self.views, (len(order),), generator=generator)
        for part in (order * self.views + views).split(batch_size):
            yield self.read(part)


class Student(nn.Module):
    """The small transformer, and linear adapters to the width of the teacher that are dropped after training."""

    def __init__(self, model: Any, teacher_dim: int) -> None:
        super().__init__()
        self.model = model
        self.adapters = nn.ModuleDict({name: nn.Linear(model.num_features, teacher_dim) for name in ("patches", "cls")})
        self._tap = AttentionTap(model.blocks[-1], BASE)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Predict `patches` [B, N, D], `cls` [B, D] and `cls_attention` [B, N] of images [B, 3, S, S]."""
        tokens = self.model.forward_features(images)
        q, k, _, _ = self._tap.inputs()
        return {
            "patches": self.adapters["patches"](tokens[:, 1:]),
            "cls": self.adapters["cls"](tokens[:, 0]),
            "cls_attention": torch.einsum("bhd,bhtd->bht", q[:, :, 0], k).softmax(-1).mean(1)[:, 1:],
        }


def token_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """Mean of 1 - cosine over tokens plus mean smooth-L1 over values. Both inputs are [..., D]."""
    return (1 - F.cosine_similarity(predicted, target, dim=-1)).mean() + F.smooth_l1_loss(predicted, target)


def attention_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """Kullback-Leibler divergence of class attention [B, N], scaled to sum to one over the patches."""
    p = target / target.sum(1, keepdim=True)
    q = predicted / predicted.sum(1, keepdim=True)
    return (torch.special.xlogy(p, p) - p * q.clamp_min(1e-8).log()).sum(1).mean()


def standardized(tokens: dict[str, Tensor], name: str, statistics: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    mean, std = statistics[name]
    return (tokens[name].float() - mean) / std


def check_teacher(teacher: Backbone, options: argparse.Namespace) -> None:
    """Raise a RequestError if the student cannot start from the teacher; called before the slow part."""
    source: Any = teacher.model
    plain = isinstance(source, VisionTransformer) and isinstance(source.patch_embed, PatchEmbed) and teacher.has_cls
    attention = getattr(source.blocks[0], "attn", None)
    plain = plain and teacher.prefix == 1 and isinstance(attention, Attention) and isinstance(attention.q_norm, nn.Identity)
    if not plain or options.width > teacher.dim:
        raise RequestError(
            "The teacher must be a plain vision transformer with a class token, without registers, not narrower than the student."
        )
    size, units = options.width // options.heads, 4 * options.width
    hidden = source.blocks[0].mlp.fc1.out_features
    if options.width % options.heads or size != attention.head_dim or options.heads > attention.num_heads or units > hidden:
        raise RequestError(
            f"The teacher has {attention.num_heads} heads of size {attention.head_dim} and {hidden} hidden units, but the "
            f"student needs {options.heads} of size {options.width / options.heads:g} and {units}. Change --width or --heads."
        )


@torch.no_grad()
def start_from_teacher(model: Any, teacher: Backbone, images: Tensor) -> None:
    """Copy the weights of the teacher into the narrower and shallower `model`, and refit it on images [B, 3, S, S].

    The teacher's residual stream is projected onto its main directions. Evenly spaced blocks, with their strongest heads and hidden
    units, are copied in that basis. This saves most of the training.
    """
    source: Any = teacher.model
    chosen = torch.linspace(0, teacher.layer, len(model.blocks)).round().long().tolist()
    basis, scale = _main_directions(source, teacher.layer, images, model.num_features)
    model.patch_embed.proj.weight.copy_(torch.einsum("do,dijk->oijk", basis, source.patch_embed.proj.weight))
    model.patch_embed.proj.bias.copy_(source.patch_embed.proj.bias @ basis)
    model.pos_embed.copy_(source.pos_embed @ basis)
    model.cls_token.copy_(source.cls_token @ basis)
    for block, index in zip(model.blocks, chosen):
        _copy_block(block, source.blocks[index], basis, scale)
    _refit(model, source, chosen, basis, images)


def _main_directions(source: Any, layer: int, images: Tensor, width: int) -> tuple[Tensor, float]:
    """Compute an orthonormal basis [D, width] of the normalized residual stream, and the scale that layer norm loses by it."""
    streams = source.forward_intermediates(
        images, indices=list(range(layer + 1)), norm=False, stop_early=True, output_fmt="NLC", intermediates_only=True
    )
    rows = torch.cat([F.layer_norm(x, x.shape[-1:]).flatten(0, 1) for x in streams])
    values, vectors = torch.linalg.eigh((rows.T @ rows).double() / len(rows))
    kept = float(values[-width:].sum() / values.sum())
    # A random rotation in the subspace spreads the energy, so that removing the mean in layer norm costs one direction of many.
    rotation = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    basis = (vectors[:, -width:] @ rotation.to(vectors.device)).float()
    return basis, (kept * source.num_features / width) ** 0.5


def _copy_block(block: Any, source: Any, basis: Tensor, scale: float) -> None:
    """Copy one block to the new basis: layer norms are folded into the projections, layer scale into the outputs."""
    heads, size = block.attn.num_heads, block.attn.head_dim
    scale1, scale2 = (getattr(layer, "gamma", torch.ones(1, device=basis.device)) for layer in (source.ls1, source.ls2))
    qkv = source.attn.qkv.weight * source.norm1.weight
    qkv_bias = source.attn.qkv.bias + source.attn.qkv.weight @ source.norm1.bias
    q, k, v = (qkv @ basis * scale).unflatten(0, (3, -1, size)).unbind(0)
    out = (basis.T @ (scale1[:, None] * source.attn.proj.weight)).unflatten(1, (-1, size))
    strength = torch.stack([(out[:, head] @ v[head]).norm() for head in range(out.shape[1])])
    best = strength.topk(heads).indices.sort().values
    block.attn.qkv.weight.copy_(torch.cat([part[best].flatten(0, 1) for part in (q, k, v)]))
    block.attn.qkv.bias.copy_(qkv_bias.unflatten(0, (3, -1, size))[:, best].flatten())
    block.attn.proj.weight.copy_(out[:, best].flatten(1))
    block.attn.proj.bias.copy_(scale1 * source.attn.proj.bias @ basis)
    hidden = source.mlp.fc1.weight * source.norm2.weight @ basis * scale
    hidden_bias = source.mlp.fc1.bias + source.mlp.fc1.weight @ source.norm2.bias
    down = basis.T @ (scale2[:, None] * source.mlp.fc2.weight)
    units = (hidden.norm(dim=1) * down.norm(dim=0)).topk(block.mlp.fc1.out_features).indices.sort().values
    block.mlp.fc1.weight.copy_(hidden[units])
    block.mlp.fc1.bias.copy_(hidden_bias[units])
    block.mlp.fc2.weight.copy_(down[:, units])
    block.mlp.fc2.bias.copy_(scale2 * source.mlp.fc2.bias @ basis)


def _refit(model: Any, source: Any, chosen: list[int], basis: Tensor, images: Tensor) -> None:
    """Block by block, fit the two output projections so that the student's stream follows the projected stream of the teacher.

    Each fit uses the actual stream of the student, so it also corrects the errors of earlier blocks.
    """
    after_attention: dict[int, Tensor] = {}
    after_mlp: dict[int, Tensor] = {}
    hooks = []
    for index in chosen:
        block = source.blocks[index]
        hooks += [
            block.norm2.register_forward_pre_hook(lambda _, x, index=index: after_attention.update({index: x[0] @ basis})),
            block.register_forward_hook(lambda _, x, y, index=index: after_mlp.update({index: y @ basis})),
        ]
    source.forward_intermediates(images, indices=[max(chosen)], stop_early=True, output_fmt="NLC", intermediates_only=True)
    for hook in hooks:
        hook.remove()
    stream = model.norm_pre(model._pos_embed(model.patch_embed(images)))
    for block, index in zip(model.blocks, chosen):
        stream = _refit_layer(block.attn.proj, nn.Sequential(block.norm1, block.attn), stream, after_attention[index])
        stream = _refit_layer(block.mlp.fc2, nn.Sequential(block.norm2, block.mlp), stream, after_mlp[index])


def _refit_layer(layer: nn.Linear, branch: nn.Module, stream: Tensor, goal: Tensor) -> Tensor:
    """Fit the last linear layer of a branch so that stream + branch(stream) is close to `goal`; return the new stream."""
    inputs: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    output = branch(stream)
    hook.remove()
    # Fits a correction, not the layer: where the images give no information, the copied weights stay.
    weight, bias = ridge_regression(inputs[0].flatten(0, 1), (goal - stream - output).flatten(0, 1))
    layer.weight.add_(weight)
    layer.bias.add_(bias)
    return stream + output + F.linear(inputs[0], weight, bias)


def ridge_regression(inputs: Tensor, targets: Tensor, ridge: float = 1e-2) -> tuple[Tensor, Tensor]:
    """Fit weight [O, I] and bias [O] of a linear map from rows [n, I] to rows [n, O]; `ridge` is relative to the mean variance."""
    center, mean = inputs.mean(0), targets.mean(0)
    x, y = inputs - center, targets - mean
    gram = (x.T @ x).double() / len(x)
    damped = gram + ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    weight = torch.linalg.solve(damped, (x.T @ y).double() / len(x)).T.to(inputs.dtype)
    return weight, mean - weight @ center


@torch.no_grad()
def fit_adapters(student: Student, images: Tensor, targets: dict[str, Tensor]) -> None:
    """Fit the adapters by ridge regression, so that training does not start by undoing the initial weights."""
    tokens = student.model.forward_features(images)
    for name, inputs in (("patches", tokens[:, 1:]), ("cls", tokens[:, 0])):
        weight, bias = ridge_regression(inputs.flatten(0, -2), targets[name].flatten(0, -2))
        adapter: Any = student.adapters[name]
        adapter.weight.copy_(weight)
        adapter.bias.copy_(bias)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then cosine decay to 0."""
    warm = max(1, int(WARMUP * steps))
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def parameter_groups(student: Student) -> list[dict[str, Any]]:
    """Weight decay applies to matrices only."""
    named = list(student.named_parameters())
    no_decay = {name for name, value in named if value.ndim < 2 or name.endswith(("pos_embed", "cls_token"))}
    return [
        {"params": [value for name, value in named if name not in no_decay], "weight_decay": WEIGHT_DECAY},
        {"params": [value for name, value in named if name in no_decay], "weight_decay": 0.0},
    ]


def train(student: Student, cache: TeacherCache, statistics: dict[str, tuple[Tensor, Tensor]], options: argparse.Namespace) -> None:
    optimizer = torch.optim.AdamW(parameter_groups(student), lr=options.lr)
    per_epoch = -(-len(cache.manifest) // options.batch_size)
    steps, step = options.epochs * per_epoch, 0
    student.train()
    with progress(total=steps, what="Training the student", unit="step") as bar:
        for epoch in range(options.epochs):
            total = 0.0
            for target in cache.batches(epoch, options.batch_size):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step, steps, options.lr)
                predicted = student(cache.teacher.normalize(target["pixels"]))
                patches, cls = (token_loss(predicted[name], standardized(target, name, statistics)) for name in ("patches", "cls"))
                attention = attention_loss(predicted["cls_attention"], target["cls_attention"].float())
                loss = patches + CLS_WEIGHT * cls + ATTENTION_WEIGHT * attention
                if not bool(torch.isfinite(loss)):
                    raise WorkError(f"The loss is not finite in epoch {epoch + 1}. Use a smaller --lr.")
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
                optimizer.step()
                total += float(loss.detach()) * len(target["pixels"])
                step += 1
                bar.update(1)
            say(f"Epoch {epoch + 1} of {options.epochs}: loss {total / len(cache.manifest):.4f}")


def distill(options: argparse.Namespace) -> None:
    manifest = Manifest.read(options.manifest).part("train")
    if not len(manifest):
        raise RequestError(f"{options.manifest} has no training images.")
    teacher = Backbone.load(BackboneConfig(options.teacher, options.weights, options.image_size, options.layer), options.device)
    check_teacher(teacher, options)
    cache = TeacherCache(options.out / "teacher-cache", manifest, teacher, options.views, options.seed)
    cache.fill()
    arguments: dict[str, Any] = {
        "patch_size": options.image_size // teacher.grid[0],
        "embed_dim": options.width,
        "depth": options.depth,
        "num_heads": options.heads,
        "class_token": True,
        "global_pool": "token",
        "fc_norm": False,
    }
    preprocessing = {name: value for name, value in teacher.preprocessing.to_dict().items() if name != "image_size"}
    recipe = Recipe(BASE, arguments, preprocessing, options.license)
    torch.manual_seed(options.seed)
    student = Student(build(BASE, options.image_size, recipe), teacher.dim).to(teacher.device)
    statistics, sample = cache.statistics(), cache.sample()
    images = teacher.normalize(sample["pixels"])
    start_from_teacher(student.model, teacher, images)
    fit_adapters(student, images, {name: standardized(sample, name, statistics) for name in student.adapters})
    train(student, cache, statistics, options)
    state = {name: value.detach().cpu().half().contiguous() for name, value in student.model.state_dict().items()}
    if not all(bool(torch.isfinite(value).all()) for value in state.values()):
        raise WorkError("Some weights are too large for fp16. Use a smaller --lr.")
    write_bytes(options.out / WEIGHTS_FILE, save(state, {"format": "pt"}))
    recipe.write(options.out)
    write_text(options.out / "README.md", card(manifest, teacher, options))


def card(manifest: Manifest, teacher: Backbone, options: argparse.Namespace) -> str:
    return f"""# A distilled backbone

A plain vision transformer ({options.depth} blocks, width {options.width}) that reproduces the tokens of its teacher.

| | |
|---|---|
| teacher | `{options.teacher}`, weights sha256 `{teacher.fingerprint["weights"]}`, block {teacher.layer} |
| images | {len(manifest)} ({manifest.source}), {options.views} views of each |
| training | {options.epochs} epochs, batch {options.batch_size}, learning rate {options.lr}, seed {options.seed} |
| license | {options.license} |

{NOTICE}
"""


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path, help="manifest created by `mtb data`")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new backbone")
    parser.add_argument("--teacher", default="vit_small_patch14_dinov2.lvd142m", help="a timm vision transformer")
    parser.add_argument("--weights", type=Path, help="the teacher's weights (.safetensors); default: download them")
    parser.add_argument("--layer", type=int, default=5, help="the teacher's block to imitate, counted from 0; -1 is the last")
    parser.add_argument("--image-size", type=positive, default=224, help="side of the square input image, in pixels")
    parser.add_argument("--width", type=positive, default=192, help="embedding dimension of the student")
    parser.add_argument("--depth", type=positive, default=6, help="number of blocks of the student")
    parser.add_argument("--heads", type=positive, default=3, help="number of attention heads of the student")
    parser.add_argument("--views", type=positive, default=2, help="stored views of each image; the first is the whole image")
    parser.add_argument("--epochs", type=positive, default=4, help="passes over the images, each with one view of every image")
    parser.add_argument("--batch-size", type=positive, default=16)
    parser.add_argument("--lr", type=float, default=3e-4, help="peak learning rate of AdamW")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--license", default="as the teacher's and the images'", help="license of the weights")
    options = parser.parse_args(arguments)
    try:
        distill(options)
    except MedTokenBudgetError as error:
        print(f"distill: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\ndistill: Stopped. The same command uses the tokens of the teacher that are stored.", file=sys.stderr)
        return 130
    print(f"Wrote the backbone {options.out}. Next: mtb extract MANIFEST --store STORE --backbone {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
