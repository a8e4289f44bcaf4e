"""Online DPO on a tiny model: with each adapter, cut off and resumed, and its gradients by TRL's OnlineDPOTrainer."""

from collections import defaultdict
from zlib import crc32

import pytest
import torch
from datasets import Dataset

import tunekit
from tests.tiny import make_tokenizer, save_jsonl, save_tiny_model
from tests.training.watching import cut_off_and_resumed, last_words, logged
from tunekit.errors import RecipeError
from tunekit.methods.online_dpo import OnlineDPOTrainer, Pairs

RECIPE = """
model: model
data: {train: prompts.jsonl, max_length: 64}
method:
  type: online_dpo
  rewards: [tests.training.test_online_dpo:low]
  max_completion_length: 12
adapter: full
train: {max_steps: 10, global_batch_size: 8, learning_rate: 1e-2, save_steps: 4}
output: {sample_prompts: []}
"""


def low(completions, **columns):
    return [sum(letter < "@" for letter in completion) / 16 for completion in completions]


def unlike(completions, **columns):
    return [crc32(completion.encode()) / 2**32 for completion in completions]


def same(completions, **columns):
    return [1.0] * len(completions)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("online_dpo")
    save_tiny_model(folder / "model")
    rows = [{"prompt": f"double {n}", "answer": 2 * n} for n in range(8)]
    save_jsonl(folder / "prompts.jsonl", rows)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.mark.sample(1)
@pytest.mark.parametrize("adapter", ["lora", "full", "qlora"])
def test_the_reward_rises(recipe, adapter):
    changes = ["train.max_steps=16", "train.global_batch_size=16", "train.save_steps=null", "method.beta=0.02"]
    run = tunekit.train(recipe, [f"adapter={adapter}", *changes])
    steps = list(logged(run))
    first, last = (sum(step["reward"] for step in part) / 4 for part in (steps[:4], steps[-4:]))
    assert last > first + 0.02
    assert {"rewards/chosen", "rewards/rejected", "rewards/margins", "kl", "entropy"} <= steps[-1].keys()


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on_with_the_same_completions(recipe):
    whole = last_words(tunekit.train(recipe))
    resumed = last_words(cut_off_and_resumed(recipe, after=9))
    for name in ("loss", "grad_norm", "reward", "kl"):
        assert [resumed[step][name] for step in range(1, 11)] == [whole[step][name] for step in range(1, 11)], name


def test_groups_with_equal_rewards_do_not_change_the_model(recipe):
    run = tunekit.train(recipe, ["method.rewards=[tests.training.test_online_dpo:same]", "train.max_steps=2"])
    for step in logged(run):
        assert step["loss"] == step["grad_norm"] == 0
        assert "rewards/margins" not in step


