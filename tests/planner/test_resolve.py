"""What is decided for which machine, and the words in which it is refused."""

import pytest

from tests.estimates.shapes import GIB, H100, LAPTOP, LLAMA_1B, LLAMA_8B, RTX_4090, T4, with_gpu
from tests.planner.golden import CASES, ROWS, known_facts, recipe
from tunekit.errors import PlanError
from tunekit.estimates.facts import DataFacts
from tunekit.estimates.hardware.machines import find_machine
from tunekit.planner.plan import Plan, used_of
from tunekit.planner.resolve import resolve
from tunekit.probe.model import known_model
from tunekit.recipe.load import load_recipe
from tunekit.recipe.methods import METHODS
from tunekit.recipe.methods.on_policy import TeacherMethod


@pytest.mark.parametrize("name", CASES)
def test_plan_survives_yaml(name):
    plan = resolve(*CASES[name], ROWS)
    assert Plan.from_yaml(plan.to_yaml(), plan.recipe) == plan


@pytest.mark.parametrize("variable", ["PYTHONPATH", "LD_PRELOAD", "PATH"])
def test_a_plan_from_elsewhere_makes_no_process_load_code_of_its_own(variable):
    plan = resolve(recipe(), LAPTOP, LLAMA_1B, ROWS)
    changed = plan.model_copy(update={"environment": {**plan.environment, variable: "/theirs"}})
    with pytest.raises(PlanError, match=variable):
        Plan.from_yaml(changed.to_yaml(), plan.recipe)


@pytest.mark.parametrize("name", CASES)
def test_batch_arithmetic_gives_the_global_batch(name):
    plan = resolve(*CASES[name], ROWS)
    assert plan.micro_batch_size * plan.gradient_accumulation_steps == plan.recipe.train.global_batch_size
    assert plan.memory.total_bytes <= plan.memory_limit_bytes


def test_more_memory_never_gives_a_smaller_micro_batch():
    sizes = []
    for gib in (20, 24, 32, 48, 80):
        plan = resolve(recipe(), with_gpu("GPU", gib, (9, 0)), LLAMA_8B, ROWS)
        sizes.append((not plan.gradient_checkpointing, plan.micro_batch_size))
    assert sizes == sorted(sizes)


def test_forced_micro_batch_and_checkpointing_are_kept():
    plan = resolve(recipe(train={"micro_batch_size": 2, "gradient_checkpointing": True}), H100, LLAMA_1B, ROWS)
    assert (plan.micro_batch_size, plan.gradient_accumulation_steps, plan.gradient_checkpointing) == (2, 8, True)


def test_steps_follow_rows_epochs_and_batch():
    plan = resolve(recipe(train={"num_epochs": 3, "global_batch_size": 16}), LAPTOP, LLAMA_1B, ROWS)
    assert plan.schedule.steps_per_epoch == 63  # 1000 rows in batches of 16, the last one of 8
    assert plan.schedule.num_steps == 189
    assert plan.schedule.warmup_steps == 6  # 3 % of 189, rounded up
    assert plan.schedule.eval_steps == 48


def test_max_steps_overrule_the_rows():
    plan = resolve(recipe(train={"max_steps": 7, "warmup_steps": 2}), LAPTOP, LLAMA_1B, ROWS)
    assert (plan.schedule.num_steps, plan.schedule.warmup_steps) == (7, 2)


def test_packed_rows_have_no_schedule_before_they_are_tokenized():
    packed = recipe(data={"packing": True})
    assert resolve(packed, LAPTOP, LLAMA_1B, ROWS).schedule is None
    counted = DataFacts(
        num_train=40,
        num_eval=4,
        tokenized=True,
        num_train_tokens=40_000,
        num_trainable_tokens=9_000,
        longest_tokens=900,
    )
    assert resolve(packed, LAPTOP, LLAMA_1B, counted).schedule.num_steps == 3


def test_learning_rate_follows_the_adapter_where_none_is_given():
    rates = [resolve(recipe(adapter=kind), H100, LLAMA_1B, ROWS).learning_rate for kind in ("full", "lora", "qlora")]
    assert rates == [2e-5, 2e-4, 2e-4]


PAIRS_AND_ANSWERS = [
    name for name, method in METHODS.items() if name != "sft" and not issubclass(method, TeacherMethod)
]


