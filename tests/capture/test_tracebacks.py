"""``strip_own_frames``: what is left of a traceback, function by function."""

import traceback

import pytest

from gradtrace.capture.tracebacks import strip_own_frames

RUNNER = "gradtrace.capture.script"


def calls(*modules, raising=None):
    """Raise at the end of a chain of calls through functions of the named modules; return the exception.

    Each function bears the name of its module, so that a traceback reads as a list of these.
    """

    def last():
        raise ValueError("x") if raising is None else raising

    function = last
    for module in reversed(modules):
        name = module.replace(".", "_")
        space = {"__name__": module, "inner": function}
        exec(compile(f"def {name}(): inner()", f"<{module}>", "exec"), space)
        function = space[name]
    with pytest.raises(BaseException) as caught:
        function()
    return caught.value


def frames(error):
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return [name for name in names if name not in ("calls", "last")]


def positions(error):
    entries, entry = [], error.__traceback__
    while entry is not None:
        entries.append((entry.tb_frame.f_code.co_name, entry.tb_lineno, entry.tb_lasti))
        entry = entry.tb_next
    return entries


def test_frames_in_the_middle_go():
    error = calls("train", "gradtrace.capture.calls", "torch.nn", "gradtrace_cli.record", "model")

    strip_own_frames(error, RUNNER)

    assert frames(error) == ["train", "torch_nn", "model"]


def test_frames_out_of_the_runner_go_whoever_they_belong_to():
    error = calls("console_script", "gradtrace_cli.main", RUNNER, "runpy", RUNNER, "train", "model")

    strip_own_frames(error, RUNNER)

    assert frames(error) == ["train", "model"]


def test_packages_with_a_similar_name_stay():
    error = calls("train", "gradtraces", "gradtrace_client.x", "my.gradtrace")

    strip_own_frames(error, RUNNER)

    assert frames(error) == ["train", "gradtraces", "gradtrace_client_x", "my_gradtrace"]


def test_lines_and_positions_are_those_of_before():
    error = calls("train", "gradtrace.capture.calls", "model")
    before = positions(error)

    strip_own_frames(error, RUNNER)

    assert positions(error) == [entry for entry in before if entry[0] != "gradtrace_capture_calls"]


def test_a_traceback_without_own_frames_is_left_as_it_is():
    error = calls("train", "model")
    before = error.__traceback__

    strip_own_frames(error, RUNNER)

    assert error.__traceback__ is before


def test_an_error_made_in_the_runner_itself_has_no_traceback_left():
    error = calls("console_script", RUNNER)
    entry = error.__traceback__
    while entry.tb_frame.f_globals["__name__"] != RUNNER:
        entry = entry.tb_next
    error.__traceback__ = entry
    entry.tb_next = None

    strip_own_frames(error, RUNNER)

    assert error.__traceback__ is None


def test_causes_contexts_and_their_own_links_are_stripped():
    cause, context, deeper = (calls("train", "gradtrace.capture.calls") for _ in range(3))
    error = calls("train")
    error.__cause__, cause.__context__, error.__context__ = cause, deeper, context

    strip_own_frames(error, RUNNER)

    assert [frames(each) for each in (error, cause, context, deeper)] == [["train"]] * 4


def test_a_circle_of_links_comes_to_an_end():
    first, second = calls("gradtrace.capture.calls", "train"), calls("gradtrace.capture.calls", "train")
    first.__cause__, second.__cause__ = second, first

    strip_own_frames(first, RUNNER)

    assert [frames(first), frames(second)] == [["train"], ["train"]]


def test_members_of_a_group_are_stripped():
    class Group(Exception):  # as ExceptionGroup has them; Python 3.10 has no such class
        def __init__(self, *exceptions):
            self.exceptions = exceptions

    members = [calls("train", "gradtrace.capture.calls"), calls("gradtrace.capture.calls", "model")]

    strip_own_frames(Group(*members), RUNNER)

    assert [frames(member) for member in members] == [["train"], ["model"]]


def test_exceptions_attributes_that_are_no_group_are_passed_over():
    error = ValueError("x")
    error.exceptions = ("not an exception",)

    strip_own_frames(error, RUNNER)

    assert error.__traceback__ is None


def test_frames_of_the_import_system_before_one_of_ours_go_with_it(tmp_path, monkeypatch):
    from gradtrace.capture.on_import import ImportWatch

    name = "failing_module_of_this_test"
    (tmp_path / f"{name}.py").write_text("def body():\n    1 / 0\nbody()\n")
    monkeypatch.syspath_prepend(tmp_path)
    watch = ImportWatch(name, lambda: None)
    watch.start()
    with pytest.raises(ZeroDivisionError) as caught:
        exec(f"import {name}")
    watch.stop()
    assert "_find_and_load" in frames(caught.value)

    strip_own_frames(caught.value, RUNNER)

    assert frames(caught.value)[-2:] == ["<module>", "body"]
    assert "_find_and_load" not in frames(caught.value)
