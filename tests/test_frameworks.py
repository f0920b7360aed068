"""Lightning, transformers and Accelerate, on real ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from commands import run
from framework_jobs import MICROS, STEPS
from framework_models import Small, lightning_module, samples
from loops import shows
from torch import nn

from distcockpit import every, open_run
from distcockpit.quantities import Alpha, GradNorm, Loss

QUIET = {"PYTHONWARNINGS": "ignore"}  # theirs


def pooled(folder: Path, step: int, world_size: int) -> oracle.Batch:
    """The union of the micro-batches of all ranks; the mean of the loss is one over terms."""
    parts = [np.load(folder / f"{rank}-{step * MICROS + k}.npz") for rank in range(world_size) for k in range(MICROS)]
    losses, gradients = (np.concatenate([part[key] for part in parts]) for key in ("losses", "gradients"))
    per_sample = len(losses) / sum(float(part["terms"]) for part in parts)
    return oracle.Batch(losses * per_sample, {"": gradients * per_sample}, {}, {"": parts[0]["values"]})


@shows("Frameworks", "Lightning (`distcockpit.lightning`), with accumulation")
@shows("Frameworks", "Hugging Face `Trainer` (`distcockpit.transformers`), with accumulation and padded tokens")
@pytest.mark.parametrize("framework, world_size", [("lightning", 2), ("transformers", 2), ("transformers", 1)])
def test_framework(tmp_path: Path, framework: str, world_size: int) -> None:
    """The example on two ranks, two micro-batches per step, against autograd's individual gradients.

    Without ranks the Trainer scales the loss in place.
    """
    store = str(tmp_path / "run")
    launcher = ["torchrun", "--nproc_per_node=2"] if world_size > 1 else [sys.executable]
    command = [*launcher, "tests/helpers/framework_jobs.py", framework, store, str(tmp_path)]
    said = run(*command, allowed="Warning", **QUIET)
    assert f"{store}: {STEPS - 1} values of alpha on {world_size} ranks" in said
    tree = open_run(store)
    assert tree.attrs["world_size"] == world_size and tree.attrs["state"] == "closed"
    batches = [pooled(tmp_path, step, world_size) for step in range(STEPS)]
    assert len({batch.n for batch in batches}) == 1 and batches[0].n > 10 * world_size
    for step, batch in enumerate(batches):
        rows = {name: tree[name].sel(step=step) for name in ("loss", "inner_test", "norm_test", "grad_norm")}
        np.testing.assert_allclose(rows["loss"]["loss"], batch.losses.mean(), rtol=1e-5)
        np.testing.assert_allclose(rows["inner_test"]["inner_test"], oracle.inner_test(batch), rtol=1e-4)
        np.testing.assert_allclose(rows["norm_test"]["norm_test"], oracle.norm_test(batch), rtol=1e-4)
        np.testing.assert_allclose(rows["grad_norm"]["total"], np.linalg.norm(batch.flat.mean(0)), rtol=1e-4)
        assert rows["loss"]["batch_size"] == batch.n
    for step in range(STEPS - 1):
        row, expected = tree["alpha"].sel(step=step), oracle.alpha(*batches[step : step + 2])
        for name in ("alpha", "update_norm", "f_start", "f_end", "slope_start", "slope_end"):
            np.testing.assert_allclose(row[name], expected[name], rtol=2e-3, err_msg=name)


@shows("Frameworks", "Lightning with `ModelParallelStrategy` and `fully_shard`")
def test_lightning_with_a_sharded_model(tmp_path: Path) -> None:
    """The same rows as with DDP."""
    for framework in ("lightning", "sharded"):
        command = ["torchrun", "--nproc_per_node=2", "tests/helpers/framework_jobs.py", framework]
        said = run(*command, str(tmp_path / framework), str(tmp_path), allowed="Warning", **QUIET)
        assert f"{STEPS - 1} values of alpha on 2 ranks" in said
    ddp, sharded = (open_run(tmp_path / framework).load() for framework in ("lightning", "sharded"))
    assert set(ddp.children) == set(sharded.children)
    for name in ("loss", "norm_test", "grad_norm", "alpha", "distance", "update_size"):
        for field, values in ddp[name].data_vars.items():
            np.testing.assert_allclose(sharded[name][field], values, rtol=1e-4, atol=1e-7, err_msg=f"{name}/{field}")


def fit_trainer(folder: Path, kind: str, resume: str | None = None, steps: int = 4, **options: Any) -> Small:
    from transformers import Trainer, TrainingArguments

    from distcockpit.transformers import DistCockpitCallback

    model = Small(kind)
    quantities = [Loss(), GradNorm(), Alpha()]
    callback = DistCockpitCallback(folder / "run", quantities=quantities, schedule=every(1), **options)
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        lr_scheduler_type="constant",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=samples(kind), callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return model


@pytest.mark.filterwarnings("ignore")
def test_a_training_of_the_trainer_that_diverges(tmp_path: Path) -> None:
    """It goes on, as without the callback, and rows say that there is no number."""
    fit_trainer(tmp_path, "diverges")
    losses = open_run(tmp_path / "run")["loss"]["loss"].values
    assert list(np.isnan(losses)) == [False, True, True, True]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["classes", "squares", "several classes", "whole numbers", "next token", "penalty"])
def test_losses_of_the_trainer(tmp_path: Path, kind: str) -> None:
    """The mean over both micro-batches of the first step."""
    from transformers import Trainer

    seen: list[dict[str, torch.Tensor]] = []
    usual = Trainer.compute_loss

    def watching(self: Any, model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        seen.append({k: v.clone() for k, v in inputs.items()})
        return usual(self, model, inputs, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "compute_loss", watching)
        fit_trainer(tmp_path, kind)
    twin, batch = Small(kind), {k: torch.cat([s[k] for s in seen[:2]]) for k in ("x", "labels")}
    loss = twin(**batch)["loss"]
    gradients = torch.autograd.grad(loss, list(twin.parameters()))
    tree = open_run(tmp_path / "run")
    np.testing.assert_allclose(tree["loss"]["loss"][0], loss.item(), rtol=1e-5)
    norm = float(torch.cat([g.reshape(-1) for g in gradients]).norm())
    np.testing.assert_allclose(tree["grad_norm"]["total"][0], norm, rtol=1e-5)
    assert tree["loss"].sizes["step"] == 4 and (tree["loss"]["batch_size"] == 8).all()
    assert (tree["alpha"]["status"].values < 2).all()


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    fit_trainer(tmp_path / "whole", "classes")
    fit_trainer(tmp_path, "classes", steps=2)
    fit_trainer(tmp_path, "classes", resume=str(tmp_path / "out" / "checkpoint-2"))
    whole, resumed = (open_run(folder / "run") for folder in (tmp_path / "whole", tmp_path))
    assert list(resumed["loss"]["step"].values) == [0, 1, 2, 3]
    for name in ("loss", "grad_norm", "alpha"):
        for field in whole[name].data_vars:
            np.testing.assert_allclose(resumed[name][field], whole[name][field], rtol=1e-6, err_msg=field)


# -- Lightning ---------------------------------------------------------------------------------------------------------


def fit_lightning(
    folder: Path,
    module: Any,
    steps: int = 4,
    resume: str | None = None,
    micros: int = 2,
    callback: Any = None,
    **options: Any,
) -> Any:
    import lightning.pytorch as pl

    from distcockpit.lightning import DistCockpitCallback

    data = [(s["x"], s["labels"]) for s in samples("classes")][:16]  # two steps per epoch
    loader = torch.utils.data.DataLoader(data, batch_size=4)  # type: ignore[arg-type]
    options = {"quantities": [Loss(), GradNorm(), Alpha()], "schedule": every(1), **options}
    callback = callback or DistCockpitCallback(folder / "run", **options)
    saving = pl.callbacks.ModelCheckpoint(folder / "out", save_last=True, every_n_train_steps=2)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=steps, accumulate_grad_batches=micros, callbacks=[callback, saving], **quiet
    )
    trainer.fit(module, loader, ckpt_path=resume)
    return callback


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["usual", "function", "own parameter"])
def test_lightning_modules(tmp_path: Path, kind: str) -> None:
    """The loss by a module or a function; parameters of the LightningModule itself; checkpoints."""
    fit_lightning(tmp_path / "whole", lightning_module(kind))
    fit_lightning(tmp_path, lightning_module(kind), steps=2)
    fit_lightning(tmp_path, lightning_module(kind), resume=str(tmp_path / "out" / "last.ckpt"))
    whole, resumed = (open_run(folder / "run") for folder in (tmp_path / "whole", tmp_path))
    twin, x = lightning_module(kind), torch.stack([s["x"] for s in samples("classes")[:8]])
    y = torch.stack([s["labels"] for s in samples("classes")[:8]])
    np.testing.assert_allclose(whole["loss"]["loss"][0], float(nn.functional.cross_entropy(twin(x), y)), rtol=1e-5)
    assert ("temperature" in whole.attrs["parameters"]) == (kind == "own parameter")
    assert list(resumed["loss"]["step"].values) == list(whole["loss"]["step"].values) == [0, 1, 2, 3]
    for name in ("loss", "grad_norm", "alpha"):
        for field in whole[name].data_vars:
            np.testing.assert_allclose(resumed[name][field], whole[name][field], rtol=1e-6, err_msg=field)


@pytest.mark.filterwarnings("ignore")
def test_lightning_skips_a_batch_and_trains_again(tmp_path: Path) -> None:
    """``None`` skips a batch; the same callback for another training begins anew."""
    callback = fit_lightning(tmp_path, lightning_module("skips"), micros=1, mode="w")
    sizes = open_run(tmp_path / "run")["loss"]["batch_size"].values
    assert sorted(sizes) == [0, 4, 4, 4]
    fit_lightning(tmp_path, lightning_module("usual"), micros=1, callback=callback)
    assert list(open_run(tmp_path / "run")["loss"]["batch_size"].values) == [4, 4, 4, 4]


@pytest.mark.filterwarnings("ignore")
def test_errors_under_lightning(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="automatic_optimization=False.*Use DistCockpit in its training_step"):
        fit_lightning(tmp_path / "a", lightning_module("manual"), micros=1)
    with pytest.raises(ValueError, match=r"model='nett'\): Module has no such submodule; it has \['net', 'loss_fn'\]"):
        fit_lightning(tmp_path / "c", lightning_module("usual"), model="nett")
    module = lightning_module("raises")
    with pytest.raises(ValueError, match="the user's own"):
        fit_lightning(tmp_path / "b", module)
    assert list(open_run(tmp_path / "b" / "run")["loss"]["step"].values) == [0]
    assert not any(m._forward_hooks for m in module.modules())
