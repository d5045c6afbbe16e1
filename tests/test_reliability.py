"""Breaking things on purpose, in all scripts: kills, full disks, damaged files, hostile checkpoints, bad input."""

import errno
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_atari import games  # noqa: F401, a fixture

ROOT = Path(__file__).resolve().parents[1]
CRITICS = ("--num-critics", 3, "--hidden-dim", 16, "--batch-size", 16, "--dataset-id", "test/cartpole-v0")
SMALL = {  # the shortest sensible run of each training script, without its number of updates
    "ersac_tabular": ("--num-critics", 5),
    "ersac_ensemble": CRITICS,
    "ersac_epinet": (*CRITICS[2:], "--index-dim", 4),
    "ersac_atari": ("--dataset-id", "test/pong-v0", "--hidden-dim", 16, "--batch-size", 4, "--algo", "sac-n"),
}
SMALL["ersac_atari"] += ("--clone-updates", 2, "--critic-warmup", 2)
SHORT = ("--total-updates", 8, "--eval-interval", 4, "--eval-episodes", 2)
TIMING = ("updates_per_second", "charts/updates_per_second")


def same(x, y):
    """Equal to the last bit, timing aside."""
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(same(x[k], y[k]) for k in x if k not in (*TIMING, "args", "run_name"))
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(map(same, x, y))
    return torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y or x != x and y != y


def one_line(done, *words):
    last = done.err.strip().splitlines()[-1]
    assert done.code in (1, 2) and "Traceback" not in done.err, done.err
    assert all(word in last for word in words), last


# ----- kills. ersac_tabular.py and gen_expectile_data.py have theirs in their own files
@pytest.mark.parametrize(
    "script",
    ["ersac_epinet", *(pytest.param(s, marks=pytest.mark.slow) for s in ("ersac_ensemble", "ersac_atari"))],
)
def test_killed_run_resumes_to_the_same_bits(script, run, load, games, tmp_path):  # noqa: F811
    """SIGKILL of a real process at random moments, three times in a row."""
    updates = 60 if script == "ersac_atari" else 1500
    flags = (*SMALL[script], "--total-updates", updates, "--eval-interval", updates // 30, "--eval-episodes", 3)
    flags = [*map(str, flags)]
    whole = load(run(script, *flags, "--exp-name", "whole").folders[0])
    command, killed = [sys.executable, str(ROOT / f"{script}.py")], 0
    start = [*command, *flags, "--output-dir", str(tmp_path / "killed")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def written():
        found = list(tmp_path.glob("killed/*/checkpoint.pt"))
        return found[0].stat().st_mtime_ns if found else 0

    for _ in range(3):
        before, deadline = written(), time.time() + 100
        process = subprocess.Popen(start, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while written() == before and process.poll() is None and time.time() < deadline:
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.5))
        killed += process.poll() is None
        process.kill()
        process.wait()
        (folder,) = tmp_path.glob("killed/*")
        start = [*command, "--resume", str(folder)]
    assert subprocess.run(start, env=environment, capture_output=True).returncode == 0
    got = load(folder)
    assert killed >= 1 and got.metrics == whole.metrics and same(got.result, whole.result)
    assert same(got.checkpoint, whole.checkpoint)


@pytest.mark.parametrize("script", SMALL)
def test_finished_run_can_be_resumed_and_stays_as_it_is(script, run, load, games):  # noqa: F811
    (folder,) = run(script, *SMALL[script], *SHORT).folders
    first = load(folder)
    assert run(script, "--resume", folder).code == 0
    again = load(folder)
    assert same(first.result, again.result) and first.metrics == again.metrics
    assert same(first.checkpoint, again.checkpoint) and again.result["updates_per_second"] > 0


def test_stopped_while_cloning_resumes_to_the_same_bits(run, load, games, monkeypatch):  # noqa: F811
    script = "ersac_atari"
    whole = load(run(script, *SMALL[script], *SHORT, "--exp-name", "whole").folders[0])
    cross_entropy, calls = torch.nn.functional.cross_entropy, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return cross_entropy(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "cross_entropy", interrupted)
        part = run(script, *SMALL[script], *SHORT, "--exp-name", "part")
    assert part.code == 130 and "--resume" in part.out and len(calls) == 2
    (folder,) = part.folders
    assert run(script, "--resume", folder).code == 0
    got = load(folder)
    assert got.metrics == whole.metrics and same(got.result, whole.result) and same(got.checkpoint, whole.checkpoint)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("script", SMALL)
def test_interrupted_run_says_how_to_go_on(script, number, run, load, games, monkeypatch):  # noqa: F811
    """Ctrl-C and a cluster's SIGTERM alike: before the training there is nothing to go on with, later there is."""
    flags = (*SMALL[script], *SHORT)

    def begin(*_, **__):
        signal.raise_signal(number)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim, "Adam", begin)
        done = run(script, *flags)
    assert done.code == 130 and done.folders == [] and "--resume" not in done.out and "Traceback" not in done.err
    whole = load(run(script, *flags, "--exp-name", "whole").folders[0])
    step, calls = torch.optim.Adam.step, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 14:  # past the first evaluation of the scripts with two optimisers
            signal.raise_signal(number)
        return step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.Adam, "step", interrupted)
        more = ("--total-updates", 16) if script == "ersac_tabular" else ()  # its critics have no optimiser
        done = run(script, *flags, *more, "--exp-name", "part")
    (folder,) = done.folders
    assert done.code == 130 and f"python {script}.py --resume runs/{folder.name}" in done.out
    assert 0 < load(folder).checkpoint["update"] < 16 and not (folder / "result.json").exists()
    assert run(script, "--resume", folder).code == 0
    got = load(folder)
    if script == "ersac_tabular":
        assert got.metrics[: len(whole.metrics)] == whole.metrics and got.result["updates"] == 16
    else:
        assert got.metrics == whole.metrics and same(got.result, whole.result)
        assert same(got.checkpoint, whole.checkpoint)


