"""The form of a new run: every field of the schema is in it, and says in the YAML what was meant."""

import re
from pathlib import Path
from typing import Any

import pytest

import tunekit
from tests.commands import run_command
from tests.webui.conftest import fill, slow_down, train
from tunekit import frontend
from tunekit.recipe.schema import all_fields
from webui import draft
from webui.fields import shown
from webui.form import EVERYDAY, faults_by_entry, name_of
from webui.site import Site

REWARDS = {
    "function": {"path": "tests.rows:row_for"},
    "regex": {"pattern": "a"},
    "json_schema": {"path": "schema.json"},
    "length": {"max_tokens": 20, "free_tokens": 10},
    "reward_model": {"model": "pico"},
    "judge": {"base_url": "http://x/v1", "model": "m", "instruction": "Be\nstrict: [x]"},
}
REWARD_TYPES = [
    "function", "exact_match", "numeric_match", "regex", "json_schema", "length", "repetition", "math", "code",
    "reward_model", "judge",
]  # fmt: skip
METHODS = {method.name: method for method in frontend.list_methods()}

FITTING: dict[str, Any] = {
    "method.teacher_prompt_template": "{prompt} as in {privileged_context}",
    "data.train.format": "text", "data.eval.format": "text", "data.train.columns": {"text": "body: x", "1e-4": "no"},
    "data.train.replace": {"A": "b: c"}, "data.eval.replace": {"A": "b"}, "data.replace": {"{{NAME}}": "Ada"},
    "data.too_long": "drop", "data.columns": {"text": "b"}, "data.eval.columns": {"text": "b"}, "data.max_length": 2000,
    "method.trainer_args": {"adam_beta1": 0.8, "lr_scheduler_kwargs": {"a": [1]}}, "method.num_generations": 4,
    "method.epsilon_high": 5.0, "method.loss_weights": [0.25, 2.0], "method.feature_layers": [0.5, 1.0],
    "method.rewards.free_tokens": 4,
    "method.rewards.max_tokens": 12, "method.rewards.pattern": "[a-z]+: \\d", "method.rewards.column": "other",
    "method.rewards.path": "tests.rows:save_rows", "method.generation.stop": ["\n\n", "END"],
    "method.rollout": "tests.rows:save_rows", "model.chat_template": "chatml",
    "train.callbacks": ["tests.rows:save_rows"],
    "method.rewards.model.chat_template": "chatml", "method.teacher.chat_template": "chatml",
    "method.label_smoothing": 0.25, "train.num_epochs": 2.5, "train.max_steps": 7, "train.learning_rate": 3e-5,
    "train.metric_for_best_model": "eval_x", "train.retry_out_of_memory": True, "train.global_batch_size": 32,
    "train.learning_rates": {r"embed\.[a-z]": 1e-5, "b": 0.5}, "output.report_to": ["wandb", "mlflow"],
    "adapter.layers_to_transform": [0, 2], "adapter.trainable_token_indices": [7, 9],
    "adapter.rank_pattern": {"q_proj": 8}, "adapter.alpha_pattern": {"q_proj": 8.5},
    "adapter.target_modules": ["q_proj", "v_proj"], "adapter.init_r": 16,
    "adapter.relora.steps": 50,
    "parallel.nvme_path": "/tmp", "output.name": "a.b-1", "output.sample_prompts": ["Hi", " a\n\"b\" ", "[]"],
}  # fmt: skip
"""Values where any would not do, by keys without positions."""

ADAPTERS = {
    "sft": "prompt_tuning", "dpo": "full", "orpo": "ia3", "cpo": "vera", "reward": "oft", "kto": "adalora",
    "rloo": "qlora", "gkd": "miss",
}  # fmt: skip
"""Kinds of adapter by method, so that all come up; LoRA for the others."""

WEIGHTS = {"data.train": [{"path": "a", "weight": 1}, {"path": "c", "weight": 2}]}
SERVER = {"method.generation.use_vllm": True, "method.generation.vllm_mode": "server"}

