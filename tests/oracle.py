"""The definition: one process, all samples, one sample at a time, float64, textbook formulas.

Nothing here comes from distcockpit. ``Batch`` holds what a single process would compute from all N samples of a
step: individual losses, individual gradients, gradients at module outputs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn


def _keeper(values: list):
    """A hook that keeps a module's output and hands on a copy, which later operations may change in place."""

    def hook(module: nn.Module, args: object, z: object) -> object:
        if not isinstance(z, Tensor):
            return z
        values.append(z)
        return z.clone()

    return hook


@dataclass
class Batch:
    losses: np.ndarray  # [N]
    gradients: dict[str, np.ndarray]  # [N, *shape]
    outputs: dict[str, np.ndarray]  # leaf module -> dL/dz of the pooled mean loss, [N, *]
    parameters: dict[str, np.ndarray]

    @property
    def n(self) -> int:
        return len(self.losses)

    @property
    def flat(self) -> np.ndarray:
        return np.concatenate([g.reshape(self.n, -1) for g in self.gradients.values()], axis=1)


def batch(model: nn.Module, state: dict[str, Tensor], terms, x: Tensor, y: Tensor) -> Batch:
    """``terms(prediction, target) -> (sum of the sample's loss terms, what the sample adds to W)``, for one sample."""
    model = copy.deepcopy(model).double()
    model.load_state_dict({k: v.double() if v.is_floating_point() else v for k, v in state.items()})
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    leaves = [(path, m) for path, m in model.named_modules() if not any(m.children())]
    x = x.double() if x.is_floating_point() else x
    rows, losses, weights, outputs = [], [], [], {path: [] for path, _ in leaves}
    for i in range(len(x)):
        seen: dict[str, list[Tensor]] = {path: [] for path, _ in leaves}
        handles = [m.register_forward_hook(_keeper(seen[path])) for path, m in leaves]
        loss, weight = terms(model(x[i : i + 1]), y[i : i + 1])
        for handle in handles:
            handle.remove()
        zs = [(path, z) for path, values in seen.items() for z in values if isinstance(z, Tensor) and z.requires_grad]
        gradients = torch.autograd.grad(loss, [*parameters, *(z for _, z in zs)], allow_unused=True)
        own, at_outputs = gradients[: len(parameters)], gradients[len(parameters) :]
        rows.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, own, strict=True)])
        losses.append(loss.item())
        weights.append(float(weight))
        for (path, z), g in zip(zs, at_outputs, strict=True):
            outputs[path].append((torch.zeros_like(z) if g is None else g)[0])
    n, total = len(x), sum(weights)
    return Batch(
        losses=np.array(losses) * n / total,
        gradients={name: torch.stack([row[k] for row in rows]).numpy() * n / total for k, name in enumerate(names)},
        outputs={path: torch.stack(g).numpy() / total for path, g in outputs.items() if g},
        parameters={name: p.detach().numpy() for name, p in zip(names, parameters, strict=True)},
    )


def edges(low: float, high: float, bins: int) -> np.ndarray:
    return np.array([(low * (bins - k) + high * k) / bins for k in range(bins + 1)])


def grad_hist_1d(batch: Batch, edges: np.ndarray) -> np.ndarray:
    return np.histogram(np.clip(batch.flat, edges[0], edges[-1]), bins=edges)[0]


def grad_hist_2d(batch: Batch, grad_edges: np.ndarray, param_edges: np.ndarray, name: str | None = None) -> np.ndarray:
    names = [name] if name else list(batch.gradients)
    g = np.concatenate([batch.gradients[k].reshape(batch.n, -1) for k in names], axis=1)
    theta = np.concatenate([batch.parameters[k].reshape(-1) for k in names])
    pairs = np.clip(g, grad_edges[0], grad_edges[-1]), np.clip(theta, param_edges[0], param_edges[-1])
    return np.histogram2d(pairs[0].ravel(), np.tile(pairs[1], batch.n), bins=[grad_edges, param_edges])[0]


def mean_gsnr(batch: Batch, epsilon: float = 1e-5) -> float:
    g = batch.flat
    return float(np.mean(g.mean(0) ** 2 / (g.var(0) + epsilon)))


