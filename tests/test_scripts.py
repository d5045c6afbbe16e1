"""Protects what all training scripts owe their users: one clear line for bad input, data sets of others, resuming to
the same bits, and W&B. Add a script or a flag here once, not in every file."""

import importlib
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import minari
import numpy as np
import pytest
import torch
from conftest import ROOT, Chain, Walk, episode, play, read_rows, same, store

import ersac_atari

VECTORS = ("ersac_ensemble", "ersac_epinet")
NETWORKS = (*VECTORS, "ersac_atari")
ALL = (*NETWORKS, "ersac_tabular")
NETWORK = ("--hidden-dim", 8, "--batch-size", 16, "--total-updates", 8, "--eval-interval", 4, "--eval-episodes", 2)
SMALL = {  # a run of a second
    "ersac_ensemble": NETWORK,
    "ersac_epinet": NETWORK,
    "ersac_atari": (*NETWORK, "--clone-updates", 3, "--critic-warmup", 1, "--batch-size", 4),
    "ersac_tabular": ("--total-updates", 8, "--eval-interval", 4),
}
DATA = {name: ("--dataset-id", "test/cartpole-v0") for name in VECTORS} | {"ersac_tabular": ()}
DATA["ersac_atari"] = ("--dataset-id", "test/walk-v0")


def one_line(done, *words):
    """Refused with one line that names the cause, and nothing left behind."""
    lines = done.err.strip().splitlines()
    assert done.code in (1, 2) and "Traceback" not in done.err, done.err
    assert done.code == 2 or len(lines) == 1, done.err  # 2: tyro's box
    assert all(word in done.err for word in words), done.err
    assert done.folders == []


# ----- bad input: v is for the scripts of vectors, e and n for one of them, p for pixels, t for tables
BAD = """
v | --dataset-id test/ragged-v0 | T + 1
v | --dataset-id test/short-v0 | T + 1
v | --dataset-id test/square-v0 | T finite rewards
v | --dataset-id test/broken-v0 | cannot be had
v | --dataset-id test/nan-v0 | finite
v | --dataset-id test/outside-v0 | Discrete(2)
v | --dataset-id test/walk-v0 | ersac_atari.py
v | --dataset-id test/other-spaces-v0 | not those of its environment
v | --dataset-id test/cartpole-v0 --dataset-size 7 | --dataset-size
v | --dataset-id test/cartpole-v0 --env-id CartPole-v1 | --env-id
v | --dataset-id test/cartpole-v0 --expectile-tau 0.9 | --expectile-tau
v | --dataset-id test/cartpole-v0 --dataset-seed 3 | --dataset-seed
v | --dataset-id ersac/lunarlander/tau77-10k-v0 | gen_expectile_data.py
v | --env-id NoSuchThing-v0 | --env-id
v | --dataset-seed -1 | --dataset-seed
v | --dataset-size 0 | --dataset-size
v | --targets his | targets
p | --dataset-id test/cartpole-v0 | uint8 images
p | --dataset-id test/text-v0 | uint8 images
p | --dataset-id test/frames-nan-v0 | finite
p | --dataset-id test/frames-outside-v0 | Discrete(4)
p | --dataset-id test/frames-ragged-v0 | T + 1
p | --dataset-id test/frames-small-v0 | not those of its environment
p | --dataset-id ersac/pong/none-v0 | record_atari.py
p | --eval-epsilon 2 | --eval-epsilon
p | --n-step 0 | --n-step
p | --critic-warmup 8 | --critic-warmup
p | --method edac | method
vp | --dataset-id test/pendulum-v0 | discrete actions
vp | --dataset-id test/shifted-v0 | from 0 on
vp | --dataset-id= | cannot be had
vp | --dataset-id no-such-set-v0 | cannot be had
vp | --dataset-id hf://user/no-such-set-v0 | cannot be had
vp | --resume= | --resume
vp | --resume nowhere | nowhere
vp | --resume nowhere --seed 3 | no other argument
vp | --prior-scale -3 | --prior-scale
vp | --batch-size 0 | --batch-size
vp | --hidden-dim 0 | --hidden-dim
vp | --batch-size 1000000000 | --batch-size
ep | --upsilon 1 | infinite
ep | --noise-scale -1 | --noise-scale
ep | --index-dim 0 | --index-dim
e | --uncertainty-set hull | ell-epi
n | --edac-eta 1 | EDAC
n | --target-entropy 5 | --target-entropy
np | --num-critics 0 | --num-critics
vt | --expectile-tau 1.5 | --expectile-tau
vt | --uncertainty-set ball | uncertainty-set
vpt | --output-dir /proc/nowhere | --output-dir
vpt | --upsilon 1.1 | --upsilon
vpt | --upsilon nan | --upsilon
vpt | --gamma 1 | --gamma
vpt | --polyak 2 | --polyak
vpt | --alpha -1 | --alpha
vpt | --q-lr 1.5 | --q-lr
vpt | --policy-lr nan | --policy-lr
vpt | --seed -1 | --seed
vpt | --total-updates 0 | --total-updates
vpt | --eval-interval 0 | --eval-interval
t | --upsilon 0 | --upsilon
t | --expectile-tau 0 | --expectile-tau
t | --epsilon 2 | --epsilon
t | --reset-prob 2 | --reset-prob
t | --prior 5 1 | --prior
t | --prior nan 1 | --prior
t | --dataset-size 0 | --dataset-size
t | --num-critics 0 | --num-critics
t | --env-id FrozenLake-v1 | env-id
"""
WHO = {"v": VECTORS, "e": ["ersac_epinet"], "n": ["ersac_ensemble"], "p": ["ersac_atari"], "t": ["ersac_tabular"]}
CASES = [line.split(" | ") for line in BAD.strip().splitlines()]
CASES = [(script, *case[1:]) for case in CASES for who in case[0] for script in WHO[who]]


