"""``gradtrace record``: its options, what it refuses, and the life of a recording around the script."""

import importlib.util
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
from gradtrace_cli.main import main
from gradtrace_cli.record_plan import RecordPlan
from gradtrace_cli.record_summary import Line, last_words, moved_aside

from gradtrace.capture.watch.triggers import Triggers
from gradtrace.settings import SETTINGS, Settings
from gradtrace.trace.runinfo import ModuleInfo, RunInfo

CONSOLE_SCRIPT = str(Path(sysconfig.get_path("scripts"), "gradtrace"))
STUBS = Path(__file__).parents[1] / "scripts" / "stubs"
IMPORTS_TORCH = "print('before'); import torch; print('after')"


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def record(directory, source, *options, arguments=(), **environment):
    """Record a script; the real torch and tracer are replaced by stubs that print what is asked of them."""
    (directory / "train.py").write_text(source)
    command = [CONSOLE_SCRIPT, "record", *options, "train.py", *arguments]
    variables = os.environ | {"PYTHONPATH": str(STUBS)} | environment
    return subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True, timeout=60)


def started_with(done):
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("start "))
    return eval(line.removeprefix("start "), {"Triggers": Triggers})


def own_lines(done):
    return [line for line in done.stderr.splitlines() if line.startswith("gradtrace: ")]


# --- when the recording starts and ends ------------------------------------------------------------------


def test_the_recording_lasts_from_the_import_of_torch_to_the_end_of_the_process(directory):
    source = f"import atexit; atexit.register(print, 'exit handler'); {IMPORTS_TORCH}"

    done = record(directory, source)

    events = [line.split()[0] for line in done.stdout.splitlines()]
    assert events == ["before", "start", "after", "exit", "stop"]
    assert done.stdout.endswith("stop completed\n")


def test_torch_is_not_loaded_before_the_script_loads_it(directory):
    done = record(directory, "import sys; print([m for m in ('torch', 'numpy', 'pyarrow') if m in sys.modules])")

    assert done.stdout == "[]\n"


def test_a_search_for_torch_does_not_start_the_recording_and_does_not_hinder_it(directory):
    done = record(directory, f"import importlib.util as u; u.find_spec('torch'); {IMPORTS_TORCH}")

    assert [line.split()[0] for line in done.stdout.splitlines()] == ["before", "start", "after", "stop"]


@pytest.mark.parametrize(
    ("ending", "code", "end"),
    [
        ("", 0, "completed"),
        ("raise SystemExit(3)", 3, "exit 3"),
        ("raise ValueError", 1, "exception ValueError"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "signal SIGINT"),
    ],
)
def test_the_tracer_is_told_how_the_script_ended(directory, ending, code, end):
    done = record(directory, f"import torch\n{ending}")

    assert done.returncode == code
    assert done.stdout.endswith(f"stop {end}\n")


def test_sigterm_closes_the_recording_quickly_and_kills(directory):
    source = "import torch, os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"

    done = record(directory, source, "-o", "my run.parquet")

    assert done.returncode == -signal.SIGTERM
    assert done.stdout.endswith("stop_quickly signal SIGTERM\n")
    assert own_lines(done)[-1] == (
        "gradtrace: signal SIGTERM; what was recorded is kept: gradtrace first-nan 'my run.parquet'"
    )


# --- what goes wrong -------------------------------------------------------------------------------------


def test_a_recording_that_cannot_be_as_asked_ends_the_script_where_it_imports_torch(directory):
    done = record(directory, IMPORTS_TORCH, STUB_FAILS="start:CaptureError")

    assert done.returncode == 2
    assert "after" not in done.stdout.splitlines()
    assert "stop" not in done.stdout
    assert done.stderr == "gradtrace: error: it went wrong\n"


def test_a_tracer_that_fails_to_start_lets_the_script_go_on(directory):
    done = record(directory, f"{IMPORTS_TORCH}; raise SystemExit(3)", STUB_FAILS="start:RuntimeError")

    assert done.returncode == 3
    assert done.stdout.endswith("after\n")
    assert done.stderr == "gradtrace: warning: nothing is recorded: it went wrong; the script goes on\n"


