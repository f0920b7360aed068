"""The scatter of individual gradients about their mean, computed from sums; the basis of the batch size tests."""

from __future__ import annotations

import numpy as np

ROUNDING = 8 * np.finfo(float).eps


def scatter(squares: np.ndarray, mean_squared: np.ndarray, n: int) -> np.ndarray:
    """``sum_i |g_i - G|^2 = S2 - N |G|^2``; a difference within rounding of zero is zero.

    Both terms are float64 sums of products that are exact in float64, so their difference keeps the precision of
    float32 gradients.

    Args:
        squares: S2, the sum of ``|g_i|^2``, any shape.
        mean_squared: ``|G|^2``, the same shape.
        n: N.
    """
    difference = np.asarray(squares - n * mean_squared)
    return np.where(difference > ROUNDING * squares, difference, np.where(np.isfinite(difference), 0.0, np.nan))


def sample_variance(squares: np.ndarray, mean_squared: np.ndarray, n: int) -> np.ndarray:
    """V, the trace of the sample covariance of the individual gradients (ddof 1); NaN for fewer than two samples."""
    return scatter(squares, mean_squared, n) / (n - 1 if n > 1 else np.nan)
