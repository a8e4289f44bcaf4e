"""How answers are generated: where they end, which of them count as cut off, and what TRL is told."""

import json
import random

import pytest
import requests
import torch

import tunekit
from tests.tiny import make_tokenizer, save_tiny_model
from tests.training.watching import logged, seeing
from tunekit.api import verbs
from tunekit.errors import RunError
from tunekit.methods.generation import _end, _generate_served, generation_arguments
from tunekit.planner.plan import VLLM
from tunekit.recipe.load import load_recipe
from tunekit.recipe.methods.on_policy import VLLM_GROUP_PORT, VLLM_URL, GenerationSection

STOP = ["a", "e", "i", "o", "u", "0", "1", "2", "bc"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generation")
    save_tiny_model(folder / "model")
    (folder / "generation_rewards.py").write_text(
        "def long(completions, **_):\n    return [len(c) for c in completions]\n"
    )
    rows = [{"prompt": f"{n} is"} for n in range(16)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def here(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    return workspace


def recipe(kind="grpo", **method):
    own = {"rewards": ["generation_rewards:long"], "num_generations": 4}
    if kind == "distillation":
        own = {"teacher": "model"}
    return {
        "model": "model",
        "data": {"train": "prompts.jsonl", "max_length": 64},
        "method": {"type": kind, "max_completion_length": 12, **own, **method},
        "train": {"max_steps": 2, "global_batch_size": 16, "learning_rate": 1e-3},
        "output": {"sample_prompts": []},
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["grpo", "rloo", "distillation"])
def test_an_answer_ends_with_its_stop_text_and_is_not_taken_for_one_that_was_cut_off(here, kind):
    import trl

    trainer = {"grpo": trl.GRPOTrainer, "rloo": trl.RLOOTrainer, "distillation": trl.DistillationTrainer}[kind]
    masks = {} if kind == "distillation" else {"mask_truncated_completions": True}
    tokenizer, answers = make_tokenizer(), []

    def see(trainer, generated):
        answers.append((generated["completion_ids"], generated["completion_mask"]))

    with seeing(trainer, "_generate_and_score_completions", see):
        run = tunekit.train(recipe(kind, generation={"stop": STOP}, **masks))
    kinds = set()
    for event, (ids, mask) in zip(logged(run), answers, strict=True):
        lengths, cut = [], 0
        for row, kept in zip(ids.tolist(), mask.tolist(), strict=True):
            if not any(kept):
                kinds.add("masked")
                # What is masked was cut off: none of its tokens ended it.
                assert not any(stop in tokenizer.decode(row) for stop in STOP)
                assert tokenizer.eos_token_id not in row
                cut, lengths = cut + 1, [*lengths, len(row)]
                continue
            tokens = row[: sum(kept)]
            lengths.append(len(tokens))
            text, before = tokenizer.decode(tokens), tokenizer.decode(tokens[:-1])
            assert not any(stop in before for stop in STOP), "it went on behind a stop text"
            if any(stop in text for stop in STOP):
                kinds.add("stopped")
            elif tokens[-1] == tokenizer.eos_token_id:
                kinds.add("ended")
            else:
                assert kind == "distillation" and len(tokens) == 12
                cut += 1
        assert event["completions/clipped_ratio"] == pytest.approx(cut / len(ids))
        assert event["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert kinds >= ({"stopped"} if kind == "distillation" else {"stopped", "masked"})


def test_a_stop_text_is_found_where_transformers_finds_it(tmp_path):
    """Also where it begins in the prompt, or a letter is several tokens."""
    from transformers import StopStringCriteria

    tokenizer, draw = make_tokenizer(), random.Random(0)
    stop = ["ab", "bab", "é", "\n\n"]
    found = 0
    for _ in range(40):
        prompt, answer = (tokenizer.encode("".join(draw.choices("abcé\n", k=length))) for length in (3, 9))
        finds = StopStringCriteria(tokenizer, stop)
        ends = (
            number
            for number in range(1, len(answer) + 1)
            if bool(finds(torch.tensor([prompt + answer[:number]]), torch.empty(0))[0])
        )
        end = next(ends, None)
        assert _end(tokenizer, prompt, answer, stop) == end
        found += end is not None
    assert 0 < found < 40


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "method",
    [
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2},
    ],
    ids=["dr_grpo", "cispo", "gspo"],
)
def test_grpo_learns_by_other_losses(here, method):
    run = tunekit.train(recipe(**method))
    assert all(event["grad_norm"] > 0 for event in logged(run))
    assert len(logged(run)) == 2


def test_a_server_without_an_answer_is_named_with_the_reason_and_the_remedy():
    """Nothing listens at the port, which is that of a service that is long gone."""
    url = "http://127.0.0.1:9"
    problem = rf"no answer from the vLLM server at {url}: \[Errno \d+\] Connection refused"
    with pytest.raises(RunError, match=problem) as error:
        _generate_served(
            GenerationSection(vllm_server_base_url=url).server_words, requests.post, f"{url}/v1/completions"
        )
    assert "`vllm serve`" in error.value.hint


def test_an_answer_of_a_server_with_an_error_is_told_and_other_errors_stay():
    def answer(error):
        raise error

    at_x = GenerationSection(vllm_server_base_url="http://x").server_words
    with pytest.raises(RunError, match=r"no answer from the vLLM server at http://x: 400, too long; "):
        _generate_served(at_x, answer, Exception("Request failed: 400, too long"))
    with pytest.raises(RunError, match=r"vllm_mode: no answer from the run's vLLM server: 400; see vllm\.log"):
        _generate_served(GenerationSection().server_words, answer, Exception("Request failed: 400"))
    error = RuntimeError("The vLLM server at http://x has no engine. Restart it with `--engine`.")
    with pytest.raises(
        RunError, match=r"base_url: the vLLM server at http://x has no engine; restart it with `--engine`$"
    ):
        _generate_served(at_x, answer, error)
    for error in (
        RuntimeError("size mismatch"),
        Exception("it is ours"),
        ValueError("Request failed: 3"),
        RunError("x", hint="y"),
    ):
        with pytest.raises(type(error), match=str(error)):
            _generate_served(at_x, answer, error)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "distillation"])
