"""What mergers lose, which keep no single patches: purity of their groups, lesion in tokens of its own, attention on the lesion."""

from __future__ import annotations

import torch
from torch import Tensor

from medtokenbudget.errors import ShapeError


def group_purity(assignment: Tensor, lesion: Tensor) -> Tensor:
    """Measures how little a merger's groups mix lesion and background; the counterpart of retention for merged tokens.

    Args:
        assignment: `[B, N]` integers, the group that each patch went to, -1 for dropped patches (`Selection.assignment`).
        lesion: `[B, N]` lesion patches.

    Returns:
        `[B]` share of the patches that are in the majority of their group (lesion or background): 1 when no group mixes them. NaN
        for an image whose patches were all dropped.

    Example:
        >>> import torch
        >>> group_purity(torch.tensor([[0, 0, 1, 1]]), torch.tensor([[True, True, True, False]])).tolist()
        [0.75]
    """
    size, lesions = _group_sizes(assignment, lesion)
    return torch.maximum(lesions, size - lesions).sum(1) / size.sum(1)


def lesion_dominated(assignment: Tensor, lesion: Tensor) -> Tensor:
    """Measures how much of the lesion is still in tokens of its own: the retention of mergers.

    A token is dominated by lesion if more than half of its patches are lesion patches. Where patches are kept as they are, every
    kept patch is a token of its own, and this is the retention.

    Args:
        assignment: `[B, N]` integers, the group that each patch went to, -1 for dropped patches (`Selection.assignment`).
        lesion: `[B, N]` lesion patches.

    Returns:
        `[B]` share of the lesion patches that are in a token dominated by lesion. NaN for an image without lesion patches.

    Example:
        >>> import torch
        >>> lesion = torch.tensor([[True, True, True, False, False, True]])
        >>> lesion_dominated(torch.tensor([[0, 0, 1, 1, 1, -1]]), lesion).tolist()  # two of four; one is outvoted, one dropped
        [0.5]
    """
    size, lesions = _group_sizes(assignment, lesion)
    dominated = torch.where(2 * lesions > size, lesions, torch.zeros_like(lesions)).sum(1)
    total = lesion.float().sum(1)
    return torch.where(total > 0, dominated / total.clamp_min(1), torch.nan)


def lesion_mass(attention: Tensor, lesion: Tensor) -> Tensor:
    """Measures how much of the tokens of a soft merger comes from the lesion.

    For a selector that keeps patches as they are, this is the precision: the share of the kept patches that are lesion.

    Args:
        attention: `[B, K, N]` share of each patch in each token, rows sum to 1 (`Selection.attention`).
        lesion: `[B, N]` lesion patches.

    Returns:
        `[B]` attention on lesion patches, averaged over the tokens. NaN for an image without lesion patches.

    Example:
        >>> import torch
        >>> attention = torch.tensor([[[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]])
        >>> lesion_mass(attention, torch.tensor([[True, False, True]])).tolist()
        [0.75]
    """
    if attention.ndim != 3 or lesion.shape != (attention.shape[0], attention.shape[2]):
        raise ShapeError(
            f"`attention` must be [B, K, N] and `lesion` [B, N], got {list(attention.shape)} and {list(lesion.shape)}."
        )
    mass = (attention.mean(1) * lesion.to(attention.dtype)).sum(1)
    return torch.where(lesion.bool().any(1), mass, torch.nan)


def _group_sizes(assignment: Tensor, lesion: Tensor) -> tuple[Tensor, Tensor]:
    """Patches and lesion patches of each group, [B, groups] each."""
    if assignment.ndim != 2 or assignment.shape != lesion.shape:
        raise ShapeError(f"`assignment` and `lesion` must be [B, N], got {list(assignment.shape)} and {list(lesion.shape)}.")
    n, last = assignment.shape[1], int(assignment.max()) if assignment.numel() else -1
    if last >= n:
        raise ShapeError(f"`assignment` names group {last}, but there are only {n} patches in an image [B, N]. Flatten grids.")
    ones = (assignment >= 0).float()
    target = assignment.clamp_min(0)
    groups = int(target.max()) + 1 if target.numel() else 1
    size = torch.zeros(len(assignment), groups, device=assignment.device).scatter_add_(1, target, ones)
    return size, torch.zeros_like(size).scatter_add_(1, target, ones * lesion.float())
