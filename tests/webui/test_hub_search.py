"""Search of models on the hub: it is asked once somebody searches, and a page that cannot reach it says so."""

import json
import socket
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

import pytest
from huggingface_hub import constants

import tunekit
from tests.data.servers import serving
from webui import hub_search
from webui.hub_search import HubModel, search_models

MODELS = {"Org/sea-large": 40, "Org/sea-small": 9_000, "Org/forest": 5}


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's API that lists models."""

    def do_GET(self):
        query = {key: value[0] for key, value in parse_qs(urlsplit(self.path).query).items()}
        names = [name for name in MODELS if query["search"] in name]
        assert urlsplit(self.path).path == "/api/models" and query["sort"] == "downloads"
        models = [{"id": name, "downloads": MODELS[name]} for name in sorted(names, key=MODELS.get, reverse=True)]
        body = json.dumps(models[: int(query["limit"])]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def address():
    with serving(Hub) as address:
        yield address


def test_models_are_found_by_a_part_of_their_names(address, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert search_models("sea") == [HubModel("Org/sea-small", 9_000), HubModel("Org/sea-large", 40)]
    assert search_models("mountain") == []


def test_a_hub_that_cannot_be_reached_or_does_not_answer_is_told_of(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(tunekit.TunekitError, match=r"the Hub cannot be reached: .*refused"):
        search_models("sea")
    monkeypatch.setattr(hub_search, "LIMIT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(tunekit.TunekitError, match="the Hub cannot be reached"):
            search_models("sea")


@pytest.mark.slow
def test_a_model_of_the_hub_becomes_that_of_the_draft(workspace, address, serve, open_page):
    from playwright.sync_api import expect

    page = open_page(f"{serve(workspace, HF_ENDPOINT=address, HF_HUB_OFFLINE='0').url}new?from=file:trained.yaml")
    page.locator("#plan-start:enabled").wait_for()
    page.locator("#form-hub > button").click()
    page.get_by_label("Part of a model's name").fill("mountain")
    page.keyboard.press("Enter")
    expect(page.locator("#form-hub-answer")).to_have_text("No model's name matches “mountain”.")
    page.get_by_label("Part of a model's name").fill("sea")
    page.locator("#form-hub-search").click()
    page.locator("#form-hub-models input").click()
    page.get_by_role("option", name="Org/sea-small · 9,000 downloads a month").click()
    expect(page.locator("#form-yaml .cm-content")).to_contain_text("Org/sea-small")
    expect(page.locator("#form-model-path textarea, #form-model-path input")).to_have_value("Org/sea-small")