@pytest.mark.parametrize("vllm", [None, VLLM(mode="colocate", gpu_memory_utilization=0.4), VLLM(mode="server")])
def test_trls_config_takes_what_the_recipe_and_the_plan_say_of_generation(here, kind, vllm):
    """With vLLM too, which is not needed to make a config; nothing is generated here."""
    import trl

    config = {"grpo": trl.GRPOConfig, "rloo": trl.RLOOConfig, "distillation": trl.DistillationConfig}[kind]
    sampling = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}
    others = {"trainer_args": {"generation_kwargs": {"suppress_tokens": [5]}}}
    if vllm is not None and vllm.mode == "server":
        sampling |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://there:8000"}
    asked = load_recipe(recipe(kind, generation={**sampling, "stop": ["END"]}, **others))
    plan = verbs.plan(recipe(kind)).model_copy(update={"vllm": vllm})
    told = generation_arguments(asked.method, asked.data, plan)
    made = config(output_dir="unused", use_cpu=True, bf16=False, **told)
    assert (made.temperature, made.top_p, made.top_k, made.min_p, made.repetition_penalty) == (0.6, 0.9, 40, 0.05, 1.1)
    assert made.max_completion_length == 12 and made.use_vllm == (vllm is not None)
    stops = "stop_strings" if vllm is None else "stop"
    assert made.generation_kwargs == {"suppress_tokens": [5], stops: ["END"]}
    if vllm is not None:
        url = "http://there:8000" if vllm.mode == "server" else None
        share = 0.4 if vllm.mode == "colocate" else 0.3  # TRL's default, which a server does not look at
        assert (made.vllm_mode, made.vllm_server_base_url, made.vllm_gpu_memory_utilization) == (vllm.mode, url, share)
        assert made.vllm_max_model_length == 64


@pytest.mark.parametrize("kind", ["grpo", "rloo", "distillation"])
def test_trls_client_finds_the_server_that_the_run_has_started(here, monkeypatch, kind):
    monkeypatch.setenv(VLLM_URL, "http://127.0.0.1:1234")
    monkeypatch.setenv(VLLM_GROUP_PORT, "4321")
    loaded = load_recipe(recipe(kind, generation={"use_vllm": True, "vllm_mode": "server"}))
    plan = verbs.plan(recipe(kind))
    plan = plan.model_copy(update={"vllm": VLLM(mode="server", gpu_memory_utilization=0.9)})
    arguments = generation_arguments(loaded.method, loaded.data, plan)
    assert (arguments["vllm_server_base_url"], arguments["vllm_group_port"]) == ("http://127.0.0.1:1234", 4321)
    assert arguments["vllm_server_timeout"] == plan.patience_seconds
