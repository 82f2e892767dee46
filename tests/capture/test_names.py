"""By which names modules and parameters go."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from gradtrace.capture.names import Names
from gradtrace.capture.roots import find_root
from tests.capture.tracing import Recorded, record

X = torch.linspace(-1, 1, 6).view(2, 3)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))


def names_of(recorded: Recorded) -> list[str]:
    return [info.name for info in recorded.info.modules]


def step(model: Callable[..., Tensor]) -> None:
    model(X).sum().backward()


PLAIN = ["", "0", "1", "1.0", "1.1"]


def test_names_are_those_of_named_modules_and_state_dict(tmp_path: Path) -> None:
    model = net()
    model.register_buffer("scale", torch.ones(1))
    recorded = record(model, tmp_path, lambda: step(model))
    assert names_of(recorded) == [name for name, _ in model.named_modules()] == PLAIN
    states = recorded.columns("module", "tensor", "path", phase="input", call=None)
    full = [(f"{module}.{path}".lstrip("."), kind) for module, kind, path in states]
    assert [name for name, _ in full] == ["scale", *(n for n, _ in model.named_parameters())]
    assert {name for name, _ in full} == set(model.state_dict())
    assert dict(full)["scale"] == "buffer"


def test_the_module_table_says_what_each_module_is(tmp_path: Path) -> None:
    model = net()
    recorded = record(model, tmp_path, lambda: (step(model), step(model)))
    root, linear, inner = recorded.info.modules[0], recorded.info.modules[1], recorded.info.modules[3]
    assert (root.type, root.root, root.depth, root.parameters) == ("Sequential", True, 0, {})
    assert (linear.type, linear.root, linear.depth, linear.calls) == ("Linear", False, 1, 2)
    assert linear.parameters == {"weight": "[4, 3]", "bias": "[4]"}
    assert (inner.type, inner.depth) == ("ReLU", 2)
    code = nn.Linear.forward.__code__
    assert (linear.file, linear.line) == (code.co_filename, code.co_firstlineno)


def wrapped_in_data_parallel(model: nn.Module) -> nn.Module:
    return nn.DataParallel(model)


def wrapped_inside(model: nn.Module) -> nn.Module:
    model[1] = checkpoint_wrapper(model[1])  # type: ignore[index,operator]
    return model


def wrapped_twice(model: nn.Module) -> nn.Module:
    return nn.DataParallel(checkpoint_wrapper(model))


WRAPPERS = [wrapped_in_data_parallel, wrapped_inside, wrapped_twice]


@pytest.mark.parametrize("engine", ["graph", "hooks"])
@pytest.mark.parametrize("found", [False, True], ids=["named", "found"])
@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_wrappers_add_nothing_to_names(
    wrap: Callable[[nn.Module], nn.Module], found: bool, engine: str, tmp_path: Path
) -> None:
    model = wrap(net())
    recorded = record(None if found else model, tmp_path, lambda: step(model), engine=engine)
    assert names_of(recorded) == PLAIN
    outputs = recorded.columns("module", tensor="output", phase="forward")
    assert sorted(outputs) == [(name,) for name in PLAIN]
    assert {row["module"] for row in recorded.where(tensor="grad")} == {"0", "1.1"}
    assert [info.type for info in recorded.info.modules] == ["Sequential", "Linear", "Sequential", "ReLU", "Linear"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_compile_adds_nothing_to_names(tmp_path: Path) -> None:
    model = net()
    recorded = record(None, tmp_path, lambda: step(torch.compile(model)))
    assert names_of(recorded) == PLAIN


def test_ddp_adds_nothing_to_names(tmp_path: Path) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(net())
        recorded = record(None, tmp_path, lambda: step(model))
    finally:
        torch.distributed.destroy_process_group()
    assert names_of(recorded) == PLAIN
    assert len(recorded.where(module="0", tensor="grad_output")) == 1


def test_a_model_that_is_wrapped_later_stays_the_same_root(tmp_path: Path) -> None:
    model = net()

    def run() -> None:
        step(model)
        parallel = nn.DataParallel(model)
        step(parallel)
        step(parallel)

    recorded = record(None, tmp_path, run)
    assert names_of(recorded) == PLAIN
    assert [info.calls for info in recorded.info.modules] == [3] * 5


class Shares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(5, 3), nn.Linear(3, 3)
        self.again, self.head = self.first, nn.Linear(3, 5)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.again(self.first(self.embed(tokens))))


def test_shared_modules_and_parameters_go_by_their_first_name(tmp_path: Path) -> None:
    model = Shares()
    recorded = record(model, tmp_path, lambda: model(torch.tensor([1, 2])).sum().backward())
    assert names_of(recorded) == ["", "embed", "first", "head"]
    assert recorded.columns("module", "call", tensor="output") == [
        ("embed", 0),
        ("first", 0),
        ("first", 1),
        ("head", 0),
        ("", 0),
    ]
    gradients = recorded.columns("module", "path", tensor="grad")
    assert sorted(gradients) == [("embed", "weight"), ("first", "bias"), ("first", "weight"), ("head", "bias")]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"include": ["1"]}, {"1"}),
        ({"include": ["1.*"]}, {"1.0", "1.1"}),
        ({"include": ["?"]}, {"0", "1"}),
        ({"include": ["1*"], "exclude": ["*.0"]}, {"1", "1.1"}),
        ({"exclude": ["1*"]}, {"", "0"}),
        ({"include": ["Sequential.0"]}, {"0"}),
        ({"include": [""]}, {""}),
    ],
)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("engine", ["graph", "hooks"])
def test_patterns_choose_what_is_recorded(
    options: dict[str, list[str]], expected: set[str], engine: str, tmp_path: Path
) -> None:
    model = net()
    recorded = record(model, tmp_path, lambda: step(model), engine=engine, **options)
    for tensor in ("input", "output", "grad_output"):
        assert {row["module"] for row in recorded.where(tensor=tensor)} == expected, tensor
    owners = {row["module"] for row in recorded.where(tensor="param")}
    assert owners == expected & {"0", "1.1"}
    assert {row["module"] for row in recorded.where(tensor="grad")} == owners
    assert len(recorded.where(tensor="loss")) == 1
    assert recorded.info.notes == []


def test_what_is_chosen_is_measured_as_if_all_were(tmp_path: Path) -> None:
    """What lies between, unrecorded, still counts: a contribution may come from an inner module."""
    model, x = net(), X.clone().requires_grad_()
    whole = record(model, tmp_path, lambda: model(x).sum().backward())
    part = record(model, tmp_path, lambda: model(x).sum().backward(), include=["1"])
    norms = [row["norm"] for row in whole.where(module="1") if row["tensor"] in ("grad_input", "grad_output")]
    assert [row["norm"] for row in part.where(module="1", phase="backward")] == norms


def test_a_pattern_that_matches_nothing_is_said(tmp_path: Path) -> None:
    model = net()
    recorded = record(model, tmp_path, lambda: step(model), exclude=["layer4.*", "0"])
    assert recorded.info.notes == ["pattern 'layer4.*' matched no module"]


# Several roots -----------------------------------------------------------------------------------------------


def test_several_models_are_prefixed_and_a_criterion_is_not_counted(tmp_path: Path) -> None:
    one, two, criterion = net(), nn.Linear(2, 2), nn.MSELoss()

    def run() -> None:
        criterion(two(one(X)), torch.zeros(2, 2)).backward()

    models = {"one": one, "two": two, "criterion": criterion}
    assert names_of(record(models, tmp_path, run)) == [*(f"one.{n}".rstrip(".") for n in PLAIN), "two", "criterion"]
    models.pop("two")
    assert names_of(record(models, tmp_path, run)) == [*PLAIN, "criterion"]


def test_names_are_found_by_the_variables_that_hold_the_models(tmp_path: Path) -> None:
    def run() -> None:
        generator, critic = nn.Linear(3, 2), nn.Linear(2, 1)
        loss = nn.BCEWithLogitsLoss()
        loss(critic(generator(X)), torch.ones(2, 1)).backward()

    recorded = record(None, tmp_path, run)
    assert names_of(recorded) == ["generator", "critic", "loss"]


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 2), nn.Linear(2, 3)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)


def test_a_part_that_is_called_alone_belongs_to_its_model(tmp_path: Path) -> None:
    def run() -> None:
        autoencoder = Parts()
        autoencoder.decoder(autoencoder.encode(X)).sum().backward()

    recorded = record(None, tmp_path, run)
    assert names_of(recorded) == ["", "encoder", "decoder"]
    assert recorded.columns("module", "phase", tensor="input") == [("encoder", "input"), ("decoder", "forward")]
    assert {row["module"] for row in recorded.where(tensor="grad")} == {"encoder", "decoder"}


def test_a_model_held_by_a_trainer_is_found_by_its_attribute() -> None:
    class Trainer:
        def __init__(self) -> None:
            self._policy = Parts()

        def train(self) -> tuple[nn.Module, str]:
            return find_root(self._policy.encoder)

    trainer = Trainer()
    root, label = trainer.train()
    assert root is trainer._policy
    assert label == "policy"


def test_a_model_that_no_variable_holds_goes_by_its_class() -> None:
    assert find_root(Parts())[1] == "Parts"


def test_looking_for_a_root_keeps_no_variable_of_the_frames_alive() -> None:
    """Up to Python 3.12 a frame keeps the dictionary of its variables once it has been asked for it."""
    large = [Parts()]
    finalized: list[str] = []

    class Witness:
        def __del__(self) -> None:
            finalized.append("gone")

    witness = Witness()
    find_root(large[0].encoder)
    del witness
    assert finalized == ["gone"]


def test_variables_of_code_that_is_run_by_exec_are_seen() -> None:
    variables: dict[str, Any] = {}
    script = "model = Parts(); root, label = find_root(model.decoder)"
    exec(script, {"Parts": Parts, "find_root": find_root}, variables)
    assert variables["root"] is variables["model"]
    assert variables["label"] == "model"


def test_a_model_that_is_still_being_made_is_passed_over() -> None:
    class Makes(nn.Module):
        def __init__(self) -> None:
            self.early = find_root(nn.Linear(1, 1))  # ahead of nn.Module.__init__
            super().__init__()

    root, label = Makes().early
    assert type(root) is nn.Linear
    assert label == "Linear"


def test_the_users_own_dictionary_of_variables_is_left_alone() -> None:
    model, number = Parts(), 3
    variables = locals()
    find_root(model.encoder)
    assert variables["model"] is model
    assert variables["number"] == number


def test_labels_are_unique() -> None:
    names = Names((), ())
    models = [nn.Linear(1, 1) for _ in range(3)]
    assert [names.add_root(model, "net").label for model in models] == ["net", "net_2", "net_3"]


# Modules that change -----------------------------------------------------------------------------------------


def test_a_module_that_is_replaced_keeps_its_name(tmp_path: Path) -> None:
    model = net()

    def run() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model)
        optimizer.step()
        old = model[0]
        model[0] = nn.Linear(3, 4, bias=False)
        step(model)
        assert old is not model[0]

    recorded = record(model, tmp_path, run)
    assert names_of(recorded) == PLAIN
    assert recorded.info.modules[1].parameters == {"weight": "[4, 3]"}
    assert recorded.columns("step", module="0", tensor="output") == [(0,), (1,)]


def test_a_copy_made_in_each_epoch_is_one_root(tmp_path: Path) -> None:
    def run() -> None:
        model = net()
        for _ in range(3):
            snapshot = copy.deepcopy(model)
            step(model)
            with torch.no_grad():
                snapshot(X)
            del snapshot

    recorded = record(None, tmp_path, run)
    assert {name.partition(".")[0] for name in names_of(recorded)} == {"model", "snapshot"}
    assert [info.calls for info in recorded.info.modules] == [3] * 10


def test_lazy_modules_show_the_shapes_that_they_got(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    recorded = record(model, tmp_path, lambda: step(model))
    assert recorded.info.modules[1].parameters == {"weight": "[2, 3]", "bias": "[2]"}


def test_scripted_modules_have_names_and_no_source(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = torch.jit.script(net())
    recorded = record({"model": model}, tmp_path, lambda: step(model))
    assert recorded.info.end == "completed"
    assert names_of(recorded) == PLAIN
    assert len(recorded.where(module="", tensor="grad_output")) == 1


def test_a_module_list_has_no_source_since_it_is_never_called(tmp_path: Path) -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x)

    model = Stack()
    recorded = record(model, tmp_path, lambda: model(torch.ones(2, 3)).sum().backward())
    stack, layers, linear = recorded.info.modules
    assert (stack.file, stack.calls) == (__file__, 1)
    assert (layers.type, layers.file, layers.line, layers.calls) == ("ModuleList", None, None, 0)
    assert linear.calls == 1
