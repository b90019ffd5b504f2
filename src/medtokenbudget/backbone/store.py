"""`FeatureStore`: frozen tokens on disk, read like an array that may be larger than memory.

Reading only; `extract.py` fills a store, `shards.py` is the file format, `fields.py` reads fields of rows, `annotations.py` adds
what a manifest says.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medtokenbudget.backbone import plan
from medtokenbudget.backbone.annotations import Annotation, annotate, known_manifests
from medtokenbudget.backbone.fields import Fields
from medtokenbudget.backbone.file_index import FileIndex
from medtokenbudget.backbone.plan import Shards
from medtokenbudget.backbone.reading import BufferPool, prefetched
from medtokenbudget.backbone.shards import (
    Failure,
    Row,
    RowError,
    Sidecar,
    read_sidecar,
    shard_path,
    sidecar_path,
)
from medtokenbudget.backbone.signals import DEFAULT
from medtokenbudget.backbone.views import IDENTITY, view_order
from medtokenbudget.data.manifest import Manifest, listed
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.files import sha256_file, sha256_json
from medtokenbudget.progress import progress
from medtokenbudget.tokens import SIGNALS, TokenBatch

_SMALL = ("cls", *DEFAULT, "luminance")
"""Fields that every batch has, if the store has them."""
_SHOWN = 5


class FeatureStore:
    """Rows of frozen tokens; a row is one view of one image.

    A store knows images by the hash of their file. Opened with a manifest, it shows the images of the manifest in its order, with
    their labels and lesion patches; opened alone, `ids` are the hashes and there are no annotations.

    Attributes:
        ids: Image of each row.
        views: View of each row.
        grid: (h, w) of the patches.
        dim: Their dimension D.
        classes: Names that `label` points to; empty without a manifest.
        config: The content of `store.json`.
        errors: Images and views of the manifest that have no row, with the reason.
        missing: Numbers of planned shards that are not extracted yet, as far as they concern the manifest.

    Example:
        >>> manifest = Manifest.read("isic.parquet")  # doctest: +SKIP
        >>> store = FeatureStore.open("stores/isic", manifest)  # doctest: +SKIP
        >>> batch = store.read(store.rows(manifest.part("val").ids))  # doctest: +SKIP
    """

    def __init__(
        self, path: Path, config: dict[str, Any], shards: Shards, sidecars: dict[int, Sidecar], annotation: Annotation | None = None
    ) -> None:
        self.path = path
        self.config = config
        self.grid: tuple[int, int] = (int(config["backbone"]["grid"][0]), int(config["backbone"]["grid"][1]))
        self.dim = int(config["backbone"]["dim"])
        self.shards = shards
        self.sidecars = sidecars
        self.annotation = annotation
        present = sorted(sidecars)
        self.stored: list[Row] = [row for index in present for row in sidecars[index].rows]
        self.failures: list[Failure] = [failure for index in present for failure in sidecars[index].failures]
        counts = [len(sidecars[index].rows) for index in present]
        shard = np.repeat(np.asarray(present, np.int64), counts)
        offset = np.concatenate([np.arange(count) for count in counts] or [np.arange(0)]).astype(np.int64)
        self.missing = [index for index in shards if index not in sidecars]
        if annotation is None:
            self.ids: list[str] = [row.image for row in self.stored]
            self.views: list[str] = [row.view for row in self.stored]
            self.errors = [RowError(failure.image, failure.view, failure.reason) for failure in self.failures]
            self.classes: tuple[str, ...] = ()
        else:
            self.ids = annotation.ids
            self.views = [self.stored[row].view for row in annotation.tokens]
            self.errors = annotation.errors
            self.classes = annotation.classes
            shard, offset = shard[annotation.tokens], offset[annotation.tokens]
            known = set(annotation.images.values())
            self.missing = [index for index in self.missing if any(image in known for image, _ in shards[index])]
        self._fields = Fields(path, config, sidecars, shard, offset)
        # Kept from epoch to epoch, for as long as they ask for batches of one kind.
        self._pool: tuple[object, BufferPool] = (None, BufferPool())

    @classmethod
    def open(
        cls, path: Path | str, manifest: Manifest | None = None, expect: dict[str, Any] | None = None, partial: bool = False
    ) -> FeatureStore:
        """Open a store.

        Args:
            path: Folder of the store.
            manifest: The images to show, with their labels and masks. Lesion patches are computed from the masks the first time.
            expect: What must agree with `store.json`.
            partial: Accept a store that is not complete.

        Returns:
            The store.

        Raises:
            RequestError: There is no such store, or its extraction is not finished.
            MismatchError: It was made with other settings than `expect` says.
            WorkError: It is damaged.
        """
        path = Path(path)
        config = plan.read_settings(path)
        if expect is not None:
            plan.check(f"The store {path}", expect, config, "Use the store that was extracted with these settings, or extract one.")
        shards = plan.read_plan(path)
        found = {index: read_sidecar(path, index, keys) for index, keys in shards.items()}
        sidecars = {index: sidecar for index, sidecar in found.items() if sidecar is not None}
        identity = plan.identity_of(config)
        if others := [shard_path(path, index).name for index, sidecar in sidecars.items() if sidecar.settings != identity]:
            raise WorkError(
                f"{path / plan.STORE} does not describe {listed(others, _SHOWN)}: it was changed after they were made. Restore it."
            )
        store = cls(path, config, shards, sidecars)
        if manifest is not None:
            store = store.annotated(manifest)
        if store.missing and not partial:
            names = listed([sidecar_path(path, index).name for index in store.missing], _SHOWN)
            raise RequestError(
                f"The store {path} is incomplete: {len(store.missing)} of {len(shards)} shards are missing or damaged ({names}). "
                "Run the same `mtb extract` command again to resume."
            )
        return store

    def annotated(self, manifest: Manifest) -> FeatureStore:
        """The same tokens, seen through another manifest."""
        annotation = annotate(self.path, self.grid, self.stored, self.failures, manifest)
        return FeatureStore(self.path, self.config, self.shards, self.sidecars, annotation)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"FeatureStore({str(self.path)!r}, rows={len(self)}, grid={self.grid}, dim={self.dim}, missing={len(self.missing)})"

    @property
    def n(self) -> int:
        """Number of patches N."""
        return self.grid[0] * self.grid[1]

    @property
    def early(self) -> dict[str, Any] | None:
        """How the tokens were routed before or inside the backbone (way, budget, k, ...); None for a plain backbone."""
        found: dict[str, Any] | None = self.config["backbone"].get("route")
        return found

    @property
    def fixed_budget(self) -> float | None:
        """The budget of tokens that were routed before or inside the backbone; None where all patches are there."""
        return float(self.config["backbone"]["route"]["budget"]) if plan.routed_early(self.config["backbone"]) else None

    @property
    def per_image(self) -> int:
        """Patch tokens of each row: N, or K if they were routed before or inside the backbone."""
        return int(self.config["backbone"]["route"]["k"]) if plan.routed_early(self.config["backbone"]) else self.n

    @cached_property
    def identity(self) -> str:
        """Hash of what the rows were made from and how, and of their annotations; other images in the store do not change it."""
        rows = [[self.stored[row].image, self.stored[row].view] for row in self._tokens.tolist()]
        said: list[Any] = []
        if self.annotation is not None:
            lesion = hashlib.sha256(np.packbits(self.annotation.lesion).tobytes()).hexdigest()
            said = [list(self.classes), self.ids, self.annotation.label.tolist(), self.annotation.has_mask.tolist(), lesion]
        return sha256_json([plan.identity_of(self.config), rows, said])

    @property
    def _tokens(self) -> np.ndarray:
        return np.arange(len(self.stored)) if self.annotation is None else self.annotation.tokens

    @cached_property
    def _row_of(self) -> dict[tuple[str, str], int]:
        return {key: row for row, key in enumerate(zip(self.ids, self.views))}

    @cached_property
    def _rows_of_id(self) -> dict[str, list[int]]:
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(self.ids):
            rows.setdefault(name, []).append(row)
        return rows

    def rows(self, ids: Sequence[str], view: str | None = IDENTITY, strict: bool = True) -> np.ndarray:
        """Row numbers of images.

        Args:
            ids: Image ids.
            view: The view; None for all views of each image.
            strict: Raise an error for images without such a row, instead of leaving them out.

        Returns:
            Row numbers, int64, in the order of `ids`.

        Raises:
            RequestError: With `strict`, if an image has no such row.
        """
        if view is None:
            found: list[list[int]] = [self._rows_of_id.get(name, []) for name in ids]
        else:
            one = [self._row_of.get((name, view)) for name in ids]
            found = [[] if row is None else [row] for row in one]
        absent = [name for name, rows in zip(ids, found) if not rows]
        if absent and strict:
            raise RequestError(self._absent(absent, len(ids), view))
        return np.asarray([row for rows in found for row in rows], np.int64)

    def _absent(self, absent: list[str], of: int, view: str | None) -> str:
        reasons = {error.image_id: error.reason for error in self.errors if view in (None, error.view)}
        shown = [f"{name} ({reasons[name]})" if name in reasons else name for name in absent[:_SHOWN]]
        more = f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
        what = "" if view in (None, IDENTITY) else f" with the view '{view}'"
        advice = f"Run `mtb extract MANIFEST --store {self.path}` to add them, or leave them out."
        if self.missing:
            advice = f"{len(self.missing)} shards are missing: run the same `mtb extract` command again."
        return f"{len(absent)} of {of} images are not in the store {self.path}{what}: {'; '.join(shown)}{more}. {advice}"

    def has(self, field: str) -> bool:
        """Whether the rows carry this field (a backbone without a class token gives no `cls`)."""
        return self._fields.has(field)

    @cached_property
    def signals(self) -> tuple[str, ...]:
        """The signals that all rows carry, see `backbone/signals.py`."""
        return tuple(name for name in SIGNALS if self.has(name))

    def require_signals(self, names: Sequence[str]) -> None:
        """Raise a MissingSignalError, with what to do, for signals that not all rows carry; other names are not looked at."""
        self._fields.require_signals(names)

    def _annotations(self) -> Annotation:
        if self.annotation is None:
            raise RequestError(f"Labels and masks of {self.path} come from a manifest: FeatureStore.open(path, manifest).")
        return self.annotation

    @cached_property
    def label(self) -> Tensor:
        """[n] int64, -1 where unknown."""
        return torch.from_numpy(self._annotations().label)

    @cached_property
    def lesion(self) -> Tensor:
        """[n, N] bool."""
        return torch.from_numpy(self._annotations().lesion)

    @cached_property
    def covered(self) -> Tensor:
        """[n, N] uint8, how much of each patch the mask covers; 255 is all of it."""
        return torch.from_numpy(self._annotations().covered)

    @cached_property
    def has_mask(self) -> Tensor:
        """[n] bool."""
        return torch.from_numpy(self._annotations().has_mask)

    @cached_property
    def luminance(self) -> Tensor:
        """Mean gray value of every patch, [n, N] in [0, 1]."""
        return self._fields.whole("luminance")

    @cached_property
    def attention_entropy(self) -> Tensor:
        """Attention entropy of every patch (Eq. 1), [n, N]."""
        return self._fields.whole("attention_entropy")

    @cached_property
    def cls_attention(self) -> Tensor:
        """Attention of the class token to every patch, [n, N]."""
        return self._fields.whole("cls_attention")

    @cached_property
    def cls(self) -> Tensor:
        """Class token of every row, [n, D]."""
        return self._fields.whole("cls")

    def read(
        self, rows: Sequence[int] | np.ndarray | Tensor, dtype: torch.dtype = torch.float32, signals: Sequence[str] = ()
    ) -> TokenBatch:
        """Read rows as one batch, with tokens in `dtype` and, beside the default ones, these signals."""
        return self._read(self._checked(rows), dtype, BufferPool(), signals)

    def batches(
        self,
        rows: Sequence[int] | np.ndarray | Tensor,
        batch_size: int,
        generator: torch.Generator | None = None,
        prefetch: int = 2,
        dtype: torch.dtype = torch.float32,
        signals: Sequence[str] = (),
    ) -> Iterator[TokenBatch]:
        """Read rows in batches.

        Args:
            rows: Row numbers.
            batch_size: Rows per batch; the last batch may be smaller.
            generator: Shuffles the rows, if given.
            prefetch: Batches that two threads read ahead; 0 uses no threads.
            dtype: Type of the tokens.
            signals: Signals to read beside the default ones, such as `selector.requires`; names of other fields are ignored.

        Yields:
            The batches.
        """
        order = self._checked(rows)
        if batch_size < 1:
            raise RequestError(f"The batch size must be 1 or more, got {batch_size}.")
        if generator is not None:
            order = order[torch.randperm(len(order), generator=generator).numpy()]
        if self._pool[0] != (batch_size, dtype):
            self._pool = ((batch_size, dtype), BufferPool())
        pool = self._pool[1]
        parts = (order[start : start + batch_size] for start in range(0, len(order), batch_size))
        self.require_signals(signals)
        return prefetched(lambda part: self._read(part, dtype, pool, signals), parts, prefetch)

    def verify(self, manifest: Manifest | None = None) -> None:
        """Read every file and compare it with its hash; with a manifest, also read every image again.

        Args:
            manifest: Its images must have the content that the store was made from.

        Raises:
            WorkError: Files are damaged, or images changed.
        """
        if bad := self.damaged():
            raise WorkError(
                f"Damaged files in {self.path}: {', '.join(bad)}. Delete them and run the same `mtb extract` command again."
            )
        if manifest is not None:
            self._verify_images(manifest)

    def damaged(self) -> list[str]:
        """Names of the files that are not as they were written. Reads all of them."""
        # Without a sidecar a shard was never finished, which is no damage.
        bad = [name for index in self.missing for name in _finished_once(self.path, index)]
        with progress(total=len(self.sidecars), what="Checking", unit="shard") as bar:
            for index, sidecar in sorted(self.sidecars.items()):
                if sha256_file(shard_path(self.path, index)) != sidecar.sha256:
                    bad.append(shard_path(self.path, index).name)
                bar.update()
        bad += self._fields.damaged()
        bad += known_manifests(self.path)[1]
        return bad + (["cache/files.json"] if FileIndex(self.path).damaged else [])

    def _verify_images(self, manifest: Manifest) -> None:
        index = FileIndex(self.path)
        found = index.hashes((manifest.image_path(i) for i in range(len(manifest))), again=True)
        index.save()
        known = {row.image for row in self.stored} | {failure.image for failure in self.failures}
        changed = [name for name, image in zip(manifest.ids, found) if image is not None and image not in known]
        if changed:
            raise WorkError(
                f"{len(changed)} of {len(found)} images have changed since {self.path} was extracted: {listed(changed, _SHOWN)}. "
                "Run the same `mtb extract` command again to extract them."
            )

    def _checked(self, rows: Sequence[int] | np.ndarray | Tensor) -> np.ndarray:
        index = np.asarray(rows, np.int64).reshape(-1)
        if len(index) and (index.min() < 0 or index.max() >= len(self)):
            raise RequestError(f"Row numbers must be between 0 and {len(self) - 1}, got {index.min()} to {index.max()}.")
        return index

    def _read(self, rows: np.ndarray, dtype: torch.dtype, pool: BufferPool, signals: Sequence[str]) -> TokenBatch:
        early = plan.routed_early(self.config["backbone"])
        self.require_signals(signals)
        large = ("tokens", "indices") if early else ("patches",)
        names = [*large, *(name for name in _SMALL if self.has(name))]
        names += [name for name in SIGNALS if name in signals and name not in names]
        fields = self._fields.gather(names, rows, pool, dtype)
        if early:
            fields["patches"], fields["places"] = fields.pop("tokens"), fields.pop("indices").long()
        if self.annotation is not None:
            index = torch.from_numpy(rows)
            fields |= {"label": self.label[index], "has_mask": self.has_mask[index], "lesion": self.lesion[index]}
        return TokenBatch(grid=self.grid, image_id=tuple(self.ids[row] for row in rows.tolist()), **fields)


def _finished_once(path: Path, index: int) -> list[str]:
    """The name of the sidecar of a shard that cannot be used now."""
    file = sidecar_path(path, index)
    return [file.name] if file.exists() else []


def info(path: Path | str) -> dict[str, Any]:
    """Describe a store.

    Args:
        path: Folder of the store.

    Returns:
        JSON values: settings, signals that all rows carry, images, rows by view, failed and missing rows, bytes, and the manifests
        that the store was opened with, each with the number of its images and how many of them are here ("fits" if all are), and
        the names of damaged files, for which every file is read.
    """
    store = FeatureStore.open(path, partial=True)
    views = Counter(row.view for row in store.stored)
    here = {row.image for row in store.stored if row.view == IDENTITY} | {failure.image for failure in store.failures}
    manifests = []
    for one in known_manifests(store.path)[0]:
        present = sum(image in here for image in one["images"].values())
        count = len(one["images"])
        manifests.append(
            {"name": one["name"], "source": one["source"], "hash": one["hash"], "images": count, "present": present}
            | {"fits": present == count}
        )
    return {
        "path": str(store.path),
        "settings": store.config,
        "signals": list(store.signals),
        "images": len({row.image for row in store.stored}),
        "rows": len(store.stored),
        "views": {view: views[view] for view in sorted(views, key=view_order)},
        "failed": len(store.failures),
        "shards": len(store.shards),
        "missing_shards": len(store.missing),
        "bytes": sum(file.stat().st_size for file in store.path.rglob("*") if file.is_file()),
        "manifests": manifests,
        "damaged": store.damaged(),
    }
