"""Every option that a recipe offers does what it says on a real, tiny run."""

import json
import re
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file

import tunekit
from tests.tiny import TEMPLATE, make_tokenizer, save_chats, save_tiny_model, watching_models
from tunekit.data.prepare import read_dataset
from tunekit.errors import PlanError
from tunekit.recipe.sections.section import LrSchedulerType, Optim

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    save_tiny_model(folder / "model", hidden=64)
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is") for n in range(32)))
    return folder


@pytest.fixture
def here(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    return workspace


def train(*overrides):
    recipe = {
        "model": "model",
        "data": {"train": "rows.jsonl", "max_length": 64},
        "train": {"max_steps": 6, "global_batch_size": 8, "learning_rate": 3e-3},
        "output": {"sample_prompts": []},
    }
    return tunekit.train(recipe, overrides)


def losses(run):
    return run.metrics()["loss"].tolist()


@pytest.mark.parametrize("optim", [name for name in get_args(Optim) if not name.startswith("paged_")])
def test_every_optimizer_trains(optim, here):
    rate = {"sgd": 3, "adagrad": 0.3}.get(optim, 3e-3)
    # Those that average weights have no schedule, and those of whole layers no LoRA.
    schedule = ["train.lr_scheduler_type=constant"] if optim.startswith("schedule_free") else []
    full = ["adapter=full"] if optim in ("galore_adamw", "apollo_adamw", "adam_mini") else []
    full += ["train.optim_args.rank=8"] if optim in ("galore_adamw", "apollo_adamw") else []
    found = losses(train(f"train.optim={optim}", f"train.learning_rate={rate}", *schedule, *full))
    assert found[-1] < found[0]


NEEDED = {
    "cosine_with_min_lr": "{min_lr_rate: 0.1}",
    "cosine_warmup_with_min_lr": "{min_lr_rate: 0.1}",
    "warmup_stable_decay": "{num_decay_steps: 2}",
}


@pytest.mark.parametrize("name", get_args(LrSchedulerType))
def test_every_schedule_warms_up_and_runs(name, here):
    arguments = [f"method.trainer_args={{lr_scheduler_kwargs: {NEEDED[name]}}}"] if name in NEEDED else []
    run = train(f"train.lr_scheduler_type={name}", "train.warmup_steps=2", *arguments)
    rates = run.metrics()["learning_rate"].tolist()
    assert max(rates) == pytest.approx(3e-3, rel=0.15)
    if name == "constant":
        assert set(rates) == {3e-3}
    elif name != "cosine_warmup_with_min_lr":
        assert rates[0] < 2e-3


@pytest.mark.parametrize("name", NEEDED)
def test_a_schedule_that_needs_more_says_what_before_the_start(name, here):
    with pytest.raises(PlanError) as caught:
        train(f"train.lr_scheduler_type={name}")
    example = NEEDED[name].strip("{}").split(":")[0]
    assert str(caught.value).startswith(f"train.lr_scheduler_type: {name} needs {example}")
    assert f"lr_scheduler_kwargs: {NEEDED[name]}" in str(caught.value)


@pytest.mark.parametrize("adapter", ["full", "lora", "qlora"])
@pytest.mark.parametrize(
    "option",
    [
        "model.dtype=bfloat16",
        "model.attn_implementation=eager",
        "train.gradient_checkpointing=true",
        "train.micro_batch_size=2",
        "data.packing=true",
        "data.padding_free=true",
        "data.loss_on=all",
        "train.weight_decay=0.1",
    ],
)
def test_options_train_with_every_adapter(adapter, option, here):
    found = losses(train(f"adapter={adapter}", option))
    assert len(found) == 6
    assert found[-1] < found[0]


@pytest.mark.parametrize(
    "option",
    [
        *("use_rslora=true", "use_dora=true", "dropout=0.1", "target_modules=[q_proj,v_proj]", "quant_type=fp4"),
        *("exclude_modules=[down_proj]", "layers_to_transform=[1]", "target_modules=.*[qv]_proj"),
        *("rank_pattern={q_proj: 4}", "alpha_pattern={.*_proj: 8.0}", "init_lora_weights=gaussian"),
    ],
)
@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_adapter_options_reach_peft_and_train(adapter, option, here):
    if option.startswith("quant") and adapter == "lora":
        return
    run = train(f"adapter={adapter}", f"adapter.{option}")
    config = json.loads((run.model_path / "adapter_config.json").read_text(encoding="utf-8"))
    assert losses(run)[-1] < losses(run)[0]
    expected = {"use_rslora": True, "use_dora": True, "lora_dropout": 0.1, "exclude_modules": ["down_proj"]}
    expected |= {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {".*_proj": 8.0}}
    name = option.partition("=")[0].replace("dropout", "lora_dropout")
    if name in expected:
        assert config[name] == expected[name]
    saved = load_file(run.model_path / "adapter_model.safetensors")
    if name == "target_modules":
        assert {key.split(".")[-3] for key in saved} == {"q_proj", "v_proj"}
    if name == "layers_to_transform":
        assert {key.partition("layers.")[2][0] for key in saved} == {"1"}
    assert run.status()["phase"] == "finished"
    assert not [event for event in run.events() if event["event"] == "warning"]


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_modules_to_save_are_trained_and_saved(module, here):
    run = train("adapter=lora", f"adapter.modules_to_save=[{module}]")
    saved = load_file(run.model_path / "adapter_model.safetensors")
    (name,) = [name for name in saved if module in name]
    original = load_file(here / "model" / "model.safetensors")
    (base,) = [tensor for key, tensor in original.items() if module in key]
    assert (saved[name] - base).abs().max() > 1e-3


def test_checkpointing_changes_no_loss(here):
    assert losses(train("train.gradient_checkpointing=true")) == pytest.approx(losses(train()), abs=1e-6)


def test_the_seed_decides_and_the_same_seed_repeats(here):
    first, again, other = (losses(train(f"train.seed={seed}")) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def rows_seen(*overrides):
    """The numbers asked for in the chats of rows.jsonl, in the order in which they are trained on."""
    tokenizer = make_tokenizer()
    seen = []

    def watch(model, inputs):
        if model.training and type(model).__name__ == "PeftModelForCausalLM":
            seen.extend(
                int(re.search(r"double (\d+)", text)[1]) for text in tokenizer.batch_decode(inputs["input_ids"])
            )

    with watching_models(watch):
        train(*overrides)
    return seen


def test_without_shuffling_rows_are_seen_in_the_order_of_the_data_each_epoch(here):
    in_order = [*range(32), *range(16)]
    assert rows_seen("data.shuffle=false") == in_order
    assert rows_seen("data.shuffle=false", "train.micro_batch_size=2", "train.seed=7") == in_order


def test_shuffled_rows_are_seen_once_an_epoch_in_another_order_each(here):
    seen = rows_seen("train.max_steps=8")
    first, second = seen[:32], seen[32:]
    assert sorted(first) == sorted(second) == list(range(32))
    assert len({tuple(first), tuple(second), tuple(range(32))}) == 3


def test_a_chat_template_of_the_recipe_is_trained_with_and_saved(here):
    own = TEMPLATE.replace("<|im_start|>", "<|im_start|>@")
    (here / "own.jinja").write_text(own, encoding="utf-8")
    run = train("model.chat_template=own.jinja")
    assert (run.model_path / "chat_template.jinja").read_text(encoding="utf-8") == own
    text = make_tokenizer().decode(read_dataset(run.path / "data" / "train.arrow")[0]["input_ids"])
    assert text.startswith("<|im_start|>@user\ndouble 0<|im_end|>")


def test_trainer_args_reach_the_trainer(here):
    plain = losses(train())
    noisy = losses(train("method.trainer_args={neftune_noise_alpha: 10}"))
    assert noisy[0] != plain[0]


def test_a_run_of_few_rows_takes_part_of_a_batch(here, tmp_path):
    (tmp_path / "few.jsonl").write_text((here / "rows.jsonl").read_text(encoding="utf-8").splitlines()[0] + "\n")
    run = train(f"data.train={tmp_path / 'few.jsonl'}", "train.num_epochs=2", "train.max_steps=null")
    assert run.plan.schedule.num_steps == 2
    assert len(losses(run)) == 2


def test_the_base_is_left_as_it_was_and_frozen(here):
    run = train("adapter=lora")
    names = load_file(run.model_path / "adapter_model.safetensors")
    assert all("lora_" in name for name in names)
    assert all(tensor.dtype == torch.float32 for tensor in names.values())
