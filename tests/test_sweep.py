"""The sweep: a row a finished run, written at once, skipped the next time; a kill costs only the runs under way."""

import csv
import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def sweep(monkeypatch, tmp_path, capsys):
    """sweep("--seeds", 1) with runs that take no time -> the commands that were run, and the rows of the CSV."""
    out = tmp_path / "sweep.csv"

    def call(*arguments, fail_at=None):
        commands = []

        def fake(command, **_):
            if fail_at == len(commands):
                return SimpleNamespace(returncode=1, stderr="out of memory")
            commands.append(command)
            given = dict(zip(command, command[1:]))
            folder = Path(given["--output-dir"]) / "run"
            folder.mkdir()
            tau = f"{100 * float(given.get('--expectile-tau', 0)):.0f}".zfill(2)
            name = f"ersac/cartpole/tau{tau}-{int(given.get('--dataset-size', 0)) // 1000}k-v0"
            result = {"env_id": "CartPole-v1", "dataset_id": given.get("--dataset-id", name), "updates": 5}
            result |= {"seed": int(given["--seed"]), "normalized_return": 50.0 + int(given["--seed"])}
            result |= dict.fromkeys(("eval_return_mean", "eval_return_std", "random_return"), 1.0)
            result |= dict.fromkeys(("reference_return", "policy_entropy", "updates_per_second"), 2.0)
            (folder / "result.json").write_text(json.dumps(result))
            if "clone.py" not in command[1]:
                (folder / "metrics.csv").write_text(
                    "update,eval/return,charts/policy_entropy\n1,3,0.5\n2,9,0.25\n3,7,0\n"
                )
            return SimpleNamespace(returncode=0)

        monkeypatch.setattr(subprocess, "run", fake)
        words = ["--envs", "CartPole-v1", "--workers", "1", "--out", str(out), *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", ["sweep.py", *words])
        runpy.run_path(str(ROOT / "docs" / "benchmark" / "sweep.py"), run_name="__main__")
        with open(out, newline="") as f:
            return commands, list(csv.DictReader(f))

    return SimpleNamespace(call=call, out=out)


GRID = ("--sizes", 1000, 10_000, "--taus", 0.1, 0.5, "--methods", "SAC-N", "BC", "--seeds", 100, 101)


def test_every_cell_once_and_none_twice(sweep):
    commands, rows = sweep.call(*GRID)
    assert len(commands) == len(rows) == 2 * 2 * 2 * 2
    cells = {(r["method"], r["dataset_size"], r["expectile_tau"], r["seed"]) for r in rows}
    assert len(cells) == 16 and {r["flags"] for r in rows} == {""}
    box = [r for r in rows if r["method"] == "SAC-N"]
    assert {(r["best_return"], r["training_entropy"]) for r in box} == {("9.0", "0.25")}
    with open(sweep.out.with_name("sweep_curves.csv"), newline="") as f:
        curves = [r for r in csv.DictReader(f) if r["dataset_id"] == "ersac/cartpole/tau50-1k-v0"]
    logged = [(r["method"], r["seed"], r["update"], r["eval/return"], r["charts/policy_entropy"]) for r in curves]
    points = (("1", "3", "0.5"), ("2", "9", "0.25"), ("3", "7", "0"))
    assert logged == [("SAC-N", seed, *point) for seed in ("100", "101") for point in points]
    assert sweep.call(*GRID)[0] == []  # all there
    more, rows = sweep.call(*GRID, 102)
    assert len(more) == 8 and len(rows) == 24
    flagged, rows = sweep.call(*GRID, "--flags=--alpha 0.1")  # another setting, which cloning does not have
    assert len(flagged) == 8 and all(c[-2:] == ["--alpha", "0.1"] for c in flagged) and len(rows) == 32


def test_any_data_set_by_its_id(sweep):
    flags = ("--datasets", "my/set-v0", "--methods", "Ell-Epi*", "BC", "--seeds", 100)
    commands, rows = sweep.call(*flags)
    assert all("--env-id" not in c and c[c.index("--dataset-id") + 1] == "my/set-v0" for c in commands)
    assert [r["dataset_id"] for r in rows] == ["my/set-v0"] * 2 and rows[0]["dataset_size"] == ""
    assert sweep.call(*flags)[0] == []


def test_a_failed_run_and_half_a_line_lose_nothing_else(sweep):
    with pytest.raises(RuntimeError, match="out of memory"):
        sweep.call(*GRID, fail_at=5)
    text = sweep.out.read_text()
    assert text.count("\n") == 1 + 5
    for cut in (1, 3, 30):  # a kill while a row is written
        sweep.out.write_text(text[:-cut])
        commands, rows = sweep.call(*GRID)
        assert len(commands) == 16 - 4 and len(rows) == 16 and all(r["seconds"] for r in rows)


def test_the_sweep_file_of_wandb_names_arguments_that_exist():
    plan = yaml.safe_load((ROOT / "docs" / "benchmark" / "sweep.yaml").read_text())
    source = (ROOT / plan["program"]).read_text()
    assert all(f"    {name}: list[" in source for name in plan["parameters"])
    assert all(f'"{method}"' in source for method in plan["parameters"]["methods"]["values"])
