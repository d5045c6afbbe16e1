"""W&B as its users expect it, and copies of a script: tested with the files of real offline runs and with stand-ins."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
DATA = ("--dataset-id", "test/cartpole-v0", "--targets", "shared")
SMALL = ("--hidden-dim", 8, "--batch-size", 16, "--total-updates", 8, "--eval-interval", 4, "--eval-episodes", 2)


def records(folder):
    """Everything that W&B wrote into the file of an offline run, as (kind, content). The file has blocks of 32 KiB;
    a record is a checksum, a length, a kind (1 whole; 2, 3, 4 its first, further and last part) and the bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("*.wandb")
    data, at, content = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        rest = 32768 - at % 32768
        if rest < 7:
            at += rest
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        content += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = Record.FromString(content)
            name = record.WhichOneof("record_type")
            yield name, getattr(record, name)
            content = b""


def read_items(items):
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def history(folder):
    return [read_items(content.item) for kind, content in records(folder) if kind == "history"]


def offline(script, folder, *flags):
    """A real process with W&B offline, from the script's folder."""
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *map(str, flags)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def test_a_copied_variant_is_its_own_script_also_on_wandb(datasets, tmp_path):
    """Run folder, result, checkpoint, last lines, W&B group, tags and code bear the copy's name. The original refuses
    to resume it. And what W&B stores: config, rows, result, video."""
    variant = tmp_path / "my_variant.py"
    shutil.copy(ROOT / "ersac_epinet.py", variant)
    done = offline(variant, tmp_path, *DATA, *SMALL, "--track", "--capture-video")
    (folder,), (stored,) = tmp_path.glob("runs/*"), tmp_path.glob("wandb/offline-run-*")
    assert folder.name.startswith("CartPole-v1__my_variant__1__") and "my_variant.py, Ell-Epi* on test/" in done.stdout
    result = json.loads((folder / "result.json").read_text())
    assert result["script"] == "my_variant.py"
    refused = subprocess.run(
        [sys.executable, str(ROOT / "ersac_epinet.py"), "--resume", str(folder)], capture_output=True, text=True
    )
    assert refused.returncode == 1 and "was not written by ersac_epinet.py" in refused.stderr

    (run,) = [content for kind, content in records(stored) if kind == "run"]
    assert run.run_id == run.display_name == folder.name
    assert run.run_group == "test/cartpole-v0 Ell-Epi* my_variant.py" and {*run.tags} == {"Ell-Epi*", "my_variant.py"}
    config = read_items(run.config.update)
    expected = {
        "dataset_id": "test/cartpole-v0",
        "label": "Ell-Epi*",
        "script": "my_variant.py",
        "method": "ell-epi-star",
    }
    assert config.items() >= expected.items() and config["commit"] == ""  # the copy is in no repository
    assert (stored / "files" / "code" / "my_variant.py").read_text() == variant.read_text()
    (video,) = (stored / "files" / "media" / "videos").glob("*.mp4")
    assert video.read_bytes() == next((folder / "video").glob("*.mp4")).read_bytes()
    assert [row["_step"] for row in history(stored)] == [4, 8]
    summary = {}
    for kind, content in records(stored):
        if kind == "summary":
            summary |= read_items(content.update)
    assert result.items() <= summary.items()


def test_an_interrupted_variant_names_itself(datasets, tmp_path):
    variant = tmp_path / "my_variant.py"
    shutil.copy(ROOT / "ersac_ensemble.py", variant)
    flags = [*DATA, "--num-critics", 2, "--hidden-dim", 8, "--batch-size", 16, "--total-updates", 10**8]
    command = [sys.executable, str(variant), *map(str, flags), "--eval-interval", "20", "--eval-episodes", "1"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    while not list(tmp_path.glob("runs/*/metrics.csv")) and process.poll() is None:
        pass
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    (folder,) = tmp_path.glob("runs/*")
    assert process.returncode == 130 and f"To go on: python my_variant.py --resume runs/{folder.name}" in out


class Server:
    """A stand-in for W&B that a kill can rob of what it had not stored: its memory outlives a run."""

    def __init__(self, monkeypatch):
        self.rows = {}
        monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=self.init))

    def init(self, **_):
        def log(row, step):
            assert step >= run.step, "W&B takes no steps back"
            self.rows[step] = dict(row)

        run = SimpleNamespace(step=max(self.rows, default=-1) + 1, log=log, summary={}, finish=lambda: None)
        return run


@pytest.mark.parametrize("script", ["ersac_tabular", "ersac_ensemble", "ersac_epinet"])
def test_rows_that_wandb_lost_are_sent_again(script, run, load, datasets, monkeypatch):
    server = Server(monkeypatch)
    flags = ("--num-critics", 3, *SMALL[4:]) if script == "ersac_tabular" else (*DATA, *SMALL)
    (folder,) = run(script, *flags, "--track").folders
    sent = dict(server.rows)
    assert [*sent] == [4, 8]
    del server.rows[8]  # the kill came before W&B wrote it
    assert run(script, "--resume", folder).code == 0
    assert server.rows == sent
    server.rows.clear()  # or nothing had been written; and a run that goes on
    assert run(script, "--resume", folder, "--total-updates", 12).code == 0
    assert [*server.rows] == [4, 8, 12] and {step: server.rows[step] for step in sent} == sent


