"""What files a recipe may name: every field that is one for paths, wherever it stands."""

import tunekit
from tunekit import frontend


def test_every_place_that_may_name_a_file_is_told_with_its_key():
    recipe = tunekit.load_recipe(
        {
            "model": {"path": "models/mine", "chat_template": "my.jinja"},
            "data": {"train": [{"path": "a.jsonl"}, {"path": "b/*.csv"}], "eval": "c.jsonl"},
            "method": {"type": "sft", "trainer_args": {"optim_args": "/var/log"}},
            "output": {"dir": "runs/mine"},
        }
    )
    assert dict(frontend.named_paths(recipe)) == {
        "model.path": "models/mine",
        "model.chat_template": "my.jinja",
        "data.train[0].path": "a.jsonl",
        "data.train[1].path": "b/*.csv",
        "data.eval.path": "c.jsonl",
        "method.trainer_args.optim_args": "/var/log",
        "output.dir": "runs/mine",
    }


def test_models_that_judge_and_teach_are_among_them():
    recipe = tunekit.load_recipe(
        {
            "model": "pico",
            "data": {"train": "a.jsonl"},
            "method": {
                "type": "grpo",
                "rewards": [{"type": "json_schema", "path": "s.json"}, {"type": "reward_model", "model": "judge"}],
            },
        }
    )
    named = dict(frontend.named_paths(recipe))
    assert named["method.rewards[0].path"] == "s.json" and named["method.rewards[1].model.path"] == "judge"
