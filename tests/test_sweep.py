"""Protects the runner of all grids: a row a finished run, written at once, skipped the next time, a kill costs the runs
under way; what it reads from a data set's id; the rivals; and the calibration of a fixed policy, in plain loops."""

import csv
import importlib
import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tyro
import yaml
from conftest import ROOT

from gen_expectile_data import Args as Gen
from gen_expectile_data import dataset_name

BENCHMARK = ROOT / "docs" / "benchmark"
sys.path.insert(0, str(BENCHMARK))
import calibration  # noqa: E402
import clone  # noqa: E402
import sweep as runner  # noqa: E402

RESULT = ("eval_return_mean", "eval_return_std", "random_return", "reference_return", "policy_entropy")
GRID = ("--datasets", "ersac/cartpole/tau50-early50-switch05-1k-s{seed}-v0", "my/set-v0")
GRID += ("--methods", "SAC-N", "BC", "--seeds", 100, 101)


@pytest.fixture
def sweep(monkeypatch, tmp_path, capsys):
    """call("--seeds", 1) with runs that take no time -> the commands, those that made data, the rows of the CSV, what
    sys.exit was given and what stood on stderr."""
    out = tmp_path / "sweep.csv"
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))

    def call(*arguments, fail_at=None):
        commands, made = [], []

        def fake(command, **_):
            if command[0] == "git":
                return SimpleNamespace(returncode=0, stdout="abc1234-dirty\n")
            if "gen_expectile_data.py" in command[1]:
                made.append(command[2:])
                return SimpleNamespace(returncode=0)
            commands.append(command)
            if fail_at == len(commands) - 1:
                return SimpleNamespace(returncode=1, stderr="out of memory")
            words = command[2:]
            given = {name[2:].replace("-", "_"): value for name, value in zip(words, words[1:]) if name[:2] == "--"}
            folder = Path(given["output_dir"]) / "run"
            folder.mkdir()
            (folder / "args.json").write_text(json.dumps(given | {"resume": None}))
            result = {"env_id": "CartPole-v1", "updates": 5, "normalized_return": 50.0 + int(given["seed"])}
            result |= dict.fromkeys((*RESULT, "updates_per_second"), 2.0) | {"eval_returns": [1.0, 3.25, -7.0]}
            (folder / "result.json").write_text(json.dumps(result))
            if "docs" not in Path(command[1]).parts:  # the rivals log nothing on the way
                header = "update,eval/return,charts/policy_entropy,charts/std_other_actions"
                (folder / "metrics.csv").write_text(f"{header}\n1,3,0.5,-1\n2,9,0.25,-2\n3,7,0,-3.5\n")
            return SimpleNamespace(returncode=0)

        monkeypatch.setattr(subprocess, "run", fake)
        monkeypatch.setattr(sys, "argv", ["sweep.py", "--workers", "1", "--out", str(out), *map(str, arguments)])
        code = 0
        try:
            runpy.run_path(str(BENCHMARK / "sweep.py"), run_name="__main__")
        except SystemExit as stop:
            code = stop.code
        rows = list(csv.DictReader(out.read_text().splitlines())) if out.exists() else []
        return SimpleNamespace(commands=commands, made=made, rows=rows, code=code, err=capsys.readouterr().err)

    return SimpleNamespace(call=call, out=out)


def flag(command, name):
    """The value that a command gives to a flag; the last one counts. None if it has no such flag."""
    return {a: b for a, b in zip(command, command[1:])}.get(f"--{name}")