BESIDE: dict[str, dict[str, Any]] = {
    "data.train.weight": WEIGHTS,
    "data.weight_by": WEIGHTS,
    "data.stopping_strategy": WEIGHTS,
    "data.mixing": {"data.train": [{"path": "a"}, {"path": "c"}], "data.shuffle": False},
    "data.eval_size": {"data.eval": frontend.UNSET},
    "data.train.sampling": {"data.train.max_samples": 5},
    "data.eval.sampling": {"data.eval.max_samples": 5},
    "data.packing": {"adapter.type": "lora"},
    "data.padding_free": {"adapter.type": "lora"},
    "data.curriculum": {"data.shuffle": False},
    "data.curriculum_column": {"data.shuffle": False},
    "data.streaming": {"train.max_steps": 5},
    "train.pure_bf16": {"adapter.type": "full"},
    "train.optim_args.rank": {"train.optim": "apollo_adamw", "adapter.type": "full"},
    "train.optim_args.update_proj_gap": {"train.optim": "apollo_adamw", "adapter.type": "full"},
    "train.optim_args.scale": {"train.optim": "apollo_adamw", "adapter.type": "full"},
    "train.optim_args.scale_type": {"train.optim": "apollo_adamw", "adapter.type": "full"},
    "train.optim_target_modules": {"train.optim": "apollo_adamw", "adapter.type": "full"},
    "train.early_stopping_threshold": {"train.early_stopping_patience": 2},
    "adapter.num_init_rows": {"adapter.init_lora_weights": "corda"},
    "adapter.corda_method": {"adapter.init_lora_weights": "corda"},
    "adapter.rho": {"adapter.init_lora_weights": "eva"},
    "adapter.prompt_tuning_init_text": {"adapter.prompt_tuning_init": "TEXT"},
    "adapter.language_model": {"adapter.projector": "full"},
    "adapter.dropout": {"method.trainer_args": {"disable_dropout": False}},
    "method.labels": {"method.num_labels": frontend.UNSET},
    "method.eaft_alpha": {"method.loss_type": "eaft"},
    "method.eaft_top_k": {"method.loss_type": "eaft"},
    "method.loss_weights": {"method.loss_type": ["sigmoid", "hinge"]},
    "method.simpo_gamma": {"method.loss_type": "simpo"},
    "method.importance_sampling_level": {"method.loss_type": "grpo"},
    "method.generation.vllm_mode": SERVER,
    "method.generation.vllm_server_base_url": SERVER,
    "method.generation.vllm_tensor_parallel_size": SERVER,
    "method.generation.vllm_data_parallel_size": SERVER,
    "method.max_staleness": SERVER,
    "method.uld_hybrid_matched_weight": {"method.uld_use_hybrid_loss": True, "method.uld_hybrid_unmatched_weight": 1.0},
    "method.uld_hybrid_unmatched_weight": {"method.uld_use_hybrid_loss": True, "method.uld_hybrid_matched_weight": 1.0},
    "method.max_tool_calling_iterations": {"method.environment": "adventure"},
    "method.tool_timeout_seconds": {"method.environment": "adventure"},
    "method.max_tool_result_chars": {"method.environment": "adventure"},
}
"""What else a recipe says where a field means something only together with it, by keys without positions."""


WITH_DROPOUT = ("sft", "gkd", "gold", "prm", "classification")
"""Methods that keep the dropout of an adapter without an argument."""

ROWS_ALONE = (
    "data.packing",
    "data.padding_free",
    "data.loss_on",
    "data.train.loss_on",
    "data.eval.loss_on",
    "method.kd_ratio",
)
"""Fields that mean something in GKD only where no completions are generated."""


