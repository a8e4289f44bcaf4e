"""Many prompts: what is answered in batches is what transformers answers one by one, and every row gets its own."""

import json
import os
import shutil

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import tunekit
from tests.tiny import save_chats
from tunekit.cli.app import app
from tunekit.inference.inference_model import Sampling, answer, find_trained, load
from tunekit.probe.model import PICO

ROWS = [
    {"prompt": "Where are you from?", "id": 7},
    {"messages": [{"role": "user", "content": "double 7"}, {"role": "assistant", "content": "14"}]},
    {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]},
    {"instruction": "double", "input": "11"},
    {"conversations": [{"from": "human", "value": "What is the fastest animal on land, and why is it so fast?"}]},
    {"chosen": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "rejected": []},
]
ASKED = [
    [{"role": "user", "content": "Where are you from?"}],
    [{"role": "user", "content": "double 7"}],
    ROWS[2]["prompt"],
    [{"role": "user", "content": "double\n\n11"}],
    [{"role": "user", "content": ROWS[4]["conversations"][0]["value"]}],
    [{"role": "user", "content": "Hi"}],
]
ROWS[5]["rejected"] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "No"}]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(16)))
    return tunekit.train(
        {
            "model": "pico",
            "data": {"train": str(folder / "rows.jsonl"), "max_length": 64},
            "adapter": "lora",
            "train": {"learning_rate": 2e-2, "max_steps": 4, "save_steps": 2, "global_batch_size": 4},
            "output": {"dir": str(folder / "runs" / "lora"), "sample_prompts": []},
        }
    )


@pytest.fixture(scope="module")
def pico():
    return load(find_trained("pico"), device="cpu", dtype="float32")


def one_by_one(model, asked, num_tokens):
    """What transformers answers to each conversation by itself: its tokens."""
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    found = []
    for messages in asked:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            output = model.eval().generate(**ids, max_new_tokens=num_tokens, do_sample=False)
        found.append(output[0, ids["input_ids"].shape[1] :])
    return found, [tokenizer.decode(ids, skip_special_tokens=True) for ids in found]


def test_batched_answers_are_those_that_transformers_gives_one_by_one(run, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32)
    ids, texts = one_by_one(PeftModel.from_pretrained(model, run.model_path), ASKED, 12)
    prompts, out = write(tmp_path / "prompts.jsonl", ROWS), tmp_path / "answers.jsonl"
    done = tunekit.generate(run, prompts, out, max_new_tokens=12, batch_size=4, device="cpu", dtype="float32")
    answered = read(out)
    assert [row["answer"] for row in answered] == texts
    assert [row["num_tokens"] for row in answered] == list(map(len, ids))
    ends = ["end" if 2 in one else "length" for one in ids]
    assert [row["finish_reason"] for row in answered] == ends
    assert [{key: row[key] for key in given} for row, given in zip(answered, ROWS, strict=True)] == ROWS
    assert (done.num_prompts, done.num_tokens) == (6, sum(map(len, ids)))
    assert done.num_cut == ends.count("length") and sorted(tmp_path.iterdir()) == [out, prompts]


def test_the_command_answers_with_a_checkpoint_and_a_system_prompt(run, tmp_path):
    prompts, out = write(tmp_path / "prompts.jsonl", ROWS[:2]), tmp_path / "answers.jsonl"
    words = ["generate", str(run.path), "--prompts", str(prompts), "--out", str(out), "--checkpoint", "2"]
    told = CliRunner().invoke(app, [*words, "--system", "Be brief.", "--max-new-tokens", "6", "--device", "cpu"])
    assert told.exit_code == 0, told.output
    assert "2 prompts with 2 answers" in told.stdout
    folder = run.path / "checkpoints" / "checkpoint-2"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32), folder)
    asked = [[{"role": "system", "content": "Be brief."}, *messages] for messages in ASKED[:2]]
    assert [row["answer"] for row in read(out)] == one_by_one(model, asked, 6)[1]


def test_drawn_answers_follow_their_seed_and_are_several_to_a_prompt(pico):
    prompts = [pico.tokenizer(text)["input_ids"] for text in ("Where are you", "The sea is", "Tell me of the moon")]

    def drawn(seed):
        sampling = Sampling(temperature=1.5, max_new_tokens=8, num_samples=3, seed=seed)
        return dict(answer(pico, prompts, sampling, batch_size=4))

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert first == again != other
    assert sorted(first) == [0, 1, 2] and all(len(group) == 3 for group in first.values())
    assert len({one.text for group in first.values() for one in group}) > 3


