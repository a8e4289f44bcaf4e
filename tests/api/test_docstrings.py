"""Examples in the docstrings of public functions do what they show."""

import doctest

import pytest

import tunekit
from tunekit.recipe import load

FUNCTIONS = {name: value for name in tunekit.__all__ if callable(value := getattr(tunekit, name))}
SHOWN = {name: value for name, value in FUNCTIONS.items() if ">>> " in (value.__doc__ or "")}


def check(function, name):
    """Run the examples of a function."""
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for test in doctest.DocTestFinder(recurse=False).find(function, name, globs={"tunekit": tunekit, **vars(load)}):
        test.globs["__name__"] = "__main__"
        runner.run(test)
    assert runner.tries > 0 and runner.failures == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_the_examples_of_a_public_function_do_what_they_show(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check(SHOWN[name], name)


def test_the_verbs_of_daily_use_have_examples():
    assert SHOWN.keys() >= {"plan", "train", "trainer", "generate"}


def test_the_examples_of_overrides_do_what_they_show():
    check(load.override_words, "override_words")