@pytest.fixture(scope="module")
def bad_data(datasets):
    """Values, actions, lengths and spaces that do not fit, vectors and frames."""
    steps = (np.ones(5), np.arange(5) == 4, np.zeros(5, bool))  # rewards, terminations, truncations
    cart, walk = gym.make("CartPole-v1"), gym.make("test/Walk-v0")
    vector, frame, left = np.zeros((6, 4), np.float32), np.zeros((6, 84, 84), np.uint8), np.zeros(5, int)
    for name, x, env in (("", vector, cart), ("frames-", frame, walk)):
        store(f"test/{name}outside-v0", [episode(x, np.arange(5), *steps)], env)
        store(f"test/{name}nan-v0", [episode(x, left, np.full(5, np.nan), *steps[1:])], env)
        store(f"test/{name}ragged-v0", 2 * [episode(x, left, *steps)], env)  # merged into one
    store("test/short-v0", [episode(vector, left, np.ones(4), *steps[1:])], cart)
    store("test/square-v0", [episode(vector, left, np.ones((5, 2)), *steps[1:])], cart)
    store("test/broken-v0", [episode(vector, left, *steps)], cart)
    (datasets / "test/broken-v0/data/main_data.hdf5").write_bytes(b"half")
    store("test/huge-v0", [episode(vector + 3e38, left, *steps)], cart)  # their sum overflows
    space = gym.spaces.Box(-1, 1, (3,), np.float32)
    store("test/other-spaces-v0", [episode(vector[:, :3], left, *steps)], cart, observation_space=space)
    small = gym.spaces.Box(0, 255, (40, 40), np.uint8)
    store("test/frames-small-v0", [episode(frame[:, :40, :40], left, *steps)], walk, observation_space=small)
    push = episode(vector[:, :3], np.zeros((5, 1), np.float32), *steps)
    store("test/pendulum-v0", [push], gym.make("Pendulum-v1"))
    spaces = {"observation_space": cart.observation_space, "action_space": gym.spaces.Discrete(2, start=1)}
    store("test/shifted-v0", [episode(vector, left + 1, *steps)], **spaces)
    spaces = {"observation_space": gym.spaces.Text(5), "action_space": gym.spaces.Discrete(2)}
    store("test/text-v0", [episode(6 * ["abc"], left, *steps)], **spaces)
    ersac_atari.load_frames(minari.load_dataset("test/walk-v0"))  # decoded once, with a progress bar