def texts() -> list[str]:
    """Recipes that together have every field of the schema."""
    found = []
    for method in METHODS:
        adapter = ADAPTERS.get(method, "lora")
        extra: dict[str, Any] = {"type": method}
        if METHODS[method].is_rewarded:
            extra["rewards"] = [{"type": one, **REWARDS.get(one, {})} for one in REWARD_TYPES]
        if METHODS[method].has_teacher:
            extra["teacher"] = {"path": "pico"}
        if method == "classification":
            extra["num_labels"] = 2
        values = {"model": {"path": "pico"}, "data": {"train": {"path": "a"}, "eval": {"path": "b"}}, "method": extra}
        text = "# Mine.\n"
        for name, value in {**values, "adapter": {"type": adapter}}.items():
            text = frontend.edit_text(text, name, value)
        found.append(text)
    return found


TOOLS = [
    {"type": "function", "path": "own:lookup"},
    "calculator",
    "python",
    {"type": "search", "path": "notes"},
]
ENVIRONMENTS = [{"type": "class", "path": "own:Game"}, "guess_number", "priced_sums", "adventure"]


def texts_with_tools() -> list[str]:
    """Recipes that together have every field of tools and environments."""
    values = {"model": {"path": "pico"}, "data": {"train": {"path": "a"}}}
    found = []
    for environment in ENVIRONMENTS:
        text = "# Mine.\n"
        for name, value in {**values, "method": {"type": "grpo", "tools": TOOLS, "environment": environment}}.items():
            text = frontend.edit_text(text, name, value)
        found.append(text)
    return found


def other_value(entry: frontend.Entry) -> Any:
    """A valid value that is not the default."""
    name = name_of(entry.key)
    if name in FITTING:
        return FITTING[name]
    if name.endswith((".short_factor", ".long_factor")):
        return [1.0, 2.5]
    if name.endswith((".image_processor", ".video_processor")):
        return {"max_pixels": 501760, "size": {"longest_edge": 5}}
    if entry.kind == "bool":
        return not entry.default
    if entry.kind == "choice":
        return next(word for word in entry.choices if word not in ("auto", entry.default))
    if entry.kind in ("int", "float"):
        low = entry.at_least if entry.at_least is not None else entry.above or 0
        high = entry.at_most if entry.at_most is not None else entry.below
        value = low + 3 if high is None else (low + high) / 2
        return int(value) if entry.kind == "int" else float(value) + (0.5 if high is None else 0)
    if entry.kind == "list":
        return ["hinge", "sft"] if entry.item_kind == "choice" else ["a: b", "c"]
    return "dict" if entry.kind == "mapping" else "tests.rows:save_rows" if entry.is_open else "some text: #1"


def beside(text: str, entry: frontend.Entry, method: str) -> str:
    """A recipe in which a field of this one means something."""
    name = name_of(entry.key)
    for key, value in BESIDE.get(name, {}).items():
        if not (key == "method.trainer_args" and (method in WITH_DROPOUT or METHODS[method].generates)):
            text = frontend.edit_text(text, key, value)
    section, _, own = entry.key.rpartition(".")
    if section.endswith("rope_scaling") and own != "factor":
        text = frontend.edit_text(text, f"{section}.factor", 2)
    if name == "method.label_smoothing" and method == "dpo":
        text = frontend.edit_text(text, "method.loss_type", ["robust"])
    if section.endswith("relora"):
        text = frontend.edit_text(text, "adapter.type", "lora")
        text = text if own == "steps" else frontend.edit_text(text, f"{section}.steps", 50)
    if method in ("gkd", "gold") and name in ROWS_ALONE:
        text = frontend.edit_text(text, "method.lmbda", 0)
    if name == "method.rewards.column":
        text = frontend.edit_text(text, entry.key.replace("column", "path"), frontend.UNSET)
    return text