def test_sigterm_to_a_real_process(tmp_path):
    command = [sys.executable, str(ROOT / "ersac_tabular.py"), "--total-updates", "100000000", "--num-critics", "5"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    deadline = time.time() + 100
    while not list(tmp_path.glob("runs/*/metrics.csv")) and time.time() < deadline:
        time.sleep(0.02)
    process.terminate()
    out, _ = process.communicate(timeout=60)
    (folder,) = tmp_path.glob("runs/*")
    assert process.returncode == 130 and f"--resume runs/{folder.name}" in out


# ----- memory
@pytest.mark.parametrize("script", ["ersac_ensemble", "ersac_epinet", "ersac_atari"])
def test_no_graph_grows_from_update_to_update(script, run, games):  # noqa: F811
    """Polyak averaging outside of no_grad made the targets part of a graph that grew by 8 kB per update."""
    names = run(script, *SMALL[script], *SHORT).names
    assert all(p.grad_fn is None and not p.requires_grad for p in names["target_critic"].parameters())
    assert all(p.grad_fn is None for part in ("critic", "actor") for p in names[part].parameters())


# ----- disks
@pytest.mark.parametrize("script", SMALL)
def test_full_disk_ends_in_one_line_and_the_last_checkpoint_goes_on(script, run, load, games):  # noqa: F811
    """A limit on the size of files stands in for a full disk: the system refuses the write in the same place."""
    whole = load(run(script, *SMALL[script], *SHORT, "--exp-name", "whole").folders[0])
    original, calls = os.replace, []

    def replace(*names):
        calls.append(names)
        if len(calls) == 5:  # arguments, checkpoints, metrics; then the disk is full
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*names)

    os.replace = replace
    try:
        done = run(script, *SMALL[script], *SHORT, "--exp-name", "part")
    finally:
        os.replace = original
    one_line(done, "No space left on device", "--resume")
    (folder,) = done.folders
    assert not (folder / "result.json").exists()
    assert run(script, "--resume", folder).code == 0
    got = load(folder)
    assert got.metrics == whole.metrics and same(got.result, whole.result) and same(got.checkpoint, whole.checkpoint)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))  # the real thing: not even the arguments fit
    try:
        done = run(script, *SMALL[script], *SHORT, "--exp-name", "limited")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    one_line(done, "File too large", "make room", "--output-dir")