@pytest.mark.parametrize("method", PAIRS_AND_ANSWERS)
def test_a_method_has_a_learning_rate_of_its_own(method):
    """None has that of imitation, which is twenty times the highest that their papers take."""
    section = {"type": method, **({"num_labels": 2} if method == "classification" else {})}
    full, lora = (resolve(recipe(method=section, adapter=kind), H100, LLAMA_1B, ROWS) for kind in ("full", "lora"))
    assert 5e-7 <= full.learning_rate <= 1e-5
    assert lora.learning_rate == pytest.approx(10 * full.learning_rate)


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        ("full", "default of dpo for full (Zephyr, arXiv 2310.16944); cosine schedule"),
        ("qlora", "default of dpo for qlora (ten times the full fine-tuning rate of Zephyr, arXiv 2310.16944); cosine"),
    ],
)
def test_a_plan_says_where_a_default_learning_rate_is_from(adapter, words):
    plan = resolve(recipe(method="dpo", adapter=adapter), H100, LLAMA_1B, ROWS)
    (why,) = (reason.why for reason in plan.reasons if reason.topic == "optimizer")
    assert why.startswith(words)


def test_flash_attention_is_taken_where_it_is_installed_and_runs():
    equipped = H100.model_copy(update={"flash_attn": True})
    assert resolve(recipe(), equipped, LLAMA_1B, ROWS).attn_implementation == "flash_attention_2"
    assert (
        resolve(recipe(model={"path": "m", "dtype": "float32"}), equipped, LLAMA_1B, ROWS).attn_implementation == "sdpa"
    )
    assert resolve(recipe(), H100, LLAMA_1B, ROWS).attn_implementation == "tunekit_varlen"


def test_idle_accelerators_are_mentioned():
    three = H100.model_copy(update={"accelerators": H100.accelerators * 3})
    plan = resolve(recipe(), three, LLAMA_1B, ROWS)
    assert plan.layout.num_processes == 2
    assert "1 idle: the batch does not divide evenly over all" in plan.explain()


APPLE = LAPTOP.model_copy(
    update={
        "accelerators": (T4.device.model_copy(update={"kind": "mps", "name": "Apple M3", "compute_capability": None}),)
    }
)

REFUSED = {
    "float16-on-cpu": (
        recipe(model={"path": "m", "dtype": "float16"}),
        LAPTOP,
        "model.dtype: float16 does not run on a CPU: torch would silently compute in float32; use bfloat16 or float32",
    ),
    "flash-on-cpu": (
        recipe(model={"path": "m", "attn_implementation": "flash_attention_2"}),
        LAPTOP,
        "model.attn_implementation: flash_attention_2 needs a CUDA device of compute capability 8.0 or newer and "
        "a 16-bit dtype; this is CPU (test) with float32; use sdpa",
    ),
    "flash-absent": (
        recipe(model={"path": "m", "attn_implementation": "flash_attention_3"}),
        H100,
        "model.attn_implementation: flash_attention_3 is not installed; install flash-attn, or use sdpa",
    ),
    "too-long": (
        recipe(data={"max_length": 200_000}),
        H100,
        "data.max_length: 200000 exceeds the 131072 positions of llama-3.2-1b; set it to 131072 or less",
    ),
    "batch-not-divided": (
        recipe(train={"micro_batch_size": 3}),
        H100,
        "train.micro_batch_size: 3 does not divide train.global_batch_size 16; use one of 16, 8, 4, 2, 1",
    ),
    "unknown-target": (
        recipe(adapter={"type": "lora", "target_modules": ["q_proj", "query"]}),
        H100,
        "adapter.target_modules: llama-3.2-1b has no linear layer named query; "
        "available: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj",
    ),
    "tied-head-saved": (
        recipe(adapter={"type": "lora", "modules_to_save": ["lm_head"]}),
        H100,
        "adapter.modules_to_save: llama-3.2-1b has no weights of lm_head; "
        "a head tied to the embedding has no separate weights; name the embedding",
    ),
    "bf16-without-bf16": (
        recipe(adapter="full", train={"pure_bf16": True}),
        T4,
        "train.pure_bf16: T4 has no native bfloat16; unset it, or set adapter.type=lora",
    ),
    "paged-on-cpu": (
        recipe(train={"optim": "paged_adamw_8bit"}),
        LAPTOP,
        "train.optim: paged_adamw_8bit pages its states between an accelerator and host memory; "
        "CPU (test) has only host memory; use adamw_8bit",
    ),
    "paged-on-mps": (
        recipe(train={"optim": "paged_adamw_8bit"}),
        APPLE,
        "train.optim: paged_adamw_8bit pages its states by CUDA, which Apple M3 does not have; use adamw_torch_fused",
    ),
    "paged-in-32-bits-on-mps": (
        recipe(train={"optim": "paged_lion_32bit"}),
        APPLE,
        "train.optim: paged_lion_32bit pages its states by CUDA, which Apple M3 does not have; use lion_32bit",
    ),
    "8-bits-on-mps": (
        recipe(train={"optim": "adamw_bnb_8bit"}),
        APPLE,
        "train.optim: adamw_bnb_8bit: bitsandbytes has no 8-bit optimizers for Apple M3; use adamw_torch_fused",
    ),
}