def alpha(start: Batch, end: Batch) -> dict[str, float]:
    d = np.concatenate([(end.parameters[k] - start.parameters[k]).ravel() for k in start.parameters])
    norm = np.linalg.norm(d)
    observed = [start.losses, end.losses, start.flat @ d / norm, end.flat @ d / norm]
    means = np.array([o.mean() for o in observed])
    variances = np.array([o.var(ddof=1) for o in observed])
    value, mu = fit_alpha(means, variances, norm)
    names = ["f_start", "f_end", "slope_start", "slope_end"]
    return {
        "alpha": value,
        "curvature_of_fit": mu[2],
        "update_norm": norm,
        **dict(zip(names, means, strict=True)),
        **{f"{k}_variance": v for k, v in zip(names, variances, strict=True)},
    }


def fit_alpha(means: np.ndarray, variances: np.ndarray, norm: float) -> tuple[float, np.ndarray]:
    """Least squares on the whitened system, in the units of the definition."""
    design = np.array([[1, 0, 0], [1, norm, norm**2], [0, 1, 0], [0, 1, 2 * norm]])
    weights = 1 / np.sqrt(np.where(variances == 0, 1e-10, variances))
    mu = np.linalg.lstsq(design * weights[:, None], means * weights, rcond=None)[0]
    return (-1.0 if mu[2] <= 0 else 2 * norm / (-mu[1] / mu[2]) - 1), mu


def hess_trace(model: nn.Module, state: dict[str, Tensor], loss_fn, x: Tensor, y: Tensor) -> dict[str, float]:
    """Trace of the Hessian of the mean loss, a second derivative per parameter element."""
    model, x, y = _double(model, state, x, y)
    traces = {}
    loss = loss_fn(model(x), y)
    for name, p in model.named_parameters():
        (g,) = torch.autograd.grad(loss, p, create_graph=True)
        flat = g.reshape(-1)
        second = [torch.autograd.grad(flat[k], p, retain_graph=True, allow_unused=True)[0] for k in range(len(flat))]
        traces[name] = float(sum(0.0 if s is None else s.reshape(-1)[k] for k, s in enumerate(second)))
    return traces


def ggn_trace(model: nn.Module, state: dict[str, Tensor], loss_fn, x: Tensor, y: Tensor) -> dict[str, float]:
    """Trace of J^T H J, H the Hessian of the loss in the network's output, averaged over samples."""
    model, x, y = _double(model, state, x, y)
    traces = dict.fromkeys((n for n, _ in model.named_parameters()), 0.0)
    for i in range(len(x)):
        z = model(x[i : i + 1])
        h = torch.autograd.functional.hessian(lambda out: loss_fn(out, y[i : i + 1]), z.detach())  # noqa: B023
        h = h.reshape(z.numel(), z.numel())
        for name, p in model.named_parameters():
            rows = [torch.autograd.grad(z.reshape(-1)[k], p, retain_graph=True)[0].reshape(-1) for k in range(len(h))]
            jacobian = torch.stack(rows)
            traces[name] += float((jacobian.T @ h @ jacobian).trace()) / len(x)
    return traces


def _double(model: nn.Module, state: dict[str, Tensor], x: Tensor, y: Tensor):
    model = copy.deepcopy(model).double()
    model.load_state_dict({k: v.double() if v.is_floating_point() else v for k, v in state.items()})
    return model, x.double() if x.is_floating_point() else x, y.double() if y.is_floating_point() else y


def output_geometry(batch: Batch, previous: Batch | None, rms: bool = False) -> dict[str, tuple[float, float]]:
    """Norm of dL/dz (or its root mean square) and the cosine with the previous one, by leaf module."""
    result = {}
    for path, z in batch.outputs.items():
        norm = np.linalg.norm(z)
        cosine = np.nan
        if previous is not None and previous.outputs[path].shape == z.shape:
            cosine = np.vdot(z, previous.outputs[path]) / (norm * np.linalg.norm(previous.outputs[path]))
        result[path] = (norm / np.sqrt(z.size) if rms else norm, cosine)
    return result
