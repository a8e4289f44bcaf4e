"""Prompt tuning: losses, gradients and answers beside plain PEFT, runs resumed and in several processes, refusals."""

from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler, set_seed
from trl.trainer.utils import add_fused_lm_head

import tunekit
from tests.processes import in_processes
from tests.tiny import save_chats, save_tiny_model, save_tiny_model_like, saved_weights
from tests.training.engines import made, work_in, worked
from tests.training.test_learning_rates import recipe_for
from tests.training.test_resume import STEPS, cut_off
from tunekit.errors import PlanError, RecipeError, RunError, TunekitError
from tunekit.estimates.memory.states import num_trainable_params, trained_bytes
from tunekit.inference.inference_model import Sampling, Trained, answer, load
from tunekit.methods.head import replace_heads
from tunekit.models.fusion.fuse import fuse
from tunekit.models.load import attach_adapter, load_model, num_trained
from tunekit.probe.model import probe_model
from tunekit.recipe.sections.adapters import PromptTuningAdapter
from tunekit.recipe.sections.model import ModelSection
from tunekit.runs.run import Run

NUM, RATE = 5, 3e-2
ADAPTER = {"type": "prompt_tuning", "num_virtual_tokens": NUM}
FAST = {"learning_rate": RATE}
TEXT = {**ADAPTER, "prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "double a number"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompt")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(20)))
    save_chats(folder / "held.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 3)) for n in range(20, 25)))
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    """A run that nothing interrupts, in one process."""
    run = Run(made(recipe_for(folder, ADAPTER, FAST)))
    worked(run.path)
    return run


def base_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)


def by_peft(base, seed, **fields):
    """Virtual tokens as PEFT begins with them, drawn by a seed."""
    set_seed(seed)
    fields = {"num_virtual_tokens": NUM, "prompt_tuning_init": "SAMPLE_VOCAB", **fields}
    return get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", **fields))


def padded(rows):
    """A batch of rows, padded on their right."""
    length = max(len(row["input_ids"]) for row in rows)
    columns = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    whole = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    return {
        name: torch.tensor([list(row[name]) + [padding] * (length - len(row[name])) for row in whole])
        for name, padding in columns.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "micro_batch_size", "kernels"),
    [("tiny", 2, "tunekit"), ("tiny", 8, "torch"), ("pico", 8, "tunekit"), ("pico", 1, "torch")],
)
def test_a_run_is_a_loop_with_plain_peft(model, micro_batch_size, kernels, folder):
    """Rows, rates and clipping as the run had them; PEFT's own loss of padded rows."""
    from tunekit.data.prepare import read_dataset
    from tunekit.files import SHIPPED_MODELS
    from tunekit.methods.run_trainer import Order

    recipe = recipe_for(folder, ADAPTER, {**FAST, "micro_batch_size": micro_batch_size})
    recipe["model"] = {"path": "pico" if model == "pico" else recipe["model"], "kernels": kernels}
    run = Run(made(recipe))
    worked(run.path)
    plan, rows = run.plan, read_dataset(run.path / "data" / "train.arrow")
    place = str(SHIPPED_MODELS["pico"]) if model == "pico" else folder / "model"
    peft = by_peft(AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32), plan.recipe.train.seed)
    (trained,) = parameters = [one for one in peft.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=plan.recipe.train.weight_decay)
    schedule, losses, norms = get_scheduler("cosine", optimizer, plan.schedule.warmup_steps, STEPS), [], []
    for epoch in range(2):
        order = list(Order(len(rows), 0, repeats=False, shuffle=True, seed=plan.recipe.train.seed).of_epoch(epoch))
        for start in range(0, len(order), 8):
            batch = padded(rows.select(order[start : start + 8]))
            assert (batch["labels"][:, 0] == -100).all()
            loss = peft(**batch, num_items_in_batch=(batch["labels"] != -100).sum()).loss
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.item())
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
            optimizer.step()
            schedule.step()
    logged = [event for event in run.events() if event["event"] == "log"]
    assert [event["loss"] for event in logged] == pytest.approx(losses, abs=1e-5)
    assert [event["grad_norm"] for event in logged] == pytest.approx(norms, rel=1e-4)
    assert losses[-1] < losses[0] - 0.1
    torch.testing.assert_close(saved_weights(run.model_path)["prompt_embeddings"], trained.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernels", ["torch", "tunekit"])
def test_loss_and_gradients_of_a_padded_batch_are_pefts_but_for_first_tokens(kernels, folder):
    torch.manual_seed(0)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 250, (3, 9)).tolist()]
    rows[1] = {name: row[:5] for name, row in rows[1].items()}
    batch, results = padded(rows), []
    for model in (by_peft(base_of(folder), 3), attach_adapter(base_of(folder), PromptTuningAdapter(**ADAPTER), seed=3)):
        if results and kernels == "tunekit":
            fuse(model, dtype=torch.float32)
        labels = batch["labels"].clone()
        labels[:, 0] = labels[:, 0] if results else -100
        loss = model(**{**batch, "labels": labels}).loss
        loss.backward()
        results.append((loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)))
    assert len(results[0]) == 2
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-5)


