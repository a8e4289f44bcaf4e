"""A model whose logits are not its last hidden states times its head's weight is trained on its own logits.

What the logs say is compared with transformers: the logits of the model as it was saved, and cross-entropy over them.
"""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl.trainer.utils import add_fused_lm_head

import tunekit
from tests.processes import in_processes
from tests.tiny import make_tokenizer, plain_accelerator, save_chats
from tests.training.engines import made, work_in
from tunekit.errors import RunError
from tunekit.estimates.layout import Layout
from tunekit.methods.head import fused_heads, replace_heads
from tunekit.recipe.methods.sft import SFTMethod
from tunekit.runs.prepared_data import FILES
from tunekit.runs.run import Run
from tunekit.training import check_head

SIZES = {
    "vocab_size": 71,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}

ORDINARY = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 8.0},
    "gemma2": {"final_logit_softcapping": 4.0},
    "gpt_neox": {},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4},
    "biogpt": {},
}
"""Families whose logits are those of a fused head, and what is set besides the sizes."""

OTHERS = {
    "bert": {"is_decoder": True},
    "modernbert-decoder": {},
    "inkling_text": {
        "logits_mup_width_multiplier": 3.0,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 16,
        "rel_extent": 32,
    },
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 16},
    "llama4_text": {"num_local_experts": 2, "moe_layers": []},
    "rembert": {"is_decoder": True, "output_embedding_size": 24},
}
"""Families whose logits are not."""

WITH_TRLS = ["tunekit", "trl"]

METHOD = SFTMethod()
PLAN = SimpleNamespace(
    dtype="float32", layout=Layout(), recipe=SimpleNamespace(data=SimpleNamespace(max_length=64), method=METHOD)
)


def tiny(kind, dtype=torch.float32, **fields):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | {**ORDINARY, **OTHERS}.get(kind, {}) | fields))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        # Logits of some units, as of a trained model.
        model.get_output_embeddings().weight.mul_(20)
    return model.to(dtype).train()


def trainer_of(model, **fields):
    """As much of a trainer as is asked: rows come one after the other, so that the tokens are made up."""
    return SimpleNamespace(model=model, accelerator=plain_accelerator(), train_dataset=None, **fields)


def with_head(model, scorer="tunekit", outputs=("log_probs", "entropy", "is_top1"), **fields):
    """A trainer of a model that has been given a fused head."""
    add_fused_lm_head(model, outputs=outputs)
    trainer = trainer_of(model, **fields)
    replace_heads(trainer, keeps_trls=scorer == "trl")
    return trainer


def why(trainer, dtype="float32"):
    (head,) = fused_heads(trainer)
    return check_head._why_not_fused(
        trainer, trainer.model, head.bound, SimpleNamespace(dtype=dtype, layout=Layout()), 71
    )


@pytest.mark.parametrize("scorer", WITH_TRLS)
@pytest.mark.parametrize("kind", ORDINARY)
def test_ordinary_families_keep_the_fused_head(kind, scorer):
    assert why(with_head(tiny(kind), scorer)) is None


@pytest.mark.parametrize("kind", ORDINARY)
def test_ordinary_families_keep_it_in_bfloat16_whose_rounding_is_no_difference(kind):
    assert why(with_head(tiny(kind, torch.bfloat16)), "bfloat16") is None


@pytest.mark.parametrize("scorer", WITH_TRLS)
@pytest.mark.parametrize("kind", OTHERS)
def test_families_that_compute_other_logits_are_found(kind, scorer):
    assert why(with_head(tiny(kind), scorer)) is not None


@pytest.mark.parametrize("kind", ["bert", "modernbert-decoder", "inkling_text"])
def test_they_are_found_in_bfloat16(kind):
    assert why(with_head(tiny(kind, torch.bfloat16)), "bfloat16") is not None


@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_a_scale_that_is_a_hundredth_off_is_found_in_float32(factor):
    trainer = with_head(tiny("granite"))
    trainer.model.config.logits_scaling *= factor
    assert "by up to" in why(trainer)


def test_a_scale_that_is_a_tenth_off_is_found_in_bfloat16():
    trainer = with_head(tiny("granite", torch.bfloat16, logits_scaling=0.5))
    trainer.model.config.logits_scaling *= 1.1
    assert "by up to" in why(trainer, "bfloat16")


def routed(kind, scorer="tunekit", **fields):
    """A trainer of a model whose routers' loss TRL has turned on, as it does by two fields of the configuration."""
    trainer = with_head(tiny(kind, **fields), scorer, aux_loss_enabled=True, router_aux_loss_coef=0.01)
    check_head._settle_routers(trainer, PLAN, 71)
    return trainer


GRANITE = {"mamba_n_heads": 4, "num_local_experts": 4, "shared_intermediate_size": 48, "layer_types": ["attention"] * 2}
ROUTED = {
    "mixtral": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "granitemoe": {"num_local_experts": 4},
    "granitemoehybrid": GRANITE,
    "phimoe": {"num_local_experts": 4},
}