@pytest.mark.parametrize("script, arguments, named", CASES)
def test_bad_input_ends_in_one_clear_line(script, arguments, named, run, bad_data, monkeypatch):
    def download(*_, **__):
        raise ConnectionError("no\nnetwork")

    for place in ("minari.download_dataset", "minari.storage.hosting.download_dataset"):
        monkeypatch.setattr(place, download)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("must be refused before data are made"))
    words = arguments.split()
    flags = {word.split("=")[0] for word in words}
    own = flags & {"--dataset-id", "--env-id", "--dataset-size", "--dataset-seed", "--expectile-tau"}
    before = () if "--resume" in flags else (*(() if own else DATA[script]), *SMALL[script])
    one_line(run(script, *before, *words), named)


@pytest.mark.parametrize("script", ALL)
def test_the_run_folder(script, run, datasets, monkeypatch, tmp_path):
    """It has the time in its name, a name cannot leave the output folder, and a folder that exists is left alone."""
    clock = itertools.count()
    monkeypatch.setattr("time.time", lambda: 1234.5 + 1e-6 * next(clock))
    flags = (*DATA[script], *SMALL[script], "--exp-name", "../../evil", "--output-dir", tmp_path / "a" / "b")
    done = run(script, *flags)
    (folder,) = tmp_path.glob("a/b/*")
    assert done.code == 0 and str(folder) in done.out, done.err
    assert folder.name.endswith("__evil__1__1234500")
    assert {path.name for path in folder.iterdir()} == {"args.json", "metrics.csv", "checkpoint.pt", "result.json"}
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    one_line(run(script, *flags), "exists")
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("script", VECTORS)
def test_a_run_whose_loss_is_not_finite_stops_in_one_line(script, run, bad_data):
    done = run(script, "--dataset-id", "test/huge-v0", *SMALL[script])
    assert done.code == 1 and "not finite" in done.err.splitlines()[-1] and "Traceback" not in done.err


# ----- data sets of others
@pytest.fixture(scope="module")
def foreign(datasets):
    for name in ("Acrobot-v1", "test/Grid-v0", "FrozenLake-v1"):
        env = gym.make(name)
        store(f"other/{env.spec.name.lower()}/random-v0", play(env, 120, 0), env)
    acrobot = gym.make("Acrobot-v1")
    spaces = {"observation_space": acrobot.observation_space, "action_space": acrobot.action_space}
    store("other/logs-v0", play(acrobot, 50, 0), **spaces)
    store("other/flat-v0", play(acrobot, 50, 0), acrobot, ref_min_score=5.0, ref_max_score=5.0)


@pytest.mark.parametrize("script", VECTORS)
@pytest.mark.parametrize("name, size, actions", [("acrobot", 6, 3), ("grid", 3 * 3 * 2 + 4, 3), ("frozenlake", 16, 4)])
def test_random_play_of_other_environments(run, load, foreign, script, name, size, actions):
    done = run(script, "--dataset-id", f"other/{name}/random-v0", *SMALL[script])
    assert done.code == 0, done.err
    got = load(done.folders[0])
    assert got.checkpoint["obs_mean"].shape == (size,)
    assert [*got.checkpoint["actor"].values()][-1].shape == (actions,)
    assert len(got.result["eval_returns"]) == 2 and got.result["normalized_return"] is None
    module, dataset = importlib.import_module(script), minari.load_dataset(f"other/{name}/random-v0")
    seed = int(np.random.default_rng(0).integers(2**31))  # the first episode: data and environment are flattened alike
    first, _ = module.make_eval_env(dataset).reset(seed=seed)
    assert torch.equal(module.load_transitions(dataset, 0.9)[0][0], torch.as_tensor(first).float())


@pytest.mark.parametrize("script", NETWORKS)
def test_data_without_an_environment_train_and_are_not_evaluated(run, load, foreign, script):
    name = "test/walk-logs-v0" if script == "ersac_atari" else "other/logs-v0"
    done = run(script, "--dataset-id", name, *SMALL[script], "--capture-video")
    assert done.code == 0 and "not evaluated" in done.out, done.err
    got = load(done.folders[0])
    for name in ("env_id", "eval_return_mean", "eval_return_std", "normalized_return"):
        assert got.result[name] is None
    assert got.result["eval_returns"] == [] and math.isnan(got.checkpoint["rows"][-1]["eval/return"])


