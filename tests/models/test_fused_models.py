"""Fused models against plain ones of the same weights: losses, every gradient, what they generate.

The plain model is transformers', PEFT's and bitsandbytes' own.

In float32 both round at other places only: some twenty operations in a row, of which each errs by a few steps of 1.2e-7
of its largest value, and a softmax makes an error of its logits one of as many shares of its result. TIGHT.

In bfloat16 both are wrong. The truth is the plain model of the same weights in float32, and the fused model may be
further from it than the plain model in bfloat16 by no more than a factor: LOOSE for the mean over all gradients,
LOOSEST for each. Errors of roundings of the same numbers at other places differ by chance, in a gradient of few numbers
the more; a wrong formula is wrong by many times that.
"""

from contextlib import nullcontext

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from peft import LoraConfig, get_peft_model

from tests.models.architectures import ARCHITECTURES, HAVE_EXPERTS, SIZES, make_model, packed_batch, padded_batch
from tunekit.models.fusion.fuse import fuse
from tunekit.models.fusion.proof import is_fused, unfuse

TIGHT = 2e-5
LOOSE, LOOSEST = 1.3, 3.0
EACH_FORM = ("llama", "qwen3", "gemma3_text", "phi", "phi3", "olmo2")
"""Architectures that have between them every form of an attention, a norm and a layer."""


def quantised(model):
    """The model with the linear layers of its blocks in NF4, double-quantised, as tunekit loads them."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is torch.nn.Linear and child is not model.get_output_embeddings():
                layer = Linear4bit(
                    child.in_features, child.out_features, child.bias is not None, child.weight.dtype, quant_type="nf4"
                )
                layer.weight = Params4bit(child.weight.data, requires_grad=False, quant_type="nf4", module=layer)
                layer.bias = child.bias
                # See `keep_quantised_layout`.
                layer.support_avx512bf16_for_cpu = False
                module.register_module(name, layer.to("cpu"))
    return model


def adapted(model, *, dropout=0.0, seed=1, **config):
    """The model with an adapter of random weights on all linear layers."""
    model = get_peft_model(
        model,
        LoraConfig(
            **{"task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "lora_dropout": dropout}
            | {"target_modules": "all-linear"}
            | config
        ),
    )
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
    return model.train()


def model_of(architecture, adapter, *, dtype=torch.float32, **config):
    """A model for training: `full`, or `lora`, or `nf4` with LoRA."""
    model = make_model(architecture, dtype=dtype)
    if adapter == "full":
        return model
    return adapted(quantised(model) if adapter == "nf4" else model, **config)


def gradients(model, batch, *, autocast=False):
    """The loss of a batch and the gradient of everything that is trained."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = model(**batch).loss
    loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    assert found and all(gradient is not None for gradient in found.values())
    return loss.item(), {name: gradient.float().clone() for name, gradient in found.items()}


def distances(found, expected):
    """How far each gradient is from what it should be, as a share of that one's largest element.

    Shares of 1e-3 of the largest of all count as that: what is nearly nothing is made of differences.
    """
    assert found.keys() == expected.keys()
    least = 1e-3 * max(float(gradient.abs().max()) for gradient in expected.values())
    return {
        name: float((found[name] - gradient).abs().max()) / max(float(gradient.abs().max()), least)
        for name, gradient in expected.items()
    }


def assert_agrees(fused, plain, batch):
    """Loss and every gradient in float32."""
    loss, found = gradients(fused, batch)
    right, expected = gradients(plain, batch)
    assert loss == pytest.approx(right, rel=1e-6)
    far = distances(found, expected)
    assert max(far.values()) < TIGHT, max(far, key=far.get)