@pytest.mark.sample(1)
@pytest.mark.parametrize(("method", "text"), list(zip(METHODS, texts(), strict=True)), ids=METHODS)
def test_every_field_says_in_the_recipe_what_was_meant_and_shows_it_again(method: str, text: str) -> None:
    for first in draft.entries_of(text):
        if first.kind in ("section", "sections") or first.is_tag:
            continue
        value = other_value(first)
        base = beside(text, first, method)
        name = name_of(first.key)
        entry = next(one for one in draft.entries_of(base) if name_of(one.key) == name and _same(one, first))
        field = shown(frontend.Entry(**{**vars(entry), "value": value}))
        edited = draft.merged(base, base, {entry.key: field})
        assert edited.startswith("# Mine.\n")
        (now,) = [one for one in draft.entries_of(edited) if one.key == entry.key]
        assert (now.value, type(now.value)) == (value, type(value)), entry.key
        assert shown(now) == field, entry.key
        recipe, faults = tunekit.check_text(edited, find_functions=False)
        assert recipe is not None, (entry.key, faults)
        at: Any = recipe.model_dump()
        for part in re.findall(r"[^.\[\]]+", entry.key):
            at = at[int(part)] if isinstance(at, list) else at[part]
        assert at == value, entry.key
        if entry.value is frontend.UNSET:
            empty: Any = entry.default if entry.kind == "bool" else [] if isinstance(field, list) else ""
            back = draft.merged(edited, edited, {entry.key: empty})
            assert frontend.read_text(back) == frontend.read_text(base), entry.key


def _same(one: frontend.Entry, other: frontend.Entry) -> bool:
    """Whether they are the same field: of several rewards, that of the same one."""
    return one.key == other.key or not one.key.startswith("method.rewards")


REFUSED = {
    ("method", "teacher", name)
    for name in ("dtype", "attn_implementation", "kernels", "image_processor", "video_processor")
}
"""Fields that no recipe may give: the schema has them, as a model has them."""


def test_every_field_of_the_schema_is_reached_by_these_forms() -> None:
    reached = {name_of(entry.key) for text in (*texts(), *texts_with_tools()) for entry in draft.entries_of(text)}
    assert reached == {".".join(key) for key, _ in all_fields() if key not in {*REFUSED, ("data", "eval", "weight")}}


@pytest.mark.parametrize(("method", "text"), list(zip(METHODS, texts(), strict=True)), ids=METHODS)
def test_what_a_form_leaves_out_is_refused_and_shown_where_it_is_given(method: str, text: str) -> None:
    given: dict[str, Any] = {
        "data.packing": True, "data.loss_on": "last", "data.train.loss_on": "last", "data.eval.loss_on": "last",
        "data.curriculum": "length",
        "data.eval.weight": 2, "output.sample_prompts": ["Hi"], "method.teacher.dtype": "float32",
        "method.teacher.attn_implementation": "eager", "method.teacher.kernels": "torch",
        "method.teacher.image_processor": {"max_pixels": 3136}, "method.teacher.video_processor": {"fps": 1},
    }  # fmt: skip
    there = {entry.key for entry in draft.entries_of(text)}
    for key in given.keys() - there:
        if key.startswith("method.teacher") and method != "distillation":
            continue
        edited = frontend.edit_text(text, key, given[key])
        recipe, faults = tunekit.check_text(edited, find_functions=False)
        assert recipe is None and key in {fault.key for fault in faults}, key
        assert key in {entry.key for entry in draft.entries_of(edited)}, key


def test_fields_that_stand_open_are_fields() -> None:
    assert set(EVERYDAY) <= {".".join(key) for key, _ in all_fields()}


