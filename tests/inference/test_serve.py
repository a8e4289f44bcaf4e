"""The endpoint as a client of OpenAI sees it: the run's answers under the run's name, and nobody else's."""

import itertools
import json
import re
import signal
import subprocess
import sys

import httpx2
import openai
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import tunekit
from tests.tiny import save_chats
from tests.waiting import LIMIT_SECONDS
from tunekit.cli.app import app
from tunekit.errors import RunError
from tunekit.inference.serve import check_address
from tunekit.probe.model import PICO

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where are you from?"}]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(16)))
    return tunekit.train(
        {
            "model": "pico",
            "data": {"train": str(folder / "rows.jsonl"), "max_length": 64},
            "adapter": "lora",
            "train": {"learning_rate": 2e-2, "max_steps": 4, "global_batch_size": 4},
            "output": {"dir": str(folder / "runs" / "lora"), "sample_prompts": []},
        }
    )


@pytest.fixture(scope="module")
def server(run):
    """The process, and what it said until it was ready."""
    words = [sys.executable, "-m", "tunekit", "serve", str(run.path), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    said = ""
    while "-d '" not in said:
        line = process.stdout.readline()
        assert line, f"it ended with {process.wait()}"
        said += line
    yield process, said
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture(scope="module")
def client(server):
    url = re.search(r"http://127\.0\.0\.1:\d+/v1", server[1])[0]
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def expected(run):
    """What transformers and PEFT answer greedily with the run's adapter."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32), run.model_path)
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.eval().generate(**ids, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def ask(client, run, **options):
    given = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0} | options
    return client.chat.completions.create(model=run.name, **given)


@pytest.mark.slow
def test_a_client_gets_the_greedy_answer_of_the_run_under_its_name(client, run, expected):
    assert [model.id for model in client.models.list()] == [run.name]
    answer = ask(client, run)
    assert answer.choices[0].message.content == expected
    assert answer.model == run.name and answer.usage.completion_tokens > 0


@pytest.mark.slow
def test_a_streamed_answer_is_the_same_in_pieces(client, run, expected):
    chunks = list(ask(client, run, stream=True))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == expected and len([piece for piece in pieces if piece]) > 1
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


@pytest.mark.slow
def test_answers_are_drawn_where_a_temperature_is_asked_for(client, run):
    drawn = {ask(client, run, temperature=1.5, seed=seed).choices[0].message.content for seed in (1, 2, 3)}
    again = {ask(client, run, temperature=1.5, seed=seed).choices[0].message.content for seed in (1, 2, 3)}
    assert drawn == again and len(drawn) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "pico"}, "requested 'pico'"),
        ({"n": 2}, "n=2 is unsupported"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": "long " * 2000}]}, "accepts 1,024 including the answer"),
        ({"temperature": "hot"}, "is not a number"),
        ({"max_tokens": 0.5}, "is not a number of tokens"),
    ],
)
def test_what_cannot_be_answered_is_told_to_the_client(client, run, options, words):
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(**{"model": run.name, "messages": MESSAGES} | options)


@pytest.mark.slow
def test_the_example_that_it_prints_is_answered(server):
    address, body = re.search(r"curl (\S+) .*-d '(.*)'", server[1], re.DOTALL).groups()
    told = httpx2.post(address, json=json.loads(body), timeout=LIMIT_SECONDS)
    assert told.status_code == 200 and told.json()["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_pages_of_other_sites_and_other_routes_get_nothing(client):
    url = str(client.base_url).removesuffix("/v1/")
    with httpx2.Client(base_url=url, timeout=LIMIT_SECONDS) as other:
        foreign = other.post("/v1/chat/completions", headers={"Origin": "http://elsewhere.example"}, json={})
        assert foreign.status_code == 403
        assert other.get("/v1/models", headers={"Host": "elsewhere.example"}).status_code == 421
        for route in ("reset", "load_model", "v1/responses"):
            assert other.post(f"/{route}", json={"model": "other"}).status_code == 404


@pytest.mark.slow
def test_ctrl_c_ends_it_in_the_middle_of_an_answer_and_without_a_complaint(server, client, run):
    process, _ = server
    endless = ask(client, run, stream=True, max_tokens=900, extra_body={"logit_bias": {"2": -100.0}})
    pieces = (chunk.choices[0].delta.content for chunk in endless)
    assert any(piece for piece in pieces)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_SECONDS) == 0
    assert process.stdout.read() == ""


def test_with_a_key_only_those_who_know_it_are_answered():
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route
    from starlette.testclient import TestClient

    from tunekit.inference.endpoint import Gate

    behind = Starlette(routes=[Route("/", lambda request: PlainTextResponse("hello"))])
    with TestClient(Gate(behind, "secret"), base_url="http://models.example") as asked:
        assert asked.get("/").status_code == 401
        assert asked.get("/", headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert asked.get("/", headers={"Authorization": "Bearer secret"}).text == "hello"


def test_vllm_would_serve_the_adapter_under_the_name_of_the_run(run):
    from tunekit.inference.inference_model import find_trained
    from tunekit.inference.vllm import serve_command

    words = serve_command(find_trained(run), run.name, host="127.0.0.1", port=8000, dtype="auto")
    given = dict(itertools.pairwise(words))
    assert given["serve"] == str(PICO) and given["--served-model-name"] == f"{run.name}-base"
    assert given["--lora-modules"] == f"{run.name}={run.model_path.resolve()}" and "--enable-lora" in words
    assert given["--max-lora-rank"] == "16" and given["--chat-template"].endswith("chat_template.jinja")


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "192.0.2.7"])
def test_an_address_that_others_reach_needs_a_key(host):
    with pytest.raises(RunError, match="without an API key"):
        check_address(host, None)
    check_address(host, "key")
    check_address("localhost", None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "no run 'nothing'"),
        (["pico", "--host", "0.0.0.0"], "without an API key"),
        (["pico", "--host", "0.0.0.0", "--api-key-file", "empty"], "is empty"),
        (["pico", "--checkpoint", "2"], "is a model, not a run"),
        (["pico", "--port", "{taken}"], "pass another --port"),
        (["pico", "--backend", "vllm"], "vLLM"),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(arguments, words, tmp_path, monkeypatch):
    import socket

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TUNEKIT_API_KEY", raising=False)
    (tmp_path / "empty").write_text("\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [word.format(taken=taken.getsockname()[1]) for word in arguments]
        told = CliRunner().invoke(app, ["serve", *given])
    assert isinstance(told.exception, tunekit.TunekitError) and words in str(told.exception)
