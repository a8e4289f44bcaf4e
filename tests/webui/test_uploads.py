"""Files that browsers send: zips of pictures with their rows are unpacked, and nothing in them can do harm."""

import io
import struct
import zipfile

import pytest
from PIL import Image

import tunekit
from tunekit.api import verbs
from tunekit.runs.run import Run
from webui import archives, listing
from webui.data_asked import Asked, recipe_of
from webui.site import Site
from webui.upload_removal import delete_upload
from webui.uploads import save_uploads

METADATA = "file_name,text\ncats/a.png,a cat\nb.jpg,a dog\n"


def picture(name):
    file = io.BytesIO()
    Image.new("RGB", (6, 4)).save(file, "JPEG" if name.endswith("jpg") else "PNG")
    return file.getvalue()


PICTURES = {name: picture(name) for name in ("cats/a.png", "b.jpg")}


@pytest.fixture
def site(tmp_path, monkeypatch):
    root = tmp_path / "workspace"
    root.mkdir()
    monkeypatch.chdir(root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Site(root)


def zipped(path, files, **options):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, **options) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def nothing_is_left(site):
    return not list((site.root / "uploads").iterdir())


@pytest.mark.parametrize("prefix", ["", "pets/"])
def test_a_zip_of_pictures_with_captions_is_rows_in_a_folder_of_its_own(prefix, site, tmp_path):
    files = {"metadata.csv": METADATA, **PICTURES, "README.md": "hi", "__MACOSX/._b.jpg": "x", ".DS_Store": "x"}
    archive = zipped(tmp_path / "my <pets>.zip", {prefix + name: content for name, content in files.items()})
    rows = [save_uploads(site, [archive]) for _ in range(2)]
    names = [path.relative_to(site.root).as_posix() for path in rows]
    assert names == [f"uploads/my _pets_/{prefix}metadata.csv", f"uploads/my _pets_-2/{prefix}metadata.csv"]
    kept = sorted(path.relative_to(rows[0].parent).as_posix() for path in rows[0].parent.rglob("*") if path.is_file())
    assert kept == ["b.jpg", "cats/a.png", "metadata.csv"]
    preview = tunekit.preview(recipe_of(site, Asked(path=names[0])))
    assert (preview.format, preview.num_rows, preview.bad) == ("captions", 2, ())


def test_pictures_are_sent_with_their_rows(site, tmp_path):
    for name, content in {"a.png": PICTURES["cats/a.png"], "pets.csv": b"image,caption\na.png,a cat\n"}.items():
        (tmp_path / name).write_bytes(content)
    rows = save_uploads(site, [tmp_path / "a.png", tmp_path / "pets.csv"])
    assert rows == site.root / "uploads" / "pets" / "pets.csv"
    assert (rows.parent / "a.png").is_file()
    with pytest.raises(tunekit.TunekitError, match=r"a\.png: images without a file of rows") as caught:
        save_uploads(site, [tmp_path / "a.png"])
    assert "metadata.csv with the columns file_name and text" in caught.value.hint


def link(name, target="/etc/passwd"):
    entry = zipfile.ZipInfo(name)
    entry.external_attr = 0o120777 << 16
    return entry, target


HARMFUL = {
    "up": ({"../b.png": b"x"}, "'../b.png' points outside the archive"),
    "up, within": ({"a/../../b.png": b"x"}, "points outside the archive"),
    "up, hidden": ({"../.b.png": b"x", "metadata.csv": METADATA}, None),
    "absolute": ({"/tmp/b.png": b"x"}, "'/tmp/b.png' points outside the archive"),
    "a drive": ({"C:/b.png": b"x"}, "points outside the archive"),
    "control characters": ({"a\nb.png": b"x"}, "has control characters in its name"),
    "a name that is too long": ({"a" * 300 + ".png": b"x"}, "cannot be unpacked: File name too long"),
    "a file as a folder": ({"a.png": b"x", "a.png/b.png": b"y"}, "cannot be unpacked"),
    "no rows": ({"a.png": b"x"}, "images without a file of rows"),
    "two files of rows": ({"a.csv": b"x", "b.jsonl": b"y"}, "2 files of rows: a.csv, b.jsonl"),
    "nothing": ({}, "images without a file of rows"),
}


