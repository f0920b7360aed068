"""The table on a GPU, where there is one: ``pytest tests/test_gpu.py``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_table import check
from train import Spec, train

from distcockpit import open_run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("model", ["mlp", "cnn", "sigmoid", "tokens", "attention", "scaled"])
def test_table_on_a_gpu(tmp_path: Path, model: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    loss = "token_mean" if model == "tokens" else "mean"
    spec = replace(Spec(str(tmp_path / "run"), model, loss), device="cuda")
    curvature = model in ("mlp", "cnn", "sigmoid")
    states = train(0, 1, None, spec, curvature)
    check(spec, states, open_run(spec.store), curvature)