def test_a_tracer_that_fails_to_finish_leaves_the_exit_code_alone(directory):
    done = record(directory, f"{IMPORTS_TORCH}; raise SystemExit(3)", STUB_FAILS="stop:OSError")

    assert done.returncode == 3
    assert own_lines(done)[-1] == "gradtrace: warning: the recording could not be finished: it went wrong"
    assert "Traceback" not in done.stderr


def test_a_second_interrupt_leaves_the_recording_in_its_parts(directory):
    done = record(directory, f"{IMPORTS_TORCH}; raise KeyboardInterrupt", STUB_FAILS="stop:KeyboardInterrupt")

    assert done.returncode == -signal.SIGINT
    assert own_lines(done)[-1] == (
        "gradtrace: warning: interrupted while finishing; what was recorded is kept: gradtrace first-nan run.parquet"
    )


def test_a_signal_kills_even_where_the_recording_cannot_be_closed(directory):
    source = "import torch, os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"

    assert record(directory, source, STUB_FAILS="stop_quickly:RuntimeError").returncode == -signal.SIGTERM


@pytest.mark.parametrize("source", ["import sys; sys.stderr.close()", "import os; os.close(2)"])
def test_a_script_that_closes_stderr_ends_as_it_does_alone(directory, source):
    done = record(directory, f"{IMPORTS_TORCH}\n{source}")

    assert done.returncode == 0
    assert done.stdout.endswith("stop completed\n")


def test_a_script_without_torch_is_told_that_nothing_was_recorded(directory):
    done = record(directory, "print('no model here')")

    assert (done.returncode, done.stdout) == (0, "no model here\n")
    assert done.stderr == (
        "gradtrace: warning: train.py did not import torch, so nothing was recorded. "
        "Does it run the model in a subprocess?\n"
    )


def test_a_script_that_failed_before_it_imported_torch_is_not_asked_for_subprocesses(directory):
    done = record(directory, "raise SystemExit(1)")

    assert done.stderr == "gradtrace: warning: train.py did not import torch, so nothing was recorded\n"


# --- what the tracer is asked for ------------------------------------------------------------------------


def test_without_options_every_step_goes_to_the_default_path_and_an_older_run_is_moved(directory):
    done = record(directory, "import torch", arguments=["--lr", "3e-4", "--help"])

    assert started_with(done) == {
        "path": str(directory / "run.parquet"),
        "mode": "full",
        "engine": "graph",
        "every": 1,
        "steps": None,
        "first_step": 0,
        "include": (),
        "exclude": (),
        "replays": 3,
        "on_nonfinite": "continue",
        "keep_compiled": False,
        "loss_lines": True,
        "op_steps": None,
        "capsule_limit": 2**30,
        "max_size": 2_000_000_000,
        "baseline": None,
        "triggers": Triggers(),
        "existing": "move_aside",
        "command": ["train.py", "--lr", "3e-4", "--help"],
    }