def test_every_cell_once_and_none_twice(sweep):
    done = sweep.call(*GRID)
    assert done.code == 0 and len(done.commands) == len(done.rows) == 2 * 2 * 2
    assert len({(r["method"], r["dataset_id"], r["seed"]) for r in done.rows}) == 8
    assert [r["seed"] for r in done.rows] == ["100"] * 4 + ["101"] * 4  # a sweep that is stopped has whole seeds
    box = [r for r in done.rows if r["method"] == "SAC-N"]
    assert {(r["best_return"], r["training_entropy"], r["std_other_actions"]) for r in box} == {("9.0", "0.25", "-3.5")}
    with open(sweep.out.with_name("sweep_curves.csv"), newline="") as f:
        curves = [r for r in csv.DictReader(f) if r["dataset_id"] == "my/set-v0"]
    logged = [(r["method"], r["seed"], r["update"], r["eval/return"], r["charts/policy_entropy"]) for r in curves]
    points = (("1", "3", "0.5"), ("2", "9", "0.25"), ("3", "7", "0"))
    assert logged == [("SAC-N", seed, *point) for seed in ("100", "101") for point in points]
    assert sweep.call(*GRID).commands == []  # all there
    more = sweep.call(*GRID, 102, "--flags=--alpha 0.1")  # the flags are part of a run's name
    assert len(more.commands) == 12 and len(more.rows) == 20 and {flag(c, "alpha") for c in more.commands} == {"0.1"}
    assert "--track" in sweep.call(*GRID, 102, "--track").commands[0]  # and --track is not
    for row in done.rows:
        arguments = json.loads(row["arguments"])
        assert row["commit"] == "abc1234-dirty" and row["eval_returns"] == "1.0 3.2 -7.0"
        assert arguments["seed"] == row["seed"] and not {"output_dir", "resume"} & arguments.keys()


def test_seed_s_learns_from_data_set_s_whose_id_tells_what_it_is(sweep):
    done = sweep.call(*GRID)
    ours = [r for r in done.rows if r["dataset_id"] != "my/set-v0"]
    assert all(r["dataset_id"].endswith(f"-s{r['seed']}-v0") for r in ours)
    names = ("env_id", "dataset_size", "expectile_tau", "early_fraction", "switch_prob")
    assert {tuple(r[name] for name in names) for r in ours} == {("CartPole-v1", "1000", "0.5", "0.5", "0.05")}
    assert {r["dataset_size"] for r in done.rows if r not in ours} == {""}
    for command, seed in zip(done.made, (100, 101), strict=True):  # missing data are made once, foreign ones are not
        args = tyro.cli(Gen, args=command)
        assert dataset_name(args) == f"ersac/cartpole/tau50-early50-switch05-1k-s{seed}-v0"


def test_ids_are_read_as_gen_writes_them():
    for env, tau, early, switch, epsilon, size, draw in [
        ("LunarLander-v3", 0.9, 0.0, 0.0, 0.1, 100_000, 1),
        ("CartPole-v1", 0.125, 0.8, 0.1, 0.3, 500, 7),
        ("Acrobot-v1", 0.05, 0.5, 0.0, 0.1, 10_000, 110),
    ]:
        shares = dict(expectile_tau=tau, early_fraction=early, switch_prob=switch, epsilon=epsilon)
        args = Gen(env_id=env, dataset_size=size, dataset_seed=draw, **shares)
        told = runner.described(dataset_name(args))
        assert told == {name: getattr(args, name) for name in told} and len(told) >= 6
    assert runner.described("ersac/pong/mixed-v0") == runner.described("my/set-v0") == {}


def test_a_failed_run_is_reported_and_the_rest_finishes(sweep):
    done = sweep.call(*GRID, fail_at=5)
    assert len(done.commands) == 8 and len(done.rows) == 7
    assert "out of memory" in done.err and "1 runs failed" in done.code  # a message: exit code 1
    again = sweep.call(*GRID)
    assert again.commands[0][:-1] == done.commands[5][:-1]  # but for the temporary folder
    assert len(again.commands) == 1 and len(again.rows) == 8 and again.code == 0


def test_half_a_line_is_dropped(sweep):
    sweep.call(*GRID)
    text = sweep.out.read_text()
    for cut in (1, 3, 30):  # a kill while a row is written
        sweep.out.write_text(text[:-cut])
        done = sweep.call(*GRID)
        assert len(done.commands) == 1 and len(done.rows) == 8 and all(r["eval_returns"] for r in done.rows)
    sweep.out.write_text("method,seed\nSAC-N,100\n")
    done = sweep.call(*GRID)
    assert done.commands == [] and "other columns" in done.code and len(done.rows) == 1
    done = sweep.call("--methods", "SAC-N", "Magic")
    assert done.commands == [] and "Magic" in done.code and "SAC-N" in done.code