def reason(plan, topic):
    (why,) = [one.why for one in plan.reasons if one.topic == topic]
    return why


WITHOUT_BF16 = {"adapter": "full", "parallel": {"strategy": "single"}}


def test_weights_in_bfloat16_are_offered_where_8_bit_states_are_not_enough():
    with pytest.raises(PlanError) as caught:
        resolve(recipe(**WITHOUT_BF16), H100, LLAMA_8B, ROWS)
    assert caught.value.changes == ("train.pure_bf16=true",)
    changed = recipe(**WITHOUT_BF16, train={"pure_bf16": True})
    needed = resolve(changed, H100, LLAMA_8B, ROWS).memory.total_bytes
    assert needed <= caught.value.limit_bytes < caught.value.needed_bytes


def test_an_optimizer_that_was_named_for_float32_goes_with_it():
    with pytest.raises(PlanError) as caught:
        resolve(recipe(**WITHOUT_BF16, train={"optim": "adamw_torch"}), H100, LLAMA_8B, ROWS)
    assert caught.value.changes == ("train.pure_bf16=true", "train.optim=null")


def test_a_plan_that_offloads_says_that_weights_in_bfloat16_would_fit():
    plan = resolve(recipe(adapter="full"), find_machine("h100").hardware(), LLAMA_8B, ROWS)
    assert plan.layout.offloads
    pure = resolve(recipe(adapter="full", train={"pure_bf16": True}), find_machine("h100").hardware(), LLAMA_8B, ROWS)
    used = used_of(pure.memory.total_bytes, pure.memory_limit_bytes)
    first = plan.advice[0]
    assert first.choice == "train.pure_bf16=true" and used in first.why


def test_where_adapters_of_experts_do_not_fit_those_of_the_other_layers_are_offered():
    model, hardware = known_facts("Qwen/Qwen3-30B-A3B"), find_machine("rtx4090").hardware()
    with pytest.raises(PlanError) as caught:
        resolve(recipe(adapter="qlora"), hardware, model, ROWS)
    assert caught.value.changes == ("adapter.target_modules=[k_proj, o_proj, q_proj, v_proj]",)
    changed = load_recipe(recipe(adapter="qlora"), list(caught.value.changes))
    plan = resolve(changed, hardware, model, ROWS)
    assert (plan.layout.strategy, plan.gradient_checkpointing) == ("single", True)
    # Of each of 48 layers, by hand: q 2048 -> 4096, k and v 2048 -> 512, o 4096 -> 2048, rank 16.
    assert plan.num_trainable_params == 48 * 16 * (2 * (2048 + 4096) + 2 * (2048 + 512))


def test_a_model_without_experts_is_offered_no_other_targets():
    with pytest.raises(PlanError) as caught:
        resolve(recipe(), with_gpu("tiny", 17, (9, 0)), LLAMA_8B, ROWS)
    assert not [change for change in caught.value.changes if "target_modules" in change]


def test_weights_in_bfloat16_take_8_bytes_a_parameter_on_one_device():
    plan = resolve(recipe(adapter="full", train={"pure_bf16": True}), H100, LLAMA_8B, ROWS)
    assert (plan.layout.strategy, plan.dtype, plan.autocast) == ("single", "bfloat16", False)
    sizes = {part: plan.memory.parts[part] / LLAMA_8B.num_params for part in ("weights", "optimizer")}
    assert sizes == {"weights": 2, "optimizer": pytest.approx(4, rel=1e-5)}
    assert "rounded stochastically" in reason(plan, "precision")


def test_an_optimizer_of_torch_is_taken_with_what_its_rounding_costs():
    plan = resolve(
        recipe(adapter="full", train={"pure_bf16": True, "optim": "adamw_torch_fused"}), H100, LLAMA_8B, ROWS
    )
    assert "adamw_torch_fused rounds weights to the nearest, so that updates below" in reason(plan, "precision")


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_says_what_and_what_to_do(name):
    asked, hardware, message = REFUSED[name]
    with pytest.raises(PlanError) as caught:
        resolve(asked, hardware, LLAMA_1B, ROWS)
    assert str(caught.value) == message