def test_every_option_reaches_the_tracer(directory):
    (directory / "pkg.py").write_text("import torch")
    (directory / "older.parquet").write_text("")
    options = """-o a/b.parquet --watch --every 10 --steps 5:20 --first-step 7 --include x.* --include y --exclude x.0
        --engine hooks --replays 1 --on-nonfinite stop --keep-compiled --no-loss-lines --op-steps 6:8
        --capsule-limit 1.5MB --max-size 3GB --baseline older.parquet --watch-first 1 --watch-after 2
        --watch-lr-factor 3 --watch-spike-factor 4.5 --watch-spike-window 50 --watch-share 0.1
        --watch-changed-first 7"""
    variables = os.environ | {"PYTHONPATH": str(STUBS)}

    done = subprocess.run(
        [CONSOLE_SCRIPT, "record", *options.split(), "-m", "pkg", "-x"],
        cwd=directory,
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert started_with(done) == {
        "path": str(directory / "a" / "b.parquet"),
        "mode": "watch",
        "engine": "hooks",
        "every": 10,
        "steps": (5, 20),
        "first_step": 7,
        "include": ("x.*", "y"),
        "exclude": ("x.0",),
        "replays": 1,
        "on_nonfinite": "stop",
        "keep_compiled": True,
        "loss_lines": False,
        "op_steps": (6, 8),
        "capsule_limit": 1_500_000,
        "max_size": 3_000_000_000,
        "baseline": str(directory / "older.parquet"),
        "triggers": Triggers(1, 2, 3.0, 4.5, 50, 0.1, 7),
        "existing": "refuse",
        "command": ["-m", "pkg", "-x"],
    }


@pytest.mark.parametrize(
    ("options", "limit"),
    [(("--no-capsule",), 0), (("--capsule-limit", "0"), 0), (("--capsule-limit", "2 GiB"), 2**31)],
)
def test_a_capsule_can_be_left_out_and_its_size_limited(directory, options, limit):
    assert started_with(record(directory, "import torch", *options))["capsule_limit"] == limit


@pytest.mark.parametrize("size", ["big", "1XB", "-1", ""])
def test_what_is_no_size_is_said(directory, size):
    done = record(directory, "import torch", f"--capsule-limit={size}")
    assert done.returncode == 2
    assert f"{size!r} is no size, as in 500MB or 1GiB" in done.stderr


@pytest.mark.parametrize(("text", "steps"), [("5:", (5, None)), (":20", (None, 20)), ("0:1", (0, 1))])
def test_either_end_of_the_steps_may_be_open(directory, text, steps):
    assert started_with(record(directory, "import torch", "--steps", text))["steps"] == steps


def test_force_overwrites(directory):
    (directory / "old.parquet").write_text("old")

    assert started_with(record(directory, "import torch", "--force"))["existing"] == "overwrite"
    done = record(directory, "import torch", "--force", "-o", "old.parquet")
    assert started_with(done)["existing"] == "overwrite"


def test_the_path_is_that_of_the_directory_where_record_was_called(directory):
    (directory / "elsewhere").mkdir()

    done = record(directory, "import os; os.chdir('elsewhere'); import torch", "-o", "x.parquet")

    assert started_with(done)["path"] == str(directory / "x.parquet")


def test_several_ranks_leave_the_look_for_older_runs_to_the_tracer(directory):
    (directory / "x.parquet").mkdir()

    done = record(directory, "import torch", "-o", "x.parquet", WORLD_SIZE="2", RANK="1")

    assert started_with(done)["existing"] == "refuse"


# --- what is printed -------------------------------------------------------------------------------------


def test_the_lines_of_a_whole_recording(directory):
    done = record(directory, "import torch", PYTHONWARNINGS="ignore::UserWarning:torch")

    assert own_lines(done) == [
        "gradtrace: warning: a warning of gradtrace",
        "gradtrace: moved the older run.parquet to older.parquet",
        "gradtrace: wrote run.parquet: 2 steps, 1 of 1 module, 34 records, 1.2 kB",
        "gradtrace: no incident; see: gradtrace summary run.parquet",
    ]
    assert "UserWarning: a warning of torch" in done.stderr


def test_quiet_leaves_only_warnings(directory):
    done = record(directory, "import torch", "-q")

    assert own_lines(done) == ["gradtrace: warning: a warning of gradtrace"]


def test_quiet_keeps_quiet_under_sigterm(directory):
    source = "import torch, os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"

    assert own_lines(record(directory, source, "-q")) == ["gradtrace: warning: a warning of gradtrace"]


def test_only_rank_zero_sums_up(directory):
    first = record(directory, "import torch", WORLD_SIZE="2", RANK="0")
    second = record(directory, "import torch", WORLD_SIZE="2", RANK="1")

    assert own_lines(first)[1:] == [
        "gradtrace: moved the older run.parquet to older.parquet",
        "gradtrace: wrote run.parquet (rank 0 of 2): 2 steps, 1 of 1 module, 34 records, 1.2 kB",
        "gradtrace: no incident; see: gradtrace summary run.parquet",
    ]
    assert own_lines(second) == ["gradtrace: warning: a warning of gradtrace"]


# --- the last words, from facts alone --------------------------------------------------------------------

MODULES = [
    ModuleInfo("", "Net", root=True, calls=3),
    ModuleInfo("layers.0.attn", "Attention", calls=3),
    ModuleInfo("layers.0.mlp", "MLP", file="net.py", calls=0),
]


def words(*, size=61_300_000, path="run.parquet", only_steps=None, in_one_file=True, is_in_place=True, **changes):
    """The last words of a run; keyword arguments change its RunInfo, or the settings of ``record``."""
    facts = {"steps": 12_000, "captured": 12_000, "records": 4_656_000, "modules": MODULES, "end": "completed"}
    options = {key: value for key, value in changes.items() if key in SETTINGS and key != "steps"}
    facts |= {key: value for key, value in changes.items() if key not in options}
    state = {"in_one_file": in_one_file, "is_in_place": is_in_place}
    tracer = SimpleNamespace(info=RunInfo("x", **facts), bytes_written=size, **state)
    plan = RecordPlan(
        script="train.py",
        args=(),
        is_module=False,
        path=path,
        moves_aside=False,
        force=False,
        quiet=False,
        settings=Settings(**({"steps": only_steps} | options)),
    )
    return list(last_words(tracer, plan))


def test_a_healthy_run_is_told_in_two_lines():
    assert words() == [
        Line("wrote run.parquet: 12,000 steps, 2 of 3 modules, 4,656,000 records, 61.3 MB"),
        Line("no incident; see: gradtrace summary run.parquet"),
    ]


def test_incidents_lead_to_the_first_of_them():
    assert words(incidents=1)[-1] == Line("1 incident; see: gradtrace first-nan run.parquet")
    assert words(incidents=2, path="my run")[-1] == Line("2 incidents; see: gradtrace first-nan 'my run'")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.0 kB"),
        (99_949, "99.9 kB"),
        (99_950, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (6_240_000, "6.2 MB"),
        (2_500_000_000, "2.5 GB"),
        (3_000_000_000_000_000, "3000 TB"),
    ],
)
def test_sizes_are_short(size, text):
    assert words(size=size)[0].text.endswith(f" records, {text}")


