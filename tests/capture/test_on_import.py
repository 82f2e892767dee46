"""``ImportWatch``: called once, when the module is there, whatever the script does before."""

import importlib.util
import sys

import pytest

from gradtrace.capture.on_import import ImportWatch

NAME = "watched_module_of_this_test"


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """What the watch has seen: the module's state at each call. The watch is gone after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    (tmp_path / f"{NAME}.py").write_text("before = 1\nlast = 2\n")
    seen = []
    watch = ImportWatch(NAME, lambda: seen.append(sys.modules[NAME].last))
    watch.start()
    yield seen
    watch.stop()
    sys.modules.pop(NAME, None)


def watches():
    return [finder for finder in sys.meta_path if isinstance(finder, ImportWatch)]


def test_the_call_comes_when_the_module_has_run_and_before_the_import_returns(calls):
    assert calls == []

    module = importlib.import_module(NAME)

    assert calls == [2]
    assert watches() == []
    assert module.__spec__.loader is module.__loader__
    assert type(module.__loader__).__module__ != ImportWatch.__module__


def test_a_search_neither_calls_nor_ends_the_watch(calls):
    assert importlib.util.find_spec(NAME) is not None
    assert importlib.util.find_spec(NAME) is not None
    assert calls == []

    importlib.import_module(NAME)

    assert calls == [2]


def test_a_search_finds_what_it_would_find_without_the_watch(calls, tmp_path):
    spec = importlib.util.find_spec(NAME)

    assert spec.origin == str(tmp_path / f"{NAME}.py")
    assert spec.loader.get_data(spec.origin) == b"before = 1\nlast = 2\n"


def test_other_modules_are_left_to_the_other_finders(calls):
    assert importlib.util.find_spec("no_such_module_anywhere") is None
    assert watches()[0].find_spec("json") is None


def test_a_failed_import_leaves_the_watch_in_place(calls, tmp_path):
    source = tmp_path / f"{NAME}.py"
    whole = source.read_text()
    source.write_text("raise ImportError('a library is missing')  # longer than before\n")
    with pytest.raises(ImportError, match="a library is missing"):
        importlib.import_module(NAME)
    assert calls == []

    source.write_text(whole)
    importlib.import_module(NAME)

    assert calls == [2]


def test_a_module_that_is_missing_leaves_the_watch_in_place(calls, tmp_path):
    source = tmp_path / f"{NAME}.py"
    whole = source.read_text()
    source.unlink()
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(NAME)

    source.write_text(whole)
    importlib.invalidate_caches()
    importlib.import_module(NAME)

    assert calls == [2]


def test_a_module_that_is_there_already_is_told_at_once():
    seen = []

    ImportWatch("sys", lambda: seen.append("sys")).start()

    assert seen == ["sys"]
    assert watches() == []


def test_a_watch_that_was_stopped_tells_nothing(calls):
    watches()[0].stop()

    importlib.import_module(NAME)

    assert calls == []