@pytest.mark.sample(12)
@pytest.mark.parametrize("adapter", ["full", "lora", "nf4"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_fused_model_has_the_loss_and_gradients_of_the_plain_one(architecture, adapter):
    fused, plain = model_of(architecture, adapter), model_of(architecture, adapter)
    report = fuse(fused)
    for batch in (padded_batch(), packed_batch()):
        assert_agrees(fused, plain, batch)
    attentions = [module for name, module in fused.named_modules() if name.endswith("self_attn")]
    assert len(attentions) == SIZES["num_hidden_layers"] and all(map(is_fused, attentions))
    kept = {line.module for line in report.kept}
    assert any("Experts" in name for name in kept) == (architecture in HAVE_EXPERTS)


@pytest.mark.sample(5)
@pytest.mark.parametrize("adapter", ["full", "lora", "nf4"])
@pytest.mark.parametrize("architecture", EACH_FORM)
def test_in_bfloat16_it_is_as_close_to_the_truth_as_the_plain_one(architecture, adapter):
    fused, plain = (model_of(architecture, adapter, dtype=torch.bfloat16) for _ in range(2))
    truth = model_of(architecture, adapter, dtype=torch.bfloat16).float()
    fuse(fused)
    for batch in (padded_batch(), packed_batch()):
        # Weights that are all trained are computed with in their own type, as adapters in float32 are under autocast.
        autocast = adapter != "full"
        _, right = gradients(truth, batch)
        errors = []
        for model in (fused, plain):
            _, found = gradients(model, batch, autocast=autocast)
            errors.append([float((found[name] - right[name]).norm() / right[name].norm()) for name in right])
        ours, theirs = errors
        assert sum(ours) < LOOSE * sum(theirs)
        assert max(our / their for our, their in zip(ours, theirs, strict=True)) < LOOSEST


@pytest.mark.parametrize("adapter", ["full", "lora", "nf4"])
@pytest.mark.parametrize("architecture", ["qwen3", "phi3", "olmo2"])
def test_checkpoints_of_activations_change_nothing(architecture, adapter):
    fused, plain = model_of(architecture, adapter), model_of(architecture, adapter)
    fuse(fused)
    for model in (fused, plain):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if adapter != "full":
        fused.enable_input_require_grads()
        plain.enable_input_require_grads()
    assert_agrees(fused, plain, packed_batch())


def test_what_dropout_leaves_out_is_the_same_when_activations_are_computed_again():
    results = []
    for is_checkpointed in (False, True):
        model = model_of("llama", "lora", dropout=0.3)
        fuse(model)
        if is_checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        torch.manual_seed(5)
        results.append(gradients(model, padded_batch()))
    (loss, kept), (loss_again, again) = results
    assert loss == loss_again
    assert max(distances(again, kept).values()) < TIGHT


def test_dropout_has_the_mean_and_the_variance_of_the_plain_one():
    """Of the outputs and of the gradients of A, which it is drawn for; both are linear in the mask."""
    layers = []
    for is_to_be_fused in (False, True):
        model = model_of("llama", "lora", dropout=0.4)
        if is_to_be_fused:
            fuse(model)
        layers.append(model.get_submodule("base_model.model.model.layers.0.self_attn.k_proj"))
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
    num_draws = 300
    torch.manual_seed(0)
    means, variances = [], []
    for layer in layers:
        a, draws = layer.lora_A["default"].weight, []
        for _ in range(num_draws):
            output = layer(x)
            (gradient,) = torch.autograd.grad(output.sum(), a)
            draws.append(torch.cat([output.detach().flatten(), gradient.flatten()]))
        means.append(torch.stack(draws).mean(0))
        variances.append(torch.stack(draws).var(0))
    errors = ((variances[0] + variances[1]) / num_draws).sqrt()
    # 768 numbers, each normal by its many draws: beyond 5 standard errors lies one in two million.
    assert ((means[0] - means[1]).abs() < 5 * errors).all()
    assert float(variances[1].sum()) == pytest.approx(float(variances[0].sum()), rel=0.05)


def test_nothing_is_dropped_in_evaluation():
    fused, plain = (model_of("llama", "lora", dropout=0.4) for _ in range(2))
    fuse(fused)
    assert_agrees(fused.eval(), plain.eval(), padded_batch())


@pytest.mark.sample(4)
@pytest.mark.parametrize("adapter", ["full", "lora", "nf4"])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "phi3", "olmo3", "smollm3", "mixtral"])
def test_it_generates_the_same_tokens(architecture, adapter):
    fused, plain = (model_of(architecture, adapter).eval() for _ in range(2))
    fuse(fused)
    tokens = padded_batch()["input_ids"].flip(1)
    generated = [
        model.generate(
            input_ids=tokens,
            attention_mask=(tokens != 0).long(),
            do_sample=False,
            max_new_tokens=8,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        for model in (fused, plain)
    ]
    assert generated[0].sequences.tolist() == generated[1].sequences.tolist()
    logits = [torch.stack(one.logits) for one in generated]
    assert torch.allclose(*logits, rtol=0, atol=1e-5 * float(logits[1].abs().max()))


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=packed_batch()["input_ids"]).logits