@pytest.mark.parametrize("script", VECTORS)
def test_equal_reference_scores_give_no_normalised_return(run, load, foreign, script):
    done = run(script, "--dataset-id", "other/flat-v0", *SMALL[script])
    assert done.code == 0 and load(done.folders[0]).result["normalized_return"] is None


@pytest.mark.parametrize("script", NETWORKS)
def test_an_environment_without_a_time_limit_gets_one(script, datasets):
    module = importlib.import_module(script)
    if script == "ersac_atari":
        env = module.make_atari_env(minari.load_dataset("test/walk-forever-v0"))
    else:
        dataset = minari.load_dataset("test/chain-v0")
        dataset.recover_environment = lambda **_: gym.make("test/Forever-v0")
        env = module.make_eval_env(dataset)
    assert env.spec.max_episode_steps == (27_000 if script == "ersac_atari" else 10_000)
    limited = module.make_atari_env if script == "ersac_atari" else module.make_eval_env
    env, steps = limited(minari.load_dataset(DATA[script][1].replace("cartpole", "declared"))), 0
    env.reset(seed=0)
    while not any(env.step(0)[2:4]):
        steps += 1
    assert steps + 1 == (40 if script == "ersac_atari" else 1)  # one's own limit stays


@pytest.mark.parametrize("script", VECTORS)
def test_a_missing_default_data_set_is_made(run, load, datasets, monkeypatch, script):
    flags, commands = ("--env-id", "CartPole-v1", *SMALL[script]), []
    done = run(script, *flags, "--dataset-size", 3000)  # it is there
    assert load(done.folders[0]).result["dataset_id"] == "ersac/cartpole/tau50-3k-v0"

    def fail(command, **_):
        commands.append(command)
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr("subprocess.run", fail)
    more = ("--dataset-size", 1500, "--expectile-tau", 0.125, "--dataset-seed", 7, "--output-dir", "elsewhere")
    one_line(run(script, *flags, *more), "ersac/cartpole/tau12p5-1500-s7-v0 cannot be had")
    one_line(run(script, "--env-id", "CartPole-v0", *SMALL[script]), "ersac/cartpole-v0/tau50-100k-v0 cannot be had")
    one_line(run(script, *flags, "--expectile-tau", 0.05), "ersac/cartpole/tau05-100k-v0 cannot be had")
    python, gen, *rest = commands[0]
    assert python == sys.executable and Path(gen).name == "gen_expectile_data.py" and Path(gen).exists()
    wanted = "--env_id=CartPole-v1 --expectile_tau=0.125 --dataset_size=1500 --dataset_seed=7 --output_dir=elsewhere"
    assert sorted(rest) == sorted(wanted.split())


@pytest.mark.parametrize("script", NETWORKS)
def test_an_id_with_a_remote_is_loaded_without_it(run, load, datasets, monkeypatch, script):
    """hf://user/data/set-v0 is data/set-v0 on this machine."""
    monkeypatch.setattr("minari.download_dataset", lambda *_, **__: pytest.fail("it is on this machine"))
    done = run(script, "--dataset-id", "hf://somebody/" + DATA[script][1], *SMALL[script])
    assert done.code == 0 and load(done.folders[0]).result["dataset_id"] == DATA[script][1], done.err


# ----- resuming
@pytest.mark.parametrize("script", NETWORKS)
def test_a_killed_run_resumes_to_the_same_bits(script, run, load, datasets, monkeypatch):
    """Killed at a minibatch before the first checkpoint (on pixels while cloning, too) and after it."""
    flags, randint = [*DATA[script], *SMALL[script]], torch.randint
    flags += ["--autotune"] if script == "ersac_ensemble" else []
    whole, clones = load(run(script, *flags).folders[0]), 3 if script == "ersac_atari" else 0
    for draw in (2, clones + 2, clones + 7):
        calls = []

        def interrupt(*arguments, draw=draw, calls=calls, **options):
            calls.append(1)
            if len(calls) == draw:
                raise KeyboardInterrupt
            return randint(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "randint", interrupt)
            part = run(script, *flags)
        (folder,) = part.folders
        assert part.code == 130 and (folder / "checkpoint.pt").exists() == (draw == clones + 7)
        assert run(script, "--resume", f"{folder}/").code == 0
        again = load(folder)
        assert again.metrics == whole.metrics and same(again.result, whole.result)
        assert same(again.checkpoint, whole.checkpoint)