@pytest.mark.parametrize("adapter", ["full", "lora", "qlora"])
@pytest.mark.parametrize("kind", ["cpmant", "laguna"])
def test_types_that_cannot_be_trained_are_refused_with_the_reason(kind, adapter):
    model = LLAMA_1B.model_copy(update={"model_type": kind})
    words = {
        "cpmant": "model.path: cpmant models are not supported: its code computes wrong logits for rows padded on the",
        "laguna": "adapter.type: adapters are unsupported for laguna models: PEFT renames the modules of an adapter",
    }
    if kind == "laguna" and adapter == "full":
        assert resolve(recipe(adapter={"type": "full"}), H100, model, ROWS)
        return
    with pytest.raises(PlanError, match=words[kind]):
        resolve(recipe(adapter={"type": adapter}), H100, model, ROWS)


def test_what_does_not_fit_is_refused_with_the_change_that_would():
    with pytest.raises(PlanError, match=r"does not fit on RTX 4090.*set adapter\.type=lora: needs "):
        resolve(recipe(adapter="full"), RTX_4090, LLAMA_8B, ROWS)
    with pytest.raises(PlanError, match=r"does not fit on T4.*set adapter\.type=qlora: needs "):
        resolve(recipe(model={"path": "m", "dtype": "float16"}), T4, LLAMA_8B, ROWS)
    with pytest.raises(PlanError, match=r"set train\.micro_batch_size=null and"):
        forced = recipe(train={"micro_batch_size": 16, "gradient_checkpointing": False})
        resolve(forced, RTX_4090, LLAMA_8B, ROWS)
    with pytest.raises(PlanError, match="no change of optimizer, precision, adapter or length fits"):
        resolve(recipe(), with_gpu("tiny", 4, (9, 0)), LLAMA_8B, ROWS)


def test_the_suggested_change_does_fit():
    plan = resolve(recipe(adapter="lora"), RTX_4090, LLAMA_8B, ROWS)
    assert plan.memory.total_bytes < 24 * GIB


@pytest.mark.parametrize(
    ("name", "length", "words"),
    [
        ("meta-llama/Llama-3.1-8B", 8192, None),
        ("meta-llama/Llama-3.1-8B", 16384, "rows of 16,384 tokens (verified: up to 8,192)"),
        ("meta-llama/Llama-3.1-405B", 2048, "406 B parameters (verified: up to 70.6 B)"),
    ],
)
def test_a_plan_outside_of_what_its_formulas_were_checked_on_says_so_in_its_first_line(name, length, words):
    asked = recipe(data={"max_length": length})
    plan = resolve(asked, find_machine("8xh200").hardware(), known_model(name), ROWS)
    first, *_ = plan.explain().splitlines()
    wanted = "" if words is None else f"; memory estimate not verified for {words}"
    assert first == f"lora on some-model fits on 8 x {plan.device.name}: {plan.layout_words}{wanted}"


def test_a_type_that_was_never_traced_is_named_in_the_first_line_with_those_that_were():
    model = LLAMA_1B.model_copy(update={"model_type": "falcon_h1"})
    plan = resolve(recipe(), H100, model, ROWS)
    assert (
        "; memory estimate not verified for falcon_h1 (verified: deepseek_v3, gemma, " in plan.explain().splitlines()[0]
    )
    assert (
        "(formulas of a Llama of the same size; upper bound, since tunekit's kernels store less)" in plan.memory_line()
    )


def test_the_figures_of_memory_say_on_which_side_they_err():
    torch = {"path": "m", "kernels": "torch"}
    plan = resolve(recipe(model=torch), H100, LLAMA_1B, ROWS)
    assert plan.memory_basis == "formulas within 3% of traces of torch modules"
    compiled = resolve(recipe(model=torch, train={"torch_compile": True}), H100, LLAMA_1B, ROWS)
    assert compiled.memory_basis == f"{plan.memory_basis}; upper bound, since compiled layers store less"
    counted = resolve(recipe(), H100, LLAMA_1B, ROWS)
    assert counted.memory_basis == f"{plan.memory_basis}, adjusted for tunekit's kernels"
    assert counted.memory.is_fused and counted.memory.tensor_bytes < plan.memory.tensor_bytes
    upper = resolve(recipe(), H100, LLAMA_1B.model_copy(update={"model_type": "olmo2"}), ROWS)
    assert upper.memory_basis == f"{plan.memory_basis}; upper bound, since tunekit's kernels store less"


