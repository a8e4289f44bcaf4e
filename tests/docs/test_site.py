"""The site builds with all its links, and works without a network."""

import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from tunekit.recipe.explain import document_fields

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


@pytest.mark.slow
def test_no_page_loads_anything_from_elsewhere(site):
    loads = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(?:https?:)?//[^>]+>")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    assert [tag for page in pages for tag in loads.findall(page.read_text(encoding="utf-8"))] == []
    styles = [path for path in site.rglob("*.css") if re.search(r"url\(['\"]?(?:https?:)?//", path.read_text("utf-8"))]
    assert styles == []


@pytest.mark.slow
def test_every_field_command_and_public_name_is_in_the_reference(site):
    fields = {path.stem: path.read_text(encoding="utf-8") for path in (site / "reference" / "recipe").glob("*.html")}
    keys = {field.key for field in document_fields() if "." in field.key}
    repeated = ("data.eval.", "method.teacher.", "method.rewards.model.")
    assert [
        key for key in keys if not key.startswith(repeated) and f'id="{key}"' not in fields[key.split(".")[0]]
    ] == []
    assert "tunekit sweep show" in (site / "reference" / "cli.html").read_text(encoding="utf-8")
    names = (site / "reference" / "python.html").read_text(encoding="utf-8")
    import tunekit

    public = {*tunekit.__all__, *tunekit.frontend.__all__} - {"frontend"}
    assert [name for name in public if f'id="{name}"' not in names] == []