def test_our_head_scores_the_answers_of_every_row_of_a_micro_batch_as_pefts_logits_do(folder):
    torch.manual_seed(0)
    ids = torch.randint(0, 250, (3, 9))
    labels = ids.clone()
    labels[:, :4], labels[1, 7:] = -100, -100
    rows, positions = (labels[:, 1:] != -100).nonzero(as_tuple=True)
    scored = by_peft(base_of(folder), 3)(input_ids=ids).logits[:, NUM:].log_softmax(-1)
    expected = scored[rows, positions, ids[rows, positions + 1]]
    base = base_of(folder)
    add_fused_lm_head(base, outputs=("log_probs",))
    model = attach_adapter(base, PromptTuningAdapter(**ADAPTER), seed=3)
    replace_heads(SimpleNamespace(model=model))
    output = model(input_ids=ids, labels=labels, scored_positions=9 * rows + positions, fused_lm_head=True)
    torch.testing.assert_close(output.log_probs[rows, positions], expected, rtol=0, atol=1e-5)


def test_outputs_are_those_of_the_row_and_without_the_adapter_those_of_the_base(folder):
    base, ids = base_of(folder).eval(), torch.arange(12)[None]
    before = base(input_ids=ids).logits
    behind = by_peft(base_of(folder), 7).eval()(input_ids=ids).logits
    model = attach_adapter(base, PromptTuningAdapter(**ADAPTER), seed=7).eval()
    assert behind.shape[1] == NUM + 12
    assert torch.equal(model(input_ids=ids).logits, behind[:, NUM:])
    with model.disable_adapter():
        assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize("init", ["SAMPLE_VOCAB", "RANDOM", "TEXT"])
def test_virtual_tokens_begin_as_pefts(init, folder):
    fields = {"prompt_tuning_init": init}
    if init == "TEXT":
        fields["prompt_tuning_init_text"] = TEXT["prompt_tuning_init_text"]
    model = attach_adapter(base_of(folder), PromptTuningAdapter(num_virtual_tokens=NUM, **fields), seed=5)
    tokenizer = {"tokenizer_name_or_path": str(folder / "model")} if init == "TEXT" else {}
    expected = by_peft(base_of(folder), 5, **fields, **tokenizer).get_prompt(1)
    assert torch.equal(model.get_prompt(1), expected)
    if init == "TEXT":
        tokens = AutoTokenizer.from_pretrained(folder / "model")(TEXT["prompt_tuning_init_text"])["input_ids"][:NUM]
        assert torch.equal(expected[0], base_of(folder).get_input_embeddings()(torch.tensor(tokens)))


