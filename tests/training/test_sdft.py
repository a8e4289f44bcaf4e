"""Self-distillation on a tiny model: each teacher and adapter, resumed, and gradients by TRL's SDFTTrainer."""

import pytest
import torch
from datasets import Dataset

import tunekit
from tests.tiny import make_tokenizer, save_jsonl, save_tiny_model
from tests.training.watching import cut_off_and_resumed, last_words, logged
from tunekit.errors import RecipeError, TunekitError
from tunekit.methods.sdft import SDFTTrainer

RECIPE = """
model: model
data: {train: prompts.jsonl, max_length: 64}
method: {type: sdft, max_completion_length: 12}
adapter: full
train: {max_steps: 10, global_batch_size: 8, learning_rate: 1e-2, save_steps: 4}
output: {sample_prompts: []}
"""
ROWS = [{"prompt": f"double {n}", "privileged_context": f"it is {2 * n}"} for n in range(8)]
CHATS = [
    {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": "4"}]} for row in ROWS
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdft")
    save_tiny_model(folder / "model")
    save_jsonl(folder / "prompts.jsonl", ROWS)
    save_jsonl(folder / "chats.jsonl", CHATS)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["base", "live"])
@pytest.mark.parametrize("adapter", ["lora", "full", "qlora"])
def test_the_divergence_falls(recipe, kind, adapter):
    changes = [f"adapter={adapter}", f"method.teacher_model_kind={kind}", "train.save_steps=null", "train.max_steps=16"]
    rate = 1e-3 if adapter == "full" else 1e-2
    steps = list(logged(tunekit.train(recipe, [*changes, f"train.learning_rate={rate}"])))
    first, last = (sum(step["loss"] for step in part) / 4 for part in (steps[:4], steps[-4:]))
    assert last < 0.95 * first
    assert {"entropy", "completions/mean_length", "completions/clipped_ratio"} <= steps[-1].keys()


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_a_run_that_was_cut_off_goes_on_with_the_same_completions(recipe, adapter):
    source = recipe.with_name(f"{adapter}.yaml")
    source.write_text(RECIPE.replace("full", adapter))
    whole = last_words(tunekit.train(source))
    resumed = last_words(cut_off_and_resumed(source, after=9))
    for name in ("loss", "grad_norm", "entropy"):
        assert [resumed[step][name] for step in range(1, 11)] == [whole[step][name] for step in range(1, 11)], name


@pytest.fixture
def steps_of(recipe, monkeypatch):
    """Trains two steps, and returns of each the weights before it, its micro-batches, its loss and its gradients."""
    steps = []
    step, compute = SDFTTrainer.training_step, SDFTTrainer._compute_loss

    def see_inputs(trainer, model, inputs, num_items):
        if trainer._step % trainer.args.gradient_accumulation_steps == 0:
            named = trainer.model.named_parameters()
            steps.append(({name: value.detach().double() for name, value in named}, [], [], {}))
        steps[-1][1].append({name: value.clone() for name, value in inputs.items()})
        return compute(trainer, model, inputs, num_items)

    def see(trainer, *args):
        loss = step(trainer, *args)
        steps[-1][2].append(loss.item())
        steps[-1][3].update({name: value.grad.double() for name, value in trainer.model.named_parameters()})
        return loss

    monkeypatch.setattr(SDFTTrainer, "_compute_loss", see_inputs)
    monkeypatch.setattr(SDFTTrainer, "training_step", see)

    def train(*changes):
        few = ["train.max_steps=2", "train.warmup_steps=0", "train.save_steps=null", "train.micro_batch_size=2"]
        tunekit.train(recipe, [*few, *changes])
        return steps

    return train


def plain():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained("model", dtype=torch.float64)


def completions_of(batches):
    """Return token ids of each prompt and completion, without padding."""
    for batch in batches:
        for row in range(len(batch["prompt_ids"])):
            names = ("prompt", "completion")
            yield tuple(batch[f"{name}_ids"][row][batch[f"{name}_mask"][row].bool()].tolist() for name in names)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("data", "kind", "beta", "temperature", "num_skipped"),
    [
        ("prompts", "base", 1.0, 1.0, 0),
        ("chats", "live", 0.3, 0.7, 2),
        ("chats", "base", 0.0, 1.0, 0),
        ("prompts", "live", 1.0, 1.5, 1),
    ],
)
def test_loss_and_gradients_are_those_of_trls_trainer_in_float64(
    steps_of, tmp_path, data, kind, beta, temperature, num_skipped
):
    from trl.experimental.sdft import SDFTConfig
    from trl.experimental.sdft import SDFTTrainer as TRLTrainer

    template = "{prompt}! For instance: {privileged_context}"
    steps = steps_of(
        f"data.train={data}.jsonl",
        f"method.teacher_model_kind={kind}",
        f"method.beta={beta}",
        f"method.generation.temperature={temperature}",
        f"method.num_loss_tokens_to_skip={num_skipped}",
        f"method.teacher_prompt_template='{template}'",
    )
    prompts = [row["prompt"] for row in ROWS]
    contexts = [row["privileged_context"] for row in ROWS]
    if data == "chats":
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
        contexts = ["4"] * len(prompts)
    tokenizer = make_tokenizer()

    class Given(TRLTrainer):
        def _generate(self, prompt_ids):
            return prompt_ids, [self.generated]

    args = SDFTConfig(
        output_dir=str(tmp_path),
        distillation_mode="full_logits",
        distillation_alpha=beta,
        teacher_model_kind=kind,
        teacher_prompt_template=template,
        num_loss_tokens_to_skip=num_skipped,
        temperature=temperature,
        per_device_train_batch_size=2,
        num_generations=2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    rows = [{"prompt": prompt, "privileged_context": text} for prompt, text in zip(prompts, contexts, strict=True)]
    model = plain()
    trainer = Given(model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    row_of = {tuple(trainer._tokenize_prompts([row["prompt"]])[0]): row for row in rows}
    assert len(steps) == 2
    for weights, batches, losses, grads in steps:
        model.load_state_dict(weights, strict=False)
        if kind == "live":
            trainer.teacher_model.load_state_dict(weights, strict=False)
        model.zero_grad()
        counted = [(row_of[tuple(prompt)], answer) for prompt, answer in completions_of(batches)]
        counted = [(row, answer) for row, answer in counted if len(answer) > num_skipped]
        assert len(counted) > 4
        num_tokens = sum(len(answer) - num_skipped for _, answer in counted)
        total = 0.0
        for row, answer in counted:
            trainer.generated = answer
            loss = trainer.compute_loss(model, trainer._prepare_training_batch([row]))
            share = loss * (len(answer) - num_skipped) / num_tokens
            share.backward()
            total += share.item()
        assert sum(losses) == pytest.approx(total, rel=1e-5, abs=2e-6)
        for name, parameter in model.named_parameters():
            assert (grads[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm() + 1e-6, name


@pytest.mark.slow
def test_an_adapter_that_is_trained_further_is_the_teacher_as_it_was(recipe):
    first = tunekit.train(recipe, ["adapter=lora", "train.max_steps=3", "output.name=first"])
    changes = [f"model={first.model_path}", "train.max_steps=3", "train.warmup_steps=0"]
    kinds = ("base", "live")
    runs = [tunekit.train(recipe, ["adapter=lora", *changes, f"method.teacher_model_kind={kind}"]) for kind in kinds]
    base, live = ([step["loss"] for step in logged(run)] for run in runs)
    assert runs[0].plan.reference == "copied adapter"
    # The copy is the adapter before the first step, and is not trained with it.
    assert base[0] == pytest.approx(live[0], rel=1e-6)
    assert base[2] != pytest.approx(live[2], rel=1e-3)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("method.num_generations=4", r"method\.num_generations"),
        ("method.teacher_prompt_template='{prompt}'", r"lacks \{privileged_context\}"),
        ("method.teacher_prompt_template='{privileged_context} {answer}'", r"unknown field \{answer\}"),
        ("method.teacher_prompt_template='{privileged_context} {'", r"cannot be read as a template"),
        ("method.num_loss_tokens_to_skip=12", r"num_loss_tokens_to_skip: 12 leaves nothing"),
        ("method.max_completion_length=64", r"max_completion_length: 64 leaves no room"),
        ("method.trainer_args={disable_dropout: false}", r"disable_dropout: set by tunekit"),
        ("data.packing=true", r"data\.packing: unsupported with method sdft"),
        ("method.teacher=pico", r"method\.teacher"),
    ],
)
def test_settings_that_it_cannot_honour_are_refused(recipe, change, problem):
    with pytest.raises(RecipeError, match=problem):
        tunekit.plan(recipe, [change])


def test_dropout_of_an_adapter_is_refused(recipe):
    with pytest.raises(RecipeError, match=r"adapter\.dropout: unsupported with method sdft"):
        tunekit.plan(recipe, ["adapter={type: lora, dropout: 0.1}"])


def chat(*turns):
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "double 2"}, r"rows\.jsonl:9: privileged_context is missing"),
        ({"prompt": "double 2", "privileged_context": 4}, r"rows\.jsonl:9: privileged_context is not a text"),
        ({"prompt": "double 2", "privileged_context": " "}, r"rows\.jsonl:9: the demonstration has no text"),
    ],
)
def test_a_row_without_a_demonstration_is_named(recipe, tmp_path, row, problem):
    save_jsonl(tmp_path / "rows.jsonl", [*ROWS, row])
    with pytest.raises(TunekitError, match=problem):
        tunekit.check(recipe, [f"data.train={tmp_path / 'rows.jsonl'}"])


def test_a_prompt_too_long_for_the_teacher_is_left_out(recipe, tmp_path):
    save_jsonl(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "double 2", "privileged_context": "4 " * 40}])
    notes = []
    tunekit.train(
        recipe,
        [f"data.train={tmp_path / 'rows.jsonl'}", "train.max_steps=1"],
        on_event=lambda event: notes.extend(event["notes"]) if event["event"] == "plan" else None,
    )
    assert any("1 row skipped: prompt longer than 52 tokens" in note for note in notes)
    preview = tunekit.preview(recipe, [f"data.train={tmp_path / 'rows.jsonl'}"], num_rows=9)
    assert [row.left_out for row in preview.rows] == [None] * 8 + ["prompt longer than 52 tokens"]