def test_rows_of_the_behaviour_policies_are_sent_again(run, monkeypatch, tmp_path):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    server = Server(monkeypatch)
    flags = ("--start-steps", 1, "--finish-steps", 1, "--floor", -1e9, "--eval-episodes", 2, "--hidden-dim", 8)
    done = run("gen_expectile_data", "--env-id", "CartPole-v1", "--retrain", "--dataset-size", 10, *flags, "--track")
    assert done.code == 0 and [*server.rows] == [1, 2], done.err
    sent = dict(server.rows)
    del server.rows[2]
    shutil.rmtree(tmp_path / "minari")
    assert run("gen_expectile_data", "--resume", done.folders[0]).code == 0
    assert server.rows == sent


def test_booleans_of_a_wandb_sweep(run, load, datasets):
    """An agent of W&B writes every parameter as --name=value, booleans as True and False."""
    flags = ("--bootstrap=True", "--layer_norm=False", "--anneal-lr=False", "--autotune=False", "--num_critics=2")
    done = run("ersac_ensemble", *DATA, *SMALL, *flags)
    assert done.code == 0, done.err
    args = load(done.folders[0]).args
    assert args["bootstrap"] and not args["layer_norm"] and not args["anneal_lr"] and not args["autotune"]
    for script in ("ersac_epinet", "ersac_atari", "ersac_tabular", "gen_expectile_data"):
        done = run(script, "--track=False", "--gamma=2")  # read, and refused for another reason
        assert done.code == 1 and done.err.startswith("--gamma 2.0: "), done.err


def test_cloning_is_tracked_too(datasets, tmp_path):
    script = ROOT / "docs" / "benchmark" / "clone.py"
    flags = (*DATA[:2], "--total-updates", 3, "--eval-episodes", 2, "--track", "--output-dir", tmp_path / "runs")
    offline(script, tmp_path, *flags)
    (folder,), (stored,) = tmp_path.glob("runs/*"), tmp_path.glob("wandb/offline-run-*")
    (run,) = [content for kind, content in records(stored) if kind == "run"]
    assert run.run_id == folder.name and run.run_group == "test/cartpole-v0 BC clone.py"
    summary = {}
    for kind, content in records(stored):
        if kind == "summary":
            summary |= read_items(content.update)
    assert json.loads((folder / "result.json").read_text()).items() <= summary.items()


# ----- after the training
@pytest.mark.parametrize("script", ["ersac_ensemble", "ersac_epinet"])
def test_an_extended_run_says_what_becomes_of_the_step_sizes(script, run, load, datasets):
    (folder,) = run(script, *DATA, *SMALL).folders
    again = run(script, "--resume", folder)
    assert again.code == 0 and "Extended: " not in again.out
    longer = run(script, "--resume", folder, "--total-updates", 10)
    assert "Extended: the step sizes start again at 20% of their first values and fall to 0." in longer.out
    rates = [group["lr"] for group in load(folder).checkpoint["q_optimizer"]["param_groups"]]
    assert rates == pytest.approx([0.1 * load(folder).args["q_lr"]] * len(rates))  # of the last update
    (constant,) = run(script, *DATA, *SMALL, "--no-anneal-lr", "--exp-name", "constant").folders
    assert "Extended: " not in run(script, "--resume", constant, "--total-updates", 10).out


@pytest.mark.parametrize("script", ["ersac_ensemble", "ersac_epinet"])
def test_a_checkpoint_knows_its_number_of_actions(script, run, datasets):
    (folder,) = run(script, "--dataset-id", "test/lander-v0", *SMALL).folders
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert checkpoint["num_actions"] == 4 == checkpoint["actor"]["net.4.weight"].shape[0]


@pytest.mark.parametrize("script", ["ersac_ensemble", "ersac_epinet"])
def test_a_critic_above_the_returns_is_warned_of(script, run, load, datasets):
    """A huge entropy bonus lifts all values far above the returns; with the defaults they stay below."""
    loud = ("--alpha", 1000, "--total-updates", 200, "--eval-interval", 200, "--q-lr", 0.1, "--no-anneal-lr")
    done = run(script, *DATA, *SMALL, *loud)
    assert done.code == 0, done.err
    gap = load(done.folders[0]).checkpoint["rows"][-1]["charts/q_star_minus_return"]
    assert gap > 15
    assert f"warning: even the worst case is far above the returns (q_star_minus_return {gap:.1f})" in done.out
    assert "warning" not in run(script, *DATA, *SMALL, *loud, "--return-scale", "None", "--exp-name", "raw").out
    assert "warning" not in run(script, *DATA, *SMALL, "--exp-name", "quiet").out
