"""Our head in the place of TRL's: the same numbers in the same fields, and the same training, in float32.

Float32 losses of one model by two orders of sums differ by rounding alone, about 1e-6 of a loss. Ten steps of AdamW
carry that on: a gradient near zero may change its sign, but not by more than it is worth.
"""

import inspect
import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

import tunekit
from tests.tiny import save_chats, save_tiny_model, saved_weights
from tests.training.answers import fixed_numbers
from tests.training.engines import made, work_in
from tests.training.watching import micro_batches
from tunekit.errors import DependencyError, PlanError
from tunekit.methods.head import HEAD, next_labels, replace_heads
from tunekit.methods.sft import TokenMeanSFTTrainer
from tunekit.runs.run import Run

STEPS = 10
LOSS, WEIGHT = 2e-5, 1e-4
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and rows for each method; some answers are cut, so that a row has nothing to learn from."""
    folder = tmp_path_factory.mktemp("head")
    save_tiny_model(folder / "model", hidden=32)
    save_chats(folder / "sft.jsonl", ((f"double {n}" + "?" * (70 * (n % 4 == 3)), f"{2 * n} it is") for n in range(16)))
    said = [[{"role": "user", "content": f"double {n}"}] for n in range(16)]
    rows = {
        "dpo": [{"prompt": p, "chosen": answer(2 * n), "rejected": answer(2 * n + 1)} for n, p in enumerate(said)],
        "kto": [{"prompt": p, "completion": answer(n), "label": bool(n % 2)} for n, p in enumerate(said)],
        "grpo": [{"prompt": f"double {n}"} for n in range(16)],
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def answer(n):
    return [{"role": "assistant", "content": f"{n} it is" + "!" * (n % 3)}]


METHODS = {
    "sft": {"type": "sft"},
    "packed": {"type": "sft"},
    "dft": {"type": "sft", "loss_type": "dft"},
    "dpo": {"type": "dpo"},
    "kto": {"type": "kto"},
    "grpo": {
        "type": "grpo",
        "num_generations": 4,
        "beta": 0.1,
        "max_completion_length": 8,
        "rewards": ["tests.training.answers:reward"],
    },
}


def recipe(folder, name, kernels, adapter="full", **sections):
    kind = METHODS[name]["type"]
    return {
        "model": {"path": str(folder / "model"), "kernels": kernels},
        "data": {
            "train": str(folder / f"{kind}.jsonl"),
            "max_length": 64,
            "packing": name == "packed",
            **({} if kind == "grpo" else {"eval": str(folder / f"{kind}.jsonl")}),
        },
        "method": METHODS[name],
        "adapter": adapter,
        "train": {"max_steps": STEPS, "global_batch_size": 8, "micro_batch_size": 4, "learning_rate": 1e-3},
        "output": {"dir": str(folder / "runs" / f"{name}-{kernels}-{adapter}")},
        **sections,
    }


def trained(recipe):
    with fixed_numbers():
        return Run(tunekit.train(recipe).path.resolve())


def logged(run, kind, name):
    return [event[name] for event in run.events() if event["event"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("name", METHODS)
def test_ten_steps_are_those_with_trls_head(name, adapter, folder):
    theirs, ours = (trained(recipe(folder, name, kernels, adapter)) for kernels in ("torch", "tunekit"))
    assert len(logged(ours, "log", "loss")) == STEPS
    torch.testing.assert_close(logged(ours, "log", "loss"), logged(theirs, "log", "loss"), rtol=0, atol=LOSS)
    torch.testing.assert_close(
        logged(ours, "eval", "eval_loss"), logged(theirs, "eval", "eval_loss"), rtol=0, atol=LOSS
    )
    torch.testing.assert_close(saved_weights(ours.model_path), saved_weights(theirs.model_path), rtol=0, atol=WEIGHT)


SHAPES = {
    "llama": {},
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.25},
    "gemma2": {"final_logit_softcapping": 4.0},
}


def two_heads(kind, temperature=1.0, **options):
    """The same model with TRL's head and with ours."""
    config = AutoConfig.for_model(
        kind,
        vocab_size=71,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        pad_token_id=0,
        **SHAPES[kind],
    )
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(20)
        add_fused_lm_head(model, temperature, outputs=OUTPUTS)
        models.append(model)
    replace_heads(SimpleNamespace(model=models[1]), **options)
    return models


