"""Text decoders of checkpoints that hold vision and audio towers as well."""

import json
import math

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open

import tunekit
from benchmarks.models import CHATS, _messages
from benchmarks.tiny_models import tiny_model
from tests.tiny import make_tokenizer
from tunekit.estimates.memory.states import num_trainable_params, trained_tensors
from tunekit.models.load import attach_adapter, load_model, num_trained
from tunekit.models.towers import towers
from tunekit.probe.model import probe_model
from tunekit.recipe.methods.reward import RewardMethod
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter
from tunekit.recipe.sections.model import ModelSection

TOWERS = {
    "gemma3": ["model.vision_tower", "model.multi_modal_projector"],
    "gemma4": ["model.vision_tower", "model.audio_tower", "model.embed_vision", "model.embed_audio"],
    "internvl": ["model.vision_tower", "model.multi_modal_projector"],
    "kimi_k25": ["model.vision_tower", "model.mm_projector"],
    "mllama": ["model.vision_model", "model.multi_modal_projector"],
    "qwen3_5": ["model.visual"],
    "qwen3_vl_moe": ["model.visual"],
}
"""The modules of each type that text does not pass through, read off transformers' code."""

IDS = torch.arange(3, 20)[None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that saves a tiny model of a type, once, and returns its folder."""
    folder = tmp_path_factory.mktemp("multimodal")

    def save(kind):
        if not (folder / kind).exists():
            tiny_model(kind).save_pretrained(folder / kind)
            make_tokenizer().save_pretrained(folder / kind)
        return folder / kind

    return save


def load(folder):
    return load_model(ModelSection(path=str(folder)), dtype="float32", attn_implementation="sdpa", device="cpu")


@pytest.mark.parametrize("kind", TOWERS)
def test_a_checkpoint_is_loaded_whole_and_its_towers_are_frozen(kind, saved):
    expected = tiny_model(kind)
    model = load(saved(kind))
    assert type(model) is type(expected)
    assert towers(model) == TOWERS[kind]
    attach_adapter(model, FullAdapter(), seed=0)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith(tuple(TOWERS[kind]))}
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert not [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]


@pytest.mark.parametrize("adapter", [FullAdapter(), LoraAdapter(rank=4, target_modules="all-linear")])
def test_the_score_of_a_reward_model_is_trained(adapter, saved):
    section, head = ModelSection(path=str(saved("gemma3"))), RewardMethod().score_head
    model = load_model(section, dtype="float32", attn_implementation="sdpa", device="cpu", score_head=head)
    assert towers(model) == TOWERS["gemma3"]
    model = attach_adapter(model, adapter, seed=0, task="SEQ_CLS")
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad and "score" in name]
    assert len(trained) == 1


@pytest.mark.parametrize("kind", TOWERS)
def test_no_linear_layer_of_a_tower_gets_an_adapter(kind, saved):
    adapter = LoraAdapter(rank=4, target_modules="all-linear")
    model = attach_adapter(load(saved(kind)), adapter, seed=0)
    names = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    adapted = [name.removeprefix("base_model.model.") for name in names]
    assert adapted
    assert not [name for name in adapted if name.startswith(tuple(TOWERS[kind]))]
    facts = probe_model(ModelSection(path=str(saved(kind))))
    planned = trained_tensors(facts, adapter)
    trained = [weight.numel() for weight in model.parameters() if weight.requires_grad]
    assert sum(map(math.prod, planned.values())) == sum(trained)


@pytest.mark.parametrize("kind", TOWERS)
def test_facts_tell_towers_by_the_names_in_a_checkpoint(kind, saved):
    facts = probe_model(ModelSection(path=str(saved(kind))))
    model = load(saved(kind))
    in_towers = sum(weight.numel() for name in towers(model) for weight in model.get_submodule(name).parameters())
    assert facts.num_tower_params == in_towers
    assert facts.num_params == model.num_parameters()
    attach_adapter(model, FullAdapter(), seed=0)
    assert num_trainable_params(facts, FullAdapter()) == num_trained(model)


@pytest.mark.sample(1)
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_a_run_learns_the_mean_over_the_tokens_of_a_step_and_saves_the_towers(adapter, saved, tmp_path):
    """Qwen3-VL's class takes no loss arguments, by which transformers' trainer averages over micro-batches."""
    folder = saved("qwen3_vl")
    rows = "".join(json.dumps({"messages": _messages(*chat)}) + "\n" for chat in CHATS)
    (tmp_path / "rows.jsonl").write_text(rows, encoding="utf-8")
    recipe = {
        "model": str(folder),
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 128},
        "adapter": adapter,
        "train": {"max_steps": 1, "global_batch_size": 4, "micro_batch_size": 1},
        "output": {"dir": str(tmp_path / "run"), "sample_prompts": []},
    }
    run = tunekit.train(recipe)
    model, total, num_tokens = load(folder).eval(), 0.0, 0
    for question, answer in CHATS:
        encoded = make_tokenizer().apply_chat_template(
            _messages(question, answer), return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        labels = encoded["input_ids"].masked_fill(torch.as_tensor(encoded["assistant_masks"]) == 0, -100)
        num = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += num * float(model(input_ids=encoded["input_ids"], labels=labels).loss)
        num_tokens += num
    losses = [event["loss"] for event in run.events() if event["event"] == "log" and "loss" in event]
    assert losses[0] == pytest.approx(total / num_tokens, abs=1e-5)
    if adapter == "full":
        with (
            safe_open(run.model_path / "model.safetensors", "pt") as weights,
            safe_open(folder / "model.safetensors", "pt") as before,
        ):
            assert set(weights.keys()) == set(before.keys())
            visual = [name for name in before.keys() if "visual" in name]  # noqa: SIM118
            assert visual
            assert all(torch.equal(weights.get_tensor(name), before.get_tensor(name)) for name in visual)


@pytest.mark.parametrize("kind", ["glm4v", "glm4v_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_documents_in_one_row_see_each_other_by_no_kind_of_positions(kind, saved):
    model = load(saved(kind)).eval()
    first, second = IDS, IDS.flip(1)[:, :9]
    with torch.no_grad():
        apart = [model(input_ids=ids, use_cache=False).logits for ids in (first, second)]
        positions = torch.cat([torch.arange(ids.shape[1]) for ids in (first, second)])[None]
        row = model(input_ids=torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(row, torch.cat(apart, 1), rtol=0, atol=1e-5)