@pytest.mark.slow
def test_a_run_that_was_cut_off_resumes_to_the_bit(folder, alone):
    run = Run(made(recipe_for(folder, ADAPTER, FAST)))
    in_processes(1, cut_off, run.path)
    worked(run.path)
    expected, ours = saved_weights(alone.model_path), saved_weights(run.model_path)
    assert ours.keys() == expected.keys() == {"prompt_embeddings"}
    assert torch.equal(ours["prompt_embeddings"], expected["prompt_embeddings"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_two_processes_take_the_steps_of_one_and_resume(strategy, folder, alone):
    recipe = recipe_for(folder, ADAPTER, FAST, num_processes=2, strategy=strategy)
    run = Run(made(recipe))
    in_processes(2, cut_off, run.path)
    work_in(run.path, 2)
    torch.testing.assert_close(saved_weights(run.model_path), saved_weights(alone.model_path), rtol=0, atol=2e-5)


@pytest.fixture
def loaded(folder, alone):
    """The run's adapter by plain PEFT."""
    return PeftModel.from_pretrained(base_of(folder), alone.model_path).eval()


def greedy(model, ids, num):
    """Answer of transformers to one prompt without a cache, with which PEFT repeats virtual tokens."""
    inputs, options = torch.tensor([ids]), {"do_sample": False, "use_cache": False}
    with torch.no_grad():
        output = model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=num, **options)
    return output[0, len(ids) :].tolist()


def asked(tokenizer, text):
    return tokenizer(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]


@pytest.mark.slow
def test_answers_of_a_batch_and_of_a_chat_are_pefts_of_each_prompt_alone(folder, alone, loaded):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    prompts = ["double 4", "double 31", "double 5", "hi"]
    expected = [greedy(loaded, asked(tokenizer, prompt), 12) for prompt in prompts]
    without = greedy(base_of(folder).eval(), asked(tokenizer, prompts[0]), 12)
    answers = tunekit.generate(alone, prompts, max_new_tokens=12, device="cpu")
    assert [list(answer.ids) for answer in answers] == expected
    with tunekit.chat(alone, compare=True, device="cpu") as talk:
        said = ["".join(talk.say(message(prompts[0]), max_new_tokens=12, base=base)) for base in (False, True)]
    assert said == [tokenizer.decode(ids, skip_special_tokens=True) for ids in (expected[0], without)]
    assert said[0] != said[1]


def message(text):
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "opt", "bloom", "qwen3_moe"])
def test_generation_with_a_cache_and_padding_follows_the_logits_of_whole_rows(family, tmp_path):
    section = ModelSection(path=str(save_tiny_model_like(tmp_path, family)))
    model = load_model(section, dtype="float32", device="cpu")
    model = attach_adapter(model, PromptTuningAdapter(num_virtual_tokens=NUM), seed=0).eval()
    ids = torch.randint(5, 200, (2, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        output = model.generate(
            input_ids=ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options
        )
        for row, start in enumerate((0, 4)):
            for place, logits in enumerate(output.logits):
                before = output.sequences[row : row + 1, start : 11 + place]
                torch.testing.assert_close(logits[row], model(input_ids=before).logits[0, -1], rtol=0, atol=1e-5)
        with model.disable_adapter():
            bare = model.generate(input_ids=ids, attention_mask=mask, **options)
        assert torch.equal(bare, model.get_base_model().generate(input_ids=ids, attention_mask=mask, **options))


@pytest.mark.slow
def test_an_evaluation_is_of_pefts_logits_before_and_after(folder, alone, loaded):
    tokenizer, sums = AutoTokenizer.from_pretrained(folder / "model"), []
    for model, num in ((base_of(folder).eval(), 0), (loaded, NUM)):
        nats, count = 0.0, 0
        for n in range(20, 25):
            ids = asked(tokenizer, f"double {n}")
            whole = ids + tokenizer(f"{2 * n} it is" + "!" * (n % 3) + "<|im_end|>")["input_ids"]
            with torch.no_grad():
                likely = model(input_ids=torch.tensor([whole])).logits[0, num:].double().log_softmax(-1)
            nats -= sum(float(likely[place - 1, whole[place]]) for place in range(len(ids), len(whole)))
            count += len(whole) - len(ids)
        sums.append(nats / count)
    (loss,) = (score for score in tunekit.evaluate(alone, data=folder / "held.jsonl").scores if score.name == "loss")
    assert [loss.before.value, loss.after.value] == pytest.approx(sums, rel=1e-5)
    assert loss.after.value < loss.before.value - 0.1


@pytest.mark.slow
def test_an_exported_adapter_is_loaded_by_plain_peft_in_a_fresh_process_and_merging_is_refused(alone, tmp_path):
    exported = tunekit.export(alone, tmp_path / "adapter", kind="adapter")
    assert exported.check.logit_error < 1e-5 and exported.check.num_same_tokens == exported.check.num_tokens
    assert exported.check.adapter_change > 1e-2
    assert "use_cache=False" in exported.notes[-1] and "use_cache=False" in (tmp_path / "adapter/README.md").read_text()
    expected = saved_weights(alone.model_path)["prompt_embeddings"]
    assert torch.equal(saved_weights(tmp_path / "adapter")["prompt_embeddings"], expected)
    for kind in ("auto", "merged"):
        with pytest.raises(RunError, match="are no part of weights to be merged into") as caught:
            tunekit.export(alone, tmp_path / "merged", kind=kind)
        assert caught.value.hint == "export the adapter itself with --adapter"


@pytest.mark.slow
def test_finished_virtual_tokens_are_trained_further_and_not_merged(folder, alone):
    recipe = recipe_for(folder, TEXT, {**FAST, "max_steps": 1, "save_steps": 1})
    recipe["adapter"] = ADAPTER
    further = {**recipe, "model": str(alone.model_path)}
    assert tunekit.train(further).metrics()["loss"].iloc[0] < alone.metrics()["loss"].iloc[0] - 0.1
    with pytest.raises(PlanError, match="are no part of weights to be merged into") as caught:
        tunekit.plan({**further, "adapter": "full"})
    assert caught.value.hint == "use adapter.type=prompt_tuning, which continues training them"
    with pytest.raises(RecipeError, match=r"adapter.num_virtual_tokens: 7 here, but 5 in the adapter"):
        tunekit.plan({**further, "adapter": {**ADAPTER, "num_virtual_tokens": 7}})


@pytest.mark.slow
def test_a_run_holds_what_is_planned(alone, folder):
    parts = alone.plan.memory.parts
    held = alone.result()["held_bytes"]
    # The peak is in the forward pass, before there are gradients.
    assert held.pop("gradients") == 4 * NUM * 48
    assert {name: parts[name] for name in held} == held
    section = ModelSection(path=str(folder / "model"))
    model = attach_adapter(load_model(section, dtype="float32", device="cpu"), PromptTuningAdapter(**ADAPTER), seed=0)
    facts, adapter = probe_model(section), PromptTuningAdapter(**ADAPTER)
    assert num_trainable_params(facts, adapter) == num_trained(model) == NUM * 48
    assert trained_bytes(facts, adapter, "adamw_torch")[0] == 4 * NUM * 48


def test_activations_and_positions_of_virtual_tokens_are_planned(folder):
    def planned(length, num, size=1):
        recipe = recipe_for(folder, {**ADAPTER, "num_virtual_tokens": num}, {"micro_batch_size": size})
        recipe["data"]["max_length"] = length
        return tunekit.plan(recipe)

    for size in (1, 4):
        parts = planned(64, 20, size).memory.parts, planned(74, 10, size).memory.parts
        assert parts[0]["activations"] == parts[1]["activations"] > planned(64, 10, size).memory.parts["activations"]
    planned(236, 20)
    with pytest.raises(PlanError, match="237 behind 20 virtual tokens exceeds the 256 positions") as caught:
        planned(237, 20)
    assert caught.value.hint.startswith("set it to 236 or less")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"packing": True}}, "data.packing: unsupported with adapter.type prompt_tuning: only the first"),
        ({"data": {"padding_free": True}}, "data.padding_free: unsupported with adapter.type prompt_tuning"),
        ({"method": "dpo"}, "unsupported with method dpo: virtual tokens change the model before training"),
        ({"method": "kto"}, "unsupported with method kto: virtual tokens change the model before training"),
        ({"method": "orpo"}, "unsupported with method orpo: untested"),
        ({"method": "reward"}, "unsupported with method reward: the score is read at the last token"),
        (
            {"method": {"type": "grpo", "rewards": ["numeric_match"], "max_completion_length": 8}},
            "unsupported with method grpo: prompts are padded on the left",
        ),
        ({"adapter": {"prompt_tuning_init": "TEXT"}}, "prompt_tuning_init_text: required with prompt_tuning_init TEXT"),
        ({"adapter": {"prompt_tuning_init_text": "hi"}}, "has no effect without prompt_tuning_init TEXT"),
        ({"adapter": {"target_modules": ["q_proj"]}}, "adapter.target_modules"),
        ({"model": {"add_tokens": ["<tool>"]}}, "prompt_tuning does not train the rows of the tokens"),
        ({"parallel": {"strategy": "fsdp2", "num_processes": 2}}, "a lookup in their table, which fsdp2 shards"),
        ({"parallel": {"strategy": "zero3", "num_processes": 2}}, "a lookup in their table, which zero3 shards"),
        ({"parallel": {"cp_size": 2, "num_processes": 2}}, "virtual tokens would be put before each part"),
        ({"train": {"optim": "muon"}}, "updates only matrices of layers, and adapter.type prompt_tuning trains none"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, words, folder):
    recipe = recipe_for(folder, {**ADAPTER, **changes.pop("adapter", {})}, FAST)
    recipe["model"] = {"path": recipe["model"], **changes.get("model", {})}
    recipe["method"] = changes.get("method", "sft")
    for name in ("data", "train", "parallel"):
        recipe[name] |= changes.get(name, {})
    with pytest.raises(TunekitError) as caught:
        tunekit.plan(recipe)
    assert words in f"{caught.value}; {caught.value.hint}"


def test_models_that_look_token_ids_up_are_refused(folder):
    recipe = recipe_for(folder, ADAPTER, FAST)
    with pytest.raises(PlanError, match="PEFT passes embeddings, and its code places images by token IDs"):
        tunekit.plan({**recipe, "model": "pico-vision"})


def test_nothing_is_padded_between_virtual_tokens_and_a_prompt_which_layers_with_a_state_would_see(folder, tmp_path):
    section = PromptTuningAdapter(num_virtual_tokens=NUM)
    attach_adapter(base_of(folder), section, seed=0).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(tmp_path)
    found = Trained("tiny", ModelSection(path=str(folder / "model")), section, str(tmp_path))
    loaded = load(found, device="cpu", dtype="float32")
    generate, masks = loaded.model.generate, []

    def watched(**inputs):
        masks.append(inputs["attention_mask"])
        return generate(**inputs)

    loaded.model.generate = watched
    prompts = [[7, 8, 9], [5, 6], [1, 2, 3]]
    answers = dict(answer(loaded, prompts, Sampling(0.0, 1.0, 4)))
    assert sorted(answers) == [0, 1, 2] and [tuple(mask.shape) for mask in masks] == [(2, 3), (1, 2)]
    assert all(mask.all() for mask in masks)
