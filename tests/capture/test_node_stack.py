"""The source lines of autograd nodes."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from capture.losses import leaf, stacks

import gradtrace
from gradtrace.capture.operations.stacks import stack_of
from gradtrace.trace.confirmation import SourceLine


def test_frames_of_torch_are_left_out_and_the_innermost_is_last() -> None:
    def loss() -> torch.Tensor:
        return F.cross_entropy(leaf(1.0, 2.0), torch.tensor(1))

    with stacks():
        node = loss().grad_fn

    stack = stack_of(node)
    assert stack[-1] == SourceLine(
        __file__, loss.__code__.co_firstlineno + 1, "loss", "return F.cross_entropy(leaf(1.0, 2.0), torch.tensor(1))"
    )
    assert stack[-2].code == "node = loss().grad_fn"
    assert not any("/torch/" in line.file for line in stack)


def test_a_node_without_notes_has_no_lines() -> None:
    assert stack_of(leaf(1.0).sum().grad_fn) == ()


def test_lines_stay_when_the_mode_is_off_again() -> None:
    with stacks():
        node = leaf(1.0).sum().grad_fn
    assert not torch.is_anomaly_enabled()
    assert stack_of(node)[-1].code == "node = leaf(1.0).sum().grad_fn"


def test_a_double_backward_is_on_the_line_that_ran_it() -> None:
    x = leaf(2.0)
    with stacks():
        cube = x.pow(3)
        (slope,) = torch.autograd.grad(cube, x, create_graph=True)
    assert stack_of(slope.grad_fn)[-1].code == "(slope,) = torch.autograd.grad(cube, x, create_graph=True)"


def frame(file: str, code: str = "code") -> str:
    return f'  File "{file}", line 7, in f\n    {code}\n'


def node(*frames: str, parent: object = None) -> SimpleNamespace:
    return SimpleNamespace(metadata={"traceback_": list(frames), **({"parent_": parent} if parent else {})})


def test_a_node_of_an_engine_thread_has_the_lines_of_its_parent() -> None:
    made_by = node(frame("/home/train.py", "y = x.sqrt()"))
    assert stack_of(node(parent=made_by)) == (SourceLine("/home/train.py", 7, "f", "y = x.sqrt()"),)


def test_what_runs_the_script_is_left_out_with_all_that_is_further_out() -> None:
    package = gradtrace.__path__[0]
    frames = [
        frame("/usr/bin/gradtrace"),
        frame(f"{package}/capture/script.py"),
        frame("<frozen runpy>"),
        frame("/home/train.py"),
        frame(f"{package}/capture/calls.py"),
        frame(torch.__file__),
        frame("/home/loss.py"),
    ]
    assert [line.file for line in stack_of(node(*frames))] == ["/home/train.py", "/home/loss.py"]


def test_a_frame_without_its_source_and_one_in_an_odd_place_are_read_too() -> None:
    frames = [
        '  File "<stdin>", line 3, in <module>\n',
        '  File "/my dir/a "b".py", line 12, in <lambda>\n    x\n',
        "?",
    ]
    assert stack_of(node(*frames)) == (
        SourceLine("<stdin>", 3, "<module>", ""),
        SourceLine('/my dir/a "b".py', 12, "<lambda>", "x"),
    )