@pytest.mark.parametrize("kind", ROUTED)
def test_the_loss_of_routers_is_the_models_own(kind):
    trainer = routed(kind, **ROUTED[kind])
    assert why(trainer) is None and trainer.aux_loss_enabled
    model = trainer.model.eval()
    ids = torch.arange(1, 31).view(2, 15)
    own = model(input_ids=ids, output_router_logits=True, use_cache=False).aux_loss
    found = model(input_ids=ids, labels=ids, output_router_logits=True, fused_lm_head=True).aux_loss
    assert own > 0
    torch.testing.assert_close(found, own)


def test_trls_head_is_left_where_it_does_not_know_how_many_experts_there_are():
    trainer = routed("granitemoe", "trl", **ROUTED["granitemoe"])
    (head,) = fused_heads(trainer)
    assert "no `num_experts`" in check_head._why_not_trls(trainer, head)
    head.scorer = "model"
    ids = torch.arange(1, 31).view(2, 15)
    assert trainer.model(input_ids=ids, labels=ids, output_router_logits=True, fused_lm_head=True).aux_loss > 0


@pytest.mark.parametrize(
    ("kind", "fields"), [("granitemoehybrid", GRANITE | {"num_local_experts": 0}), ("llama4_text", {})]
)
def test_a_model_without_a_loss_of_routers_has_none(kind, fields):
    trainer = routed(kind, **fields)
    assert not trainer.aux_loss_enabled and not trainer.router_aux_loss_coef


def test_routers_whose_loss_is_another_have_the_models_own():
    trainer = routed("doge", is_moe=True, num_experts=4, num_experts_per_tok=2)
    assert "a router loss other than Mixtral's" in why(trainer)


def test_a_loss_of_routers_that_is_asked_for_and_that_there_is_not_is_refused():
    method = SimpleNamespace(trainer_args={"router_aux_loss_coef": 0.1})
    plan = SimpleNamespace(recipe=SimpleNamespace(method=method))
    trainer = with_head(tiny("llama4_text"), aux_loss_enabled=True)
    with pytest.raises(RunError, match="Llama4ForCausalLM computes no router loss"):
        check_head._settle_routers(trainer, plan, 71)


def test_logits_that_are_not_numbers_are_left_to_the_guard():
    model = tiny("llama")
    model.get_output_embeddings().weight.data[3] = math.nan
    assert why(with_head(model)) is None


