"""Recipes made of vision configurations train on the pictures that the configuration named."""

import json
from pathlib import Path

import pytest

import tunekit
from tests.training.test_vision import loss_of
from tests.vision import save_rows, save_tiny_vision_model
from tunekit.migration.migration import migrate

pytestmark = pytest.mark.slow

STEP = {
    "learning_rate": 0.01, "max_steps": 1, "gradient_accumulation_steps": 4, "weight_decay": 0.0, "warmup_steps": 0,
}  # fmt: skip
FACTORY = {
    "model_name_or_path": "model", "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 4,
    "lora_target": "all", "image_max_pixels": 262144, "freeze_vision_tower": True, "dataset": "colours",
    "media_dir": "data", "template": "llava", "cutoff_len": 512, "per_device_train_batch_size": 2,
    "lr_scheduler_type": "constant", "optim": "sgd", "bf16": True, **STEP,
}  # fmt: skip
AXOLOTL = {
    "base_model": "model", "processor_type": "AutoProcessor", "skip_prepare_dataset": True,
    "remove_unused_columns": False, "sample_packing": False, "chat_template": "tokenizer_default",
    "datasets": [{"path": "rows.jsonl", "type": "chat_template", "field_messages": "messages"}], "sequence_len": 512,
    "adapter": "lora", "lora_r": 4, "lora_alpha": 4, "micro_batch_size": 2, "freeze_mm_modules": True,
    "lora_target_modules": r"language_model.model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj",
    "lr_scheduler": "constant", "optimizer": "sgd", **STEP,
}  # fmt: skip
SWIFT = """\
MAX_PIXELS=1003520 \\
swift sft --model model --dataset rows.jsonl --tuner_type lora --lora_rank 4 --target_modules all-linear \\
    --freeze_vit true --freeze_aligner true --per_device_train_batch_size 2 --max_length 512 --optim sgd \\
    --lr_scheduler_type constant \\
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, pictures, and the same rows as each tool has them."""
    folder = tmp_path_factory.mktemp("vision")
    save_tiny_vision_model(folder / "model", "llava")
    save_rows(folder / "data")
    parts = [json.loads(line)["messages"] for line in (folder / "data/rows.jsonl").read_text().splitlines()]
    marked = [as_marks(*messages) for messages in parts]
    (folder / "data/info").mkdir()
    (folder / "data/info/colours.json").write_text(
        json.dumps([{"messages": row["messages"], "photos": row["images"]} for row in marked])
    )
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "images": "photos"}
    info = {"colours": {"file_name": "info/colours.json", "formatting": "sharegpt", "columns": columns, "tags": tags}}
    (folder / "data/dataset_info.json").write_text(json.dumps(info))
    with_folder = [{**row, "images": [f"data/{name}" for name in row["images"]]} for row in marked]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in with_folder))
    return folder


def as_marks(asked, answer):
    """A row of a question in parts, with marks and a list of its pictures."""
    content, names = asked["content"], []
    if isinstance(content, list):
        names = [part["image"] for part in content if "image" in part]
        content = "".join(part.get("text", "<image>") for part in content)
    return {"messages": [{"role": "user", "content": content}, answer], "images": names}


def migrated(folder, kind, monkeypatch):
    monkeypatch.chdir(folder)
    path = Path("train.sh" if kind == "ms-swift" else f"{kind}.yaml")
    steps = "".join(f" --{key} {value}" for key, value in STEP.items())
    path.write_text(
        f"{SWIFT}    {steps}\n" if kind == "ms-swift" else json.dumps(FACTORY if kind == "llama-factory" else AXOLOTL)
    )
    made = migrate(path)
    assert made.is_whole, made.of_kind("unsupported")
    recipe = made.recipe.model_dump(exclude_unset=True)
    return {**recipe, "train": {**recipe["train"], "micro_batch_size": 2, "max_grad_norm": 1e9}}


@pytest.mark.parametrize("kind", ["llama-factory", "axolotl", "ms-swift"])
def test_the_first_loss_is_that_of_plain_transformers_on_the_same_rows(kind, folder, monkeypatch, tmp_path):
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    recipe = migrated(folder, kind, monkeypatch)
    recipe |= {"output": {"dir": str(tmp_path / "run"), "sample_prompts": []}}
    plan = tunekit.plan(recipe)
    assert any(reason.topic == "pictures" for reason in plan.reasons)
    run = tunekit.train(recipe)
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    loss = loss_of(model, AutoProcessor.from_pretrained(folder / "model"), folder)
    assert run.metrics()["loss"].iloc[0] == pytest.approx(loss.item(), rel=1e-5)
    adapted = (run.model_path / "adapter_model.safetensors").read_bytes()
    assert b"language_model.layers" in adapted
    assert b"vision_tower" not in adapted and b"projector" not in adapted