@pytest.mark.parametrize("kind", HARMFUL)
def test_names_of_an_archive_lead_nowhere_else(kind, site, tmp_path):
    files, problem = HARMFUL[kind]
    if problem is None:
        assert save_uploads(site, [zipped(tmp_path / "x.zip", files)]).parent == site.root / "uploads" / "x"
        return
    with pytest.raises(tunekit.TunekitError) as caught:
        save_uploads(site, [zipped(tmp_path / "x.zip", files)])
    assert str(caught.value.problem).startswith("x.zip: ")
    assert problem in str(caught.value)
    assert nothing_is_left(site)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["workspace", "x.zip"]


def test_links_in_an_archive_are_refused(site, tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(*link("a.png"))
    with pytest.raises(tunekit.TunekitError, match=r"x\.zip: 'a\.png' is a link or not a regular file"):
        save_uploads(site, [tmp_path / "x.zip"])
    assert nothing_is_left(site)


def test_a_name_that_is_there_twice_is_refused(site, tmp_path):
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a.png", b"x")
        archive.writestr("a.png", b"y")
    with pytest.raises(tunekit.TunekitError, match="occurs twice"):
        save_uploads(site, [tmp_path / "x.zip"])


def test_what_comes_out_of_an_archive_is_counted_whatever_it_says(site, tmp_path):
    archive = zipped(tmp_path / "x.zip", {"a.png": bytes(5_000_000), "metadata.csv": METADATA})
    small = Site(site.root, max_upload_bytes=1_000_000)
    assert archive.stat().st_size < 10_000
    raw = archive.read_bytes()
    # The size in the list of files, told smaller than it is.
    lying = raw.replace(struct.pack("<I", 5_000_000), struct.pack("<I", 100))
    for content, problem in ((raw, "exceeds the upload limit"), (lying, "exceeds the upload limit|damaged")):
        archive.write_bytes(content)
        with pytest.raises(tunekit.TunekitError, match=problem):
            save_uploads(small, [archive])
        assert nothing_is_left(site)


@pytest.mark.parametrize("kind", ["text", "empty", "cut", "flipped", "locked", "method"])
def test_a_damaged_archive_is_told(kind, site, tmp_path):
    raw = zipped(tmp_path / "x.zip", {"metadata.csv": METADATA * 50, **PICTURES}).read_bytes()
    at = raw.index(b"metadata.csv") + 20
    of_list = raw.rindex(b"PK\x01\x02", 0, raw.rindex(b"metadata.csv"))
    broken = {
        "text": b"hello",
        "empty": b"",
        "cut": raw[:-200],
        "flipped": raw[:at] + bytes([raw[at] ^ 0xFF]) + raw[at + 1 :],
        "locked": raw[: of_list + 8] + b"\x01\x00" + raw[of_list + 10 :],
        "method": raw[: of_list + 10] + b"\x63\x00" + raw[of_list + 12 :],
    }[kind]
    (tmp_path / "x.zip").write_bytes(broken)
    with pytest.raises(tunekit.TunekitError, match=r"damaged or unsupported archive|needs a password"):
        save_uploads(site, [tmp_path / "x.zip"])
    assert nothing_is_left(site)


def test_a_list_of_files_that_is_too_long_is_not_read(site, tmp_path, monkeypatch):
    archive = zipped(tmp_path / "x.zip", {f"{number}.png": b"" for number in range(20)})
    for limit, value in (("MAX_FILES", 10), ("MAX_LIST_BYTES", 500)):
        with monkeypatch.context() as patched:
            patched.setattr(archives, limit, value)
            patched.setattr(zipfile, "ZipFile", None)
            with pytest.raises(tunekit.TunekitError, match=r"more than .* files, or in ZIP64"):
                save_uploads(site, [archive])
    assert nothing_is_left(site)


def test_a_folder_of_pictures_that_links_elsewhere_shows_nothing_of_it(site, tmp_path):
    (tmp_path / "secret.png").write_bytes(PICTURES["cats/a.png"])
    rows = save_uploads(site, [zipped(tmp_path / "x.zip", {"metadata.csv": "file_name,text\na.png,a cat\n"})])
    (rows.parent / "a.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(tunekit.TunekitError, match="outside the workspace"):
        recipe_of(site, Asked(path="uploads/x"))
    preview = tunekit.preview(recipe_of(site, Asked(path="uploads/x/metadata.csv")))
    assert "is outside of" in preview.bad[0].reason


def upload(site, name, text="1"):
    file = site.root / "uploads" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_an_upload_is_deleted_with_its_whole_folder_and_nothing_else_is(site):
    rows, pictures = upload(site, "rows.jsonl"), upload(site, "pictures/train.jsonl")
    upload(site, "pictures/images/one.png")
    (site.root / "chats.jsonl").write_text("1")
    (site.root / "link.jsonl").symlink_to(site.root / "chats.jsonl")
    (site.root / "uploads" / "outside.jsonl").symlink_to("/etc/hostname")
    refused = ("chats.jsonl", "uploads", "uploads/no.jsonl", "uploads/../chats.jsonl", "uploads/*", "link.jsonl", "")
    for path in (*refused, "uploads/outside.jsonl", "../x", "org/set"):
        with pytest.raises(tunekit.TunekitError, match="is not an upload"):
            delete_upload(site, path)
    with pytest.raises(tunekit.TunekitError, match="is not an upload"):
        delete_upload(Site(site.root, read_only=True), "uploads/rows.jsonl")
    assert rows.exists() and pictures.exists()
    assert delete_upload(site, "uploads/rows.jsonl") == "uploads/rows.jsonl"
    assert delete_upload(site, "uploads/pictures/train.jsonl") == "uploads/pictures"
    assert [path.name for path in (site.root / "uploads").iterdir()] == ["outside.jsonl"]


@pytest.mark.parametrize("train", ["uploads/rows.jsonl", "uploads/*.jsonl", "uploads", "{root}/uploads/rows.jsonl"])
def test_an_upload_that_a_run_reads_stays_until_the_run_is_over(site, train, monkeypatch):
    upload(site, "rows.jsonl", '{"prompt": "Who are you?", "completion": "pico"}\n' * 4)
    other = upload(site, "more/rows.txt")
    recipe = {"model": "pico", "data": {"train": train.format(root=site.root)}, "output": {"dir": "runs/waits"}}
    run = Run.create(verbs.plan(recipe))
    run.update_status(phase="queued")
    with pytest.raises(tunekit.TunekitError, match=r"uploads/rows\.jsonl is in use by waits"):
        delete_upload(site, "uploads/rows.jsonl")
    run.update_status(phase="finished")
    monkeypatch.setattr(listing, "FRESH_SECONDS", 0.0)
    assert delete_upload(Site(site.root), "uploads/rows.jsonl") == "uploads/rows.jsonl"
    assert other.exists()


@pytest.mark.slow
def test_an_upload_is_deleted_in_the_page_once_that_is_meant(workspace, tmp_path, serve, open_page):
    from playwright.sync_api import expect

    page = open_page(f"{serve(workspace).url}data?path=chats.jsonl")
    expect(page.locator("#data-status")).to_contain_text("16 rows")
    expect(page.locator("#data-delete")).to_be_hidden()
    given = tmp_path / "mine.jsonl"
    given.write_text((workspace / "pairs.jsonl").read_text())
    page.locator("input[type=file]").first.set_input_files(given)
    expect(page.locator("#data-path input")).to_have_value("uploads/mine.jsonl")
    page.locator("#data-delete").click()
    expect(page.locator("#data-delete-ask")).to_contain_text("Delete uploads/mine.jsonl?")
    page.locator("#data-delete-not").click()
    expect(page.locator("#data-delete-ask")).to_be_hidden()
    page.locator("#data-delete").click()
    page.locator("#data-delete-sure").click()
    expect(page.locator("#data-status")).to_contain_text("uploads/mine.jsonl was deleted.")
    expect(page.locator("#data-path input")).to_have_value("")
    expect(page.locator("#data-delete")).to_be_hidden()
    assert not (workspace / "uploads" / "mine.jsonl").exists()
    # What is typed for it says that it is gone.
    page.goto(page.url.partition("?")[0] + "?path=uploads/mine.jsonl")
    expect(page.locator("#data-status")).to_contain_text("Not a workspace file")
