"""Every page of the documentation does what it says: its commands and its Python run as they are written.

A change of pages does not choose it, since it takes long: `pytest tests/docs/test_pages_run.py -k data` runs a page.
"""

import pytest

from tests.docs.test_pages import NAMES, PAGES, blocks
from tests.documents import run_blocks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_and_python_run_as_written(page, tmp_path):
    run_blocks(blocks(page), tmp_path)
