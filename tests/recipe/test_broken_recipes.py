"""What a user sees for a broken recipe: every message in full."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tunekit.errors import RecipeError
from tunekit.recipe.load import load_recipe
from tunekit.recipe.methods import METHODS

GOOD = "model: pico\ndata: {train: x.jsonl}\n"
QLORA = GOOD + "adapter: {type: qlora, rank: 4, quant_type: fp4}\ntrain: {num_epochs: 2}\n"
LISTS_SHIPPED = "`tunekit recipes` lists the shipped recipes"


def unfolding(first: str, each: str) -> str:
    """A page of YAML whose aliases unfold ninefold from line to line."""
    lines = [f"a: &a {first}"]
    for above, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} " + each.replace("_", ",".join([f"*{above}"] * 9)))
    return "\n".join(lines)


BROKEN = {
    "an_empty_file": (
        "",
        "recipe.yaml:1:1: the file is empty; start from an example: `tunekit recipes copy sft/quickstart`",
    ),
    "only_comments": (
        "# nothing yet\n",
        "recipe.yaml:1:1: the file is empty; start from an example: `tunekit recipes copy sft/quickstart`",
    ),
    "a_list": (
        "- model: pico\n",
        (
            "recipe.yaml:1:1: a recipe must be a mapping of sections (model, data, ...), got a list; start from an "
            "example: `tunekit recipes copy sft/quickstart`"
        ),
    ),
    "a_word": (
        "pico\n",
        (
            "recipe.yaml:1:1: a recipe must be a mapping of sections (model, data, ...), got 'pico'; start from an "
            "example: `tunekit recipes copy sft/quickstart`"
        ),
    ),
    "two_documents": (
        GOOD + "---\n" + GOOD,
        "recipe.yaml:3:1: second YAML document; write one recipe per file, without '---'",
    ),
    "a_tab": (
        ("model: pico\ndata:\n\ttrain: x.jsonl\n"),
        "recipe.yaml:3:1: unexpected tab; use spaces",
    ),
    "a_tab_after_the_colon": (
        GOOD + ("train:\n  seed:\t3\n"),
        "recipe.yaml:4:8: unexpected tab; use spaces",
    ),
    "no_space_after_the_colon": (
        ("model:pico\ndata:\n  train: x.jsonl\n"),
        (
            "recipe.yaml:2:5: unexpected ':'; quote values that contain ': ', or check the lines above for wrong "
            "indentation and for a ':' that is missing or has no space after it"
        ),
    ),
    "a_key_without_colon": (
        ("model: pico\ndata:\n  train x.jsonl\n"),
        (
            "recipe.yaml:3:3: data: must be a section (with train, eval, format, loss_on, ...), got 'train "
            "x.jsonl'; write `train: ...`, with ':' and a space after the key"
        ),
    ),
    "a_key_without_colon_before_others": (
        ("model: pico\ndata:\n  train x.jsonl\n  max_length: 64\n"),
        (
            "recipe.yaml:4:13: unexpected ':'; quote values that contain ': ', or check the lines above for wrong "
            "indentation and for a ':' that is missing or has no space after it"
        ),
    ),
    "a_colon_in_a_value": (
        ("model: pico\ndata:\n  train: a: b\n"),
        (
            "recipe.yaml:3:11: unexpected ':'; quote values that contain ': ', or check the lines above for wrong "
            "indentation and for a ':' that is missing or has no space after it"
        ),
    ),
    "wrong_indentation": (
        ("model: pico\ndata:\n    train: x.jsonl\n  max_length: 64\n"),
        ("recipe.yaml:4:3: inconsistent indentation; align the keys of a section, and close quotes and brackets above"),
    ),
    "an_open_quote": (
        GOOD + ("output:\n  name: 'abc\n"),
        "recipe.yaml:4:9: unclosed quote; close it",
    ),
    "an_open_list": (
        GOOD + ("adapter:\n  type: lora\n  target_modules: [q_proj, v_proj\ntrain:\n  seed: 1\n"),
        ("recipe.yaml:5:19: unclosed '[' before line 6, column 6; close it, and separate items by commas"),
    ),
    "an_open_brace": (
        ("model: {path: pico\ndata: {train: x.jsonl}\n"),
        ("recipe.yaml:1:8: unclosed '{' before line 2, column 5; close it, and separate items by commas"),
    ),
    "a_list_on_the_line_of_its_key": (
        GOOD + ("output:\n  sample_prompts: - a\n  - b\n"),
        "recipe.yaml:4:19: unexpected '-'; start the list on a new line",
    ),
    "a_value_that_begins_with_at": (
        GOOD + "output: {name: @home}\n",
        "recipe.yaml:3:16: a value cannot begin with '@'; quote it",
    ),
    "an_unknown_escape": (
        GOOD + 'output: {dir: "C:\\new\\qwen"}\n',
        "recipe.yaml:3:23: unknown escape '\\q' in double quotes; use single quotes",
    ),
    "a_control_character": (
        GOOD + "output: {name: \x07}\n",
        "recipe.yaml:3:16: character U+0007 is not allowed in YAML; remove it",
    ),
    "a_stray_directive": (
        ("%YML\nmodel: pico\ndata: {train: x.jsonl}\n"),
        (
            "recipe.yaml:2:1: invalid YAML: expected '<document start>', but found '<scalar>'; quote values with "
            "special characters"
        ),
    ),
    "python_tags": (
        GOOD + "train: !!python/object/apply:os.system [ls]\n",
        ("recipe.yaml:3:8: train: tags such as !!python/object/apply:os.system are unsupported; write the plain value"),
    ),
    "a_custom_tag": (
        GOOD + "output: {name: !env NAME}\n",
        "recipe.yaml:3:16: output.name: tags such as !env are unsupported; write the plain value",
    ),
    "an_alias_without_anchor": (
        GOOD + "train: *fast\n",
        "recipe.yaml:3:8: alias *fast has no anchor &fast before it; quote values that begin with '*'",
    ),
    "an_anchor_set_twice": (
        GOOD + "train: {seed: &a 1, max_steps: &a 2}\n",
        "recipe.yaml:3:32: duplicate anchor &a; rename one of them",
    ),
    "an_anchor_that_contains_itself": (
        ("model: pico\ndata: &d {train: x.jsonl, eval: *d}\n"),
        "recipe.yaml:2:7: data.eval: an anchor contains an alias to itself",
    ),
    "a_merge_of_a_number": (
        GOOD + "train: {<<: 3}\n",
        ("recipe.yaml:3:13: train: '<<' merges only mappings; write `<<: *name`, with &name on a mapping"),
    ),
    "aliases_that_unfold_without_end": (
        unfolding("[x,x,x,x,x,x,x,x,x]", "[_]"),
        "recipe.yaml:1:8: more than 50,000 values after expanding aliases",
    ),
    "merges_that_unfold_without_end": (
        unfolding("{x: 1}", "{<<: [_]}"),
        "recipe.yaml:1:8: more than 50,000 values after expanding aliases",
    ),
    "brackets_without_end": (
        "[" * 5000,
        "recipe.yaml:1:1076: nested deeper than 50 levels; close the brackets above",
    ),
    "a_key_given_twice": (
        ("model: pico\nmodel: other\ndata: {train: x.jsonl}\n"),
        "recipe.yaml:2:1: model: duplicate key, first at line 1, column 1; keep one of them",
    ),
    "a_nested_key_given_twice": (
        GOOD + ("train:\n  seed: 1\n  max_steps: 5\n  seed: 2\n"),
        "recipe.yaml:6:3: train.seed: duplicate key, first at line 4, column 3; keep one of them",
    ),
    "keys_that_are_not_text": (
        GOOD + ("3: x\ntrain: {true: 1, ~: 2, [a]: 3}\n"),
        (
            "recipe.yaml:3:1: a key must be a string, got 3; quote it\n"
            "recipe.yaml:4:9: train: a key must be a string, got true; quote it\n"
            "recipe.yaml:4:18: train: a key must be a string, got ~; quote it\n"
            "recipe.yaml:4:24: train: a key must be a string, got a mapping, a list or a tag; write a plain name "
            "before ':'"
        ),
    ),
    "an_unknown_key": (
        GOOD + ("adapter:\n  type: lora\n  rnak: 8\n"),
        "recipe.yaml:5:3: adapter.rnak: unknown key; did you mean 'rank'?",
    ),
    "an_unknown_section": (
        GOOD + ("trian:\n  seed: 1\n"),
        "recipe.yaml:3:1: trian: unknown key; did you mean 'train'?",
    ),
    "an_unknown_key_like_no_other": (
        GOOD + ("xyzzy: 1\ndata2: {}\n"),
        (
            "recipe.yaml:3:1: xyzzy: unknown key; keys of a recipe: model, data, method, adapter, "
            "train, parallel, output\n"
            "recipe.yaml:4:1: data2: unknown key; did you mean 'data'?"
        ),
    ),
    "a_key_of_another_section": (
        GOOD + ("learning_rate: 1e-4\ntrain: {max_length: 64, path: x.jsonl}\n"),
        (
            "recipe.yaml:3:1: learning_rate: unknown key; use train.learning_rate\n"
            "recipe.yaml:4:9: train.max_length: unknown key; use data.max_length\n"
            "recipe.yaml:4:25: train.path: unknown key; use model.path, data.train.path or data.eval.path"
        ),
    ),
    "a_misspelt_key_of_another_section": (
        GOOD + "train: {dropuot: 0.1}\n",
        "recipe.yaml:3:9: train.dropuot: unknown key; did you mean 'adapter.dropout'?",
    ),
    "an_argument_of_trl_outside_trainer_args": (
        GOOD + "train: {adam_beta2: 0.95}\n",
        ("recipe.yaml:3:9: train.adam_beta2: unknown key; use method.trainer_args.adam_beta2"),
    ),
    "names_of_other_tools": (
        (
            "model_name_or_path: pico\n"
            "dataset: x.jsonl\n"
            "lora_r: 8\n"
            "load_in_4bit: true\n"
            "train:\n"
            "  lr: 1e-4\n"
            "  per_device_train_batch_size: 2\n"
            "  gradient_accumulation_steps: 8\n"
            "  bf16: true\n"
            "  num_train_epochs: 3\n"
            "output_dir: out\n"
        ),
        (
            "recipe.yaml:1:1: model: missing required key; `tunekit explain model` documents it\n"
            "recipe.yaml:1:1: data: missing required key; `tunekit explain data` documents it\n"
            "recipe.yaml:1:1: model_name_or_path: unknown key; use model.path\n"
            "recipe.yaml:2:1: dataset: unknown key; use data.train\n"
            "recipe.yaml:3:1: lora_r: unknown key; use adapter.rank\n"
            "recipe.yaml:4:1: load_in_4bit: unknown key; set adapter.type to qlora\n"
            "recipe.yaml:6:3: train.lr: unknown key; use train.learning_rate\n"
            "recipe.yaml:7:3: train.per_device_train_batch_size: unknown key; use train.micro_batch_size\n"
            "recipe.yaml:8:3: train.gradient_accumulation_steps: unknown key; computed from "
            "train.global_batch_size, train.micro_batch_size and the number of devices\n"
            "recipe.yaml:9:3: train.bf16: unknown key; set model.dtype; mixed precision follows from it\n"
            "recipe.yaml:10:3: train.num_train_epochs: unknown key; use train.num_epochs\n"
            "recipe.yaml:11:1: output_dir: unknown key; use output.dir\n"
            "is this a configuration of another tool? `tunekit migrate recipe.yaml` converts it"
        ),
    ),
    "a_field_of_another_adapter": (
        GOOD + "adapter: {type: full, rank: 8}\n",
        "recipe.yaml:3:23: adapter.rank: adapter.type=full has no 'rank'; available with adapter.type=lora, qlora, "
        "vera or miss",
    ),
    "a_field_of_qlora_in_lora": (
        GOOD + "adapter: {type: lora, quant_type: nf4}\n",
        (
            "recipe.yaml:3:23: adapter.quant_type: adapter.type=lora has no 'quant_type'; available with "
            "adapter.type=qlora"
        ),
    ),
    "missing_sections": (
        "train: {seed: 1}\n",
        (
            "recipe.yaml:1:1: model: missing required key; `tunekit explain model` documents it\n"
            "recipe.yaml:1:1: data: missing required key; `tunekit explain data` documents it"
        ),
    ),
    "a_missing_key": (
        ("model: {dtype: auto}\ndata:\n  max_length: 64\n"),
        (
            "recipe.yaml:1:1: model.path: missing required key; `tunekit explain model.path` documents it\n"
            "recipe.yaml:2:1: data.train: missing required key; `tunekit explain data.train` documents it"
        ),
    ),
    "an_adapter_without_type": (
        GOOD + ("adapter:\n  rank: 8\n"),
        "recipe.yaml:3:1: adapter.type: missing required key; set it to one of full, lora, qlora, ia3, vera, oft, "
        "miss, adalora, prompt_tuning",
    ),
    "an_unknown_adapter": (
        GOOD + "adapter: qlroa\n",
        (
            "recipe.yaml:3:10: adapter.type: must be one of full, lora, qlora, ia3, vera, oft, miss, adalora, "
            "prompt_tuning, got 'qlroa'; did you mean 'qlora'?"
        ),
    ),
    "an_unknown_adapter_type": (
        GOOD + "adapter: {type: LoRA, rank: 8}\n",
        "recipe.yaml:3:17: adapter.type: must be one of full, lora, qlora, ia3, vera, oft, miss, adalora, "
        "prompt_tuning, got 'LoRA'; did you mean 'lora'?",
    ),
    "an_adapter_type_that_is_a_number": (
        GOOD + "adapter: {type: 4}\n",
        "recipe.yaml:3:17: adapter.type: must be one of full, lora, qlora, ia3, vera, oft, miss, adalora, "
        "prompt_tuning, got 4",
    ),
    "an_unknown_method": (
        GOOD + "method: sftt\n",
        f"recipe.yaml:3:9: method.type: must be one of {', '.join(METHODS)}, got 'sftt'; did you mean 'sft'?",
    ),
    "an_unknown_choice": (
        ("model: {path: pico, dtype: bf16}\ndata: {train: x.jsonl, loss_on: answers}\n"),
        (
            "recipe.yaml:1:28: model.dtype: must be one of auto, float32, bfloat16, float16, got 'bf16'; "
            "did you mean 'bfloat16'?\n"
            "recipe.yaml:2:33: data.loss_on: must be one of assistant, last, all, got 'answers'"
        ),
    ),
    "an_unknown_optimizer": (
        GOOD + "train: {optim: AdamW}\n",
        (
            "recipe.yaml:3:16: train.optim: must be one of 29 names (`tunekit explain train.optim` lists "
            "them), got 'AdamW'; did you mean 'adamw_torch'?"
        ),
    ),
    "out_of_range": (
        GOOD
        + (
            "train:\n"
            "  global_batch_size: -4\n"
            "  learning_rate: -1e-4\n"
            "  seed: -1\n"
            "  num_epochs: 0\n"
            "adapter: {type: lora, dropout: 1.0}\n"
        ),
        (
            "recipe.yaml:4:22: train.global_batch_size: must be greater than 0, got -4\n"
            "recipe.yaml:5:18: train.learning_rate: must be greater than 0, got -0.0001\n"
            "recipe.yaml:6:9: train.seed: must be at least 0, got -1\n"
            "recipe.yaml:7:15: train.num_epochs: must be greater than 0, got 0\n"
            "recipe.yaml:8:32: adapter.dropout: must be less than 1, got 1.0"
        ),
    ),
    "infinite_numbers": (
        GOOD + "train: {learning_rate: .inf, weight_decay: .nan, max_grad_norm: 1e999}\n",
        (
            "recipe.yaml:3:24: train.learning_rate: must be a finite number, got .inf\n"
            "recipe.yaml:3:44: train.weight_decay: must be a finite number, got .nan\n"
            "recipe.yaml:3:65: train.max_grad_norm: must be a finite number, got .inf"
        ),
    ),
    "numbers_of_other_kinds": (
        GOOD
        + (
            "train: {max_steps: 1e3, global_batch_size: 2.5, seed: true, logging_steps: '5', eval_steps: 1:30,\n"
            "  save_steps: '2.5', warmup_steps: 'true'}\n"
        ),
        (
            "recipe.yaml:3:20: train.max_steps: must be an integer, got 1000.0; write 1000\n"
            "recipe.yaml:3:44: train.global_batch_size: must be an integer, got 2.5\n"
            "recipe.yaml:3:55: train.seed: must be an integer, got true\n"
            "recipe.yaml:3:76: train.logging_steps: must be an integer, got '5'; write it without quotes\n"
            "recipe.yaml:3:93: train.eval_steps: must be an integer, got '1:30'\n"
            "recipe.yaml:4:15: train.save_steps: must be an integer, got '2.5'\n"
            "recipe.yaml:4:36: train.warmup_steps: must be a number, got 'true'"
        ),
    ),
    "a_number_of_too_many_digits": (
        GOOD + "train: {seed: " + "9" * 200 + "}\n",
        "recipe.yaml:3:15: train.seed: the number has too many digits",
    ),
    "words_for_truth": (
        ("model: {path: pico, trust_remote_code: yes}\ndata: {train: x.jsonl, packing: 'false'}\n"),
        (
            "recipe.yaml:1:40: model.trust_remote_code: must be true or false, got 'yes'; write true\n"
            "recipe.yaml:2:33: data.packing: must be true or false, got 'false'; write false"
        ),
    ),
    "auto_or_truth": (
        GOOD + "train: {gradient_checkpointing: on}\n",
        "recipe.yaml:3:33: train.gradient_checkpointing: must be auto, true or false, got 'on'; write true",
    ),
    "activations_that_are_offloaded_and_not_recomputed": (
        GOOD + "train: {gradient_checkpointing: false, activation_offloading: true}\n",
        (
            "recipe.yaml:3:40: train.activation_offloading: requires gradient_checkpointing: without it, more "
            "activations are kept than can be copied in time; unset one of them"
        ),
    ),
    "bfloat16_weights_below_an_adapter": (
        GOOD + "train: {pure_bf16: true}\n",
        (
            "recipe.yaml:3:9: train.pure_bf16: saves almost nothing with adapter lora, which is small compared "
            "with the base model; unset it, or set adapter.type=full"
        ),
    ),
    "bfloat16_weights_in_float32": (
        "model: {path: pico, dtype: float32}\ndata: {train: x}\nadapter: full\ntrain: {pure_bf16: true, fp8: true}\n",
        (
            "recipe.yaml:4:9: train.pure_bf16: contradicts model.dtype float32; unset one of them\n"
            "recipe.yaml:4:26: train.fp8: unsupported with train.pure_bf16: its products are cast from float32 "
            "weights; unset one of them"
        ),
    ),
    "null_where_a_value_belongs": (
        GOOD + "train: {seed: null, lr_scheduler_type:}\n",
        (
            "recipe.yaml:3:15: train.seed: must be an integer, got null; remove the key to use its default\n"
            "recipe.yaml:3:39: train.lr_scheduler_type: must be one of 10 names (`tunekit explain "
            "train.lr_scheduler_type` lists them), got null; remove the key to use its default"
        ),
    ),
    "text_where_a_list_belongs": (
        GOOD + "adapter: {type: lora, exclude_modules: q_proj, modules_to_save: lm_head}\n",
        (
            "recipe.yaml:3:40: adapter.exclude_modules: must be a list of strings, got 'q_proj'; write [q_proj]\n"
            "recipe.yaml:3:65: adapter.modules_to_save: must be a list of strings, got 'lm_head'; write [lm_head]"
        ),
    ),
    "broken_expressions_of_modules": (
        GOOD + 'adapter: {type: lora, target_modules: "(q", rank_pattern: {"*": 4}}\n',
        (
            "recipe.yaml:3:39: adapter.target_modules: '(q' is not a valid regular expression: missing ), "
            "unterminated subpattern at position 0\n"
            "recipe.yaml:3:59: adapter.rank_pattern: '*' is not a valid regular expression: nothing to repeat at "
            "position 0"
        ),
    ),
    "layers_beside_an_expression": (
        GOOD + 'adapter: {type: lora, target_modules: ".*q_proj", layers_to_transform: [0]}\n',
        "recipe.yaml:3:51: adapter.layers_to_transform: does not apply to a regular expression in target_modules; "
        "select the layers in the expression",
    ),
    "ranks_and_layers_of_other_kinds": (
        GOOD + "adapter: {type: lora, rank_pattern: {q_proj: 0}, alpha_pattern: 3, layers_to_transform: [1.5]}\n",
        (
            "recipe.yaml:3:37: adapter.rank_pattern: must be greater than 0, got 0\n"
            "recipe.yaml:3:65: adapter.alpha_pattern: must be a mapping, got 3\n"
            "recipe.yaml:3:90: adapter.layers_to_transform[0]: must be an integer, got 1.5"
        ),
    ),
    "numbers_in_a_list_of_text": (
        GOOD + ("adapter: {type: lora, target_modules: [q_proj, 3]}\noutput: {sample_prompts: [null, {a: b}]}\n"),
        (
            "recipe.yaml:3:48: adapter.target_modules[1]: must be a string, got 3; quote it\n"
            "recipe.yaml:4:27: output.sample_prompts[0]: must be a string, got null\n"
            "recipe.yaml:4:33: output.sample_prompts[1]: must be a string, got a mapping"
        ),
    ),
    "values_where_sections_belong": (
        ("model: [pico]\ndata: x.jsonl\ntrain:\n  - seed: 3\nadapter: 8\n"),
        (
            "recipe.yaml:1:8: model: must be a section (with path, revision, dtype, attn_implementation, "
            "...), got a list\n"
            "recipe.yaml:2:7: data: must be a section (with train, eval, format, loss_on, ...), got 'x.jsonl'\n"
            "recipe.yaml:4:3: train: must be a section (with num_epochs, max_steps, global_batch_size, "
            "micro_batch_size, ...), got a list\n"
            "recipe.yaml:5:10: adapter: must be a section (with type, last_layers, unfrozen_parameters, "
            "new_layers, ...), got 8"
        ),
    ),
    "an_empty_path": (
        ("model: ''\ndata: {train: 3, eval: ['']}\n"),
        (
            "recipe.yaml:1:8: model.path: must not be empty\n"
            "recipe.yaml:2:15: data.train: must be a section (with path, name, split, revision, ...) or a list of "
            "sections, got 3\n"
            "recipe.yaml:2:25: data.eval[0].path: must not be empty"
        ),
    ),
    "a_schedule_beside_averages": (
        GOOD + "train:\n  optim: schedule_free_adamw\n  lr_scheduler_type: linear\n  pure_bf16: true\n",
        (
            "recipe.yaml:5:3: train.lr_scheduler_type: linear is unsupported with schedule_free_adamw, which "
            "averages weights instead; set it to constant; warmup_steps still apply\n"
            "recipe.yaml:6:3: train.pure_bf16: schedule_free_adamw switches between weights and their average, and "
            "bfloat16 rounds them each time; unset it, or use another optim"
        ),
    ),
    "parts_beside_new_layers": (
        GOOD + "adapter: {type: full, new_layers: 2, last_layers: 1}\n",
        (
            "recipe.yaml:3:38: adapter.last_layers: mutually exclusive with new_layers: only the new layers are "
            "trained; unset "
            "one of them"
        ),
    ),
    "a_second_average": (
        GOOD + "train:\n  optim: schedule_free_adamw\n  lr_scheduler_type: constant\n  ema_decay: 0.9\n",
        "recipe.yaml:6:3: train.ema_decay: schedule_free_adamw averages weights already; unset one of them",
    ),
    "an_average_in_bfloat16": (
        GOOD + "train:\n  ema_decay: 0.9\n  pure_bf16: true\nadapter: full\n",
        "recipe.yaml:4:3: train.ema_decay: bfloat16 rounds off the update of an average; unset one of them",
    ),
    "a_low_rank_of_another_optimizer": (
        GOOD + "adapter: full\ntrain:\n  optim_args:\n    rank: 8\n  optim_target_modules: ['(']\n",
        (
            "recipe.yaml:5:3: train.optim_args: has no effect with adamw_torch_fused; "
            "unset it, or set optim to galore_adamw or apollo_adamw\n"
            "recipe.yaml:7:26: train.optim_target_modules[0]: '(' is not a valid regular expression: missing ), "
            "unterminated "
            "subpattern at position 0; escape special characters with a backslash"
        ),
    ),
    "heads_of_an_adapter": (
        GOOD + "train:\n  optim: adam_mini\n",
        "recipe.yaml:4:3: train.optim: needs the heads and rows of layers, which adapter.type lora does not train; "
        "use adamw_torch_fused, or set adapter.type=full",
    ),
    "channels_of_galore": (
        GOOD + "adapter: full\ntrain:\n  optim: galore_adamw\n  optim_args:\n    scale_type: tensor\n",
        "recipe.yaml:7:5: train.optim_args.scale_type: has no effect with galore_adamw; unset it",
    ),
    "a_low_rank_of_an_adapter": (
        GOOD + "train:\n  optim: apollo_adamw\nmethod:\n  type: sft\n  trainer_args:\n    optim_args: rank=8\n",
        (
            "recipe.yaml:4:3: train.optim: projects to a low rank, but the weights of adapter.type lora already have "
            "one; "
            "use adamw_torch_fused, or set adapter.type=full\n"
            "recipe.yaml:8:5: method.trainer_args.optim_args: apollo_adamw does not read them; "
            "use train.optim_args, or unset it"
        ),
    ),
    "epochs_and_steps": (
        GOOD + ("train:\n  num_epochs: 1\n  max_steps: 10\n"),
        "recipe.yaml:5:3: train.max_steps: mutually exclusive with train.num_epochs; keep one of them",
    ),
    "epochs_and_steps_and_more": (
        GOOD + ("train:\n  max_steps: 10\n  num_epochs: 1\n  seed: x\n"),
        (
            "recipe.yaml:5:3: train.num_epochs: mutually exclusive with train.max_steps; keep one of them\n"
            "recipe.yaml:6:9: train.seed: must be an integer, got 'x'"
        ),
    ),
    "a_name_that_is_a_path": (
        GOOD + "output: {name: runs/first, dir: ''}\n",
        (
            "recipe.yaml:3:16: output.name: must consist of letters, digits, '.', '_' and '-' and start with a "
            "letter or digit, got 'runs/first'\n"
            "recipe.yaml:3:33: output.dir: must not be empty"
        ),
    ),
    "a_name_that_is_too_long": (
        GOOD + "output: {name: " + "x" * 101 + "}\n",
        "recipe.yaml:3:16: output.name: must be at most 100 characters long, got 101",
    ),
    "variables_where_none_may_stand": (
        (
            'model: {path: pico, dtype: "${DTYPE}"}\n'
            "data: {train: x.jsonl}\n"
            "output:\n"
            "  name: ${USER}-run\n"
            '  sample_prompts: ["What is ${x}?"]\n'
        ),
        (
            "recipe.yaml:1:28: model.dtype: ${DTYPE} is not expanded in this field; write the value, or $${ for a "
            "literal ${\n"
            "recipe.yaml:4:9: output.name: ${USER} is not expanded in this field; write the value, or $${ for a "
            "literal ${\n"
            "recipe.yaml:5:20: output.sample_prompts[0]: ${x} is not expanded in this field; write the value, or "
            "$${ for a literal ${"
        ),
    ),
    "variables_that_are_not_set": (
        ("model: ${TUNEKIT_UNSET}/m\ndata:\n  train: ${TUNEKIT UNSET}\n  eval: ${TUNEKIT_UNSET\n"),
        (
            "recipe.yaml:1:8: model.path: environment variable TUNEKIT_UNSET is not set; export TUNEKIT_UNSET=..., "
            "or write the path\n"
            "recipe.yaml:3:10: data.train.path: invalid reference ${TUNEKIT UNSET}; write ${NAME} with the name of "
            "an environment variable\n"
            "recipe.yaml:4:9: data.eval.path: invalid reference ${TUNEKIT_UNSET; write ${NAME} with the name of an "
            "environment variable"
        ),
    ),
    "trainer_args": (
        GOOD
        + (
            "method:\n"
            "  trainer_args:\n"
            "    adam_bta1: 0.8\n"
            "    adam_beta2: '0.9'\n"
            "    output_dir: x\n"
            "    hub_model_id: x\n"
            "    ddp_timeout: 3\n"
            "    dataloader_multiprocessing_context: frok\n"
            "    torch_empty_cache_steps: 1.0\n"
            "    torch_compile: yes\n"
            "    label_names: loss\n"
            "    warmup_ratio: 0.1\n"
            "    zzz: 1\n"
            "  type: sft\n"
        ),
        (
            "recipe.yaml:5:5: method.trainer_args.adam_bta1: not a field of SFTConfig; did you mean "
            "'adam_beta1'?\n"
            "recipe.yaml:6:17: method.trainer_args.adam_beta2: must be a number, got '0.9'; write it without "
            "quotes\n"
            "recipe.yaml:7:5: method.trainer_args.output_dir: set by tunekit; use output.dir\n"
            "recipe.yaml:8:5: method.trainer_args.hub_model_id: set by tunekit; tunekit does not upload during "
            "training\n"
            "recipe.yaml:9:5: method.trainer_args.ddp_timeout: set by tunekit; set by the plan for the available "
            "devices\n"
            "recipe.yaml:10:41: method.trainer_args.dataloader_multiprocessing_context: must be one of fork, spawn, "
            "forkserver, got 'frok'; did you mean 'fork'?\n"
            "recipe.yaml:11:30: method.trainer_args.torch_empty_cache_steps: must be an integer or null, got 1.0; "
            "write 1\n"
            "recipe.yaml:12:20: method.trainer_args.torch_compile: must be true or false, got 'yes'; write true\n"
            "recipe.yaml:13:18: method.trainer_args.label_names: must be a list or null, got 'loss'; write [loss]\n"
            "recipe.yaml:14:5: method.trainer_args.warmup_ratio: set by tunekit; use train.warmup_steps: below 1 "
            "it is a share of all steps\n"
            "recipe.yaml:15:5: method.trainer_args.zzz: not a field of SFTConfig; see the documentation of "
            "TRL's SFTConfig"
        ),
    ),
    "trainer_args_that_are_a_list": (
        GOOD + "method: {type: sft, trainer_args: [adam_beta1]}\n",
        "recipe.yaml:3:35: method.trainer_args: must be a mapping, got a list",
    ),
    "mistakes_in_a_list_of_sources": (
        (
            "model: pico\n"
            "data:\n"
            "  train:\n"
            "    - a.jsonl\n"
            "    - pth: b.jsonl\n"
            "      weight: 0\n"
            "    -\n"
            "    - 3\n"
            "    - [a.jsonl]\n"
            "    - ''\n"
            "    - path: c.jsonl\n"
            "      loss_on: lst\n"
            "      columns: [prompt]\n"
            "      wieght: 1\n"
        ),
        (
            "recipe.yaml:5:7: data.train[1].path: missing required key; `tunekit explain data.train.path` "
            "documents it\n"
            "recipe.yaml:5:7: data.train[1].pth: unknown key; did you mean 'path'?\n"
            "recipe.yaml:6:15: data.train[1].weight: must be greater than 0, got 0\n"
            "recipe.yaml:7:6: data.train[2]: must be a section (with path, name, split, revision, ...), got null\n"
            "recipe.yaml:8:7: data.train[3]: must be a section (with path, name, split, revision, ...), got 3\n"
            "recipe.yaml:9:7: data.train[4]: must be a section (with path, name, split, revision, ...), got a "
            "list\n"
            "recipe.yaml:10:7: data.train[5].path: must not be empty\n"
            "recipe.yaml:12:16: data.train[6].loss_on: must be one of assistant, last, all, got 'lst'; did you "
            "mean 'last'?\n"
            "recipe.yaml:13:16: data.train[6].columns: must be a mapping, got a list\n"
            "recipe.yaml:14:7: data.train[6].wieght: unknown key; did you mean 'weight'?"
        ),
    ),
    "an_empty_list_of_sources": (
        "model: pico\ndata: {train: [], eval: []}\n",
        "recipe.yaml:2:15: data.train: must not be an empty list\n"
        "recipe.yaml:2:25: data.eval: must not be an empty list",
    ),
    "variables_in_a_list_of_sources": (
        ("model: pico\ndata:\n  train:\n    - ${TUNEKIT_UNSET}\n    - {path: x.jsonl, split: '${HOME}'}\n"),
        (
            "recipe.yaml:4:7: data.train[0].path: environment variable TUNEKIT_UNSET is not set; export "
            "TUNEKIT_UNSET=..., or write the path\n"
            "recipe.yaml:5:30: data.train[1].split: ${HOME} is not expanded in this field; write the value, or $${ "
            "for a literal ${"
        ),
    ),
    "weights_of_some_sources": (
        ("model: pico\ndata:\n  train:\n    - {path: a.jsonl, weight: 2}\n    - b.jsonl\n    - path: c.jsonl\n"),
        (
            "recipe.yaml:5:7: data.train[1].weight: missing for 'b.jsonl', but other sources have one; give all "
            "sources a weight, or none\n"
            "recipe.yaml:6:7: data.train[2].weight: missing for 'c.jsonl', but other sources have one; give all "
            "sources a weight, or none"
        ),
    ),
    "mixing_of_a_single_source": (
        (
            "model: pico\n"
            "data:\n"
            "  train: [{path: a.jsonl, weight: 2}]\n"
            "  eval: {path: b.jsonl, weight: 1}\n"
            "  weight_by: tokens\n"
            "  stopping_strategy: all_exhausted\n"
            "  mixing: concatenate\n"
        ),
        (
            "recipe.yaml:3:27: data.train[0].weight: has no effect with a single source; unset it\n"
            "recipe.yaml:4:25: data.eval.weight: has no effect in data.eval: every row is used once; unset it\n"
            "recipe.yaml:5:3: data.weight_by: has no effect with a single source; unset it\n"
            "recipe.yaml:6:3: data.stopping_strategy: has no effect with a single source; unset it\n"
            "recipe.yaml:7:3: data.mixing: has no effect with a single source; unset it"
        ),
    ),
    "weights_explained_and_not_given": (
        "model: pico\ndata: {train: [a, b], weight_by: tokens, stopping_strategy: all_exhausted}\n",
        (
            "recipe.yaml:2:23: data.weight_by: has no effect without weights; give all sources of data.train a "
            "weight, or unset it\n"
            "recipe.yaml:2:42: data.stopping_strategy: has no effect without weights; give all sources of "
            "data.train a weight, or unset it"
        ),
    ),
    "an_order_that_is_not_kept": (
        "model: pico\ndata: {train: [a, b], mixing: concatenate, shuffle: true}\n",
        (
            "recipe.yaml:2:23: data.mixing: cannot be concatenate with data.shuffle, which reorders the rows; set "
            "data.shuffle to false, or unset mixing"
        ),
    ),
    "the_order_of_packed_rows": (
        "model: pico\ndata: {train: a, packing: true, shuffle: false}\n",
        (
            "recipe.yaml:2:33: data.shuffle: cannot be false with data.packing, which reorders the rows; unset one "
            "of them"
        ),
    ),
    "the_padding_of_packed_rows": (
        "model: pico\ndata: {train: a, packing: true, padding_free: false}\n",
        (
            "recipe.yaml:2:33: data.padding_free: cannot be false with data.packing: packed batches have no "
            "padding; unset it"
        ),
    ),
    "rows_to_evaluate_on_and_rows_held_out": (
        "model: pico\ndata: {train: a, eval: b, eval_size: 0.1}\n",
        "recipe.yaml:2:27: data.eval_size: mutually exclusive with data.eval; keep one of them",
    ),
    "a_stream_of_what_must_be_known_before": (
        (
            "model: pico\n"
            "data:\n"
            "  train: [{path: a, weight: 1}, {path: b, weight: 2}]\n"
            "  streaming: true\n"
            "  weight_by: tokens\n"
            "  stopping_strategy: all_exhausted\n"
            "  eval_size: 0.1\n"
        ),
        (
            "recipe.yaml:5:3: data.weight_by: cannot be tokens with data.streaming: row lengths are unknown in "
            "advance; set it to rows\n"
            "recipe.yaml:6:3: data.stopping_strategy: cannot be all_exhausted with data.streaming: training ends "
            "after train.max_steps; unset it\n"
            "recipe.yaml:7:3: data.eval_size: unsupported with data.streaming: no rows can be held out of a "
            "stream; set data.eval"
        ),
    ),
    "a_stream_without_end": (
        "model: pico\ndata: {train: a, streaming: true}\n",
        (
            "recipe.yaml:2:18: data.streaming: requires train.max_steps: the number of rows per epoch is unknown; "
            "set train.max_steps"
        ),
    ),
    "epochs_of_a_stream": (
        "model: pico\ndata: {train: a, streaming: true}\ntrain: {num_epochs: 1}\n",
        (
            "recipe.yaml:3:9: train.num_epochs: unsupported with data.streaming: the number of rows per epoch is "
            "unknown; set train.max_steps instead"
        ),
    ),
    "words_of_other_tools_for_mixtures": (
        (
            "model: pico\n"
            "datasets: [a.jsonl]\n"
            "data: {train: x.jsonl, mix_strategy: concat, interleave_probs: 1}\n"
            "probabilities: 1\n"
        ),
        (
            "recipe.yaml:2:1: datasets: unknown key; use data.train\n"
            "recipe.yaml:3:24: data.mix_strategy: unknown key; set data.mixing, and data.stopping_strategy for when "
            "to stop\n"
            "recipe.yaml:3:46: data.interleave_probs: unknown key; give each source of data.train a weight\n"
            "recipe.yaml:4:1: probabilities: unknown key; give each source of data.train a weight"
        ),
    ),
    "windows_line_ends": (
        ("model: pico\r\ndata:\r\n  trian: x.jsonl\r\n"),
        (
            "recipe.yaml:2:1: data.train: missing required key; `tunekit explain data.train` documents it\n"
            "recipe.yaml:3:3: data.trian: unknown key; did you mean 'train'?"
        ),
    ),
    "letters_beyond_ascii": (
        ("model: pïco\ndata: {train: 'é.jsonl', évál: 3}\n"),
        (
            "recipe.yaml:2:26: data.évál: unknown key; keys of data: train, eval, format, loss_on, max_length, "
            "too_long, packing, padding_free, columns, image_folder, system, prompt_style, replace, max_bad_rows, "
            "eval_size, weight_by, stopping_strategy, mixing, shuffle, curriculum, curriculum_column, streaming"
        ),
    ),
    "json_with_a_missing_comma": (
        ('{"model": "pico",\n "data": {"train": "x.jsonl"}\n "train": {"seed": 1}}\n'),
        ("recipe.yaml:1:1: unclosed '{' before line 3, column 2; close it, and separate items by commas"),
    ),
}

BROKEN_FILES = {
    "a_binary_file": (b"\x00\x01model: pico", "recipe.yaml: is a binary file, not YAML; pass a recipe file"),
    "latin_1": (
        b"model: pico\ndata: {train: caf\xe9}\n",
        "recipe.yaml:2:18: is not UTF-8 text (byte 0xe9); save the file as UTF-8",
    ),
    "utf_16": ("model: pico".encode("utf-16"), "recipe.yaml: is UTF-16 text; save the file as UTF-8"),
    "a_byte_order_mark_counts_for_nothing": (
        b"\xef\xbb\xbfmodle: pico\ndata: x",
        "recipe.yaml:1:1: model: missing required key; `tunekit explain model` documents it\n"
        "recipe.yaml:1:1: modle: unknown key; did you mean 'model'?\n"
        "recipe.yaml:2:7: data: must be a section (with train, eval, format, loss_on, ...), got 'x'",
    ),
    "a_huge_file": (b"# x\n" * 100_000, "recipe.yaml: is larger than 256 KiB; pass a recipe, not its data"),
}

BROKEN_SOURCES = {
    "a_file_that_does_not_exist": ("nope.yaml", f"nope.yaml: file not found; {LISTS_SHIPPED}"),
    "a_misspelt_file": ("mien.yaml", f"mien.yaml: file not found; did you mean 'mine.yaml'? {LISTS_SHIPPED}"),
    "another_suffix": ("mine.yml", f"mine.yml: file not found; did you mean 'mine.yaml'? {LISTS_SHIPPED}"),
    "a_file_in_no_folder": (
        "recipes/mine.yaml",
        f"recipes/mine.yaml: file not found, folder recipes does not exist; {LISTS_SHIPPED}",
    ),
    "a_misspelt_name": (
        "sft/quickstrat",
        "sft/quickstrat: no such file, and no shipped recipe has this name; "
        f"did you mean 'sft/quickstart' or 'vision/quickstart'? {LISTS_SHIPPED}",
    ),
    "half_a_name": (
        "quickstart",
        "quickstart: no such file, and no shipped recipe has this name; "
        f"did you mean 'sft/quickstart' or 'vision/quickstart'? {LISTS_SHIPPED}",
    ),
    "a_name_with_suffix": (
        "quickstart.yaml",
        f"quickstart.yaml: file not found; did you mean 'sft/quickstart' or 'vision/quickstart'? {LISTS_SHIPPED}",
    ),
    "a_folder": ("folder", "folder: is a folder, not a recipe; pass a recipe file"),
    "a_folder_with_recipes": (".", ".: is a folder, not a recipe; pass a file in it, such as mine.yaml"),
    "yaml_text": (
        "model: pico\ndata: x",
        r"'model: pico\ndata: x' is not a path or a name; write YAML text to a file, or pass a mapping",
    ),
    "nothing": ("", "'' is not a path or a name; write YAML text to a file, or pass a mapping"),
    "a_name_without_end": ("x" * 5000, "x" * 40 + "...: File name too long; pass a recipe file"),
}

BROKEN_OVERRIDES = {
    "an_unknown_key": (
        ["train.learning_rat=1"],
        "command line: train.learning_rat: unknown key; did you mean 'learning_rate'?",
    ),
    "an_unknown_section": (["trian.seed=1"], "command line: trian: unknown key; did you mean 'train'?"),
    "the_name_of_another_tool": (["lr=1e-4"], "command line: lr: unknown key; use train.learning_rate"),
    "no_equals_sign": (
        ["train.seed"],
        "command line: cannot read 'train.seed'; write key=value, such as train.max_steps=100",
    ),
    "no_key": (["=3"], "command line: cannot read '=3'; write key=value, such as train.max_steps=100"),
    "half_a_key": (["train.=3"], "command line: cannot read 'train.=3'; write key=value, such as train.max_steps=100"),
    "no_value": (
        ["output.dir="],
        "command line: output.dir: no value after '='; write null for the default, '\"\"' for an empty string",
    ),
    "a_wrong_value": (["train.seed=x"], "command line: train.seed: must be an integer, got 'x'"),
    "an_open_list": (
        ["adapter.target_modules=[q_proj"],
        "command line: adapter.target_modules: unclosed '['; close it, and separate items by commas",
    ),
    "a_value_that_needs_quotes": (
        ["output.dir=@home"],
        "command line: output.dir: a value cannot begin with '@'; quote it",
    ),
    "a_tag": (
        ["train.seed=!!int 3"],
        "command line: train.seed: tags such as !!int are unsupported; write the plain value",
    ),
    "two_documents": (
        ["train.seed=1\n---\n2"],
        "command line: train.seed: second YAML document; write one recipe per file, without '---'",
    ),
    "a_key_below_a_plain_value": (
        ["train.num_epochs.x=3"],
        "command line: train.num_epochs.x: train.num_epochs is not a section; write train.num_epochs=...",
    ),
    "a_required_key_taken_away": (
        ["data.train=null"],
        "command line: data.train: missing required key; `tunekit explain data.train` documents it",
    ),
    "a_section_of_which_only_a_detail_is_given": (
        ["data.eval.split=test"],
        "command line: data.eval.path: missing required key; `tunekit explain data.eval.path` documents it",
    ),
    "a_field_that_the_new_adapter_does_not_have": (
        ["adapter=full", "adapter.rank=3"],
        "command line: adapter.rank: adapter.type=full has no 'rank'; available with adapter.type=lora, qlora, vera "
        "or miss",
    ),
    "an_unknown_adapter": (
        ["adapter.type=lroa"],
        "command line: adapter.type: must be one of full, lora, qlora, ia3, vera, oft, miss, adalora, "
        "prompt_tuning, got 'lroa'; did you mean 'lora'?",
    ),
    "an_unknown_key_in_a_section": (
        ["adapter={type: lora, rnak: 3}"],
        "command line: adapter.rnak: unknown key; did you mean 'rank'?",
    ),
    "epochs_and_steps": (
        ["train.max_steps=3", "train.num_epochs=2"],
        "command line: train.num_epochs: mutually exclusive with train.max_steps; keep one of them",
    ),
    "a_misspelt_trainer_arg": (
        ["method.trainer_args.adam_bta1=0.8"],
        "command line: method.trainer_args.adam_bta1: not a field of SFTConfig; did you mean 'adam_beta1'?",
    ),
    "a_variable_where_none_may_stand": (
        ["output.name=${USER}"],
        "command line: output.name: ${USER} is not expanded in this field; write the value, or $${ for a literal ${",
    ),
    "a_key_of_a_list": (
        ["data.train=[a.jsonl, b.jsonl]", "data.train.split=test"],
        "command line: data.train.split: data.train is a list; write data.train[0].split=... for its first item, "
        "or replace it: data.train=...",
    ),
    "a_position_without_brackets": (
        ["data.train=[a.jsonl, b.jsonl]", "data.train.1.split=test"],
        "command line: data.train.1.split: list positions need brackets; write data.train[1].split=...",
    ),
    "a_position_beyond_the_list": (
        ["data.train=[a.jsonl, b.jsonl]", "data.train[2].split=test"],
        "command line: data.train[2].split: data.train has 2 items; the last item is data.train[1]",
    ),
    "a_position_from_the_end": (
        ["data.train=[a.jsonl, b.jsonl]", "data.train[-1].split=test"],
        "command line: cannot read 'data.train[-1].split=test'; write key=value, such as data.train[0].weight=2",
    ),
    "a_position_in_a_section": (
        ["data.train[0].split=test"],
        "command line: data.train[0].split: data.train is not a list; write data.train.split=...",
    ),
    "a_position_in_a_list_of_words": (
        ["adapter.target_modules[0]=q_proj"],
        "command line: adapter.target_modules[0]: adapter.target_modules is not a list of sections; "
        "write adapter.target_modules=...",
    ),
    "a_position_in_a_free_mapping": (
        ["method.trainer_args[0]=1"],
        "command line: method.trainer_args[0]: method.trainer_args is not a list of sections; "
        "write method.trainer_args=...",
    ),
    "an_item_taken_away": (
        ["data.train=[a.jsonl, b.jsonl]", "data.train[0]=null"],
        "command line: data.train[0]: must be a section (with path, name, split, revision, ...), got null",
    ),
    "a_misspelt_key_of_an_item": (
        ["data.train=[a.jsonl, {path: b.jsonl}]", "data.train[1].splt=test"],
        "command line: data.train[1].splt: unknown key; did you mean 'split'?",
    ),
    "the_weight_of_one_item": (
        ["data.train=[a.jsonl, b.jsonl]", "data.train[1].weight=2"],
        "command line: data.train[0].weight: missing for 'a.jsonl', but other sources have one; give all sources a "
        "weight, or none",
    ),
    "several_at_once": (
        ["adapter.rank=0", "foo=1"],
        "command line: foo: unknown key; keys of a recipe: model, data, method, adapter, train, parallel, output\n"
        "command line: adapter.rank: must be greater than 0, got 0",
    ),
}

BROKEN_MAPPINGS: dict[str, tuple[Mapping[Any, Any], str]] = {
    "an_empty_mapping": (
        {},
        "recipe: model: missing required key; `tunekit explain model` documents it\n"
        "recipe: data: missing required key; `tunekit explain data` documents it",
    ),
    "a_key_that_is_not_text": (
        {"model": "pico", "data": {"train": "x.jsonl"}, 3: 4},
        "recipe: a key must be a string, got 3; quote it",
    ),
    "a_value_of_no_yaml_type": (
        {"model": "pico", "data": {"train": "x.jsonl"}, "train": {"seed": object()}},
        "recipe: train.seed: must be an integer, got a Python object",
    ),
}


def message(source: str | Mapping[str, Any], *overrides: str) -> str:
    with pytest.raises(RecipeError) as error:
        load_recipe(source, overrides)
    return str(error.value)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TUNEKIT_UNSET", raising=False)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_recipe_is_told_with_its_place(case: str) -> None:
    text, expected = BROKEN[case]
    Path("recipe.yaml").write_bytes(text.encode())
    assert message("recipe.yaml") == expected


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_a_file_that_is_not_text_is_told_by_name(case: str) -> None:
    raw, expected = BROKEN_FILES[case]
    Path("recipe.yaml").write_bytes(raw)
    assert message("recipe.yaml") == expected


@pytest.mark.parametrize("case", BROKEN_SOURCES)
def test_a_recipe_that_is_not_there_is_told_with_what_is_near(case: str) -> None:
    Path("mine.yaml").write_text(GOOD)
    Path("folder").mkdir()
    source, expected = BROKEN_SOURCES[case]
    assert message(source) == expected


@pytest.mark.parametrize("case", BROKEN_OVERRIDES)
def test_a_broken_override_is_told_as_of_the_command_line(case: str) -> None:
    Path("recipe.yaml").write_text(QLORA)
    overrides, expected = BROKEN_OVERRIDES[case]
    assert message("recipe.yaml", *overrides) == expected


@pytest.mark.parametrize("case", BROKEN_MAPPINGS)
def test_a_broken_mapping_is_told_by_its_keys(case: str) -> None:
    source, expected = BROKEN_MAPPINGS[case]
    assert message(source) == expected


def test_the_file_is_named_as_the_user_named_it() -> None:
    Path("folder").mkdir()
    Path("folder/a b.yaml").write_text(GOOD + "seed: 1\n")
    expected = "./folder/../folder/a b.yaml:3:1: seed: unknown key; use train.seed"
    assert message("./folder/../folder/a b.yaml") == expected


def test_mistakes_of_file_and_command_line_come_together_in_reading_order() -> None:
    Path("recipe.yaml").write_text(GOOD + "train:\n  sede: 1\n  max_steps: x\nadapter: lroa\n")
    assert message("recipe.yaml", "output.nam=x").splitlines() == [
        "recipe.yaml:4:3: train.sede: unknown key; did you mean 'seed'?",
        "recipe.yaml:5:14: train.max_steps: must be an integer, got 'x'",
        "recipe.yaml:6:10: adapter.type: must be one of full, lora, qlora, ia3, vera, oft, miss, adalora, "
        "prompt_tuning, got 'lroa'; did you mean 'lora'?",
        "command line: output.nam: unknown key; did you mean 'name'?",
    ]


def test_an_unreadable_file_is_told() -> None:
    Path("recipe.yaml").symlink_to("/proc/self/mem")
    if not Path("recipe.yaml").exists():
        pytest.skip("this system has no file that exists and cannot be read")
    assert message("recipe.yaml") == "recipe.yaml: cannot read the file: Input/output error"
