"""Code that comes with a model runs where the recipe says so, at a commit or as it was, and nowhere else."""

import json
import shutil
from contextlib import nullcontext

import pytest
import yaml

from tests.security.entries import ENTRIES, RUNNING
from tests.tiny import save_chats, save_tiny_model
from tunekit.api import verbs
from tunekit.errors import DataError, ModelError, PlanError, RecipeError, TunekitError
from tunekit.launching.local import launch
from tunekit.models.load import load_model
from tunekit.recipe.load import dump_recipe, load_recipe
from tunekit.recipe.sections.model import ModelSection
from tunekit.runs.fingerprints import read_recipe

COMMIT = "0123456789abcdef0123456789abcdef01234567"

CODE = """\
from pathlib import Path
Path({sentinel!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

class OwnJudge(LlamaForSequenceClassification):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass

def generate(*args, **kwargs):
    raise AssertionError
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("code")
    save_tiny_model(folder / "plain", hidden=16, layers=1)
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(4)))
    return folder


@pytest.fixture
def sentinel(tmp_path, monkeypatch):
    """What code that was run leaves; where transformers keeps copies of it is the test's own."""
    import transformers.dynamic_module_utils as modules

    for module in (modules,):
        monkeypatch.setattr(module, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "sentinel"


def edit(file, **changes):
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | changes))


def bring_code(workspace, folder, sentinel, *, parts):
    """A model whose parts bring code that leaves the sentinel."""
    shutil.copytree(workspace / "plain", folder)
    (folder / "own.py").write_text(CODE.format(sentinel=str(sentinel)))
    if "model" in parts:
        classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
        classes["AutoModelForSequenceClassification"] = "own.OwnJudge"
        edit(folder / "config.json", model_type="own", auto_map=classes)
    if "tokenizer" in parts:
        classes = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
        edit(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=classes)
    if "generate" in parts:
        (folder / "custom_generate").mkdir()
        (folder / "custom_generate" / "generate.py").write_text(CODE.format(sentinel=str(sentinel)))
    return str(folder)


def recipe_for(workspace, model, **sections):
    return {
        "model": model,
        "data": {"train": str(workspace / "rows.jsonl"), "max_length": 64},
        "train": {"max_steps": 1, "global_batch_size": 2},
        **sections,
    }


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("part", ["model", "tokenizer", "generate"])
def test_code_that_comes_with_a_model_is_not_run_unasked(part, entry, workspace, tmp_path, sentinel):
    model = bring_code(workspace, tmp_path / "own", sentinel, parts=[part])
    recipe = recipe_for(workspace, model, data={"train": str(workspace / "rows.jsonl"), "packing": True})
    try:
        ENTRIES[entry](recipe)
    except TunekitError as error:
        assert "own" in str(error)
    else:
        # The report of the data loads the tokenizer alone.
        assert entry not in RUNNING or part == "generate" or (entry, part) == ("data", "model")
    assert not sentinel.exists()


@pytest.mark.sample(2)
@pytest.mark.parametrize("entry", RUNNING)
@pytest.mark.parametrize("where", ["teacher", "reward_model"])
def test_nor_is_that_of_a_second_model(where, entry, workspace, tmp_path, sentinel):
    own = bring_code(workspace, tmp_path / "own", sentinel, parts=["model", "tokenizer"])
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    common = {"max_completion_length": 4}
    method = {"type": "distillation", "teacher": own, **common}
    if where == "reward_model":
        reward = {"type": "reward_model", "model": own}
        method = {"type": "grpo", "rewards": [reward], "num_generations": 2, **common}
    data = {"train": "prompts.jsonl", "max_length": 64}
    # The report of the data asks no reward.
    key = r"method\.teacher: .*own" if where == "teacher" else ""
    with nullcontext() if (where, entry) == ("reward_model", "data") else pytest.raises(TunekitError, match=key):
        ENTRIES[entry](recipe_for(workspace, str(workspace / "plain"), method=method, data=data))
    assert not sentinel.exists()


def test_code_that_is_asked_for_runs_is_written_down_and_may_not_change(workspace, tmp_path, sentinel):
    own = bring_code(workspace, tmp_path / "own", sentinel, parts=["model", "tokenizer"])
    model = {"path": own, "trust_remote_code": True}
    train = {"max_steps": 2, "global_batch_size": 2, "save_steps": 1}
    run = verbs.train(recipe_for(workspace, model, train=train))
    assert sentinel.exists()
    assert list(json.loads((run.path / "code.json").read_text())["model"]) == ["own.py"]
    assert "trust_remote_code" in (run.model_path / "README.md").read_text()
    assert "code" in {reason.topic for reason in run.plan.reasons}

    # A run that starts from this one is asked again.
    with pytest.raises(RecipeError, match=r"model.trust_remote_code: is false, but .* comes with its own code"):
        verbs.plan(recipe_for(workspace, str(run.path)))

    run.update_status(phase="failed", exit_reason="the power is gone")
    with (tmp_path / "own" / "own.py").open("a") as file:
        file.write("# changed\n")
    sentinel.unlink()
    with pytest.raises(ModelError, match=r"own\.py: the code that comes with the model changed"):
        verbs.resume(run)
    assert not sentinel.exists()


def test_a_plan_that_trusts_more_than_its_recipe_is_refused(workspace, tmp_path, sentinel):
    own = bring_code(workspace, tmp_path / "own", sentinel, parts=["model"])
    run = verbs.make_run(recipe_for(workspace, str(workspace / "plain")))
    origin = {
        "folder": own,
        "base": {"path": own, "trust_remote_code": True},
        "start": own,
        "runs": [],
        "adapter": None,
    }
    lines = [line for line in (run.path / "plan.yaml").read_text().splitlines() if not line.startswith("origin:")]
    (run.path / "plan.yaml").write_text("\n".join([*lines, f"origin: {json.dumps(origin)}\n"]))
    from tunekit.training.worker import work

    with pytest.raises(PlanError, match="which is not in its recipe"):
        work(run)
    assert not sentinel.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONPATH", "PYTHONSTARTUP", "PATH", "HF_ENDPOINT"])
