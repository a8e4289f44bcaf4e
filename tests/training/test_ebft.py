"""Energy-based fine-tuning on a tiny model: rewards by the paper's formula, features by plain Transformers, runs."""

import math

import pytest
import torch

import tunekit
from tests.tiny import make_tokenizer, save_jsonl, save_tiny_model
from tests.training.watching import cut_off_and_resumed, last_words, logged
from tunekit.errors import RecipeError, RunError, TunekitError
from tunekit.methods.ebft.features import feature_rewards, layer_indices, pooled
from tunekit.methods.ebft.trainer import EBFTTrainer

RECIPE = """
model: model
data: {train: prompts.jsonl, max_length: 64}
method: {type: ebft, max_completion_length: 12, num_generations: 4}
adapter: full
train: {max_steps: 10, global_batch_size: 8, learning_rate: 1e-2, save_steps: 4}
output: {sample_prompts: []}
"""
ROWS = [{"prompt": f"double {n}", "ground_truth": f"it is {2 * n}"} for n in range(8)]
CHATS = [
    {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["ground_truth"]}]}
    for row in ROWS
]
METHODS = ("last_token", "mean_pooling", "completion_mean", "concat")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ebft")
    save_tiny_model(folder / "model")
    save_jsonl(folder / "prompts.jsonl", ROWS)
    save_jsonl(folder / "chats.jsonl", CHATS)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def dot(first, second):
    return math.fsum(a * b for a, b in zip(first, second, strict=True))


def unit(vector):
    return [value / math.sqrt(dot(vector, vector)) for value in vector]


@pytest.mark.parametrize(("alignment_coef", "diversity_coef"), [(1.0, 1.0), (0.5, 2.0), (1.0, 0.0)])
def test_rewards_are_those_of_the_paper_in_float64(alignment_coef, diversity_coef):
    generator = torch.Generator().manual_seed(3)
    own = torch.randn(3 * 4, 7, generator=generator, dtype=torch.float64)
    answers = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    outcome = feature_rewards(
        own, answers, alignment_coef=alignment_coef, diversity_coef=diversity_coef, use_whitening=False
    )
    for prompt in range(3):
        group = [unit(row) for row in own[4 * prompt : 4 * prompt + 4].tolist()]
        answer = unit(answers[prompt].tolist())
        for place, row in enumerate(group):
            products = [dot(row, other) for number, other in enumerate(group) if number != place]
            reward = 2 * alignment_coef * dot(row, answer) - 2 * diversity_coef * sum(products) / 3
            assert outcome.rewards[4 * prompt + place].item() == pytest.approx(reward, abs=1e-12)
        mean = [sum(values) / 4 for values in zip(*group, strict=True)]
        gap = [a - b for a, b in zip(mean, answer, strict=True)]
        assert outcome.cfm_loss[prompt].item() == pytest.approx(dot(gap, gap), abs=1e-12)


def test_the_rewards_of_a_group_are_an_estimate_of_the_distance_from_the_answer():
    """The mean of 2 <e_j, e> - <e_j, e_i> over pairs is 1 - ||E e_j - e||^2: of many completions that of their mean."""
    generator = torch.Generator().manual_seed(4)
    own = torch.randn(500, 6, generator=generator, dtype=torch.float64) + 1
    answer = torch.randn(1, 6, generator=generator, dtype=torch.float64)
    outcome = feature_rewards(own, answer, alignment_coef=1.0, diversity_coef=0.5, use_whitening=False)
    assert outcome.rewards.mean().item() == pytest.approx(1 - outcome.cfm_loss.item(), abs=0.01)


@pytest.mark.parametrize("repeats", [False, True])
def test_whitened_completions_are_orthogonal_unless_they_repeat(repeats):
    """The projection by eigenvectors of the second moments, with numpy: `phi (phi^T phi)^(-1/2)` on their span."""
    import numpy

    generator = torch.Generator().manual_seed(5)
    own = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    if repeats:
        own[3] = own[2]
    answer = torch.randn(1, 9, generator=generator, dtype=torch.float64)
    outcome = feature_rewards(own, answer, alignment_coef=1.0, diversity_coef=1.0, use_whitening=True)
    values, vectors = numpy.linalg.eigh(own.numpy().T @ own.numpy())
    inverse = numpy.where(values > 1e-9, 1 / numpy.sqrt(numpy.maximum(values, 1e-300)), 0)
    white = vectors @ numpy.diag(inverse) @ vectors.T
    group, target = own.numpy() @ white, (answer.numpy() @ white)[0]
    for place, row in enumerate(group):
        cosine = row @ target / numpy.linalg.norm(row) / numpy.linalg.norm(target)
        products = [row @ other for number, other in enumerate(group) if number != place]
        assert outcome.alignment[place].item() == pytest.approx(cosine, abs=1e-7)
        assert outcome.diversity[place].item() == pytest.approx(sum(products) / 3, abs=1e-7)
    is_repeated = [repeats and place > 1 for place in range(4)]
    assert [value > 0.1 for value in outcome.diversity.tolist()] == is_repeated