def test_one_of_a_thing_is_singular():
    facts = words(steps=1, records=1, modules=MODULES[:1])[0].text

    assert facts == "wrote run.parquet: 1 step, 1 of 1 module, 1 record, 61.3 MB"


def test_a_module_without_code_of_its_own_is_not_missed():
    facts = words(modules=[*MODULES, ModuleInfo("layers", "ModuleList", calls=0)])[0].text
    assert "2 of 3 modules" in facts


def test_that_a_recording_stopped_early_has_been_said_when_it_did():
    assert words(end="tracer failed: the disk is full", last_step=812) == words()


def test_what_could_not_be_put_into_one_file_was_not_written_there():
    assert words(in_one_file=False) == [
        Line("kept run.parquet in its parts: 12,000 steps, 2 of 3 modules, 4,656,000 records, 61.3 MB"),
        Line("no incident; see: gradtrace summary run.parquet"),
    ]


def test_of_a_recording_that_is_gone_nothing_is_told():
    assert words(in_one_file=False, is_in_place=False, incidents=1) == []


def test_a_run_without_a_module_call_says_so_and_asks_for_subprocesses():
    assert words(modules=[], records=0, steps=0) == [
        Line(
            "no module was called, so nothing was recorded. Does train.py run the model in a subprocess?",
            warning=True,
        ),
        Line("wrote run.parquet: 0 steps, 0 of 0 modules, 0 records, 61.3 MB"),
    ]


def test_steps_that_the_run_never_reached_are_named():
    first, second, *_ = words(captured=0, only_steps=(100, None))
    assert first == Line("no step was captured in full: none of the run lies in steps 100:", warning=True)
    assert second.text.startswith("wrote run.parquet: 12,000 steps (0 captured in full), 2 of 3 modules, ")


@pytest.mark.parametrize("settings", [{"mode": "watch"}, {"every": 500}, {"only_steps": (3, 27)}])
def test_where_not_all_steps_are_captured_in_full_their_number_is_told(settings):
    facts = words(captured=24, **settings)[0].text
    assert facts == (
        "wrote run.parquet: 12,000 steps (24 captured in full), 2 of 3 modules, 4,656,000 records, 61.3 MB"
    )


def test_a_pattern_that_matches_nothing_is_named_with_names_that_exist():
    notes = ["pattern 'layer.0.attn' matched no module", "pattern 'head' matched no module"]
    lines = words(include=("layer.0.attn", "layers.*"), exclude=("head",), records=0, notes=notes)

    assert lines[:2] == [
        Line(
            "--include 'layer.0.attn' matches no module; names look like: layers.0.attn, layers.0.mlp",
            warning=True,
        ),
        Line("--exclude 'head' matches no module; names look like: layers.0.attn, layers.0.mlp", warning=True),
    ]
    assert [line.text[:5] for line in lines[2:]] == ["wrote"]