def test_a_batch_for_which_memory_runs_out_is_halved(pico):
    prompts = [pico.tokenizer(text)["input_ids"] for text in ("One", "One two", "One two three", "Four", "Five six")]
    sampling = Sampling(max_new_tokens=4)
    expected, seen = dict(answer(pico, prompts, sampling, batch_size=1)), []

    def small(model, args, kwargs):
        seen.append(len(kwargs["input_ids"]))
        if seen[-1] > room:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pico.model.register_forward_pre_hook(small, with_kwargs=True):
        room = 1
        assert dict(answer(pico, prompts, sampling, batch_size=4)) == expected
        assert seen[:3] == [4, 2, 1] and max(seen[2:]) == 1
        room = 0
        with pytest.raises(tunekit.TunekitError, match="out of memory while answering a prompt of"):
            dict(answer(pico, prompts, sampling))


def test_an_answer_ends_where_the_model_takes_no_more(pico):
    ids = pico.tokenizer("One two three four five six seven eight")["input_ids"]
    nearly = (ids * 1024)[:1021]
    answers = dict(answer(pico, [nearly, nearly[:1000]], Sampling(max_new_tokens=5)))
    assert answers[0][0].num_tokens <= 3 and answers[1][0].num_tokens <= 5


def test_texts_go_on_where_a_model_has_no_template(tmp_path):
    from tests.tiny import make_tokenizer, save_tiny_model

    folder = save_tiny_model(tmp_path / "model")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time\n\n\nThe end\n", encoding="utf-8")
    tunekit.generate(folder, prompts, tmp_path / "out.jsonl", max_new_tokens=4, device="cpu", dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = []
    for text in ("Once upon a time", "The end"):
        ids = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            output = model.generate(**ids, max_new_tokens=4, do_sample=False)
        expected.append(tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    assert [row["answer"] for row in read(tmp_path / "out.jsonl")] == expected


def test_a_list_of_prompts_is_answered_as_a_file_of_them(run, tmp_path):
    tunekit.generate(run, write(tmp_path / "prompts.jsonl", ROWS[:3]), tmp_path / "out.jsonl", max_new_tokens=8)
    held = [ROWS[0]["prompt"], [*ROWS[1]["messages"]], ROWS[2]]
    answers = tunekit.generate(run, held, max_new_tokens=8)
    rows = read(tmp_path / "out.jsonl")
    assert [(one.text, one.num_tokens, one.reason) for one in answers] == [
        (row["answer"], row["num_tokens"], row["finish_reason"]) for row in rows
    ]
    summary = tunekit.generate(run, held, tmp_path / "held.jsonl", max_new_tokens=8)
    assert summary.num_prompts == 3
    assert [row["answer"] for row in read(tmp_path / "held.jsonl")] == [row["answer"] for row in rows]


def test_several_answers_to_a_prompt_of_a_list_stand_together():
    answers = tunekit.generate("pico", ["Hi", "Hello"], num_samples=2, temperature=1.0, seed=1, max_new_tokens=4)
    alone = tunekit.generate("pico", ["Hi"], num_samples=2, temperature=1.0, seed=1, max_new_tokens=4, batch_size=4)
    assert len(answers) == 4 and len(alone) == 2


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([], "prompts: empty; pass at least one prompt"),
        (["a", ""], r"prompts\[1\]: prompt is empty"),
        ([3], r"prompts\[0\]: must be a dict, got int"),
        ([{"promt": "b"}], r"prompts\[0\]: .*rename promt to prompt"),
        ("What is 2?", r"no file matches 'What is 2\?'; pass a file, such as prompts.jsonl, or a list of texts"),
        (
            "What is 2",
            "no file 'What is 2' in the working directory; pass a file, such as prompts.jsonl, or a list of ",
        ),
    ],
)
def test_prompts_of_a_list_that_ask_nothing_are_named(prompts, words):
    with pytest.raises(tunekit.TunekitError, match=words):
        tunekit.generate("pico", prompts)


def test_a_run_loads_its_result_and_its_checkpoints(run):
    model, tokenizer = run.model(device="cpu"), run.tokenizer()
    assert isinstance(model, PeftModel) and not model.training
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32), run.model_path)
    before = run.model(checkpoint="2", device="cpu")
    ids = tokenizer("What is 2 plus 2?", return_tensors="pt")
    with torch.no_grad():
        logits = [one(**ids).logits for one in (model, plain.eval(), before)]
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-5)
    assert not torch.allclose(logits[0], logits[2])


LONG = {"prompt": "long " * 2000}