def test_an_adapter_on_the_head_is_trained():
    model = tiny("llama")
    trainer = with_head(model)
    trainer.model = get_peft_model(model, LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"))
    assert why(trainer) == "has an adapter on its head, which the head's weight does not include"
    fused_heads(trainer)[0].scorer = "model"
    ids = torch.arange(1, 12)[None]
    trainer.model(input_ids=ids, labels=ids, fused_lm_head=True).loss.backward()
    assert all(parameter.grad is not None for parameter in trainer.model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("kind", ["modernbert-decoder", "recurrent_gemma"])
def test_the_models_own_head_gives_its_loss_and_gradients(kind):
    ids = torch.randint(1, 71, (3, 11), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :4] = labels[1] = -100
    plain, model = tiny(kind).eval(), tiny(kind).eval()
    logits = plain(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    wanted = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / 50
    wanted.backward()
    trainer = with_head(model)
    fused_heads(trainer)[0].scorer = "model"
    found = model(input_ids=ids, labels=labels, num_items_in_batch=50, fused_lm_head=True)
    found.loss.backward()
    torch.testing.assert_close(found.loss, wanted)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    scored = labels[:, 1:].flatten() != -100
    entropy = torch.distributions.Categorical(logits=logits[scored]).entropy()
    torch.testing.assert_close(found.entropy.flatten()[scored], entropy)
    assert not found.entropy.flatten()[~scored].any()
    assert found.is_top1.sum() == (logits.argmax(-1) == labels[:, 1:].flatten()).sum()


def test_a_batch_without_a_label_has_a_loss_and_gradients_of_zero():
    model = tiny("modernbert-decoder")
    fused_heads(with_head(model))[0].scorer = "model"
    ids = torch.arange(1, 12)[None]
    loss = model(input_ids=ids, labels=torch.full_like(ids, -100), fused_lm_head=True).loss
    loss.backward()
    assert loss == 0
    assert not any(parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


class Told:
    """A record that keeps what it is told."""

    def __init__(self):
        self.events = []

    def write(self, event, **fields):
        self.events.append((event, fields))


def test_the_run_says_that_the_models_own_logits_are_scored():
    told = Told()
    trainer = with_head(tiny("modernbert-decoder"), args=SimpleNamespace(per_device_train_batch_size=4))
    check_head.check_head(trainer, PLAN, told, vocabulary=71)
    assert [head.scorer for head in fused_heads(trainer)] == ["model"]
    ((event, fields),) = told.events
    assert event == "warning"
    assert "ModernBertDecoderForCausalLM has logits that differ" in fields["message"]
    assert "using the model's own logits" in fields["message"]


@pytest.mark.parametrize(
    ("scorer", "fields", "hint"),
    [
        ({}, {"precompute_ref_logps": True}, "precompute_ref_log_probs=false"),
        ({"cast_lm_head_to_fp32": True}, {}, "cast_lm_head_to_fp32"),
    ],
)
def test_wishes_that_the_models_own_logits_cannot_meet_are_refused(scorer, fields, hint):
    model = tiny("modernbert-decoder")
    add_fused_lm_head(model, **scorer)
    trainer = trainer_of(model, **fields)
    replace_heads(trainer)
    with pytest.raises(RunError) as refusal:
        check_head.check_head(trainer, PLAN, Told(), vocabulary=71)
    assert hint in refusal.value.hint


@pytest.mark.parametrize("teacher", ["llama", "modernbert-decoder"])
def test_a_teacher_whose_logits_are_others_is_refused(teacher):
    student, teacher_model = tiny("qwen3"), tiny(teacher)
    trainer = trainer_of(student, teacher_model=teacher_model, temperature=1.0)
    if teacher == "llama":
        check_head._check_distillation(trainer, PLAN, 71)
    else:
        with pytest.raises(RunError, match=r"method\.teacher: ModernBertDecoderForCausalLM has logits that differ"):
            check_head._check_distillation(trainer, PLAN, 71)
    assert "forward" not in vars(student) and "forward" not in vars(teacher_model)


def found_in_one(kind):
    """What a process finds whose first one alone has a model with another scale."""
    trainer = with_head(tiny(kind))
    if trainer.accelerator.is_main_process:
        trainer.model.config.logits_scaling *= 1.01
    return why(trainer)


@pytest.mark.slow
def test_all_processes_find_what_one_of_them_finds():
    first, second = in_processes(2, found_in_one, "granite")
    assert first is not None and second == first


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    tokenizer = make_tokenizer()
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": 0}
    tiny("modernbert-decoder", **tokens, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    save_chats(folder / "sft.jsonl", ((f"double {n}", f"{2 * n} it is") for n in range(8)))
    said = [[{"role": "user", "content": f"double {n}"}] for n in range(8)]
    pairs = [{"prompt": p, "chosen": answer(n), "rejected": answer(n + 1)} for n, p in enumerate(said)]
    (folder / "dpo.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder


def answer(n):
    return [{"role": "assistant", "content": f"{n} it is"}]


def recipe(folder, name, kernels="tunekit", method="sft", **sections):
    return {
        "model": {"path": str(folder / "model"), "kernels": kernels},
        "data": {"train": str(folder / f"{method}.jsonl"), "max_length": 64},
        "method": method,
        "adapter": "lora",
        "train": {"max_steps": 1, "global_batch_size": 8, "micro_batch_size": 4},
        "output": {"dir": str(folder / name)},
        **sections,
    }


def mean_loss(folder, run):
    """Cross-entropy of the run's own tokens by transformers, each row alone."""
    from tunekit.data.prepare import read_dataset

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    sums, num = 0.0, 0
    for row in read_dataset(run.path / "data" / FILES["train"]):
        ids, labels = (torch.tensor(row[name])[None] for name in ("input_ids", "labels"))
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1].double()
        sums += torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum").item()
        num += int((labels[0, 1:] != -100).sum())
    return sums / num


def events(run, kind):
    return [event for event in run.events() if event["event"] == kind]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernels", ["tunekit", "torch"])
def test_the_first_loss_is_that_of_transformers(kernels, folder):
    run = Run(tunekit.train(recipe(folder, kernels, kernels)).path.resolve())
    assert [event["head"] for event in events(run, "warning") if "head" in event] == ["model"]
    assert events(run, "log")[0]["loss"] == pytest.approx(mean_loss(folder, run), abs=2e-5)


@pytest.mark.slow
def test_pairs_are_scored_by_the_same_logits(folder):
    run = Run(tunekit.train(recipe(folder, "dpo", method="dpo")).path.resolve())
    (first,) = events(run, "log")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    found = []
    for line in (folder / "dpo.jsonl").read_text().splitlines():
        pair = json.loads(line)
        prompt, whole = (
            tokenizer.apply_chat_template(turns, add_generation_prompt=ask, return_dict=False)
            for turns, ask in ((pair["prompt"], True), (pair["prompt"] + pair["chosen"], False))
        )
        with torch.no_grad():
            log_p = model(input_ids=torch.tensor([whole])).logits[0, :-1].log_softmax(-1)
        scores = log_p.gather(-1, torch.tensor(whole[1:])[:, None]).squeeze(-1)
        found.append(scores[len(prompt) - 1 :].sum().item())
    assert first["logps/chosen"] == pytest.approx(sum(found) / len(found), abs=1e-3)


def scorers(trainer):
    return [head.scorer for head in fused_heads(trainer)]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_several_processes_train_on_the_same_loss(strategy, folder):
    parallel = {"strategy": strategy, "num_processes": 2}
    path = made(recipe(folder, strategy, parallel=parallel))
    assert work_in(path, 2, scorers) == [["model"]] * 2
    run = Run(path)
    assert events(run, "log")[0]["loss"] == pytest.approx(mean_loss(folder, run), abs=2e-5)
