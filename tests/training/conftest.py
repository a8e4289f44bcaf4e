"""Fixtures of runs whose recipe lies in a folder of their module."""

from pathlib import Path

import pytest


@pytest.fixture
def recipe(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe of the module's workspace, in which the test runs."""
    monkeypatch.chdir(workspace)
    return workspace / "recipe.yaml"


@pytest.fixture
def batches_of(recipe, monkeypatch):
    """Trains two steps of gkd or gold; of each the weights before it, its micro-batch, its loss and its gradients."""
    import tunekit
    from tunekit.methods.gkd import GKDTrainer

    seen, rows = [], []
    step, compute = GKDTrainer.training_step, GKDTrainer.compute_loss

    def see_rows(trainer, model, inputs, *args, **kwargs):
        rows.append({name: value.clone() for name, value in inputs.items()})
        return compute(trainer, model, inputs, *args, **kwargs)

    def see(trainer, *args):
        named = dict(trainer.model.named_parameters())
        weights = {name: value.detach().double() for name, value in named.items()}
        loss = step(trainer, *args)
        grads = {name: value.grad.double() for name, value in named.items()}
        seen.append((weights, rows[-1], float(loss), grads))
        return loss

    monkeypatch.setattr(GKDTrainer, "compute_loss", see_rows)
    monkeypatch.setattr(GKDTrainer, "training_step", see)

    def train(*changes):
        tunekit.train(recipe, ["train.max_steps=2", "train.warmup_steps=0", "data.eval=null", *changes])
        return seen

    return train
