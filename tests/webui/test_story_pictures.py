"""One visitor's way with pictures through the pages: a zip of captions, its tokens, a run, and a chat about one."""

import io
import zipfile
from pathlib import Path

import pytest
from PIL import Image

import tunekit
from tests.vision import COLOURS, save_tiny_vision_model


def picture(colour, number=0):
    file = io.BytesIO()
    Image.new("RGB", (64 + 20 * number, 48), colour).save(file, "PNG")
    return file.getvalue()


def zipped(path: Path) -> Path:
    """A zip of pictures with captions, as a visitor has it on a machine of their own."""
    with zipfile.ZipFile(path, "w") as archive:
        lines = ["file_name,text"]
        for number in range(8):
            colour = COLOURS[number % len(COLOURS)]
            archive.writestr(f"pictures/{number}.png", picture(colour, number))
            lines.append(f"pictures/{number}.png,a {colour} picture")
        archive.writestr("metadata.csv", "\n".join(lines))
    return path


@pytest.mark.slow
def test_a_visitor_goes_from_a_zip_of_pictures_to_a_chat_about_one(workspace, tmp_path, serve, open_page):
    from playwright.sync_api import expect

    save_tiny_vision_model(workspace / "tiny", "llava")
    server = serve(workspace, XDG_CACHE_HOME=str(tmp_path / "cache"))

    # The zip is uploaded, and its pictures stand among the tokens.
    page = open_page(f"{server.url}data?model=tiny&max_length=512")
    expect(page.locator("#data-status")).to_contain_text("Nothing to show yet")
    page.locator("#data-upload input, input[type=file]").first.set_input_files(zipped(tmp_path / "pets.zip"))
    row = page.locator(".data-row").first
    expect(row.locator(".data-picture")).to_have_text("[image 0.png 64x48: 4 tokens]")
    assert row.locator(".data-picture img").evaluate("one => one.naturalWidth") == 64
    assert "".join(row.locator(".data-trained").all_text_contents()) == "a red picture<|im_end|>"
    draft = page.locator("a.data-use").get_attribute("href")

    # A run trains on them.
    values = ["adapter.type=lora", "train.global_batch_size=4", "train.num_epochs=null", "train.max_steps=4"]
    page.goto(server.url.rstrip("/") + draft + "".join(f"&set={value}" for value in [*values, "output.name=pets"]))
    start = page.locator("#plan-start")
    expect(start).to_be_enabled()
    start.click()
    page.wait_for_url("**/runs?run=pets-*")
    expect(page.locator("#runs-head")).to_contain_text("step 4 of 4")
    run = next(one for one in tunekit.list_runs(workspace / "runs") if one.name.startswith("pets-"))
    assert run.plan.data.num_pictures == 8

    # Its samples show the pictures that were asked about, in the page and in the report.
    page.get_by_role("tab", name="Samples").click()
    shown = page.locator("#runs-samples img")
    expect(shown).to_have_count(3)
    assert shown.first.evaluate("one => one.naturalWidth") == 64
    expect(page.locator("#runs-samples td").first).to_contain_text("[image 0.png]")
    page.goto(f"{server.url}report?run={run.name}")
    assert page.locator(".answers img").first.evaluate("one => one.naturalWidth") == 64

    # It is asked about a picture, and keeps it in the conversation.
    page.goto(f"{server.url}chat?run={run.name}")
    page.locator("#chat-load:enabled").click()
    page.locator(".chat-loaded").wait_for()
    (tmp_path / "asked.png").write_bytes(picture("blue"))
    page.locator("#chat-prompt input[type=file]").set_input_files(tmp_path / "asked.png")
    prompt = page.locator("#chat-prompt textarea")
    page.locator("#chat-prompt img").wait_for()
    for num_asked, text in enumerate(("What is it?", "Are you sure?"), start=1):
        prompt.fill(text)
        prompt.press("Enter")
        for side in ("left", "right"):
            expect(page.locator(f"#chat-{side} [data-testid=bot]")).to_have_count(num_asked)
        page.locator("#chat-send:enabled").wait_for()
        expect(page.locator("#chat-status .told")).to_have_count(0)
    image = page.locator("#chat-left [data-testid=user] img").first
    assert image.evaluate("one => one.naturalWidth") == 64