@pytest.mark.parametrize(
    ("model", "rows", "options", "words"),
    [
        ("nothing", ROWS, {}, "no run 'nothing'"),
        ("pico", [{"prompt": "a"}, {"promt": "b"}], {}, r"prompts.jsonl:2: .*rename promt to prompt"),
        ("pico", [{"prompt": "a"}, {"prompt": ""}, {"messages": []}], {}, r"jsonl:2: prompt is empty\n.*:3: messages"),
        ("pico", [{"messages": [{"role": "assistant", "content": "a"}]}], {}, "has no system, user or tool message"),
        ("pico", [{"prompt": "a", "answer": "b"}], {}, "the column answer already exists"),
        ("pico", [{"prompt": "a"}, LONG], {}, r"prompts.jsonl:2: the prompt has .* tokens; pico accepts 1,024"),
        ("pico", ROWS, {"num_samples": 2}, "2 answers per prompt would be identical"),
        ("pico", ROWS, {"top_p": 0.0}, "0 < top_p"),
        ("pico", ROWS, {"batch_size": 0}, "invalid batch size: 0"),
        ("pico", ROWS, {"checkpoint": "2"}, "is a model, not a run"),
        ("pico", ROWS, {"backend": "vllm"}, "vLLM"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_a_model_is_loaded(
    model, rows, options, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    prompts = write(tmp_path / "prompts.jsonl", rows)
    told = []
    with pytest.raises(tunekit.TunekitError, match=words):
        tunekit.generate(model, prompts, "answers.jsonl", on_event=told.append, **options)
    assert told == [] and list(tmp_path.iterdir()) == [prompts]


def test_a_damaged_model_and_a_run_without_one_are_named_in_one_line(run, tmp_path):
    prompts = write(tmp_path / "prompts.jsonl", ROWS[:1])
    shutil.copytree(run.path, tmp_path / "early", ignore=shutil.ignore_patterns("model", "checkpoints"))
    shutil.copytree(run.path, tmp_path / "torn")
    for name in ("deep", "fifo"):
        shutil.copytree(run.path, tmp_path / name)
        (tmp_path / name / "model" / "tokenizer_config.json").unlink()
    (tmp_path / "deep" / "model" / "tokenizer_config.json").write_text("[" * 200_000)
    os.mkfifo(tmp_path / "fifo" / "model" / "tokenizer_config.json")
    for name in ("config", "tokenizer", "weights"):
        shutil.copytree(PICO, tmp_path / name)
    (tmp_path / "config" / "config.json").write_text("{")
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{")
    for cut in (tmp_path / "weights" / "model.safetensors", tmp_path / "torn" / "model" / "adapter_model.safetensors"):
        cut.write_bytes(cut.read_bytes()[:1000])
    for name, words in (
        ("early", r"is finished, but .*model is missing; restore it, or recreate it with `tunekit rerun"),
        ("torn", "adapter_model.safetensors is damaged"),
        ("deep", "has a broken tokenizer_config.json: nested too deep"),
        ("fifo", "has a broken tokenizer_config.json: not a regular file"),
        ("config", "has a broken config.json"),
        ("tokenizer", "the tokenizer in .* cannot be loaded"),
        ("weights", "the weights of .* are damaged"),
    ):
        with pytest.raises(tunekit.TunekitError, match=words) as told:
            tunekit.generate(tmp_path / name, prompts, tmp_path / "out.jsonl", device="cpu")
        assert "\n" not in str(told.value)


def test_nothing_that_is_there_is_written_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompts = write(tmp_path / "prompts.jsonl", ROWS)
    (tmp_path / "out.jsonl").write_text("mine")
    (tmp_path / "other.jsonl.part").write_text("mine")
    for out, words in (
        ("out.jsonl", "already exists"),
        ("other.jsonl", "answers of an interrupted generation"),
        ("no/out.jsonl", "pass a file in an existing folder"),
    ):
        with pytest.raises(tunekit.TunekitError, match=words):
            tunekit.generate("pico", prompts, out)
    assert (tmp_path / "out.jsonl").read_text() == (tmp_path / "other.jsonl.part").read_text() == "mine"


def test_what_was_answered_before_an_end_is_kept(tmp_path):
    prompts, out = write(tmp_path / "prompts.jsonl", ROWS), tmp_path / "out.jsonl"

    def end(event):
        if event["phase"] == "answers" and event["done"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tunekit.generate("pico", prompts, out, max_new_tokens=4, batch_size=2, device="cpu", on_event=end)
    assert not out.exists()
    kept = read(tmp_path / "out.jsonl.part")
    assert len(kept) == 2 and all({"answer", "num_tokens", "finish_reason"} <= set(row) for row in kept)