@pytest.mark.parametrize("adapter", ["lora", "nf4"])
def test_an_adapter_that_is_switched_off_or_merged_is_as_in_the_plain_model(adapter):
    fused, plain = (model_of("qwen3", adapter).eval() for _ in range(2))
    fuse(fused)
    trained = logits_of(fused)
    seen = []
    for model in (fused, plain):
        with model.disable_adapter():
            seen.append(logits_of(model))
    assert torch.allclose(*seen, atol=1e-5) and not torch.allclose(trained, seen[0], atol=1e-2)
    assert torch.equal(logits_of(fused), trained)
    if adapter == "lora":
        fused.merge_adapter()
        plain.merge_adapter()
        assert torch.allclose(logits_of(fused), logits_of(plain), atol=1e-5)
        fused.unmerge_adapter()
        assert torch.allclose(logits_of(fused), trained, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_dora": True}, "no kernel for this variant of LoRA: DoraLinearVariant"),
        ({"lora_bias": True}, "no kernel for adapters with bias"),
    ],
)
def test_what_no_kernel_knows_is_computed_as_before_and_named(config, words):
    fused, plain = (model_of("qwen3", "lora", **config) for _ in range(2))
    report = fuse(fused)
    assert words in [line.reason for line in report.kept]
    assert_agrees(fused, plain, packed_batch())


def test_a_layer_that_is_watched_is_called():
    fused, plain = (model_of("llama", "lora") for _ in range(2))
    fuse(fused)
    seen = []
    layer = fused.get_submodule("base_model.model.model.layers.1.self_attn.v_proj")
    layer.lora_A["default"].register_forward_hook(lambda *given: seen.append(given))
    assert_agrees(fused, plain, packed_batch())
    assert len(seen) == 1


def test_two_adapters_at_once_are_computed_as_before():
    fused, plain = (model_of("llama", "lora") for _ in range(2))
    fuse(fused)
    for model in (fused, plain):
        model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        generator = torch.Generator().manual_seed(9)
        for name, parameter in model.named_parameters():
            if ".other." in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        model.base_model.set_adapter(["default", "other"])
    assert_agrees(fused, plain, packed_batch())


def test_layers_without_an_adapter_are_computed_beside_those_with_one():
    fused, plain = (model_of("llama", "nf4", target_modules=["q_proj", "v_proj", "up_proj"]) for _ in range(2))
    fuse(fused)
    assert_agrees(fused, plain, packed_batch())


@pytest.mark.parametrize("adapter", ["lora", "nf4"])
def test_layers_of_several_ranks_and_scales_and_layers_with_none_are_computed_together(adapter):
    config = {"rank_pattern": {"q_proj": 2, "0.mlp.up_proj": 24}, "alpha_pattern": {"[vg].*_proj": 5.0}}
    names = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]
    for layers in (None, [0]):
        config |= {"layers_to_transform": layers, "target_modules": names, "exclude_modules": ["0.self_attn.k_proj"]}
        fused, plain = (model_of("llama", adapter, **config) for _ in range(2))
        fuse(fused)
        assert_agrees(fused, plain, packed_batch())


def test_an_unfused_model_is_the_plain_one():
    model, plain = model_of("gemma3_text", "lora"), model_of("gemma3_text", "lora")
    fuse(model)
    unfuse(model)
    assert not any(is_fused(module) for module in model.modules())
    assert torch.equal(logits_of(model), logits_of(plain))