def test_committed_csvs_have_the_columns_that_the_runner_writes():
    for name in ("networks", "pixels", "tuning", "tables", "calibration"):
        kind = name if name in runner.COLUMNS else "networks"
        with open(BENCHMARK / f"{name}.csv", newline="") as f:
            rows = list(csv.DictReader(f))
        assert list(rows[0]) == runner.COLUMNS[kind]
        keys = [tuple(row[key] for key in runner.KEYS[kind]) for row in rows]
        repeats = len(calibration.UPSILONS) if name == "calibration" else 1
        assert len(set(keys)) * repeats == len(keys)  # no run twice


@pytest.mark.parametrize("method", runner.METHODS)
def test_methods_spell_out_flags_that_exist(method, monkeypatch):
    """The script's own parser takes every flag and value, and has kept nothing that matters for its default."""
    script, *words = runner.METHODS[method].split()
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    args = tyro.cli(importlib.import_module(Path(script).stem).Args, args=words)
    given = {word[2:] for word in words}
    needed = {"total-updates"}
    if script.startswith("ersac_e"):
        needed |= {"targets", "uncertainty-set", "prior-scale", "batch-size", "q-lr", "policy-lr", "polyak", "alpha"}
        needed |= {"method", "head-input", "noise-scale"} if "epinet" in script else {"input-scale", "num-critics"}
        needed |= {"upsilon"} if args.uncertainty_set == "ellipsoid" else set()
        kinds = {"box": ("SAC-N", "EDAC", "Box"), "hull": ("CH",), "ellipsoid": ("Ell",)}
        assert (args.targets == "own") == method.endswith("-own")
        assert ("*" in method) == (getattr(args, "method", None) == "ell-epi-star")
        assert method.startswith(kinds[args.uncertainty_set])
    elif script == "ersac_atari.py":
        needed |= {"method", "clone-updates", "critic-warmup", "bc-coef", "n-step"}
        assert method.lower().replace("_0.9", "") == args.method.replace("-star", "*") + "-pixels"
    elif "d3" in script:
        needed |= {"algo", "target-interval", "polyak", "lr"} | ({"alpha"} if args.algo == "cql" else set())
        assert method.lower().startswith(args.algo)
    assert needed <= given


def test_the_sweep_file_of_wandb_names_arguments_and_methods_that_exist():
    plan = yaml.safe_load((BENCHMARK / "sweep.yaml").read_text())
    assert ROOT / plan["program"] == BENCHMARK / "sweep.py"
    for name, choice in plan["parameters"].items():
        words = [f"--{name.replace('_', '-')}", *map(str, choice["values"])]
        assert getattr(tyro.cli(runner.Args, args=words), name) == choice["values"]
    assert set(plan["parameters"]["methods"]["values"]) <= set(runner.METHODS)


def test_cells_of_the_studies_are_arguments_of_the_script_and_all_their_runs_are_committed():
    counts = {"paper": 72, "no-bootstrap": 36, "upsilon": 24, "critics": 72, "targets": 384, "calibration": 68}
    parse = importlib.import_module("ersac_tabular").Args
    with open(BENCHMARK / "tables.csv", newline="") as f:
        have = {(r["study"], r["arguments"]) for r in csv.DictReader(f)}
    for study, count in counts.items():
        args = runner.Args(study=study, seeds=[100])
        cells = runner.study_cells(args)
        assert len({key for key, _ in cells}) == len(cells) == count
        for (_, words, _), cell in zip((key for key, _ in cells), calibration.table_cells(study)):
            parsed = tyro.cli(parse, args=words.split())
            assert all(getattr(parsed, key) == value for key, value in cell.items())
        names = {key[:2] for key, _ in cells}
        committed = {name for name in have if name[0] == study}
        assert committed <= names and (study in ("targets", "calibration") or committed == names)


# ----- the rivals
def test_weighted_cloning_draws_transitions_by_their_episodes_return():
    args = clone.Args(return_temperature=0.5)
    returns, lengths = [0.0, 1.0, 2.0], [20_000, 30_000, 50_000]
    numbers = clone.chosen(returns, lengths, args, torch.Generator().manual_seed(0))
    share = np.histogram(numbers.numpy(), [0, 20_000, 50_000, 100_000])[0] / len(numbers)
    z = (np.array(returns) - 1) / np.sqrt(2 / 3)
    weight = np.array(lengths) * np.exp(z / 0.5)
    np.testing.assert_allclose(share, weight / weight.sum(), atol=0.01)


