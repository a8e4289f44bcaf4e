import pytest

import tunekit
from webui.site import Site


def test_links_carry_what_a_page_is_asked(tmp_path):
    site = Site(tmp_path)
    assert site.link("en", "runs") == "/runs"
    assert site.link("zh", "runs", run="a b") == "/zh/runs?run=a+b"
    assert site.link("en", "compare", run=["a", "b"]) == "/compare?run=a&run=b"
    asked = site.link("en", "new", from_="run:a", set=["train.max_steps=1"], file=None)
    assert asked == "/new?from=run%3Aa&set=train.max_steps%3D1"


@pytest.mark.parametrize("text", ["..", "../x", "/etc/passwd", "a/../../x", "link/x", "link", "", " ", "a\0b", "a\nb"])
def test_a_path_that_leaves_the_workspace_is_refused(tmp_path, text):
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    with pytest.raises(tunekit.TunekitError):
        Site(root).inside(text)


def test_a_path_inside_is_resolved_however_it_is_written(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "again").symlink_to(tmp_path / "data")
    for text in ("data/x.jsonl", "./data/../data/x.jsonl", str(tmp_path / "data/x.jsonl"), "again/x.jsonl"):
        assert Site(tmp_path).inside(text) == tmp_path.resolve() / "data/x.jsonl"


@pytest.mark.parametrize("name", ["", ".", "..", "one/../one", "one/", "on", "out", "/one", "one/data"])
def test_a_run_is_found_by_its_exact_name_only(tmp_path, name):
    run = tmp_path / "root/runs/one"
    for folder in (run, tmp_path / "elsewhere", run / "data"):
        folder.mkdir(parents=True)
        (folder / "status.json").write_text("{}")
    (tmp_path / "root/runs/out").symlink_to(tmp_path / "elsewhere")
    site = Site(tmp_path / "root")
    assert site.run("one").path == run
    with pytest.raises(tunekit.TunekitError):
        site.run(name)