def batch():
    torch.manual_seed(1)
    ids = torch.randint(1, 71, (3, 11))
    labels = ids.clone()
    labels[:, :4] = -100
    labels[1] = -100
    return {"input_ids": ids, "labels": labels, "fused_lm_head": True}


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", SHAPES)
def test_each_field_is_trls(kind, temperature):
    theirs, ours = (model(**batch()) for model in two_heads(kind, temperature, entropy_gradient=True))
    assert isinstance(ours, FusedCausalLMOutput)
    for name in ("loss", *OUTPUTS, "label_mask"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-5)
        assert ours[name].requires_grad == theirs[name].requires_grad


@pytest.mark.parametrize("kind", SHAPES)
def test_gradients_of_log_probabilities_and_entropy_are_trls(kind):
    models = two_heads(kind, entropy_gradient=True)
    factors = torch.randn(2, 3, 10)
    for model in models:
        output = model(**batch())
        (output.log_probs * factors[0] + output.entropy * factors[1]).sum().backward()
    torch.testing.assert_close(gradients(models[1]), gradients(models[0]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sums_losses", [True, False])
def test_the_loss_and_its_gradients_are_trls_for_any_number_of_items(sums_losses):
    models = two_heads("llama", sums_losses=sums_losses)
    for model in models:
        model(**batch(), num_items_in_batch=torch.tensor(50)).loss.backward()
    torch.testing.assert_close(gradients(models[1]), gradients(models[0]), rtol=1e-4, atol=1e-5)


def eaft_losses(logits, labels, top_k, alpha):
    """Losses of the tokens with a label by the definition of EAFT (arXiv 2601.02151)."""
    log_p, labels = logits[:, :-1].log_softmax(-1), labels[:, 1:]
    largest = log_p.detach().exp().topk(top_k).values
    share = largest / largest.sum(-1, keepdim=True)
    weights = (-(share * share.log()).sum(-1) / math.log(top_k)) ** alpha
    of_labels = log_p.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return -(of_labels * weights)[labels != -100]


@pytest.mark.parametrize("scorer", ["tunekit", "model"])
@pytest.mark.parametrize(("top_k", "alpha"), [(20, 1.0), (5, 2.5)])
def test_tokens_weighted_by_their_entropies_train_as_eaft_is_defined(scorer, top_k, alpha):
    plain, ours = two_heads("llama", sums_losses=True, entropy_top_k=top_k, entropy_power=alpha)
    del plain.forward
    vars(ours)[HEAD].scorer = scorer
    output = ours(**batch())
    output.loss.backward()
    given, plain = batch(), plain.double()
    loss = eaft_losses(plain(input_ids=given["input_ids"]).logits, given["labels"], top_k, alpha).mean()
    loss.backward()
    torch.testing.assert_close(output.loss.double(), loss, rtol=1e-5, atol=0)
    widened = {name: gradient.double() for name, gradient in gradients(ours).items()}
    torch.testing.assert_close(widened, gradients(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("loss", "changes", "words"),
    [
        ("eaft", ["model.kernels=torch"], "eaft needs tunekit's head, and .* not torch's; unset model.kernels"),
        ("eaft", ["parallel.cp_size=2"], "eaft needs tunekit's head, and .* split sequences; unset method.loss_type"),
        (
            "dft",
            ["parallel.sp_size=2"],
            "dft: TRL does not compute it on sequences that are divided by sp_size; use cp_size",
        ),
    ],
)
def test_a_loss_is_refused_where_its_head_does_not_score(loss, changes, words, folder):
    plain = recipe(folder, "sft", "auto", method={"type": "sft"})
    tunekit.plan(plain, changes, on="2xh100")
    with pytest.raises(PlanError, match=words):
        tunekit.plan(plain, [f"method.loss_type={loss}", *changes], on="2xh100")


def documents(tensors):
    """Yield the token ids and labels of each document of a micro-batch, `(1, tokens)` each."""
    for row, ids in enumerate(tensors["input_ids"]):
        begins = tensors["position_ids"][row] == 0 if "position_ids" in tensors else torch.arange(len(ids)) == 0
        bounds = [*begins.nonzero().flatten().tolist(), len(ids)]
        for start, end in itertools.pairwise(bounds):
            yield ids[None, start:end], tensors["labels"][row, None, start:end]


@pytest.mark.parametrize("name", ["sft", "packed"])
def test_a_run_logs_the_loss_of_eaft_and_evaluates_without_its_weights(name, folder):
    """Weights hardly move, so that the logged losses are those of the model that training starts from."""
    method = {"type": "sft", "loss_type": "eaft", "eaft_alpha": 0.5, "eaft_top_k": 10}
    steps = {"max_steps": 2, "global_batch_size": 4, "micro_batch_size": 2, "learning_rate": 1e-9}
    output = {"dir": str(folder / "runs" / f"eaft-{name}")}
    with micro_batches(TokenMeanSFTTrainer) as batches:
        run = trained(recipe(folder, name, "tunekit", method=method, train=steps, output=output))
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    assert len(batches) == 4
    for step, loss in enumerate(logged(run, "log", "loss")):
        parts = [
            eaft_losses(model(input_ids=ids).logits, labels, 10, 0.5).detach()
            for tensors in batches[2 * step : 2 * step + 2]
            for ids, labels in documents(tensors)
        ]
        assert loss == pytest.approx(torch.cat(parts).mean().item(), abs=2e-6)
    plain = trained(recipe(folder, name, "tunekit", train=steps, output={"dir": f"{output['dir']}-plain"}))
    assert logged(run, "eval", "eval_loss") == pytest.approx(logged(plain, "eval", "eval_loss"), abs=2e-6)


def test_shifted_labels_are_scored_as_they_are():
    given = batch()
    shifted = next_labels(given.pop("labels"))
    theirs, ours = (model(**given, shift_labels=shifted) for model in two_heads("llama"))
    assert ours.log_probs.shape == shifted.shape
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sums_losses", [True, False])
def test_a_batch_without_a_label_has_a_loss_and_gradients_of_zero(sums_losses):
    given = batch()
    given["labels"] = torch.full_like(given["labels"], -100)
    _, model = two_heads("llama", sums_losses=sums_losses)
    loss = model(**given).loss
    loss.backward()
    assert loss.item() == 0
    assert all(gradient is not None and not gradient.any() for gradient in gradients(model).values())


def test_without_its_flag_the_model_is_what_it_was():
    theirs, ours = two_heads("llama")
    ids = batch()["input_ids"]
    torch.testing.assert_close(ours(input_ids=ids, labels=ids).loss, theirs(input_ids=ids, labels=ids).loss)
    options = {"max_new_tokens": 5, "do_sample": False}
    assert ours.generate(ids, **options).equal(theirs.generate(ids, **options))


def test_routers_have_their_loss_as_in_trls_head():
    config = AutoConfig.for_model(
        "mixtral",
        vocab_size=71,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    add_fused_lm_head(model)
    theirs = model(**batch())
    replace_heads(SimpleNamespace(model=model))
    ours = model(**batch())
    torch.testing.assert_close([ours.loss, ours.aux_loss], [theirs.loss, theirs.aux_loss])
    torch.testing.assert_close(ours.nll + 0.5 * ours.aux_loss, theirs.loss)


def test_the_entropy_has_no_gradient_where_nobody_said_that_it_is_learned_from():
    _, model = two_heads("llama")
    output = model(**batch())
    assert output.log_probs.requires_grad and not output.entropy.requires_grad


def test_a_head_that_is_not_trls_is_refused():
    config = AutoConfig.for_model("llama", vocab_size=71, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(DependencyError, match="LlamaForCausalLM has none"):
        replace_heads(SimpleNamespace(model=model))
    add_fused_lm_head(model)
    replace_heads(SimpleNamespace(model=model))
    with pytest.raises(DependencyError, match="LlamaForCausalLM has none"):
        replace_heads(SimpleNamespace(model=model))


def head_of(trainer):
    """What scores the tokens of a trainer's model, and what its collator names."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = model if "forward" in vars(model) else model.get_base_model()
    code = inspect.unwrap(base.forward.__func__, stop=lambda one: one.__code__.co_filename.endswith("head.py")).__code__
    return code.co_filename.endswith("methods/head.py"), type(trainer.data_collator).__name__


PROCESSES = [("sft", "ddp", "full"), ("dpo", "ddp", "lora"), ("sft", "fsdp2", "full"), ("dpo", "fsdp2", "lora")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy", "adapter"), PROCESSES)
def test_two_processes_train_as_one(name, strategy, adapter, folder):
    few = {"train": {"max_steps": 3, "global_batch_size": 8, "micro_batch_size": 4, "learning_rate": 1e-3}}
    alone = trained(
        recipe(folder, name, "tunekit", adapter, **few, output={"dir": str(folder / f"{strategy}-{name}-1")})
    )
    parallel = {"strategy": strategy, "num_processes": 2}
    output = {"dir": str(folder / f"{strategy}-{name}-2")}
    divided = made(recipe(folder, name, "tunekit", adapter, **few, parallel=parallel, output=output))
    collator = "ScoredPositionsCollator" if name == "sft" else "DataCollatorForPreference"
    assert work_in(divided, 2, head_of) == [(True, collator)] * 2
    many = Run(divided)
    torch.testing.assert_close(logged(many, "log", "loss"), logged(alone, "log", "loss"), rtol=0, atol=LOSS)
    torch.testing.assert_close(saved_weights(many.model_path), saved_weights(alone.model_path), rtol=0, atol=WEIGHT)