@pytest.mark.parametrize("script", NETWORKS)
def test_a_damaged_checkpoint_is_refused_and_left_alone(run, datasets, script):
    (folder,) = run(script, *DATA[script], *SMALL[script]).folders
    path = folder / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:3000])
    done = run(script, "--resume", folder)
    assert done.code == 1 and "checkpoint.pt is damaged" in done.err.splitlines()[-1] and len(path.read_bytes()) == 3000


@pytest.mark.slow
@pytest.mark.parametrize("script", NETWORKS)
def test_killed_at_random_moments_a_run_resumes_to_the_same_bits(script, run, load, datasets, tmp_path):
    """SIGKILL of a real process, three times in a row. It does not know the environments of these tests."""
    data = ("--dataset-id", "test/walk-logs-v0") if script == "ersac_atari" else DATA[script]
    flags = [*data, *SMALL[script], "--total-updates", 300, "--eval-interval", 10]
    whole = load(run(script, *flags, "--exp-name", "whole").folders[0])
    command = [sys.executable, str(ROOT / f"{script}.py")]
    start, killed = [*command, *map(str, flags), "--output-dir", str(tmp_path / "killed")], 0
    quiet = {"cwd": tmp_path, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    for _ in range(3):
        process = subprocess.Popen(start, env=os.environ | {"OMP_NUM_THREADS": "1"}, **quiet)
        while process.poll() is None and not list(tmp_path.glob("killed/*/checkpoint.pt")):
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.5))
        process.kill()
        killed += process.wait() == -9
        (folder,) = tmp_path.glob("killed/*")
        start = [*command, "--resume", str(folder)]
    assert killed >= 1
    assert run(script, "--resume", folder).code == 0
    got = load(folder)
    assert got.metrics == whole.metrics and same(got.result, whole.result) and same(got.checkpoint, whole.checkpoint)


@pytest.mark.parametrize("script", VECTORS)
def test_a_finished_run_is_evaluated_again_and_another_scripts_is_refused(script, run, load, datasets):
    (folder,) = run(script, *DATA[script], *SMALL[script]).folders
    first = load(folder)
    (folder / "result.json").unlink()
    assert run(script, "--resume", folder).code == 0
    assert same(load(folder).checkpoint, first.checkpoint) and same(load(folder).result, first.result)
    (other,) = set(VECTORS) - {script}
    one_line(run(other, "--resume", folder), "not a run folder of this script")
    (folder / "args.json").write_text("{")
    one_line(run(script, "--resume", folder), "not a run folder of this script")


@pytest.mark.parametrize("script", ALL)
def test_same_seed_same_numbers_other_seed_other_numbers(script, run, load, datasets):
    flags = (*DATA[script], *SMALL[script])
    a, b, c = (load(run(script, *flags, "--seed", s, "--exp-name", n).folders[0]) for n, s in ("a3", "b3", "c4"))
    assert a.metrics == b.metrics and same(a.checkpoint, b.checkpoint) and a.metrics != c.metrics


@pytest.mark.parametrize("script", NETWORKS)
def test_no_graph_grows_and_the_speed_is_that_of_the_updates(script, run, load, datasets, monkeypatch):
    """Polyak averaging outside of no_grad would make the targets part of a graph that grows with every update. On a
    clock of our own a minibatch takes a second, a step in the environment takes fifty; cloning does not count."""
    env, data = (Walk, "test/walk-v0") if script == "ersac_atari" else (Chain, "test/chain-v0")
    clock, randint, step = [1e9], torch.randint, env.step
    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(torch, "randint", lambda *a, **k: (clock.append(clock.pop() + 1), randint(*a, **k))[1])
    monkeypatch.setattr(env, "step", lambda self, a: (clock.append(clock.pop() + 50), step(self, a))[1])
    done = run(script, "--dataset-id", data, *SMALL[script], "--total-updates", 10)
    assert [row["charts/updates_per_second"] for row in read_rows(done.folders[0])] == [1.0] * 3
    assert load(done.folders[0]).result["updates_per_second"] == 1.0
    assert all(p.grad_fn is None and not p.requires_grad for p in done.names["target_critic"].parameters())
    assert all(p.grad_fn is None for part in ("critic", "actor") for p in done.names[part].parameters())