def test_layers_are_rounded_down_as_fractions_of_the_depth():
    assert layer_indices([0.25, 0.5, 0.75], 32) == [8, 16, 24]
    assert layer_indices([0, 0.3, 1], 7) == [0, 2, 7]


def test_a_mean_over_an_answer_without_tokens_is_zero():
    hidden = torch.ones(1, 3, 2)
    two = torch.tensor([2])
    assert pooled(hidden, two, two, "completion_mean").tolist() == [[0.0, 0.0]]
    assert pooled(hidden, two, two, "mean_pooling").tolist() == [[1.0, 1.0]]


def embedding_of(model, prompt_ids, answer_ids, method):
    """Return the embedding of one sequence by plain Transformers: nothing is padded."""
    with torch.no_grad():
        states = model(torch.tensor([[*prompt_ids, *answer_ids]]), output_hidden_states=True).hidden_states
    num_layers, length = model.config.num_hidden_layers, len(prompt_ids) + len(answer_ids)
    hidden = torch.cat([states[int(fraction * num_layers)][0] for fraction in (0.25, 0.5, 0.75)], dim=-1)
    if method == "last_token":
        return hidden[-1]
    if method == "mean_pooling":
        return hidden.mean(0)
    if method == "completion_mean":
        return hidden[len(prompt_ids) :].mean(0) if answer_ids else torch.zeros(hidden.size(1))
    return torch.cat([hidden[length // 4], hidden[length // 2], hidden[3 * length // 4]])


@pytest.fixture
def rewarded(recipe, monkeypatch):
    """Trains two steps, and returns of each its prompts, completions and rewards."""
    seen_calls = []
    features = EBFTTrainer.features

    def see(trainer, **given):
        rewards = features(trainer, **given)
        seen_calls.append((trainer._tokenize_prompts(given["prompts"])[0], given, rewards))
        return rewards

    see.__name__ = "features"
    monkeypatch.setattr(EBFTTrainer, "features", see)

    def train(*changes):
        few = ["train.max_steps=3", "train.warmup_steps=0", "train.save_steps=null", "train.micro_batch_size=2"]
        run = tunekit.train(recipe, [*few, *changes])
        return run, seen_calls

    return train


@pytest.mark.sample(2)
@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("method", METHODS)
def test_rewards_of_a_run_are_those_of_the_model_before_training(rewarded, adapter, method):
    from transformers import AutoModelForCausalLM

    _, calls = rewarded(f"adapter={adapter}", f"method.embed_method={method}", "data.train=chats.jsonl")
    model, tokenizer = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32).eval(), make_tokenizer()
    assert len(calls) == 3
    for prompt_ids, given, rewards in calls:
        ends = (tokenizer.eos_token_id,)
        completions = [ids[:-1] if ids[-1] in ends else ids for ids in map(list, given["completion_ids"])]
        own = [embedding_of(model, *pair, method) for pair in zip(prompt_ids, completions, strict=True)]
        answers = [
            embedding_of(model, ids, tokenizer(text, add_special_tokens=False)["input_ids"], method)
            for ids, text in zip(prompt_ids, given["ground_truth"], strict=True)
        ]
        for place, reward in enumerate(rewards):
            start = place // 4 * 4
            group = [unit(own[number].tolist()) for number in range(start, start + 4)]
            row = group.pop(place - start)
            expected = 2 * dot(row, unit(answers[place].tolist())) - 2 * sum(dot(row, other) for other in group) / 3
            assert reward == pytest.approx(expected, abs=2e-5)


def test_advantages_are_rewards_less_their_mean_over_their_deviation(rewarded, monkeypatch):
    advantages = []
    compute = EBFTTrainer._compute_loss

    def see(trainer, model, inputs):
        advantages.append(inputs["advantages"].tolist())
        return compute(trainer, model, inputs)

    monkeypatch.setattr(EBFTTrainer, "_compute_loss", see)
    _, calls = rewarded("train.max_steps=1")
    expected = []
    for start in (0, 4):
        group = torch.tensor(calls[0][2][start : start + 4], dtype=torch.float64)
        expected += ((group - group.mean()) / (group.std() + 1e-4)).tolist()
    # TRL shuffles the completions of a step before it trains on them.
    assert sorted(value for batch in advantages for value in batch) == pytest.approx(sorted(expected), abs=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("adapter", ["lora", "full", "qlora"])
def test_the_reward_rises(recipe, adapter):
    changes = [
        f"adapter={adapter}",
        "train.save_steps=null",
        "train.max_steps=30",
        "method.embed_method=completion_mean",
        "method.max_completion_length=6",
        "method.diversity_coef=0",
        "train.global_batch_size=32",
        "method.num_generations=8",
        "train.warmup_steps=0",
    ]
    steps = list(logged(tunekit.train(recipe, changes)))
    first, last = (sum(step["reward"] for step in part) / 5 for part in (steps[:5], steps[-5:]))
    assert last > first + 0.05
    assert {"ebft/alignment", "ebft/diversity", "ebft/cfm_loss", "rewards/features/mean"} <= steps[-1].keys()
    assert steps[-1]["reward"] == pytest.approx(2 * steps[-1]["ebft/alignment"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_a_run_that_was_cut_off_goes_on_with_the_same_rewards(recipe, adapter):
    source = recipe.with_name(f"{adapter}.yaml")
    source.write_text(RECIPE.replace("full", adapter).replace("type: ebft", "type: ebft, beta: 0.1"))
    whole = last_words(tunekit.train(source))
    resumed = last_words(cut_off_and_resumed(source, after=9))
    for name in ("loss", "grad_norm", "reward", "kl"):
        assert [resumed[step][name] for step in range(1, 11)] == [whole[step][name] for step in range(1, 11)], name


@pytest.mark.slow
def test_an_adapter_that_is_trained_further_has_the_features_that_it_began_with(recipe):
    first = tunekit.train(recipe, ["adapter=lora", "train.max_steps=3", "output.name=first"])
    changes = [f"model={first.model_path}", "adapter=lora", "train.max_steps=3", "method.beta=0.1"]
    run = tunekit.train(recipe, changes)
    assert run.plan.reference == "copied adapter"
    steps = list(logged(run))
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["kl"] > 1e-6


def test_other_rewards_are_added(recipe):
    save_jsonl(recipe.with_name("answers.jsonl"), [{**row, "pattern": "a"} for row in ROWS])
    changes = ["train.max_steps=1", "train.save_steps=null", "data.train=answers.jsonl"]
    reward = "method.rewards=[{type: function, path: 'tests.training.answers:length', weight: 3}]"
    (step,) = logged(tunekit.train(recipe, [*changes, reward]))
    assert step["rewards/length/mean"] > 0
    assert step["reward"] == pytest.approx(step["rewards/features/mean"] + 3 * step["rewards/length/mean"], rel=1e-5)


def test_features_that_are_not_finite_are_an_error(recipe, monkeypatch):
    monkeypatch.setattr(EBFTTrainer, "_embeddings", lambda trainer, rows: torch.full((len(rows), 4), math.nan))
    with pytest.raises(RunError, match=r"method\.feature_layers: hidden states .* are not finite"):
        tunekit.train(recipe, ["train.max_steps=1"])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("method.num_generations=3", r"num_generations: 3 does not divide"),
        ("method.feature_layers=[0.5,1.5]", r"method\.feature_layers"),
        ("method.feature_layers=[deep]", r"feature_layers\[0\]: must be a number, got 'deep'"),
        ("method.feature_layers=[]", r"method\.feature_layers"),
        ("method.embed_method=first_token", r"method\.embed_method"),
        ("method.loss_type=cispo", r"method\.loss_type"),
        (
            "method={type: ebft, num_generations: 4, max_completion_length: 12, alignment_coef: 0, diversity_coef: 0}",
            r"all rewards would be zero",
        ),
        ("method.max_completion_length=64", r"max_completion_length: 64 leaves no room"),
        ("method.trainer_args={sync_ref_model: true}", r"sync_ref_model: set by tunekit"),
        ("data.packing=true", r"data\.packing: unsupported with method ebft"),
    ],
)
def test_settings_that_it_cannot_honour_are_refused(recipe, change, problem):
    with pytest.raises(RecipeError, match=problem):
        tunekit.plan(recipe, [change])


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "double 2"}, r"rows\.jsonl:9: ground_truth is missing"),
        ({"prompt": "double 2", "ground_truth": 4}, r"rows\.jsonl:9: ground_truth is not a text"),
        ({"prompt": "double 2", "ground_truth": " "}, r"rows\.jsonl:9: the answer has no text"),
    ],
)
def test_a_row_without_an_answer_is_named(recipe, tmp_path, row, problem):
    save_jsonl(tmp_path / "rows.jsonl", [*ROWS, row])
    with pytest.raises(TunekitError, match=problem):
        tunekit.check(recipe, [f"data.train={tmp_path / 'rows.jsonl'}"])


def test_a_row_whose_answer_does_not_fit_is_left_out(recipe, tmp_path):
    save_jsonl(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "double 2", "ground_truth": "4 " * 40}])
    preview = tunekit.preview(recipe, [f"data.train={tmp_path / 'rows.jsonl'}"], num_rows=9)
    reason = "prompt longer than 52 tokens, or with ground_truth than 64"
    assert [row.left_out for row in preview.rows] == [None] * 8 + [reason]