@pytest.mark.parametrize("script", SMALL)
def test_output_folder_that_cannot_be_written(script, run, games, tmp_path):  # noqa: F811
    (tmp_path / "file").write_text("precious")
    for place in ("/proc/nowhere", tmp_path / "file"):
        one_line(run(script, *SMALL[script], *SHORT, "--output-dir", place), str(place), "output-dir")
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("script", SMALL)
def test_two_runs_in_the_same_second(script, run, load, games, monkeypatch):  # noqa: F811
    """They have folders of their own; in the same millisecond the later one is refused."""
    clock = time.time
    start = int(clock()) + 0.0002
    monkeypatch.setattr(time, "time", lambda: start + (clock() - start) % 0.0006)  # a millisecond that does not end
    (folder,) = run(script, *SMALL[script], *SHORT).folders
    before = {path: path.read_bytes() for path in folder.iterdir()}
    one_line(run(script, *SMALL[script], *SHORT), "exists", "--exp-name")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert run(script, *SMALL[script], *SHORT, "--exp-name", "other").code == 0
    monkeypatch.setattr(time, "time", lambda: start + 0.5 + (clock() - start) % 0.0006)
    assert run(script, *SMALL[script], *SHORT).code == 0


# ----- checkpoints
class Attack:
    """A pickle that would make a folder when it is loaded."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("script", [*SMALL, "gen_expectile_data"])
def test_a_strangers_checkpoint_runs_no_code(script, run, tmp_path):
    folder, trap = tmp_path / "stranger", tmp_path / "trap"
    folder.mkdir()
    torch.save({"script": f"{script}.py", "args": {}, "attack": Attack(trap)}, folder / "checkpoint.pt")
    one_line(run(script, "--resume", folder), "damaged")
    (folder / "checkpoint.pt").write_bytes(pickle.dumps(Attack(trap)))
    one_line(run(script, "--resume", folder), "damaged")
    assert not trap.exists()
    pickle.loads(pickle.dumps(Attack(trap)))  # the attack is real: a plain unpickling does make the folder
    assert trap.exists()


@pytest.mark.parametrize("script", SMALL)
def test_checkpoints_that_do_not_fit(script, run, games, tmp_path):  # noqa: F811
    (good,) = run(script, *SMALL[script], *SHORT).folders
    result = (good / "result.json").read_bytes()
    content = (good / "checkpoint.pt").read_bytes()
    for cut in (0, 1, len(content) // 2, len(content) - 1):
        bad = tmp_path / f"cut{cut}"
        shutil.copytree(good, bad)
        (bad / "checkpoint.pt").write_bytes(content[:cut])
        one_line(run(script, "--resume", bad), "damaged")
        assert (bad / "result.json").read_bytes() == result
    for other in {*SMALL, "gen_expectile_data"} - {script}:
        one_line(run(other, "--resume", good), "not written by")
    for flags in (("--gamma", 0.5), ("--seed", 1), ("--seed=7",), ("--exp_name", "x")):  # whatever its value
        one_line(run(script, "--resume", good, *flags), flags[0][:3], "cannot change in a run that has begun")
    one_line(run(script, "--resume", good, "--total-updates", 7), "--total-updates 7", "has done 8")
    assert (good / "result.json").read_bytes() == result and (good / "checkpoint.pt").read_bytes() == content


@pytest.mark.parametrize("script", SMALL)
def test_what_may_change_beside_resume(script, run, load, games):  # noqa: F811
    """More evaluation episodes: only the result is new. More updates: the run goes on from its end."""
    (folder,) = run(script, *SMALL[script], *SHORT).folders
    first = load(folder)
    assert run(script, "--resume", folder, "--eval-episodes", 3).code == 0
    again = load(folder)
    assert again.metrics == first.metrics and same(again.checkpoint, first.checkpoint)
    assert len(first.result["eval_returns"]) == 2 and len(again.result["eval_returns"]) == 3
    if script != "ersac_tabular":  # which draws all starts at once
        assert again.result["eval_returns"][:2] == first.result["eval_returns"]
    assert run(script, "--resume", folder, "--total-updates", 12).code == 0
    longer = load(folder)
    assert longer.metrics[: len(first.metrics)] == first.metrics and len(longer.metrics) == len(first.metrics) + 1
    assert longer.checkpoint["update"] == longer.result["updates"] == 12


# ----- data
@pytest.mark.parametrize("script", ["ersac_ensemble", "ersac_epinet", "ersac_atari"])
def test_damaged_and_changed_data_sets(script, run, games, tmp_path, monkeypatch):  # noqa: F811
    name = SMALL[script][SMALL[script].index("--dataset-id") + 1]
    shutil.copytree(games / "test", tmp_path / "sets" / "test")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "sets"))
    flags = ("--cache-dir", tmp_path / "cache") if script == "ersac_atari" else ()
    (folder,) = run(script, *SMALL[script], *SHORT, *flags).folders
    (file,) = (tmp_path / "sets" / name).glob("data/*.hdf5")
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    content = file.read_bytes()
    for damaged in (content[: len(content) // 2], b"nonsense" * 100):
        file.write_bytes(damaged)
        one_line(run(script, *SMALL[script], *SHORT, *flags, "--exp-name", "damaged"), name)
    file.write_bytes(content)
    import h5py

    with h5py.File(file, "r+") as f:
        f["episode_0/observations"][0] = 7
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    one_line(run(script, "--resume", folder), "has changed")
    assert not list(tmp_path.glob("runs/*damaged*"))  # nothing was begun on damaged data


# ----- losses
@pytest.mark.parametrize("script", ["ersac_ensemble", "ersac_epinet"])
def test_diverging_run_stops_in_one_line_and_keeps_its_checkpoint(script, run, load, datasets):
    done = run(script, *SMALL[script], *SHORT, "--q-lr", 1e30)
    one_line(done, "update", "loss not finite", "--q-lr")
    checkpoint = load(done.folders[0]).checkpoint
    assert all(x.isfinite().all() for x in checkpoint["critic"].values())


@pytest.mark.parametrize("script", SMALL)
def test_same_seed_same_numbers_other_seed_other_numbers(script, run, load, games):  # noqa: F811
    runs = [("a", 3), ("b", 3), ("c", 4)]
    a, b, c = (
        load(run(script, *SMALL[script], *SHORT, "--seed", seed, "--exp-name", name).folders[0]) for name, seed in runs
    )
    assert a.metrics == b.metrics and same(a.checkpoint, b.checkpoint) and a.metrics != c.metrics


# ----- W&B
@pytest.mark.parametrize("script", SMALL)
def test_wandb_that_fails_never_stops_a_run(script, run, games, monkeypatch):  # noqa: F811
    import wandb

    def init(**_):
        raise wandb.errors.CommError("server not reachable")

    monkeypatch.setattr(wandb, "init", init)
    done = run(script, *SMALL[script], *SHORT, "--track")
    assert done.code == 0 and "server not reachable" in done.err and "goes on without it" in done.err
    assert (done.folders[0] / "result.json").exists()


@pytest.mark.slow
def test_wandb_without_a_login_never_stops_a_run(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {"HOME": str(tmp_path)}
    command = [sys.executable, str(ROOT / "ersac_tabular.py"), "--track", "--total-updates", "5", "--num-critics", "5"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0 and "No API key" in done.stderr and "goes on without it" in done.stderr, done.stderr
    assert len(list(tmp_path.glob("runs/*/result.json"))) == 1


@pytest.mark.slow
def test_wandb_offline_from_start_to_resumed_end(datasets, tmp_path):
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "ersac_epinet.py")]
    flags = [*map(str, (*SMALL["ersac_epinet"], *SHORT)), "--track"]
    done = subprocess.run([*command, *flags], cwd=tmp_path, env=environment, capture_output=True, text=True)
    (folder,) = tmp_path.glob("runs/*")
    assert done.returncode == 0 and (folder / "result.json").exists(), done.stderr
    done = subprocess.run([*command, "--resume", str(folder)], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0
    stored = {path.name.split("-", 3)[-1] for path in tmp_path.glob("wandb/offline-run-*")}
    assert stored == {folder.name}  # both parts belong to one W&B run


# ----- bad input: the scripts' own test files have tables of it
@pytest.mark.parametrize(
    "script, flags",
    [
        ("ersac_tabular", "--upsilon 0"),
        ("ersac_ensemble", "--dataset-id test/pendulum-v0"),
        ("ersac_epinet", "--env-id NoSuchThing-v0"),
        ("ersac_atari", "--dataset-id test/cartpole-v0"),
        ("gen_expectile_data", "--env-id Pendulum-v1"),
    ],
)
def test_bad_input_in_a_real_process(script, flags, datasets, tmp_path):
    command = [sys.executable, str(ROOT / f"{script}.py"), *flags.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and list(tmp_path.iterdir()) == []