def test_a_plan_sets_no_variable_that_loads_other_code(name, workspace, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = verbs.make_run(recipe_for(workspace, str(workspace / "plain")))
    plan = yaml.safe_load((run.path / "plan.yaml").read_text())
    (run.path / "plan.yaml").write_text(yaml.safe_dump(plan | {"environment": {name: "/tmp/x"}}))
    with pytest.raises(PlanError, match=name):
        launch(run)


@pytest.mark.parametrize(
    "keys",
    [
        {"model": {"path": "owner/name", "trust_remote_code": True}},
        {"model": {"path": "owner/name", "trust_remote_code": True, "revision": "main"}},
        {"model": {"path": "owner/name", "trust_remote_code": True, "revision": COMMIT[:7]}},
        {"model": {"path": "owner/name", "trust_remote_code": True, "revision": COMMIT.upper()}},
        {"method": {"type": "distillation", "teacher": {"path": "owner/name", "trust_remote_code": True}}},
        {
            "method": {
                "type": "grpo",
                "rewards": [{"type": "reward_model", "model": {"path": "owner/name", "trust_remote_code": True}}],
            }
        },
    ],
    ids=["none", "branch", "short", "capitals", "teacher", "reward"],
)
def test_code_of_the_hub_runs_at_a_commit_alone(keys):
    with pytest.raises(RecipeError) as refused:
        read_recipe({"model": "pico", "data": {"train": "a.jsonl"}, **keys})
    said = str(refused.value)
    assert "trust_remote_code: cannot be true for 'owner/name' from the Hub without a commit" in said
    assert "git ls-remote https://huggingface.co/owner/name HEAD" in said


def test_a_full_commit_is_taken_and_kept():
    model = {"path": "owner/name", "trust_remote_code": True, "revision": COMMIT}
    recipe, _ = read_recipe({"model": model, "data": {"train": "a.jsonl"}})
    assert COMMIT in dump_recipe(recipe)
    method = {"type": "grpo", "rewards": ["exact_match"], "beta": 0.1}
    with pytest.raises(RecipeError, match="TRL pins no commit of its code"):
        read_recipe({"model": model, "data": {"train": "a.jsonl"}, "adapter": "full", "method": method})


def test_an_adapter_names_the_commit_of_its_base(workspace, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    edit(folder / "adapter_config.json", **config, base_model_name_or_path="owner/name", revision="main")
    recipe = recipe_for(workspace, {"path": str(folder), "trust_remote_code": True})
    with pytest.raises(RecipeError, match=r"set revision in the adapter_config.json"):
        read_recipe(recipe)


def test_code_of_another_repository_is_refused(workspace, tmp_path, sentinel):
    own = bring_code(workspace, tmp_path / "own", sentinel, parts=["model"])
    edit(tmp_path / "own" / "config.json", auto_map={"AutoConfig": "evil/other--own.OwnConfig"})
    with pytest.raises(RecipeError, match="runs code of another repository, evil/other"):
        verbs.make_run(recipe_for(workspace, {"path": own, "trust_remote_code": True}))
    assert not sentinel.exists()


def test_trust_is_asked_for_by_nothing_else_than_its_field():
    with pytest.raises(RecipeError, match=r"trust_remote_code: set by tunekit; use model\.trust_remote_code"):
        load_recipe(
            {
                "model": "pico",
                "data": {"train": "a.jsonl"},
                "method": {"type": "sft", "trainer_args": {"trust_remote_code": True}},
            }
        )


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_an_attention_of_the_hub_in_a_config_is_not_loaded(key, workspace, tmp_path, sentinel):
    """transformers would load such code by the package `kernels`, without `trust_remote_code`."""
    shutil.copytree(workspace / "plain", tmp_path / "model")
    edit(tmp_path / "model" / "config.json", **{key: "owner/kernels"})
    section = ModelSection(path=str(tmp_path / "model"))
    for implementation in (None, "sdpa"):
        model = load_model(section, dtype="float32", attn_implementation=implementation, device="cpu")
        assert model.config._attn_implementation == "sdpa"


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("verb", [verbs.data_report, verbs.make_run])
def test_a_chat_template_that_does_not_end_is_ended_and_named(verb, workspace, tmp_path, monkeypatch):
    monkeypatch.setattr("tunekit.probe.chat_template.ROW_SECONDS", 0.5)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(workspace / "plain", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(ENDLESS)
    with pytest.raises(DataError, match="rendering the chat template timed out after 0 s"):
        verb(recipe_for(workspace, str(tmp_path / "model")))


ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('touch SENTINEL').read() }}",
    "{% for m in messages %}{{ lipsum.__globals__['os'].system('touch SENTINEL') }}{% endfor %}",
    "{{ messages.append(1) }}",
)


@pytest.mark.parametrize("template", ESCAPES)
def test_a_chat_template_runs_in_its_sandbox(template, workspace, tmp_path, sentinel):
    shutil.copytree(workspace / "plain", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(template.replace("SENTINEL", str(sentinel)))
    with pytest.raises(TunekitError, match=r"rows.jsonl|template"):
        verbs.check(recipe_for(workspace, str(tmp_path / "model")))
        verbs.data_report(recipe_for(workspace, str(tmp_path / "model")))
    assert not sentinel.exists()
