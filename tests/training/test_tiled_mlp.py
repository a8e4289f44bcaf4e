"""Real runs whose MLPs are computed in tiles: losses and weights of those that are not, resumed and exported."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import tunekit
from tests.tiny import saved_weights, watching_models
from tests.training import long_rows

pytestmark = pytest.mark.slow

HIDDEN, LAYERS = 48, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return long_rows.save_inputs(tmp_path_factory.mktemp("tiles"), hidden=HIDDEN, layers=LAYERS)


def train(folder, name, *, adapter="lora", **changes):
    constant = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "warmup_steps": 0}
    return long_rows.train(folder, name, adapter=adapter, **{**constant, **changes})


@pytest.mark.parametrize(
    ("adapter", "kernels", "checkpointing"),
    [("full", "torch", False), ("lora", "auto", True), ("qlora", "auto", False)],
)
def test_tiles_change_neither_losses_nor_weights(adapter, kernels, checkpointing, folder):
    name, how = (
        f"{adapter}-{kernels}",
        {"adapter": adapter, "kernels": kernels, "gradient_checkpointing": checkpointing},
    )
    whole = train(folder, f"{name}-whole", **how)
    sizes = set()

    def watch(model, _):
        mlps = [module for module in model.modules() if type(module).__name__ == "LlamaMLP"]
        sizes.add(tuple(vars(mlp).get("tile_tokens") for mlp in mlps))

    with watching_models(watch):
        tiled = train(folder, f"{name}-tiled", **how, tiled_mlp=True)
    assert tiled.plan.mlp_tile_tokens == HIDDEN and whole.plan.mlp_tile_tokens is None
    # The last one is the saved model, loaded for its check.
    assert (HIDDEN,) * LAYERS in sizes
    # Gradients of weights are summed in another order; AdamW's step does not know how large they are.
    assert tiled.metrics()["loss"].tolist() == pytest.approx(whole.metrics()["loss"].tolist(), rel=1e-5)
    expected = saved_weights(whole.model_path)
    for parameter, weight in saved_weights(tiled.model_path).items():
        assert (weight - expected[parameter]).abs().mean() < 1e-5, parameter


def test_a_run_in_tiles_resumes_to_the_bit_and_its_merged_model_is_a_plain_one(folder):
    whole = train(folder, "all", tiled_mlp=True)
    cut = train(folder, "cut", tiled_mlp=True, max_steps=2)
    resumed = tunekit.resume(cut, ["train.max_steps=3"])
    assert resumed.metrics()["loss"].tolist() == whole.metrics()["loss"].tolist()
    expected = saved_weights(whole.model_path)
    assert all(torch.equal(weight, expected[name]) for name, weight in saved_weights(resumed.model_path).items())
    merged = tunekit.export(resumed, folder / "merged", kind="merged", dtype="float32")
    assert AutoModelForCausalLM.from_pretrained(merged.folder).config.model_type == "llama"