@pytest.mark.parametrize(
    ("key", "typed", "message"),
    [
        ("adapter.rank", "0", "must be greater than 0, got 0"),
        ("adapter.rank", "many", "must be an integer, got 'many'"),
        ("adapter.rank", "2.5", "must be an integer, got 2.5"),
        ("adapter.dropout", "1", "must be less than 1, got 1"),
        ("train.learning_rate", "-1e-4", "must be greater than 0, got -0.0001"),
        (
            "output.name",
            "a b",
            "must consist of letters, digits, '.', '_' and '-' and start with a letter or digit, got 'a b'",
        ),
        ("data.columns", "no mapping", "must be a mapping, got 'no mapping'"),
        ("data.format", "aplaca", "did you mean 'alpaca'?"),
    ],
)
def test_a_wrong_value_is_told_at_its_field_as_on_the_command_line(
    tmp_path: Path, key: str, typed: str, message: str
) -> None:
    text = "model: pico\ndata: {train: a.jsonl}\n"
    edited = draft.merged(text, text, {key: typed})
    _, (fault,) = draft.check_draft(edited)
    assert faults_by_entry(draft.entries_of(edited), [fault]) == {key: fault.message}
    assert message in fault.message
    (entry,) = [one for one in draft.entries_of(edited) if one.key == key]
    assert str(shown(entry)) == str(frontend.read_text(f"x: {typed}")["x"]), "as the YAML reads it"
    (tmp_path / "mine.yaml").write_text(edited)
    told = run_command("check", "mine.yaml", cwd=tmp_path).stderr
    assert f"mine.yaml:{fault}" in told


def test_what_is_missing_is_told_at_the_field_that_is_empty() -> None:
    text = "data: {train: a.jsonl}\n"
    _, faults = draft.check_draft(text)
    assert list(faults_by_entry(draft.entries_of(text), faults)) == ["model.path"]


def test_a_change_in_the_form_keeps_what_was_written_meanwhile() -> None:
    known = "model: pico\ndata: {train: a.jsonl}\nadapter: {type: lora, rank: 8}\n"
    fields = {entry.key: shown(entry) for entry in draft.entries_of(known)}
    written = known.replace("rank: 8", "rank: 8, alpha: 3") + "# a comment\n"
    merged = draft.merged(written, known, {**fields, "adapter.rank": "4"})
    assert frontend.read_text(merged)["adapter"] == {"type": "lora", "rank": 4, "alpha": 3}
    assert "# a comment" in merged


def test_remote_code_is_not_run_from_a_page() -> None:
    commit = "a" * 40
    text = f"model: {{path: some/model, revision: {commit}, trust_remote_code: true}}\ndata: {{train: a.jsonl}}\n"
    recipe, (fault,) = draft.check_draft(text)
    assert recipe is None
    assert (fault.line, fault.key) == (1, "model.trust_remote_code")


# Where drafts come from, and where they go


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(fill(tmp_path / "workspace"))


def test_a_draft_begins_from_a_recipe_a_file_or_a_run_with_changes(site: Site) -> None:
    text = draft.opened(site, "recipe:sft/quickstart", ["adapter.rank=8", "train.num_epochs=null", "train.max_steps=3"])
    assert text.startswith("# LoRA fine-tuning of pico")
    values = frontend.read_text(text)
    assert values["adapter"]["rank"] == 8
    assert values["train"] == {"learning_rate": 2e-3, "max_steps": 3}
    assert draft.opened(site, "file:trained.yaml", []) == (site.root / "trained.yaml").read_text()
    listed = draft.sources(site)
    assert "recipe:sft/quickstart" in [value for _, value in listed["recipe"]]
    assert [value for _, value in listed["file"]] == ["file:trained.yaml"]


@pytest.mark.parametrize(
    "source", ["file:../x.yaml", "file:/etc/passwd", "file:chats.jsonl", "run:..", "run:x", "recipe:x", "x", ""]
)
def test_a_draft_begins_from_nothing_else(site: Site, source: str) -> None:
    (site.root.parent / "x.yaml").write_text("model: pico\n")
    with pytest.raises(tunekit.TunekitError):
        draft.opened(site, source, [])


def test_a_draft_begins_from_a_run(trained_run: tunekit.Run) -> None:
    site = Site(trained_run.path.parent.parent)
    text = draft.opened(site, f"run:{trained_run.name}", ["train.max_steps=9"])
    assert frontend.read_text(text)["train"]["max_steps"] == 9
    assert len(text.splitlines()) < 30


