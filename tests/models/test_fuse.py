"""What is fused of each architecture, that it is proved, that it can be undone, and what it must live with.

That fused models compute what plain ones do, with adapters and quantised, is in `test_fused_models`.
"""

import copy
import dataclasses
import pickle
from collections import Counter

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN

from tests.models.architectures import ARCHITECTURES, make_model, packed_batch, padded_batch
from tunekit.models.fusion.forms import activation_of, gated_rule, layer_rule, norm_rule
from tunekit.models.fusion.fuse import fuse
from tunekit.models.fusion.proof import Fusion, Kept, is_fused, unfuse

RULES = (norm_rule, gated_rule, layer_rule)

ADD, SILU, GELU = "residual add + RMSNorm", "gated MLP (silu)", "gated MLP (gelu tanh)"
LLAMA = {ADD: 2, SILU: 2, "RMSNorm": 5}
FUSED = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA | {"RMSNorm": 9},
    "gemma2": {ADD: 2, GELU: 2, "RMSNorm (1 + weight)": 9},
    "gemma3_text": {ADD: 2, GELU: 2, "RMSNorm (1 + weight)": 13},
    "phi3": {ADD: 2, "gated MLP (silu, one projection)": 2, "RMSNorm": 5},
    "olmo2": {SILU: 2, "RMSNorm (rounded once)": 9},
    "olmo3": {SILU: 2, "RMSNorm (rounded once)": 9},
    "granite": LLAMA,
    "smollm3": LLAMA,
    "mixtral": {ADD: 2, "RMSNorm": 5},
    "qwen3_moe": {ADD: 2, "RMSNorm": 9},
    "phi": {},
}
"""Of two layers and a norm behind them: how many modules of each form."""


def results(model, batch):
    """Loss, logits and every gradient of a batch."""
    model.zero_grad()
    found = model(**batch)
    found.loss.backward()
    gradients = {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": found.loss.detach(), "logits": found.logits.detach(), **gradients}


def assert_close(found, wanted, tolerance):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        distance = (found[name] - value).abs().max() / value.abs().max().clamp_min(1e-6)
        assert distance <= tolerance, f"{name}: {distance:.2g}"


def assert_as_close(fused, plain, exact):
    """Both round, at other places: the fused may be further off by half of it and one step of bfloat16, 2^-7."""
    for name, value in exact.items():
        scale = value.abs().max()
        allowed = 1.5 * (plain[name].double() - value).abs().max() / scale + 2**-7
        assert (fused[name].double() - value).abs().max() / scale <= allowed, name


def num_fused(report):
    nums = Counter()
    for line in report.fused:
        nums[line.form] += line.num_modules
    return dict(nums)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_norms_gated_blocks_and_adds_of_each_architecture_are_fused(architecture):
    report = fuse(make_model(architecture), rules=RULES)
    assert num_fused(report) == FUSED[architecture]
    # The references compute what transformers does, in the same order, but for sums in the backward pass.
    assert all(line.difference < 1e-5 for line in report.fused)


@pytest.mark.sample(20)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("batch", [padded_batch, packed_batch])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_fused_model_computes_what_it_did(architecture, batch, checkpointing):
    model = make_model(architecture)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    wanted = results(model, batch())
    fuse(model, rules=RULES)
    # Sums of a few dozen float32 numbers in another order, through two layers: a few hundred roundings of 6e-8.
    assert_close(results(model, batch()), wanted, 2e-5)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi3", "olmo2", "granite"])
def test_in_bfloat16_a_fused_model_is_as_close_to_the_exact_one(architecture):
    exact = results(make_model(architecture), padded_batch())
    model = make_model(architecture, dtype=torch.bfloat16)
    plain = results(model, padded_batch())
    fuse(model, rules=RULES)
    fused = results(model, padded_batch())
    assert_as_close(fused, plain, exact)


def test_checkpointed_layers_are_computed_twice_and_plain_ones_once():
    nums = []
    for checkpointing in (False, True):
        model = make_model("llama")
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        fuse(model, rules=RULES)
        called = []
        model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *_, called=called: called.append(1))
        results(model, padded_batch())
        nums.append(len(called))
    assert nums == [1, 2]


def test_dense_layers_between_experts_are_fused(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES["qwen3_moe"], "mlp_only_layers", [0])
    assert num_fused(fuse(make_model("qwen3_moe"), rules=RULES)) == {ADD: 2, SILU: 1, "RMSNorm": 9}


def test_a_model_without_weights_is_fused_by_its_shapes():
    config = AutoConfig.for_model("llama", num_hidden_layers=2, vocab_size=32, num_attention_heads=8)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert num_fused(fuse(model, rules=RULES)) == LLAMA
    assert all(parameter.is_meta for parameter in model.parameters())