@pytest.mark.parametrize("algo", ["cql", "bcq", "ddqn"])
def test_rivals_of_d3rlpy_leave_a_result(run, load, datasets, algo):
    pytest.importorskip("d3rlpy")
    flags = ("--algo", algo, "--dataset-id", "test/cartpole-v0", "--total-updates", 3, "--eval-episodes", 2)
    done = run("docs/benchmark/d3", *flags, "--target-interval", 2, "--polyak", 0.5)
    result = json.loads((done.folders[0] / "result.json").read_text())
    assert done.code == 0 and result["method"] == algo.upper() and len(result["eval_returns"]) == 2


# ----- calibration of a fixed policy
def rates_at(points, pi, upsilon):
    """Robust value of one state's points [N, A], their mean, covariance and squared radius."""
    mu = points.mean(0)
    sigma = np.cov(points.T, bias=True)
    sigma += (1e-12 * np.trace(sigma) / len(mu) + 1e-300) * np.eye(len(mu))  # where critics agree on an action
    distances = [(x - mu) @ np.linalg.solve(sigma, x - mu) for x in points]
    radius2 = sorted(distances)[int(np.ceil(upsilon * len(points) - 1e-9)) - 1]
    return pi @ mu - np.sqrt(radius2 * (pi @ sigma @ pi)), mu, sigma, radius2


@pytest.mark.parametrize("targets, upsilon", [("own", 0.9), ("shared", 0.8)])
def test_calibration_of_a_fixed_policy_against_plain_loops(monkeypatch, targets, upsilon):
    """150 updates of every critic, state by state; then whether the set holds the truth and bounds it from below."""
    monkeypatch.setattr(calibration, "UPSILONS", [upsilon])
    tabular = calibration.Tabular
    monkeypatch.setattr(calibration, "Tabular", lambda: tabular(total_updates=150))
    (row,) = calibration.evaluate_fixed(100, 0.5, targets, 3)
    tables = importlib.import_module("ersac_tabular")
    P, R = tables.riverswim()
    S, A, _ = P.shape
    behaviour = tables.expectile_value_iteration(P, R, 0.5, 0.9).argmax(-1)
    visits = tables.collect(P, behaviour, 100 * S, 0.1, 0.1, np.random.default_rng([3, 0]))
    resamples = np.random.default_rng([3, 1]).multinomial(100 * S, visits.ravel() / visits.sum(), 100)
    resamples = resamples.reshape(100, S, A, S)
    n = resamples.sum(-1)
    p_hat = resamples / np.maximum(n, 1)[..., None]
    q = np.random.default_rng([3, 2]).uniform(R.min() / 0.1, R.max() / 0.1, (100, S, A))
    target = q.copy()
    pi = np.where(np.arange(A) == behaviour[:, None], 0.95, 0.05)
    for _ in range(150):
        v = np.stack([(pi * target[i]).sum(-1) for i in range(100)])  # [N, S]
        if targets == "shared":
            v = np.tile([rates_at(target[:, s], pi[s], upsilon)[0] for s in range(S)], (100, 1))
        for i in range(100):
            q[i] += (1 - 0.99 ** n[i]) * ((p_hat[i] * (R + 0.9 * v[i])).sum(-1) - q[i])
            target[i] += 0.02 * (q[i] - target[i])
    v = np.zeros(S)
    for _ in range(400):
        truth = (P * (R + 0.9 * v)).sum(-1)
        v = (pi * truth).sum(-1)
    inside, below = [], []
    for s in range(S):
        value, mu, sigma, radius2 = rates_at(q[:, s], pi[s], upsilon)
        gap = np.sign(truth[s] - mu) * np.maximum(np.abs(truth[s] - mu) - 0.01, 0)
        inside.append(gap @ np.linalg.solve(sigma, gap) <= radius2)
        below.append(value <= v[s] + 0.01)
    assert 0 < sum(below) < S or 0 < sum(inside) < S  # the comparison says something
    assert row["coverage_rate"] == pytest.approx(np.mean(inside))
    assert row["lower_bound_rate"] == pytest.approx(np.mean(below))
