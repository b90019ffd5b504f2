"""Duplicate images: the same bytes, or the same picture after resizing, compression, a change of light or a small crop.

A 64-bit perceptual hash proposes pairs and thumbnails decide. Dermoscopic images look alike (a blob on skin, a dark rim), so two
thumbnails must correlate both as a whole and in the middle, away from the rim of the lens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.fft import dctn

from medtokenbudget.data.images import DecodeError, decode_image
from medtokenbudget.data.manifest import Manifest
from medtokenbudget.files import sha256_file
from medtokenbudget.runtime import progress

Pair = tuple[int, int]
SIDE = 32
MAX_DISTANCE = 8
MIN_CORRELATION = 0.97
_BLOCK = 512
_WEIGHTS = 1 << np.arange(64, dtype=np.uint64)


@dataclass(frozen=True)
class Fingerprint:
    """What is compared of an image: SHA-256 of the file, perceptual hash (63 bits), gray thumbnail `[32, 32]` uint8."""

    sha256: str
    phash: int
    thumbnail: np.ndarray


def fingerprint(path: Path, image: Image.Image) -> Fingerprint:
    small = np.asarray(image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX))
    return Fingerprint(sha256_file(path), perceptual_hash(small), small)


def perceptual_hash(thumbnail: np.ndarray) -> int:
    """Hash a thumbnail `[32, 32]`: one bit for each of the 8 x 8 lowest cosine frequencies that is above their median.

    Bit 0, which is the mean, is always 0.
    """
    low = dctn(thumbnail.astype(np.float64), norm="ortho")[:8, :8].reshape(-1)
    # Without the mean: it is far larger than all other frequencies.
    bits = low > np.median(low[1:])
    bits[0] = False
    return int(_WEIGHTS[bits].sum())


def exact_pairs(prints: Mapping[int, Fingerprint]) -> list[Pair]:
    """Find files with the same content, by row: each copy with the first one."""
    first: dict[str, int] = {}
    pairs = []
    for index, one in prints.items():
        # With the first one only: n copies are n - 1 pairs, and their groups merge all the same.
        earlier = first.setdefault(one.sha256, index)
        if earlier != index:
            pairs.append((earlier, index))
    return pairs


def near_pairs(prints: Mapping[int, Fingerprint]) -> list[Pair]:
    """Find pairs of rows `i < j` that show the same picture in files with different content, in order."""
    if len(prints) < 2:
        return []
    left, right = _close_hashes(np.array([one.phash for one in prints.values()], dtype=np.uint64), MAX_DISTANCE)
    thumbnails = np.stack([one.thumbnail for one in prints.values()])
    same = _correlated(thumbnails, left, right)
    # Away from the rim, which all images of one lens share.
    middle = slice(SIDE // 8, SIDE - SIDE // 8)
    same &= _correlated(thumbnails[:, middle, middle], left, right)
    rows = list(prints)
    pairs = ((rows[i], rows[j]) for i, j in zip(left[same], right[same]))
    return [(i, j) for i, j in pairs if prints[i].sha256 != prints[j].sha256]


def _close_hashes(hashes: np.ndarray, max_distance: int) -> tuple[np.ndarray, np.ndarray]:
    """Find all pairs `i < j` of `[n]` uint64 within a Hamming distance, in order. Works on blocks that fit into the CPU cache."""
    left, right = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for top in range(0, len(hashes), _BLOCK):
        for start in range(top, len(hashes), _BLOCK):
            close = _popcount(hashes[top : top + _BLOCK, None] ^ hashes[None, start : start + _BLOCK]) <= max_distance
            if not close.any():
                continue
            i, j = np.nonzero(close)
            keep = i + top < j + start
            left.append(i[keep] + top)
            right.append(j[keep] + start)
    i, j = np.concatenate(left), np.concatenate(right)
    order = np.lexsort((j, i))
    return i[order], j[order]


def _popcount(values: np.ndarray) -> np.ndarray:
    if hasattr(np, "bitwise_count"):  # of NumPy 2
        return np.bitwise_count(values)
    return np.unpackbits(np.ascontiguousarray(values).view(np.uint8).reshape(*values.shape, 8), axis=-1).sum(-1)


def _correlated(pictures: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Tell whether pairs of `[n, h, w]` correlate enough; two pictures of one color each do if they are equal."""
    flat = pictures.reshape(len(pictures), -1).astype(np.float32)
    flat = flat - flat.mean(1, keepdims=True)
    norm = np.linalg.norm(flat, axis=1)
    result = np.zeros(len(left), dtype=bool)
    # In parts: a picture that occurs a thousand times is half a million pairs.
    for start in range(0, len(left), 1 << 14):
        i, j = left[start : start + (1 << 14)], right[start : start + (1 << 14)]
        both = norm[i] * norm[j]
        equal = (pictures[i] == pictures[j]).all((1, 2))
        result[start : start + (1 << 14)] = equal | ((flat[i] * flat[j]).sum(1) >= MIN_CORRELATION * np.maximum(both, 1e-6))
    return result


def merge(names: Sequence[str], pairs: Iterable[Pair]) -> list[str]:
    """Merge groups that a pair connects. A merged group takes the first name in sorted order."""
    from scipy.cluster.hierarchy import DisjointSet  # here, because it loads much that reading images does not need

    groups = DisjointSet(names)
    for i, j in pairs:
        groups.merge(names[i], names[j])
    merged = {name: min(group) for group in groups.subsets() for name in group}
    return [merged[name] for name in names]


def merged_groups(manifest: Manifest, workers: int = 4) -> tuple[list[str], list[str]]:
    """Return the group of each image, those that share duplicates merged, and the ids of images that could not be read.

    Images that could not be read keep their group. Every file is read once, in `workers` threads.
    """

    def read(index: int) -> Fingerprint | None:
        path = manifest.image_path(index)
        try:
            return fingerprint(path, decode_image(path))
        except DecodeError:
            return None

    with ThreadPoolExecutor(max(1, workers)) as pool:
        rows = range(len(manifest))
        read_all = progress(pool.map(read, rows), total=len(manifest), what="Looking for duplicates", unit="image")
        prints = {row: one for row, one in enumerate(read_all) if one is not None}
    unreadable = [image_id for row, image_id in enumerate(manifest.ids) if row not in prints]
    return merge(manifest.groups, [*exact_pairs(prints), *near_pairs(prints)]), unreadable