def plain(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@pytest.fixture
def steps_of(recipe, monkeypatch):
    """Trains two steps, and returns of each the weights before it, its micro-batches, its loss and its gradients."""
    steps = []
    step, compute = OnlineDPOTrainer.training_step, OnlineDPOTrainer._compute_loss

    def see_inputs(trainer, model, inputs):
        named = trainer.model.named_parameters()
        if trainer._step % trainer.args.gradient_accumulation_steps == 0:
            steps.append(({name: value.detach().double() for name, value in named}, [], [], {}))
        steps[-1][1].append({name: value.clone() for name, value in inputs.items() if torch.is_tensor(value)})
        return compute(trainer, model, inputs)

    def see(trainer, *args):
        loss = step(trainer, *args)
        steps[-1][2].append(loss.item())
        steps[-1][3].update({name: value.grad.double() for name, value in trainer.model.named_parameters()})
        return loss

    monkeypatch.setattr(OnlineDPOTrainer, "_compute_loss", see_inputs)
    monkeypatch.setattr(OnlineDPOTrainer, "training_step", see)

    def train(*changes):
        changes = ("train.max_steps=2", "train.warmup_steps=0", "train.save_steps=null", *changes)
        tunekit.train(
            recipe, ["method.rewards=[tests.training.test_online_dpo:unlike]", "train.micro_batch_size=2", *changes]
        )
        return steps

    return train


def groups_of(batches, tokenizer):
    """Return token ids of prompt and completion, and the reward, of all completions by their prompts."""
    groups = defaultdict(list)
    for batch in batches:
        for row in range(len(batch["prompt_ids"])):
            prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
            answer = batch["completion_ids"][row][batch["completion_mask"][row].bool()].tolist()
            (value,) = unlike([tokenizer.decode(answer, skip_special_tokens=True)])
            groups[tuple(prompt)].append((value, answer))
    return groups


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("loss_type", "num_generations", "beta", "temperature"),
    [("sigmoid", 2, 0.1, 1.0), ("sigmoid", 4, 0.5, 0.7), ("ipo", 2, 0.2, 1.0), ("ipo", 4, 0.1, 1.5)],
)
def test_loss_and_gradients_are_those_of_trls_trainer_in_float64(
    steps_of, tmp_path, loss_type, num_generations, beta, temperature
):
    from trl.experimental.online_dpo import OnlineDPOConfig
    from trl.experimental.online_dpo import OnlineDPOTrainer as TRLTrainer

    steps = steps_of(
        f"method.loss_type={loss_type}",
        f"method.num_generations={num_generations}",
        f"method.beta={beta}",
        f"method.generation.temperature={temperature}",
    )
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"

    class Given(TRLTrainer):
        def _generate(self, model, prompts, images):
            return *self.generated, None

    args = OnlineDPOConfig(
        output_dir=str(tmp_path),
        beta=beta,
        loss_type=loss_type,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_dropout=True,
    )
    model = plain("model")
    trainer = Given(
        model=model,
        ref_model=plain("model"),
        reward_funcs=lambda completions, **columns: unlike(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "double"}]),
        processing_class=tokenizer,
    )
    assert len(steps) == 2
    for weights, batches, losses, grads in steps:
        groups = groups_of(batches, tokenizer)
        pairs = [(list(prompt), max(group)[1], min(group)[1]) for prompt, group in groups.items()]
        assert len(pairs) == 8 // num_generations
        assert all(max(group)[0] > min(group)[0] for group in groups.values())
        prompts = [prompt for prompt, _, _ in pairs] * 2
        answers = [best for _, best, _ in pairs] + [worst for _, _, worst in pairs]
        padded = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        width = max(map(len, answers))
        ids = torch.tensor([answer + [tokenizer.pad_token_id] * (width - len(answer)) for answer in answers])
        mask = torch.tensor([[1] * len(answer) + [0] * (width - len(answer)) for answer in answers])
        trainer.generated = padded["input_ids"], padded["attention_mask"], ids, mask
        model.load_state_dict(weights, strict=False)
        model.zero_grad()
        loss = trainer.training_step(model, {"prompt": ["double"] * len(pairs)}) * args.gradient_accumulation_steps
        assert sum(losses) == pytest.approx(loss.item(), rel=1e-5, abs=2e-6)
        for name, parameter in model.named_parameters():
            assert (grads[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm() + 1e-6, name


def test_completions_without_a_reward_are_in_no_pair():
    rewards = torch.tensor([[torch.nan, 1.0, 3.0], [torch.nan, torch.nan, 2.0], [torch.nan] * 3, [1.0, 1.0, 1.0]])
    ratios = torch.randn(4, 3)
    pairs = Pairs.of(rewards, ratios)
    assert pairs.differ.flatten().tolist() == [True, False, False, False]
    losses, slopes = pairs.losses("sigmoid", 0.1)
    assert torch.equal(losses[0] != 0, torch.tensor([False, True, True]))
    assert torch.equal(losses[1:], torch.zeros(3, 3))
    assert torch.equal(slopes[1:], torch.zeros(3, 3))
    assert slopes[0, 2] < 0 < slopes[0, 1]


@pytest.mark.slow
def test_masked_completions_are_in_no_pair(recipe):
    # Completions of a random model end by chance alone.
    changes = ["method.mask_truncated_completions=true", "method.max_completion_length=1", "train.max_steps=2"]
    run = tunekit.train(recipe, ["method.rewards=[tests.training.test_online_dpo:unlike]", *changes])
    for step in logged(run):
        assert step["loss"] == 0 or step["completions/clipped_ratio"] < 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("method.beta=0", r"method\.beta"),
        ("method.num_iterations=2", r"method\.num_iterations"),
        ("method.num_generations=3", r"method\.num_generations: 3 does not divide train\.global_batch_size 8"),
        (
            "method.trainer_args={scale_rewards: none}",
            r"scale_rewards: set by tunekit; not used by the loss",
        ),
        ("method.trainer_args={num_iterations: 2}", r"num_iterations: set by tunekit; completions are trained on once"),
        (
            "method.trainer_args={disable_dropout: false}",
            r"disable_dropout: set by tunekit; the loss",
        ),
    ],
)
def test_settings_that_it_cannot_honour_are_refused(recipe, change, problem):
    with pytest.raises(RecipeError, match=problem):
        tunekit.plan(recipe, [change])