@pytest.mark.parametrize("kind", ["rwkv", "zamba"])
def test_types_that_are_not_quantized_are_refused_in_4_bits_alone(kind):
    model = LLAMA_1B.model_copy(update={"model_type": kind})
    resolve(recipe(adapter="lora"), H100, model, ROWS)
    with pytest.raises(
        PlanError, match=f"quantized training is unsupported for {kind} models: .*; set adapter.type=lora or full"
    ):
        resolve(recipe(adapter="qlora"), H100, model, ROWS)


@pytest.mark.parametrize(("name", "tower"), [("google/gemma-3-4b-it", "420 M"), ("google/gemma-3-1b-it", None)])
def test_towers_are_frozen(name, tower):
    model = known_model(name)
    plan = resolve(recipe(adapter="full"), find_machine("8xh100").hardware(), model, ROWS)
    choices = [reason.choice for reason in plan.reasons if reason.topic == "towers"]
    assert choices == ([] if tower is None else [f"frozen, {tower} parameters"])
    assert plan.num_trainable_params == model.num_params - model.num_tower_params


def test_a_busy_accelerator_is_left_out_where_one_is_enough_and_sets_the_limit_where_all_are_used():
    device = H100.accelerators[0]
    busy = device.model_copy(update={"memory_free_bytes": 30 * GIB})
    hardware = H100.model_copy(update={"accelerators": (busy, device)})
    alone = resolve(recipe(parallel={"strategy": "single"}), hardware, LLAMA_1B, ROWS)
    both = resolve(recipe(), hardware, LLAMA_1B, ROWS)
    assert (alone.memory_limit_bytes, both.memory_limit_bytes) == (int(0.92 * 80 * GIB), int(0.92 * 30 * GIB))


@pytest.mark.parametrize(
    ("name", "method", "coefficient", "words"),
    [
        ("openai/gpt-oss-20b", {"type": "sft"}, 0.9, "load balancing, router_aux_loss_coef 0.9"),
        ("mistralai/Mixtral-8x7B-v0.1", {"type": "dpo"}, 0.02, "load balancing, router_aux_loss_coef 0.02"),
        ("Qwen/Qwen3-30B-A3B", {"type": "grpo"}, 0.001, "load balancing, router_aux_loss_coef 0.001"),
        (
            "mistralai/Mixtral-8x7B-v0.1",
            {"type": "sft", "trainer_args": {"router_aux_loss_coef": 0.1}},
            0.1,
            "load balancing, router_aux_loss_coef 0.1",
        ),
        ("mistralai/Mixtral-8x7B-v0.1", {"type": "sft", "trainer_args": {"router_aux_loss_coef": 0.0}}, 0.0, None),
        ("mistralai/Mixtral-8x7B-v0.1", {"type": "orpo"}, None, "no load balancing"),
        ("mistralai/Mixtral-8x7B-v0.1", {"type": "reward"}, None, "no load balancing"),
        ("deepseek-ai/DeepSeek-V3", {"type": "sft"}, None, "no load balancing"),
        ("Qwen/Qwen3-8B", {"type": "sft"}, None, None),
    ],
)
def test_the_loss_of_routers_and_its_coefficient_stand_in_the_plan(name, method, coefficient, words):
    machine = find_machine("32x8xh200").hardware()
    plan = resolve(recipe(method=method, train={"global_batch_size": 256}), machine, known_model(name), ROWS)
    assert plan.router_aux_loss_coef == coefficient
    assert next((reason.choice for reason in plan.reasons if reason.topic == "experts"), None) == words


def test_a_weight_for_a_loss_of_routers_that_a_model_does_not_have_is_refused():
    asked = recipe(method={"type": "sft", "trainer_args": {"router_aux_loss_coef": 0.1}})
    with pytest.raises(PlanError, match=r"router_aux_loss_coef: .* \(llama\) has no router loss; unset it"):
        resolve(asked, H100, LLAMA_1B, ROWS)


def test_the_loss_of_the_router_is_told_of_where_there_is_one():
    experts = known_model("mistralai/Mixtral-8x7B-v0.1")
    machine = find_machine("8xh100").hardware()
    without = {"type": "sft", "trainer_args": {"router_aux_loss_coef": 0.0}}
    topics = [
        {reason.topic for reason in resolve(asked, machine, model, ROWS).reasons}
        for asked, model in ((recipe(), experts), (recipe(method=without), experts), (recipe(), LLAMA_8B))
    ]
    assert ["experts" in found for found in topics] == [True, False, False]