@pytest.mark.slow
def test_a_draft_from_a_run_names_the_run_that_it_trained_on_and_files_of_the_workspace(
    trained_run: tunekit.Run,
) -> None:
    site = Site(trained_run.path.parent.parent)
    data = f"data.train={site.root}/chats.jsonl"
    again = train(
        site.root, "trained.yaml", f"model={trained_run.name}", data, "train.max_steps=1", "output.name=again"
    )
    assert again.recipe.model.path == str(trained_run.model_path)
    recipe, _ = tunekit.check_text(draft.opened(site, f"run:{again.name}", []))
    assert (recipe.model.path, recipe.data.train.path) == (trained_run.name, "chats.jsonl")


def test_a_draft_is_saved_once_and_replaced_only_where_that_is_said(site: Site) -> None:
    draft.save(site, "mine.yaml", "model: a\n", replace=False)
    with pytest.raises(FileExistsError):
        draft.save(site, "mine.yaml", "model: b\n", replace=False)
    assert (site.root / "mine.yaml").read_text() == "model: a\n"
    draft.save(site, "mine.yaml", "model: b", replace=True)
    assert (site.root / "mine.yaml").read_text() == "model: b\n"
    for name in ("../mine.yaml", "mine.py", "runs/a.yaml", "no/folder.yaml", "", "/tmp/mine.yaml"):
        with pytest.raises(tunekit.TunekitError):
            draft.save(site, name, "x", replace=True)
    with pytest.raises(tunekit.TunekitError, match="read-only"):
        draft.save(Site(site.root, read_only=True), "other.yaml", "x", replace=False)


def test_the_command_trains_the_same_recipe() -> None:
    base = frontend.recipe_text("pico/grpo")
    text = frontend.edit_text(base, "adapter.type", "lora")
    text = frontend.edit_text(text, "method.rewards[1]", {"type": "regex", "pattern": "it's .*"})
    command, python = draft.command_and_python("recipe:pico/grpo", text, "mine.yaml")
    assert command.startswith("tunekit train pico/grpo ") and "adapter.type=lora" in command
    words = draft.overrides(base, text)
    assert words is not None
    assert tunekit.load_recipe("pico/grpo", words) == tunekit.check_text(text)[0]
    compile(python, "page", "exec")
    assert draft.command_and_python("file:a.yaml", text, "my recipe.yaml")[0] == "tunekit train 'my recipe.yaml'"


@pytest.mark.slow
def test_form_and_yaml_follow_each_other_and_a_reload_keeps_the_draft(
    tmp_path: Path, serve: Any, open_page: Any
) -> None:
    server = serve(fill(tmp_path / "workspace"))
    page = open_page(f"{server.url}new?from=recipe:sft/quickstart")
    rank = page.get_by_label("Rank · adapter.rank")
    rank.wait_for()
    yaml = page.locator("#form-yaml .cm-content")
    rank.fill("0")
    page.locator("#form-adapter-rank").get_by_text("must be greater than 0, got 0").wait_for()
    page.locator("#form-problems li").get_by_text("Line 11").wait_for()
    rank.fill("8")
    page.locator("#form-problems .form-valid").wait_for()
    page.locator("#form-adapter-rank").get_by_text("must be").wait_for(state="detached")
    yaml.get_by_text("rank: 8").wait_for()
    page.get_by_label("Method · method.type").click()
    page.get_by_role("option", name="dpo", exact=True).click()
    page.locator("#form-method-beta").wait_for()
    yaml.click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text("model: pico\ndata:\n  train: chats.jsonl\nadapter:\n  type: lora\n  rank: 5\n")
    page.locator("#form-method-beta").wait_for(state="detached")
    page.wait_for_function(
        "document.querySelector('#form-adapter-rank textarea, #form-adapter-rank input')?.value == '5'"
    )
    page.locator("#form-problems .form-valid").wait_for()
    page.reload()
    page.wait_for_function(
        "document.querySelector('#form-adapter-rank textarea, #form-adapter-rank input')?.value == '5'"
    )
    yaml.get_by_text("chats.jsonl").wait_for()