def test_what_is_not_known_stays_and_is_named():
    report = fuse(make_model("mixtral"), rules=RULES)
    kept = {line.module: line.reason for line in report.kept}
    assert kept["MixtralExperts"] == "no kernel for this computation"
    assert "MixtralAttention" in kept
    assert "MixtralExperts" in report.words()
    assert "5 RMSNorm" in report.words()


def test_norms_before_the_adds_are_told_as_the_reason():
    report = fuse(make_model("olmo2"), rules=RULES)
    assert (
        next(line.reason for line in report.kept if line.module == "Olmo2DecoderLayer")
        == "no norm follows an add within this layer"
    )


def wrong(rule, **changes):
    """A rule that takes a form for another one."""

    def look(module):
        fusion = rule(module)
        if not isinstance(fusion, Fusion):
            return fusion
        return dataclasses.replace(fusion, settings=dataclasses.replace(fusion.settings, **changes))

    return look


@pytest.mark.parametrize(
    ("architecture", "rule", "changes"),
    [
        ("llama", norm_rule, {"eps": 0.0}),
        ("llama", norm_rule, {"eps": 2e-6}),
        ("llama", norm_rule, {"offset": 1.0}),
        ("llama", norm_rule, {"weight": None}),
        ("gemma2", norm_rule, {"offset": 0.0}),
        ("llama", gated_rule, {"activation": "gelu_tanh"}),
        ("gemma2", gated_rule, {"activation": "gelu"}),
        ("llama", gated_rule, {"gate": "up_proj", "up": "gate_proj"}),
    ],
)
def test_a_wrong_kernel_is_found_by_the_proof(architecture, rule, changes):
    model = make_model(architecture)
    report = fuse(model, rules=[wrong(rule, **changes)])
    assert not report.fused
    assert not any(map(is_fused, model.modules()))
    refused = [line for line in report.kept if line.difference is not None]
    assert refused
    assert all(line.difference > 1e-4 and "differs by" in line.reason for line in refused)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("granite", {"scale": None}),
        ("gemma2", {"behind_attention": None}),
        ("gemma2", {"behind_block": "post_attention_layernorm"}),
        ("llama", {"dropped": ("position_embeddings",)}),
        ("llama", {"parameters": ("position_ids", "attention_mask")}),
    ],
)
def test_a_wrong_layer_is_found_by_the_proof(architecture, changes):
    report = fuse(make_model(architecture), rules=[norm_rule, wrong(layer_rule, **changes)])
    assert ADD not in num_fused(report)


def test_a_module_whose_proof_fails_stays_and_says_why():
    def rule(module):
        found = norm_rule(module)
        return dataclasses.replace(found, trial=broken) if isinstance(found, Fusion) else found

    def broken(*_):
        raise ValueError("expected 3, got 2\nand more")

    model = make_model("llama")
    report = fuse(model, rules=(rule, gated_rule))
    reasons = {line.module: line.reason for line in report.kept}
    assert reasons["LlamaRMSNorm"] == "could not be tested: ValueError: expected 3, got 2"
    assert num_fused(report) == {SILU: 2}
    assert not any(is_fused(module) for name, module in model.named_modules() if name.endswith("norm"))


def test_a_model_whose_own_code_does_not_take_the_proofs_input_is_fused_but_for_that():
    config = AutoConfig.for_model(
        "jetmoe",
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_key_value_heads=2,
        kv_channels=16,
        num_local_experts=3,
    )
    model = AutoModelForCausalLM.from_config(config)
    report = fuse(model)
    reasons = {line.module: line.reason for line in report.kept}
    assert reasons["JetMoeDecoderLayer"].startswith("could not be tested: ValueError: not enough values to unpack")
    ids = torch.arange(1, 12)[None]
    model(input_ids=ids, labels=ids).loss.backward()


