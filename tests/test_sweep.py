"""The sweep: a row a finished run, written at once, skipped the next time; a kill costs only the runs under way."""

import csv
import importlib
import itertools
import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tyro
import yaml

ROOT = Path(__file__).resolve().parents[1]
BENCHMARK = ROOT / "docs" / "benchmark"
SWEEP = runpy.run_path(str(BENCHMARK / "sweep.py"))
RESULT = ("eval_return_mean", "eval_return_std", "random_return", "reference_return", "policy_entropy")


@pytest.fixture
def sweep(monkeypatch, tmp_path, capsys):
    """call("--seeds", 1) with runs that take no time -> the commands, the rows of the CSV, what sys.exit was given and
    what stood on stderr."""
    out = tmp_path / "sweep.csv"

    def call(*arguments, fail_at=None):
        commands = []

        def fake(command, **_):
            if command[0] == "git":
                return SimpleNamespace(returncode=0, stdout="abc1234-dirty\n")
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
            if "docs" not in Path(command[1]).parts:  # the baselines log nothing on the way
                header = "update,eval/return,charts/policy_entropy,charts/q_star_minus_return"
                (folder / "metrics.csv").write_text(f"{header}\n1,3,0.5,-1\n2,9,0.25,-2\n3,7,0,-3.5\n")
            return SimpleNamespace(returncode=0)

        monkeypatch.setattr(subprocess, "run", fake)
        words = ["--envs", "CartPole-v1", "--workers", "1", "--out", str(out), *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", ["sweep.py", *words])
        code = 0
        try:
            runpy.run_path(str(BENCHMARK / "sweep.py"), run_name="__main__")
        except SystemExit as stop:
            code = stop.code
        rows = list(csv.DictReader(out.read_text().splitlines())) if out.exists() else []
        return SimpleNamespace(commands=commands, rows=rows, code=code, err=capsys.readouterr().err)

    return SimpleNamespace(call=call, out=out)


def flag(command, name):
    """The value that a command gives to a flag; the last one counts. None if it has no such flag."""
    return {a: b for a, b in zip(command, command[1:])}.get(f"--{name}")


GRID = ("--sizes", 1000, 10_000, "--taus", 0.1, 0.5, "--methods", "SAC-N", "BC", "--seeds", 100, 101)


def test_every_cell_once_and_none_twice(sweep):
    done = sweep.call(*GRID)
    assert done.code == 0 and len(done.commands) == len(done.rows) == 2 * 2 * 2 * 2
    cells = {(r["method"], r["dataset_size"], r["expectile_tau"], r["seed"]) for r in done.rows}
    assert len(cells) == 16 and {r["flags"] for r in done.rows} == {""}
    assert [r["seed"] for r in done.rows] == ["100"] * 8 + ["101"] * 8  # a sweep that is stopped has whole seeds
    box = [r for r in done.rows if r["method"] == "SAC-N"]
    logged = {(r["best_return"], r["training_entropy"], r["q_star_minus_return"]) for r in box}
    assert logged == {("9.0", "0.25", "-3.5")}
    with open(sweep.out.with_name("sweep_curves.csv"), newline="") as f:
        curves = [r for r in csv.DictReader(f) if "tau50-1k-" in r["dataset_id"]]
    logged = [(r["method"], r["seed"], r["update"], r["eval/return"], r["charts/policy_entropy"]) for r in curves]
    points = (("1", "3", "0.5"), ("2", "9", "0.25"), ("3", "7", "0"))
    assert logged == [("SAC-N", seed, *point) for seed in ("100", "101") for point in points]
    assert sweep.call(*GRID).commands == []  # all there
    more = sweep.call(*GRID, 102)
    assert len(more.commands) == 8 and len(more.rows) == 24


def test_flags_are_for_the_training_scripts_and_part_of_a_runs_name(sweep):
    sweep.call(*GRID)
    done = sweep.call(*GRID, "--flags=--alpha 0.1")
    assert len(done.commands) == 8 and len(done.rows) == 24  # cloning is there already
    assert all("ersac_ensemble.py" in c[1] and flag(c, "alpha") == "0.1" for c in done.commands)
    done = sweep.call(*GRID, 102, "--flags=--alpha 0.1", "--methods", "BC", "BC-top", "CQL", "SAC-N")
    baselines = [c for c in done.commands if "docs" in Path(c[1]).parts]
    assert len(baselines) == 4 * 3 + 2 * 4 * 2 and all(flag(c, "alpha") is None for c in baselines)
    assert {r["flags"] for r in done.rows if r["method"] in ("BC", "BC-top", "CQL")} == {""}
    done = sweep.call(*GRID, 103, "--flags=--track --alpha 0.1", "--methods", "BC", "BC-top", "CQL", "SAC-N")
    assert all("--track" in c for c in done.commands)  # W&B sees every cell
    assert all(flag(c, "alpha") is None for c in done.commands if "docs" in Path(c[1]).parts)


def test_seed_s_learns_from_data_set_s(sweep):
    done = sweep.call(*GRID, "--early-fraction", 0.5)
    assert all(flag(c, "dataset-seed") == flag(c, "seed") for c in done.commands)
    assert all(flag(c, "early-fraction") == "0.5" for c in done.commands)
    names = {(r["seed"], r["dataset_id"]) for r in done.rows if r["dataset_size"] == "1000"}
    taus = ("tau10", "tau50")
    assert names == {(s, f"ersac/cartpole/{tau}-early50-1k-s{s}-v0") for s in ("100", "101") for tau in taus}
    one = sweep.call(*GRID, "--one-dataset")
    assert len(one.commands) == 16 and {flag(c, "dataset-seed") for c in one.commands} == {"1"}
    assert {flag(c, "seed") for c in one.commands} == {"100", "101"}
    names = {r["dataset_id"] for r in one.rows[16:]}
    assert names == {f"ersac/cartpole/{tau}-{size}-v0" for tau in taus for size in ("1k", "10k")}


def test_commit_arguments_and_returns_are_in_every_row(sweep):
    done = sweep.call(*GRID)
    for command, row in zip(done.commands, done.rows):
        arguments = json.loads(row["arguments"])
        assert row["commit"] == "abc1234-dirty" and row["eval_returns"] == "1.0 3.2 -7.0"
        assert arguments["seed"] == row["seed"] and arguments["dataset_size"] == row["dataset_size"]
        assert not {"output_dir", "resume"} & arguments.keys()
        if row["method"] == "SAC-N":
            assert arguments["uncertainty_set"] == flag(command, "uncertainty-set") == "box"


def test_any_data_set_by_its_id(sweep):
    flags = ("--datasets", "my/set-v0", "--methods", "Ell-Epi*", "BC", "--seeds", 100)
    done = sweep.call(*flags)
    assert all(flag(c, "env-id") is None and flag(c, "dataset-id") == "my/set-v0" for c in done.commands)
    assert [r["dataset_id"] for r in done.rows] == ["my/set-v0"] * 2 and done.rows[0]["dataset_size"] == ""
    assert sweep.call(*flags).commands == []
    done = sweep.call("--datasets", "my/set-s{seed}-v0", "--methods", "BC", "--seeds", 7, 8)
    assert [flag(c, "dataset-id") for c in done.commands] == ["my/set-s7-v0", "my/set-s8-v0"]


def test_a_failed_run_is_reported_and_the_rest_finishes(sweep):
    done = sweep.call(*GRID, fail_at=5)
    assert len(done.commands) == 16 and len(done.rows) == 15
    assert "out of memory" in done.err and "1 runs failed" in done.code  # a message: exit code 1
    again = sweep.call(*GRID)
    assert again.commands[0][:-1] == done.commands[5][:-1]  # but for the temporary folder
    assert len(again.commands) == 1 and len(again.rows) == 16 and again.code == 0


def test_exit_code_of_a_real_process_with_a_failed_run(datasets, tmp_path):
    command = [sys.executable, str(BENCHMARK / "sweep.py"), "--datasets", "test/missing-v0", "--methods", "BC"]
    command += ["--seeds", "100", "--out", str(tmp_path / "out.csv")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "test/missing-v0" in done.stderr and "1 runs failed" in done.stderr
    assert not (tmp_path / "out.csv").exists()


def test_half_a_line_is_dropped(sweep):
    sweep.call(*GRID)
    text = sweep.out.read_text()
    for cut in (1, 3, 30):  # a kill while a row is written
        sweep.out.write_text(text[:-cut])
        done = sweep.call(*GRID)
        assert len(done.commands) == 1 and len(done.rows) == 16 and all(r["eval_returns"] for r in done.rows)
    sweep.out.write_text("method,seed\nSAC-N,100\n")
    done = sweep.call(*GRID)
    assert done.commands == [] and "other columns" in done.code and len(done.rows) == 1


def test_unknown_methods_are_refused(sweep):
    done = sweep.call("--methods", "SAC-N", "Magic")
    assert done.commands == [] and "Magic" in done.code and "SAC-N" in done.code


@pytest.mark.parametrize("method", SWEEP["METHODS"])
def test_methods_spell_out_flags_that_exist(method, monkeypatch):
    """The script's own parser takes every flag and value, and has kept nothing that matters for its default."""
    script, *words = SWEEP["METHODS"][method].split()
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    args = tyro.cli(importlib.import_module(Path(script).stem).Args, args=words)
    if method in SWEEP["BASELINES"]:
        assert words in ([], ["--top", "0.5"]) or method == "BC-pixels"
        return
    if "atari" in script:
        needed = {"algo", "clone-updates", "critic-warmup", "bc-coef", "n-step", "total-updates"}
        assert needed <= {word[2:] for word in words} and method.endswith("-pixels")
        return
    needed = {"targets", "uncertainty-set", "prior-scale", "total-updates", "q-lr", "policy-lr"}
    needed |= {"method", "head-input", "noise-scale"} if "epinet" in script else {"input-scale", "polyak"}
    needed |= {"upsilon"} if args.uncertainty_set == "ellipsoid" else set()
    assert needed <= {word[2:] for word in words}
    assert (args.targets == "own") == method.endswith("-own")
    assert ("*" in method) == (getattr(args, "method", None) == "ell-epi-star")


def test_the_sweep_file_of_wandb_names_arguments_and_methods_that_exist():
    plan = yaml.safe_load((BENCHMARK / "sweep.yaml").read_text())
    assert ROOT / plan["program"] == BENCHMARK / "sweep.py"
    for name, choice in plan["parameters"].items():
        words = [f"--{name.replace('_', '-')}", *map(str, choice["values"])]
        assert getattr(tyro.cli(SWEEP["Args"], args=words), name) == choice["values"]
    assert set(plan["parameters"]["methods"]["values"]) <= set(SWEEP["METHODS"])


# ----- the tabular grids
def test_cells_of_the_tabular_grids_are_arguments_of_the_script():
    tabular = runpy.run_path(str(BENCHMARK / "tabular.py"))
    parse = importlib.import_module("ersac_tabular").Args
    counts = {"paper": 72, "no-bootstrap": 36, "upsilon": 24, "critics": 72, "targets": 384, "calibration": 68}
    for grid, count in counts.items():
        names = [tabular["flags"](cell) for cell in tabular["cells"](grid)]
        assert len(names) == len(set(names)) == count
        for cell, name in zip(tabular["cells"](grid), names):
            args = tyro.cli(parse, args=name.split())
            assert all(getattr(args, key) == value for key, value in cell.items())


def test_a_part_of_a_tabular_grid(tmp_path):
    """--envs and --sizes choose cells; a part that the grid lacks ends in one line, and nothing is written."""
    command = [sys.executable, str(BENCHMARK / "tabular.py"), "--grid", "no-bootstrap"]
    done = subprocess.run([*command, "--envs", "RiverSwim", "--sizes", "10"], capture_output=True, text=True)
    assert done.returncode == 0 and "all 240 runs are there" in done.stdout  # of the 360 of both MDPs
    command += ["--out", str(tmp_path / "x.csv")]
    done = subprocess.run([*command, "--sizes", "1000"], capture_output=True, text=True)  # the grid has 10 alone
    assert done.returncode == 1 and "the grid has no such cell" in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_tabular_grid_makes_what_is_missing_and_reproduces_the_committed_row(tmp_path):
    """The last line is cut in half, as by a kill; its run is made again, and nothing else."""
    out = tmp_path / "grid.csv"
    text = (BENCHMARK / "tabular_no_bootstrap.csv").read_text()
    committed = list(csv.DictReader(text.splitlines()))
    out.write_text(text[:-50])
    command = [sys.executable, str(BENCHMARK / "tabular.py"), "--grid", "no-bootstrap", "--out", str(out)]
    done = subprocess.run([*command, "--workers", "1"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("1 runs in"), done.stderr
    *rows, last = csv.DictReader(out.read_text().splitlines())
    assert [r | {"commit": ""} for r in committed[:-1]] == [r | {"commit": ""} for r in rows] and last["commit"]
    for name, value in committed[-1].items():
        if name == "updates_per_second":
            continue
        try:
            assert float(last[name]) == pytest.approx(float(value), abs=1e-4), name
        except ValueError:
            assert last[name] == value
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "all 360 runs are there" in done.stdout


def plain_critics(targets, p_hat, n, prior, pi, R, upsilon, updates):
    """The critics after some updates with a fixed policy, in numpy, critic by critic and state by state."""
    N, S, _, _ = p_hat.shape
    q, target = prior.copy(), prior.copy()
    for _ in range(updates):
        v = np.stack([(pi * target[i]).sum(-1) for i in range(N)])  # [N, S]
        if targets == "shared":
            v = np.tile([rates_at(target[:, s], pi[s], upsilon)[0] for s in range(S)], (N, 1))
        for i in range(N):
            q[i] += (1 - 0.99 ** n[i]) * ((p_hat[i] * (R + 0.9 * v[i])).sum(-1) - q[i])
            target[i] += 0.02 * (q[i] - target[i])
    return q


def rates_at(points, pi, upsilon):
    """Robust value of one state's points [N, A], their mean, covariance and squared radius."""
    mu = points.mean(0)
    sigma = np.cov(points.T, bias=True)
    sigma += (1e-12 * np.trace(sigma) / len(mu) + 1e-300) * np.eye(len(mu))  # where critics agree on an action
    distances = [(x - mu) @ np.linalg.solve(sigma, x - mu) for x in points]
    radius2 = sorted(distances)[int(np.ceil(upsilon * len(points) - 1e-9)) - 1]
    return pi @ mu - np.sqrt(radius2 * (pi @ sigma @ pi)), mu, sigma, radius2


@pytest.mark.parametrize("targets, upsilon, updates", [("own", 0.5, 6000), ("own", 0.9, 150), ("shared", 0.8, 150)])
def test_calibration_of_a_fixed_policy_against_plain_loops(targets, upsilon, updates):
    calibration = runpy.run_path(str(BENCHMARK / "calibration.py"))
    calibration["UPSILONS"][:] = [upsilon]
    tabular_args = calibration["Tabular"]
    calibration["evaluate_fixed"].__globals__["Tabular"] = lambda: tabular_args(total_updates=updates)
    ((size, tau, kind, level, seed, coverage, bound, *_),) = calibration["evaluate_fixed"](100, 0.5, targets, 3, "abc")
    assert (size, tau, kind, level, seed) == (100, 0.5, targets, upsilon, 3)
    tables = importlib.import_module("ersac_tabular")
    P, R = tables.riverswim()
    S, A, _ = P.shape
    behaviour = tables.expectile_value_iteration(P, R, 0.5, 0.9).argmax(-1)
    visits = tables.collect(P, behaviour, 100 * S, 0.1, 0.1, np.random.default_rng([3, 0]))
    resamples = np.random.default_rng([3, 1]).multinomial(100 * S, visits.ravel() / visits.sum(), 100)
    resamples = resamples.reshape(100, S, A, S)
    n = resamples.sum(-1)
    p_hat = resamples / np.maximum(n, 1)[..., None]
    prior = np.random.default_rng([3, 2]).uniform(R.min() / 0.1, R.max() / 0.1, (100, S, A))
    pi = np.where(np.arange(A) == behaviour[:, None], 0.95, 0.05)
    if updates == 6000:  # converged: exact backups of every critic, where it has data
        q = prior.copy()
        for _ in range(400):
            v = (pi * q).sum(-1)
            q = np.where(n > 0, np.stack([(p_hat[i] * (R + 0.9 * v[i])).sum(-1) for i in range(100)]), prior)
    else:
        q = plain_critics(targets, p_hat, n, prior, pi, R, upsilon, updates)
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
    assert 0 < sum(below) < S  # the comparison says something
    assert targets == "shared" or 0 < sum(inside) < S  # sets of shared targets hold the truth nowhere
    assert coverage == pytest.approx(np.mean(inside)) and bound == pytest.approx(np.mean(below))


# ----- the budget of online episodes
def test_expected_best_against_all_subsets():
    budget = runpy.run_path(str(BENCHMARK / "budget.py"))
    values = [3.0, -1.0, 3.0, 10.0, 0.5]
    for k in range(1, 6):
        best = [max(subset) for subset in itertools.combinations(values, k)]
        assert budget["expected_best"](values, k) == pytest.approx(np.mean(best))


def test_the_bandit_finds_the_best_policy_and_starts_from_a_random_one():
    budget = runpy.run_path(str(BENCHMARK / "budget.py"))
    rng = np.random.default_rng(0)
    returns = [np.full(100, 0.2), rng.permutation([0.0, 1.0] * 50), np.full(100, 0.9)]  # means 0.2, 0.5, 0.9
    kept = budget["bandit"](returns, 200, 4000, rng)
    assert kept[0] == pytest.approx((0.2 + 0.5 + 0.9) / 3, abs=0.02)  # one episode, of a policy drawn at random
    assert kept[2] == pytest.approx(0.7, abs=0.02)  # one each: the noisy policy has 1 in half of the cases
    assert kept[-1] > 0.89 and kept[-1] > kept[20] > kept[2]


def test_cells_of_the_budget_have_complete_seeds_only(tmp_path):
    budget = runpy.run_path(str(BENCHMARK / "budget.py"))
    row = dict(random_return="-100", reference_return="100", eval_returns="100.0 0.0 -100.0", flags="")
    rows = [row | dict(dataset_id=f"a/tau50-1k-s{s}-v0", seed=s, method=m) for s in ("7", "8") for m in "xy"]
    rows.append(row | dict(dataset_id="a/tau50-1k-s9-v0", seed="9", method="x"))
    (seeds,) = budget["cells"](rows).values()
    assert len(seeds) == 2 and all(len(policies) == 2 for policies in seeds)
    assert seeds[0][0] == pytest.approx([1.0, 0.5, 0.0])