@pytest.mark.slow
def test_no_edit_is_lost_while_the_form_is_made_anew(tmp_path: Path, serve: Any, open_page: Any) -> None:
    from playwright.sync_api import expect

    page = open_page(
        f"{serve(fill(tmp_path / 'workspace')).url}new?from=recipe:sft/quickstart&set=train.num_epochs=null"
    )
    slow_down(page)
    fields, yaml = page.locator("#form-fields"), page.locator("#form-yaml .cm-content")
    steps = page.locator("#form-fields:not([inert]) #form-train-max_steps input")
    busy, buttons = page.locator("#form-lock"), page.locator("#plan-buttons")
    expect(steps).to_have_value("")

    def is_held() -> None:
        expect(fields).to_have_attribute("aria-busy", "true")
        expect(busy).to_be_visible()
        expect(buttons).to_have_attribute("inert", "")

    def is_kept(value: str) -> None:
        expect(yaml).to_contain_text(f"max_steps: {value}")
        page.evaluate("formLock.settled()")
        expect(steps).to_have_value(value)
        expect(yaml).to_contain_text(f"max_steps: {value}")

    # Another method, right behind an edit.
    steps.fill("200")
    page.get_by_label("Method · method.type").click()
    page.get_by_role("option", name="dpo", exact=True).click()
    is_held()
    steps.fill("300")
    page.locator("#form-method-beta").wait_for()
    expect(busy).to_be_hidden()
    is_kept("300")
    # What is looked for, and a section more.
    steps.fill("400")
    page.locator("#form-search input, #form-search textarea").fill("max_steps")
    expect(page.locator("#form-method-type")).to_have_count(0)
    is_kept("400")
    page.locator("#form-search input, #form-search textarea").fill("")
    steps.fill("500")
    page.locator("#form-data-train-add").click()
    page.locator("#form-data-train-1-path").wait_for()
    is_kept("500")
    # Another recipe.
    page.locator("#form-source input").fill("pico/dpo")
    page.get_by_role("option", name="pico/dpo:").click()
    is_held()
    steps.fill("600")
    expect(yaml).to_contain_text("dpo")
    is_kept("600")


def test_recipes_are_offered_by_method_and_memory() -> None:
    every = draft.recipes()
    assert len(every) == len(tunekit.list_recipes())
    offered = [value for _, value in draft.recipes("dpo", 16)]
    assert "recipe:mistral-7b/dpo" in offered and "recipe:pico/dpo" in offered
    assert "recipe:qwen3-8b/dpo" not in offered and "recipe:mistral-7b/sft" not in offered
    on_a_cpu = draft.recipes("", 0)
    assert on_a_cpu and all(label.endswith("· CPU") for label, _ in on_a_cpu)


@pytest.mark.slow
def test_a_recipe_is_chosen_by_task_and_memory_and_edits_tell_their_effect(
    tmp_path: Path, serve: Any, open_page: Any
) -> None:
    from playwright.sync_api import expect

    page = open_page(f"{serve(fill(tmp_path / 'workspace')).url}new?from=file:trained.yaml")

    def after(field: str) -> str:
        return page.locator(field).evaluate("one => getComputedStyle(one, '::after').content")

    def choose(field: str, name: str) -> None:
        page.locator(f"{field} input").click()
        page.locator(field).get_by_role("option", name=name).click()

    expect(page.locator("#plan-brief .plan-verdict")).to_be_visible()
    assert "Plan: adamw_torch_fused, learning rate" in after("#form-train-learning_rate")
    page.locator("#form-train-global_batch_size input").fill("16")
    expect(page.locator("#plan-brief .plan-effect")).to_contain_text("train.global_batch_size: Memory")
    assert after("#form-train-global_batch_size").startswith('"Last edit: Memory')
    choose("#form-task", "Prefer one answer")
    choose("#form-size", "CPU")
    expect(page.locator("#form-source")).to_contain_text("2 shipped recipes fit")
    choose("#form-source", "pico/dpo:")
    expect(page.locator("#form-yaml .cm-content")).to_contain_text("method: dpo")
    expect(page.locator("#plan-brief .plan-effect")).to_have_count(0)
