"""Liger's kernels go into the model that is held; what they compute takes an accelerator to see."""

import importlib
from collections.abc import Iterator

import pytest

from benchmarks.isolation import small_model
from tunekit.errors import ModelError
from tunekit.models.load import use_liger

pytest.importorskip("liger_kernel")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """What Liger puts into transformers' modules is taken out again."""
    modules = [importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in ("llama", "qwen3")]
    before = [dict(vars(module)) for module in modules]
    yield
    for module, names in zip(modules, before, strict=True):
        vars(module).update(names)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_norms_and_mlps_of_the_model_are_ligers_and_its_loss_is_not(model_type):
    model = small_model(model_type, "sdpa")
    names, forward = model.state_dict().keys(), model.forward.__func__
    use_liger(model)
    layer = model.model.layers[0]
    for module in (layer.mlp, layer.input_layernorm, model.model.norm):
        assert module.forward.__func__.__module__.startswith("liger_kernel.")
    assert model.forward.__func__ is forward
    assert model.state_dict().keys() == names


def test_a_model_that_liger_does_not_know_is_refused():
    with pytest.raises(ModelError, match=r"liger-kernel does not support stablelm; unset model\.kernels"):
        use_liger(small_model("stablelm", "sdpa"))