@pytest.mark.parametrize("script", VECTORS)
def test_video_of_the_final_evaluation_changes_no_number(run, load, datasets, script):
    flags = (*DATA[script], *SMALL[script])
    plain, filmed = (run(script, *flags, *more).folders[0] for more in ((), ("--capture-video",)))
    assert list((filmed / "video").glob("*.mp4"))[0].stat().st_size > 1000
    assert same(load(filmed).result, load(plain).result)


def test_a_checkpoint_acts_in_a_few_lines(run, datasets):
    """The snippet of your_own.md, run as it is printed."""
    (folder,) = run("ersac_epinet", *DATA["ersac_epinet"], *NETWORK, "--hidden-dim", 24).folders
    pages = (ROOT / "docs" / "your_own.md").read_text().split("```")
    (snippet,) = [x for x in pages if x.startswith("python\n") and "Actor" in x]
    names = {}
    exec(snippet.removeprefix("python\n").replace("runs/...", str(folder)), names)
    assert names["action"] in range(2)


# ----- W&B
@pytest.fixture
def wandb(monkeypatch):
    """What a stand-in for W&B is told."""
    told = SimpleNamespace(rows={}, summary={}, groups=[])

    def init(**named):
        told.__dict__.update(named)
        told.groups.append(named["group"])

    def log(row, step):
        told.rows[step] = dict(row)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, log=log, run=told))
    return told


@pytest.mark.parametrize("script", ALL)
def test_wandb_gets_what_the_run_folder_gets(run, load, datasets, wandb, script):
    names = ("--track", "--wandb-project-name", "project", "--wandb-entity", "team", "--exp-name", "told")
    (folder,) = run(script, *DATA[script], *SMALL[script], *names).folders
    got = load(folder)
    assert (wandb.project, wandb.entity, wandb.name, wandb.save_code) == ("project", "team", folder.name, True)
    data = "RiverSwim tau 0.5 x 10" if script == "ersac_tabular" else DATA[script][1]
    assert wandb.group == f"{data} {got.result['method']}" and folder.name.split("__")[1:3] == ["told", "1"]
    for row, stored in zip(wandb.rows.values(), read_rows(folder), strict=True):
        assert stored == pytest.approx(row, rel=1e-9, nan_ok=True)
    assert [*wandb.rows] == [4, 8] and wandb.summary == got.result
    if script == "ersac_tabular":
        assert wandb.config | {"prior": list(wandb.config["prior"])} == got.args
        return
    assert wandb.config == got.args | {"dataset_id": data} and wandb.id == folder.name and wandb.resume == "allow"
    assert run(script, "--resume", folder).code == 0 and wandb.id == folder.name


@pytest.mark.parametrize("script", VECTORS)
def test_a_group_averages_over_seeds_of_the_data(script, run, datasets, wandb):
    for seed in (3, 14):
        store(f"test/{script[6:]}-s{seed}-v0", play(gym.make("test/Chain-v0"), 30, seed), gym.make("test/Chain-v0"))
        run(script, "--dataset-id", f"test/{script[6:]}-s{seed}-v0", *SMALL[script], "--track")
    assert wandb.groups[0] == wandb.groups[1] and wandb.groups[0].startswith(f"test/{script[6:]}-v0 ")


@pytest.mark.slow
def test_wandb_offline_from_start_to_resumed_end_of_a_copied_variant(datasets, tmp_path):
    """A copy names itself everywhere, and both parts of its run belong to one W&B run."""
    variant = tmp_path / "my_variant.py"
    shutil.copy(ROOT / "ersac_epinet.py", variant)
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(variant)]
    flags = [*map(str, (*DATA["ersac_epinet"], *NETWORK)), "--track"]
    done = subprocess.run([*command, *flags], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("runs/*")
    assert "__my_variant__1__" in folder.name
    assert json.loads((folder / "result.json").read_text())["script"] == "my_variant.py"
    done = subprocess.run([*command, "--resume", str(folder)], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0
    assert {path.name.split("-", 3)[-1] for path in tmp_path.glob("wandb/offline-run-*")} == {folder.name}


def test_bad_input_in_a_real_process(datasets, tmp_path):
    command = [sys.executable, str(ROOT / "ersac_epinet.py"), "--env-id", "NoSuchThing-v0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1 and list(tmp_path.iterdir()) == []
