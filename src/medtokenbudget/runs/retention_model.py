"""The supplement's Gaussian model of retention: what a scorer that separates lesion from background by delta / sigma retains.

Lesion scores are N(s+, sigma^2), background scores N(s-, sigma^2), delta = s+ - s-, a share rho of the patches is lesion. Kept is
what lies above the (1 - beta)-quantile of the mixture. The supplement takes that quantile as if the mixture were one normal
with deviation sigma; `exact=True` solves for it. The two agree for delta = 0 and part as delta grows: the mixture is wider than
sigma, so the approximation sets the threshold too low for small beta and lets retention pass the ceiling beta / rho.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar
from scipy.special import ndtr, ndtri

from medtokenbudget.errors import RequestError
from medtokenbudget.metrics import Floats

_LARGEST_SEPARATION = 20.0


def predicted_retention(beta: ArrayLike, separation: ArrayLike, prevalence: ArrayLike, exact: bool = False) -> Floats:
    """Expected share of the lesion patches kept at budget beta; the arguments broadcast.

    beta in [0, 1], separation = delta / sigma, prevalence = rho in [0, 1].
    Approximate: `1 - Phi(Phi^-1(1 - beta) - (1 - rho) delta / sigma)`. Exact: `1 - Phi(t - delta / sigma)` where t solves
    `rho (1 - Phi(t - delta / sigma)) + (1 - rho) (1 - Phi(t)) = beta`.
    """
    beta, separation, prevalence = np.broadcast_arrays(*(np.asarray(v, float) for v in (beta, separation, prevalence)))
    if (beta < 0).any() or (beta > 1).any() or (prevalence < 0).any() or (prevalence > 1).any():
        raise RequestError("Budget and prevalence must be in [0, 1].")
    if exact:
        return ndtr(separation - _mixture_quantile(beta, separation, prevalence))
    return ndtr((1 - prevalence) * separation - ndtri(1 - beta))


def _mixture_quantile(beta: Floats, separation: Floats, prevalence: Floats) -> Floats:
    """The threshold above which a share beta of the mixture lies, in units of sigma above the background's mean."""
    # It lies between the quantiles of the two parts; bisection halves that interval to the last bit.
    single = ndtri(1 - beta)
    low, high = np.minimum(single, single + separation), np.maximum(single, single + separation)
    for _ in range(60):
        with np.errstate(invalid="ignore"):
            middle = np.where(np.isinf(single), single, (low + high) / 2)
        above = prevalence * ndtr(separation - middle) + (1 - prevalence) * ndtr(-middle)
        low, high = np.where(above > beta, middle, low), np.where(above > beta, high, middle)
    return middle


def mean_predicted_retention(beta: ArrayLike, separation: float, prevalences: ArrayLike, exact: bool = False) -> Floats:
    """Pooled retention over images of different prevalence: each image's prediction weighted by its lesion patches.

    beta [...], prevalences [n]; returns [...]. Weighting by prevalence is pooling, as long as the images have one grid.
    """
    prevalences = np.asarray(prevalences, float)
    if prevalences.ndim != 1 or prevalences.sum() <= 0:
        raise RequestError("Prevalences must be one number per image, with at least one above 0.")
    values, images = np.unique(prevalences, return_counts=True)  # whole patches of one grid: few different values
    each = predicted_retention(np.asarray(beta, float)[..., None], separation, values, exact)
    return (each * values * images).sum(-1) / prevalences.sum()


def fit_separation(budgets: ArrayLike, measured: ArrayLike, prevalence: ArrayLike, exact: bool = False) -> float:
    """The delta / sigma whose predicted retention is nearest to the measured one in squares over the budgets.

    prevalence is one number, or one an image [n] for the pooled mean over images. Budgets at which everything is kept say
    nothing; at least one below 1 is needed.
    """
    budgets, measured = np.asarray(budgets, float), np.asarray(measured, float)
    prevalences = np.atleast_1d(np.asarray(prevalence, float))
    if budgets.shape != measured.shape or not (budgets < 1).any():
        raise RequestError("A fit needs one measured retention for each budget, and a budget below 1.")

    def loss(separation: float) -> float:
        return float(((mean_predicted_retention(budgets, separation, prevalences, exact) - measured) ** 2).sum())

    # The loss can be flat far out: start the bounded search around the best of a grid.
    grid = np.linspace(-_LARGEST_SEPARATION, _LARGEST_SEPARATION, 81)
    best = grid[int(np.argmin([loss(value) for value in grid]))]
    step = grid[1] - grid[0]
    return float(minimize_scalar(loss, bounds=(best - step, best + step), method="bounded", options={"xatol": 1e-8}).x)
