"""Pages that need nothing else: no script, nothing loaded from elsewhere, and no secret told."""

from pathlib import Path
from typing import Any

from tunekit.redact import redacted


def page_of(template: str, **values: Any) -> str:
    """A page as HTML.

    Args:
        template: A file beside this one.
        values: What it names; all of it is text, but for what the template says is safe.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return redacted(environment.get_template(template).render(**values))
