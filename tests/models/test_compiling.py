"""Compiled layers train as others do, and neither they nor products in float8 change how weights are named."""

import pytest
import torch

from benchmarks.isolation import small_model
from tests.models.test_attention import batch_of, documents
from tunekit.errors import ModelError
from tunekit.models.attention import register_packed_attention
from tunekit.models.load import compile_layers, to_float8
from tunekit.planner.plan import VARLEN


def losses(model, *, checkpointing):
    """Of four steps on packed documents."""
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch, found = batch_of(*documents()), []
    for _ in range(4):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", VARLEN])
def test_compiled_layers_have_the_losses_of_others(attention, checkpointing):
    """As dynamo and autograd trace them, run by torch: inductor would have g++ compile each graph, which takes long."""
    register_packed_attention()
    torch.compiler.reset()
    plain, compiled = (small_model("llama", attention) for _ in range(2))
    assert compile_layers(compiled, backend="aot_eager") == 4
    wanted = losses(plain, checkpointing=checkpointing)
    assert losses(compiled, checkpointing=checkpointing) == pytest.approx(wanted, rel=1e-5)
    assert wanted[-1] < wanted[0]
    assert compiled.state_dict().keys() == plain.state_dict().keys()


def test_a_model_without_layers_is_not_compiled():
    with pytest.raises(ModelError, match="Linear has no decoder layers to compile"):
        compile_layers(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_linear_layers_but_the_head_are_turned_to_float8(device):
    """What they compute was not looked at: products in float8 take a GPU of compute capability 8.9 or newer."""
    from torchao.float8.float8_linear import Float8Linear

    model = small_model("llama", "sdpa").to(device)
    names, dtype = model.state_dict().keys(), model.dtype
    narrow = model.model.layers[0].mlp.down_proj = torch.nn.Linear(48, 24, bias=False, device=device)
    assert to_float8(model) == 4 * 7 - 1
    assert model.state_dict().keys() == names
    assert not isinstance(model.lm_head, Float8Linear)
    assert model.model.layers[0].mlp.down_proj is narrow
    assert model.model.layers[1].mlp.down_proj.weight.dtype == dtype