def test_unfusing_restores_the_model():
    model = make_model("qwen3")
    before, names = results(model, padded_batch()), list(model.state_dict())
    state = {name: dict(vars(module)) for name, module in model.named_modules()}
    fuse(model, rules=RULES)
    assert list(model.state_dict()) == names
    unfuse(model)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == state
    after = results(model, padded_batch())
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_fusing_twice_is_fusing_once():
    model = make_model("gemma2")
    first = fuse(model, rules=RULES)
    assert fuse(model, rules=RULES) == first
    unfuse(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_random_numbers_of_the_run_are_not_touched():
    model = make_model("phi3")
    before = torch.get_rng_state()
    fuse(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_copy_of_a_fused_model_is_fused_and_its_own():
    model = make_model("llama")
    fuse(model, rules=RULES)
    copied = copy.deepcopy(model)
    wanted = results(model, padded_batch())
    for parameter in model.parameters():
        parameter.data.zero_()
    assert sum(map(is_fused, copied.modules())) == 9
    found = results(copied, padded_batch())
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_pickled_model_comes_back_with_its_own_forwards():
    model = make_model("llama")
    wanted = results(model, padded_batch())
    fuse(model, rules=RULES)
    loaded = pickle.loads(pickle.dumps(model))
    found = results(loaded, padded_batch())
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert num_fused(fuse(loaded, rules=RULES)) == LLAMA


def test_hooks_of_fused_modules_and_of_those_they_call_run():
    model = make_model("llama")
    fuse(model, rules=RULES)
    layer, called = model.model.layers[0], []
    for name in ("", "input_layernorm", "post_attention_layernorm", "mlp", "mlp.gate_proj", "mlp.act_fn"):
        module = layer.get_submodule(name)
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    model(**padded_batch())
    # The activation is in the kernel.
    assert called == ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp", ""]


def test_a_fused_layer_takes_its_arguments_by_place_and_by_name():
    model = make_model("llama").eval()
    layer = model.model.layers[0]
    x = torch.randn(1, 6, model.config.hidden_size)
    positions = torch.arange(6)[None]
    rotation = model.model.rotary_emb(x, positions)
    wanted = layer(x, None, positions, None, False, rotation)
    fuse(model, rules=RULES)
    assert is_fused(layer)
    assert torch.equal(layer(x, None, positions, None, False, rotation), wanted)
    assert torch.equal(layer(x, position_embeddings=rotation), wanted)


def test_a_fused_model_generates_the_same():
    model = make_model("gemma3_text").eval()
    given = padded_batch()["input_ids"][:1]
    wanted = model.generate(given, max_new_tokens=8, do_sample=False)
    fuse(model, rules=RULES)
    assert torch.equal(model.generate(given, max_new_tokens=8, do_sample=False), wanted)


def test_under_autocast_a_fused_model_is_as_close_to_the_exact_one():
    exact = results(make_model("llama"), padded_batch())
    model = make_model("llama")
    with torch.autocast("cpu", torch.bfloat16):
        plain = results(model, padded_batch())
        fuse(model, rules=RULES)
        fused = results(model, padded_batch())
    assert {name: value.dtype for name, value in fused.items()} == {name: value.dtype for name, value in plain.items()}
    assert_as_close(fused, plain, exact)


@pytest.mark.slow
def test_a_fused_layer_is_compiled_without_a_break_and_as_often_as_a_plain_one():
    nums = []
    for is_to_be_fused in (False, True):
        model = make_model("llama")
        wanted = results(model, padded_batch())
        if is_to_be_fused:
            fuse(model, rules=RULES)
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        for layer in model.model.layers:
            layer.compile(backend=counter, fullgraph=True)
        assert_close(results(model, padded_batch()), wanted, 2e-5)
        nums.append(counter.frame_count)
    assert nums[0] == nums[1] > 0


def test_a_module_whose_forward_something_else_has_replaced_stays():
    model = make_model("llama")
    norm = model.model.norm
    norm.forward = lambda x: x
    report = fuse(model, rules=RULES)
    assert norm.forward(3) == 3
    assert [line.reason for line in report.kept if line.example == "model.norm"] == ["its forward was replaced"]


def test_a_module_with_divided_weights_stays():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model = make_model("llama")
    for layer in model.model.layers:
        weight = DTensor.from_local(layer.mlp.up_proj.weight.data, mesh, [Replicate()])
        layer.mlp.up_proj.weight = nn.Parameter(weight)
    report = fuse(model, rules=RULES)
    torch.distributed.destroy_process_group()
    assert num_fused(report) == {"RMSNorm": 5}
    assert {line.reason for line in report.kept if line.module in ("LlamaMLP", "LlamaDecoderLayer")} == {
        "its weights are sharded over devices"
    }


def test_layers_stay_where_their_norm_does():
    model = make_model("llama")
    for layer in model.model.layers:
        layer.post_attention_layernorm = nn.LayerNorm(model.config.hidden_size)
    report = fuse(model, rules=RULES)
    assert ADD not in num_fused(report)
    assert "the norm after its add, post_attention_layernorm, is not fused" in {line.reason for line in report.kept}


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("silu", "silu"),
        ("swish", "silu"),
        ("gelu", "gelu"),
        ("gelu_python", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_10", None),
        ("quick_gelu", None),
        ("relu", None),
        ("relu2", None),
        ("prelu", None),
    ],
)
def test_activations_are_known_by_what_they_compute(name, kernel):
    assert activation_of(ACT2FN[name]) == kernel


def test_a_gated_block_with_another_activation_stays_and_says_which():
    config = AutoConfig.for_model("llama", hidden_act="relu2", hidden_size=32, num_hidden_layers=1, vocab_size=32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    kept = gated_rule(model.model.layers[0].mlp)
    assert kept == Kept("a gated block; no kernel for its activation ReLUSquaredActivation")