def test_what_could_not_be_measured_is_counted():
    notes = words(unmeasured={"meta tensor": 1_000, "never fired in backward": 2}, notes=["a word more"])[:-2]

    assert notes == [
        Line(
            "note: 1,002 boundaries could not be measured or never fired: "
            "meta tensor (1,000), never fired in backward (2)"
        ),
        Line("note: a word more"),
    ]


def test_the_files_of_several_ranks_are_told_by_the_first_and_their_warnings_by_all():
    assert words(world_size=2)[0].text.startswith("wrote run.parquet (rank 0 of 2): ")
    assert words(world_size=2, rank=1, incidents=1) == []
    assert words(world_size=2, rank=1, modules=[], records=0) == [
        Line(
            "rank 1: no module was called, so nothing was recorded. Does train.py run the model in a subprocess?",
            warning=True,
        )
    ]


def test_an_older_run_is_told_with_its_new_name_beside_the_path():
    plan = SimpleNamespace(path="out/run.parquet")
    tracer = SimpleNamespace(info=RunInfo("x"), moved_to=Path("/home/me/out/run.1.parquet"))

    assert list(moved_aside(tracer, plan)) == [Line("moved the older out/run.parquet to out/run.1.parquet")]
    assert list(moved_aside(SimpleNamespace(info=RunInfo("x"), moved_to=None), plan)) == []


# --- errors: text and exit code --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "missing argument 'SCRIPT'; see: gradtrace record --help"),
        (["nope.py"], "no such script: nope.py"),
        (["nope.py", "--nope"], "no such script: nope.py"),
        (["json.tool"], "no such script: json.tool; to run a module: -m json.tool"),
        (["-m", "no_such_module"], "no such module: no_such_module"),
        (["-m", "no_such_module.train"], "no such module: no_such_module.train"),
        (["--forc", "x.py"], "no such option: --forc; did you mean --force? See: gradtrace record --help"),
        (["--zzz", "x.py"], "no such option: --zzz; see: gradtrace record --help"),
        (["-o"], "option '-o' requires an argument"),
        (
            ["--every", "0", "x.py"],
            "invalid value for '--every': 0 is not a whole number, 1 or more; see: gradtrace record --help",
        ),
        (
            ["--engine", "x", "x.py"],
            "invalid value for '--engine': 'x' is not one of 'graph', 'hooks'; see: gradtrace record --help",
        ),
        (
            ["--steps", "7", "x.py"],
            "invalid value for '--steps': '7' is not A:B, as in 100:200, 100: or :200; see: gradtrace record --help",
        ),
        (
            ["--steps", "7:7", "x.py"],
            "invalid value for '--steps': no step lies in 7:7; A:B is A up to, not including, B; "
            "see: gradtrace record --help",
        ),
        (
            ["-o", "old.parquet", "train.py"],
            "old.parquet exists; pass --force to replace it, or -o to write elsewhere",
        ),
        (
            ["-o", "killed.parquet", "train.py"],
            "killed.parquet exists; pass --force to replace it, or -o to write elsewhere",
        ),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_two(directory, capsys, arguments, message):
    (directory / "train.py").write_text("")
    (directory / "old.parquet").write_text("old")
    (directory / "killed.parquet.parts").mkdir()

    code = main(["record", *arguments])

    assert (code, *capsys.readouterr()) == (2, "", f"gradtrace: error: {message}\n")


def test_without_torch_the_one_command_that_helps_is_named(directory, capsys, monkeypatch):
    (directory / "train.py").write_text("")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))

    code = main(["record", "train.py"])

    message = "gradtrace: error: record needs PyTorch: pip install torch\n"
    assert (code, *capsys.readouterr()) == (2, "", message)


def test_a_script_that_cannot_be_read_is_one_line(directory, capsys, monkeypatch):
    (directory / "train.py").write_text("")
    monkeypatch.setattr(os, "access", lambda path, mode: False)

    code = main(["record", "train.py"])

    assert (code, *capsys.readouterr()) == (
        2,
        "",
        "gradtrace: error: cannot read train.py: permission denied\n",
    )


def test_help_of_the_script_is_the_scripts(directory):
    (directory / "train.py").write_text("import sys; print(sys.argv[1:])")

    done = subprocess.run(
        [sys.executable, "-m", "gradtrace", "record", "train.py", "--help"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.stdout == "['--help']\n"
