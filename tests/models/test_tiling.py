"""MLPs in tiles against transformers', PEFT's and bitsandbytes' own, of the same weights, all tokens at once."""

from types import MethodType

import pytest

from tests.models.architectures import SIZES, packed_batch, padded_batch
from tests.models.test_fused_models import assert_agrees, model_of
from tunekit.errors import ModelError
from tunekit.models.fusion import tiling
from tunekit.models.fusion.fuse import fuse
from tunekit.models.fusion.tiling import tile_mlps

DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "granite", "smollm3")


@pytest.mark.sample(10)
@pytest.mark.parametrize("checkpoints", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("fuses", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("adapter", ["full", "lora", "nf4"])
@pytest.mark.parametrize("architecture", DENSE)
def test_tiles_have_the_loss_and_gradients_of_all_tokens_at_once(architecture, adapter, fuses, checkpoints):
    tiled, plain = model_of(architecture, adapter), model_of(architecture, adapter)
    if fuses:
        fuse(tiled)
    assert tile_mlps(tiled, 7) == SIZES["num_hidden_layers"]
    for model in (tiled, plain):
        if checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
    for batch in (padded_batch(), packed_batch()):
        assert_agrees(tiled, plain, batch)


def test_no_more_tokens_than_a_tile_are_computed_at_once():
    model, seen = model_of("llama", "lora"), []
    tile_mlps(model, 7)
    for layer in model.get_base_model().model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    batch = padded_batch()
    model(**batch).loss.backward()
    assert max(shape[-2] for shape in seen) == 7
    # Forward and again, in each layer.
    assert sum(shape[-2] for shape in seen) == 2 * SIZES["num_hidden_layers"] * batch["input_ids"].numel()


@pytest.mark.parametrize("architecture", ["qwen3_moe", "phi"])
def test_a_model_without_one_gated_mlp_in_each_layer_is_refused(architecture):
    with pytest.raises(ModelError, match=r"train\.tiled_mlp: layer 0 of \w+ has 0 gated MLPs, not one"):
        tile_mlps(model_of(architecture, "full"), 7)


def test_tiles_that_do_not_compute_the_same_are_refused(monkeypatch):
    """As if an MLP took the mean of its tokens out of them: the mean over a tile is another."""

    def tile(module, tile_tokens):
        own = module.forward
        of_tile = MethodType(lambda self, x: own(x - x.mean(-2, keepdim=True)), module)
        vars(module)["forward"] = of_tile
        real(module, tile_tokens)

    real = tiling._tile
    monkeypatch.setattr(tiling, "_tile", tile)
    with pytest.raises(ModelError, match="LlamaMLP the output differs by"):
        tile_mlps(model_of("llama", "full"), 7)
