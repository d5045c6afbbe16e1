"""Protects what all training scripts owe their users: one clear line for bad input, data sets of others, resuming to
the same bits, and W&B. Add a script or a flag here once, not in every file."""

import importlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import minari
import numpy as np
import pytest
import torch
from minari.data_collector import EpisodeBuffer

ROOT = Path(__file__).resolve().parents[1]
BOTH = ("ersac_ensemble", "ersac_epinet")
DATA = ("--dataset-id", "test/cartpole-v0")
SMALL = ("--hidden-dim", 8, "--batch-size", 16, "--total-updates", 8, "--eval-interval", 4, "--eval-episodes", 2)


def one_line(done, *words):
    """Refused with one line that names the cause, and nothing left behind."""
    lines = done.err.strip().splitlines()
    assert done.code in (1, 2) and "Traceback" not in done.err, done.err
    assert done.code == 2 or len(lines) == 1, done.err  # 2: tyro's box
    assert all(word in done.err for word in words), done.err
    assert done.folders == []


def same(x, y):
    """Equal to the last bit, timing and names aside."""
    if isinstance(x, dict):
        aside = ("updates_per_second", "charts/updates_per_second", "args", "exp_name")
        return x.keys() == y.keys() and all(same(x[k], y[k]) for k in x if k not in aside)
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(map(same, x, y))
    return torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y or x != x and y != y


# ----- bad input
BAD = """
--dataset-id test/ragged-v0 | T + 1
--dataset-id test/nan-v0 | finite
--dataset-id test/outside-v0 | Discrete(2)
--dataset-id test/pictures-v0 | ersac_atari.py
--dataset-id test/pendulum-v0 | discrete actions
--dataset-id test/other-spaces-v0 | not those of its environment
--dataset-id test/cartpole-v0 --dataset-size 7 | --dataset-size
--dataset-id test/cartpole-v0 --env-id CartPole-v1 | --env-id
--dataset-id test/cartpole-v0 --expectile-tau 0.9 | --expectile-tau
--dataset-id test/cartpole-v0 --dataset-seed 3 | --dataset-seed
--dataset-id= | cannot be had
--dataset-id no-such-set-v0 | cannot be had
--dataset-id ersac/lunarlander/tau77-10k-v0 | gen_expectile_data.py
--env-id NoSuchThing-v0 | --env-id
--resume=  | --resume
--resume nowhere | nowhere
--resume nowhere --seed 3 | no other argument
--output-dir /proc/nowhere | --output-dir
--targets his | targets
--uncertainty-set ball | uncertainty-set
--upsilon 1.1 | upsilon
--upsilon -0.1 | upsilon
--upsilon nan | upsilon
--gamma 1 | gamma
--gamma -0.1 | gamma
--polyak 2 | polyak
--alpha -1 | alpha
--alpha inf | alpha
--q-lr nan | --q-lr
--policy-lr -1 | --policy-lr
--prior-scale -3 | --prior-scale
--seed -1 | seed
--dataset-seed -1 | --dataset-seed
--dataset-size 0 | --dataset-size
--expectile-tau 1.5 | --expectile-tau
--total-updates 0 | --total-updates
--batch-size 0 | --batch-size
--hidden-dim 0 | --hidden-dim
--eval-interval 0 | --eval-interval
--eval-episodes -2 | --eval-episodes
--total-updates 1.5 | total-updates
"""
BAD_OWN = """
ersac_epinet | --upsilon 1 | infinite
ersac_epinet | --uncertainty-set hull | ell-epi
ersac_epinet | --method ell-n | method
ersac_epinet | --noise-scale -1 | --noise-scale
ersac_epinet | --lambda-mu -1 | --lambda-mu
ersac_epinet | --index-dim 0 | --index-dim
ersac_epinet | --num-index-samples 0 | --num-index-samples
ersac_ensemble | --num-critics 0 | --num-critics
ersac_ensemble | --edac-eta 1 | EDAC
ersac_ensemble | --edac-eta -1 | --edac-eta
ersac_ensemble | --target-entropy -1 | --target-entropy
"""
CASES = [(script, *map(str.strip, line.split("|"))) for line in BAD.strip().splitlines() for script in BOTH]
CASES += [tuple(map(str.strip, line.split("|"))) for line in BAD_OWN.strip().splitlines()]


@pytest.fixture(scope="module")
def bad_data(datasets):
    """Actions outside of the space, and spaces that are not the environment's."""
    steps = {"rewards": np.ones(5), "terminations": np.arange(5) == 4, "truncations": np.zeros(5, bool)}
    cart = gym.make("CartPole-v1")
    with warnings.catch_warnings(action="ignore"):
        outside = EpisodeBuffer(id=0, observations=np.zeros((6, 4), np.float32), actions=np.arange(5), **steps)
        minari.create_dataset_from_buffers("test/outside-v0", [outside], env=cart)
        other = EpisodeBuffer(id=0, observations=np.zeros((6, 3), np.float32), actions=np.zeros(5, int), **steps)
        space = gym.spaces.Box(-1, 1, (3,), np.float32)
        minari.create_dataset_from_buffers("test/other-spaces-v0", [other], env=cart, observation_space=space)


@pytest.mark.parametrize("script, arguments, named", CASES)
def test_bad_input_ends_in_one_clear_line(script, arguments, named, run, bad_data, monkeypatch):
    def download(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr("minari.storage.hosting.download_dataset", download)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("must be refused before data are made"))
    words = arguments.split()
    flags = {word.split("=")[0] for word in words}
    data = () if flags & {"--dataset-id", "--env-id", "--dataset-size", "--dataset-seed", "--expectile-tau"} else DATA
    if "--resume" in flags:
        one_line(run(script, *words), named)
        return
    one_line(run(script, *data, *SMALL, *words), named)


@pytest.mark.parametrize("script", BOTH)
def test_a_name_cannot_leave_the_output_folder(script, run, datasets):
    done = run(script, *DATA, *SMALL, "--exp-name", "../../evil")
    assert done.code == 0 and "__evil__" in done.folders[0].name


@pytest.mark.parametrize("script", BOTH)
def test_a_diverging_run_stops_in_one_line(script, run, datasets):
    done = run(script, *DATA, *SMALL, "--batch-size", 300, "--alpha", 1e9, "--q-lr", 1, "--gamma", 0.999)
    assert done.code == 0 or "not finite" in done.err and "Traceback" not in done.err


# ----- data sets of others
def random_play(env, episodes, limit=60):
    rng = np.random.default_rng(0)
    buffers = []
    for number in range(episodes):
        observations = [env.reset(seed=number)[0]]
        steps = []
        done = False
        while not done:
            action = int(rng.integers(env.action_space.n))
            obs, reward, terminated, truncated, _ = env.step(action)
            truncated = truncated or len(steps) + 1 == limit
            observations.append(obs)
            steps.append((action, reward, terminated, truncated))
            done = terminated or truncated
        if isinstance(observations[0], dict):
            observations = {key: np.array([obs[key] for obs in observations]) for key in observations[0]}
        columns = dict(zip(("actions", "rewards", "terminations", "truncations"), map(np.array, zip(*steps))))
        buffers.append(EpisodeBuffer(id=number, observations=observations, **columns))
    return buffers


class Grid(gym.Env):
    """Observed as a dictionary of a small image and a direction. Walk to the right end in 12 steps."""

    image = gym.spaces.Box(0, 255, (3, 3, 2), np.uint8)
    observation_space = gym.spaces.Dict(image=image, direction=gym.spaces.Discrete(4))
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(4))
        return self.observe(), {}

    def observe(self):
        return {"image": np.full((3, 3, 2), 10 * self.place, np.uint8), "direction": self.place % 4}

    def step(self, action):
        self.place = int(np.clip(self.place + action - 1, 0, 9))
        return self.observe(), float(self.place == 9), self.place == 9, False, {}


if "test/Grid-v0" not in gym.registry:
    gym.register("test/Grid-v0", "test_scripts:Grid", max_episode_steps=12)


@pytest.fixture(scope="module")
def foreign(datasets):
    acrobot = gym.make("Acrobot-v1")
    spaces = {"observation_space": acrobot.observation_space, "action_space": acrobot.action_space}
    with warnings.catch_warnings(action="ignore"):
        for env in (acrobot, gym.make("test/Grid-v0"), gym.make("FrozenLake-v1")):
            name = f"other/{env.spec.name.lower()}/random-v0"
            minari.create_dataset_from_buffers(name, random_play(env, 8), env=env)
        minari.create_dataset_from_buffers("other/logs-v0", random_play(acrobot, 5), **spaces)
        flat = {"ref_min_score": 5.0, "ref_max_score": 5.0}
        minari.create_dataset_from_buffers("other/flat-v0", random_play(acrobot, 5), env=acrobot, **flat)


@pytest.mark.parametrize("script", BOTH)
@pytest.mark.parametrize("name, size, actions", [("acrobot", 6, 3), ("grid", 3 * 3 * 2 + 4, 3), ("frozenlake", 16, 4)])
def test_random_play_of_other_environments(run, load, foreign, script, name, size, actions):
    done = run(script, "--dataset-id", f"other/{name}/random-v0", *SMALL)
    assert done.code == 0, done.err
    got = load(done.folders[0])
    assert got.checkpoint["obs_mean"].shape == (size,)
    assert got.checkpoint["actor"]["net.4.weight"].shape[0] == actions
    assert all(math.isfinite(x) for x in got.result["eval_returns"]) and got.result["normalized_return"] is None
    module = importlib.import_module(script)  # data and environment are flattened alike
    dataset = minari.load_dataset(f"other/{name}/random-v0")
    first, _ = module.make_eval_env(dataset).reset(seed=0)  # the first episode of the data
    assert torch.equal(module.load_transitions(dataset, 0.9)[0][0], torch.as_tensor(first).float())


@pytest.mark.parametrize("script", BOTH)
def test_data_without_an_environment_train_and_are_not_evaluated(run, load, foreign, script):
    done = run(script, "--dataset-id", "other/logs-v0", *SMALL, "--capture-video")
    assert done.code == 0 and "not evaluated" in done.out, done.err
    got = load(done.folders[0])
    for name in ("env_id", "eval_return_mean", "eval_return_std", "normalized_return"):
        assert got.result[name] is None
    assert got.result["eval_returns"] == [] and math.isnan(got.checkpoint["rows"][-1]["eval/return"])


@pytest.mark.parametrize("script", BOTH)
def test_equal_reference_scores_give_no_normalised_return(run, load, foreign, script):
    done = run(script, "--dataset-id", "other/flat-v0", *SMALL)
    assert done.code == 0 and load(done.folders[0]).result["normalized_return"] is None


@pytest.mark.parametrize("script", BOTH)
def test_transitions_against_a_loop(datasets, script):
    """Terminations and truncations apart, and the discounted return that followed, unknown where it was cut."""
    dataset = minari.load_dataset("test/chain-v0")
    ours = importlib.import_module(script).load_transitions(dataset, 0.9)
    at = 0
    for episode in dataset.iterate_episodes():
        T = len(episode.actions)
        for t in range(T):
            obs, action, reward, next_obs, terminated, followed = (x[at + t] for x in ours)
            assert torch.equal(obs, torch.tensor(episode.observations[t])) and action == episode.actions[t]
            assert torch.equal(next_obs, torch.tensor(episode.observations[t + 1]))
            assert reward == np.float32(episode.rewards[t]) and terminated == episode.terminations[t]
            expected = sum(0.9 ** (k - t) * episode.rewards[k] for k in range(t, T))
            assert math.isnan(followed) != episode.terminations[-1]
            assert math.isnan(followed) or followed.item() == pytest.approx(expected, rel=1e-5)
        at += T
    assert at == len(ours[0])


@pytest.mark.parametrize("script", BOTH)
def test_a_missing_default_data_set_is_made(run, load, datasets, monkeypatch, script):
    flags = ("--env-id", "CartPole-v1", *SMALL)
    done = run(script, *flags, "--dataset-size", 3000)  # it is there
    assert load(done.folders[0]).result["dataset_id"] == "ersac/cartpole/tau50-3k-v0"
    commands = []
    monkeypatch.setattr("subprocess.run", lambda x, **_: (commands.append(x), SimpleNamespace(returncode=1))[1])
    more = ("--dataset-size", 1500, "--expectile-tau", 0.125, "--dataset-seed", 7, "--output-dir", "elsewhere")
    one_line(run(script, *flags, *more), "ersac/cartpole/tau12p5-1500-s7-v0 could not be made")
    one_line(run(script, "--env-id", "CartPole-v0", *SMALL), "ersac/cartpole-v0/tau50-100k-v0 could not be made")
    python, gen, *rest = commands[0]
    assert python == sys.executable and Path(gen).name == "gen_expectile_data.py" and Path(gen).exists()
    wanted = "--env_id=CartPole-v1 --expectile_tau=0.125 --dataset_size=1500 --dataset_seed=7 --output_dir=elsewhere"
    assert sorted(rest) == sorted(wanted.split())


# ----- resuming
@pytest.mark.parametrize("script", ["ersac_epinet", pytest.param("ersac_ensemble", marks=pytest.mark.slow)])
def test_killed_run_resumes_to_the_same_bits(script, run, load, datasets, tmp_path):
    """SIGKILL of a real process at random moments, three times in a row."""
    flags = [*DATA, *SMALL[:4], "--total-updates", 3000, "--eval-interval", 100, "--eval-episodes", 3]
    whole = load(run(script, *flags, "--exp-name", "whole").folders[0])
    command = [sys.executable, str(ROOT / f"{script}.py")]
    start = [*command, *map(str, flags), "--output-dir", str(tmp_path / "killed")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    quiet = {"env": environment, "cwd": tmp_path, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    killed = 0
    for _ in range(3):
        process = subprocess.Popen(start, **quiet)
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


@pytest.mark.parametrize("script", BOTH)
def test_a_run_without_a_checkpoint_begins_anew_and_a_finished_one_is_evaluated_again(script, run, load, datasets):
    (folder,) = run(script, *DATA, *SMALL).folders
    first = load(folder)
    assert run(script, "--resume", folder).code == 0
    assert same(load(folder).checkpoint, first.checkpoint) and same(load(folder).result, first.result)
    (folder / "checkpoint.pt").unlink()
    (folder / "result.json").unlink()
    assert run(script, "--resume", folder).code == 0
    assert same(load(folder).checkpoint, first.checkpoint) and same(load(folder).result, first.result)
    other = "ersac_epinet" if script == "ersac_ensemble" else "ersac_ensemble"
    one_line(run(other, "--resume", folder), "not a run folder of this script")
    (folder / "args.json").write_text("{")
    one_line(run(script, "--resume", folder), "not a run folder of this script")


@pytest.mark.parametrize("script", BOTH)
def test_same_seed_same_numbers_other_seed_other_numbers(script, run, load, datasets):
    a, b, c = (load(run(script, *DATA, *SMALL, "--seed", s, "--exp-name", n).folders[0]) for n, s in ("a3", "b3", "c4"))
    assert a.metrics == b.metrics and same(a.checkpoint, b.checkpoint) and a.metrics != c.metrics


@pytest.mark.parametrize("script", BOTH)
def test_no_graph_grows_from_update_to_update(script, run, datasets):
    """Polyak averaging outside of no_grad would make the targets part of a graph that grows with every update."""
    names = run(script, *DATA, *SMALL).names
    assert all(p.grad_fn is None and not p.requires_grad for p in names["target_critic"].parameters())
    assert all(p.grad_fn is None for part in ("critic", "actor") for p in names[part].parameters())


@pytest.mark.parametrize("script", BOTH)
def test_speed_is_that_of_the_updates(run, load, datasets, monkeypatch, script):
    """A clock of our own: a minibatch takes a second, a step in the environment takes fifty."""
    from conftest import Chain

    clock, randint, step = [1000.0], torch.randint, Chain.step
    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(torch, "randint", lambda *a, **k: (clock.append(clock.pop() + 1), randint(*a, **k))[1])
    monkeypatch.setattr(Chain, "step", lambda env, a: (clock.append(clock.pop() + 50), step(env, a))[1])
    (folder,) = run(script, "--dataset-id", "test/chain-v0", *SMALL, "--total-updates", 10).folders
    assert [row["charts/updates_per_second"] for row in load(folder).checkpoint["rows"]] == [1.0] * 3
    assert load(folder).result["updates_per_second"] == 1.0


@pytest.mark.parametrize("script", BOTH)
def test_video_of_the_final_evaluation_changes_no_number(run, load, datasets, script):
    plain, filmed = (run(script, *DATA, *SMALL, *flags).folders[0] for flags in ((), ("--capture-video",)))
    assert list((filmed / "video").glob("*.mp4"))[0].stat().st_size > 1000
    assert same(load(filmed).result, load(plain).result)


def test_a_checkpoint_acts_in_a_few_lines(run, datasets):
    """The snippet of the front page, run as it is printed."""
    (folder,) = run("ersac_epinet", "--dataset-id", "test/lander-v0", *SMALL, "--hidden-dim", 128).folders
    (snippet,) = [x for x in (ROOT / "README.md").read_text().split("```") if x.startswith("python\n") and "Actor" in x]
    names = {}
    exec(snippet.removeprefix("python\n").replace("runs/...", str(folder)), names)
    assert names["action"] in range(4)


# ----- W&B
@pytest.mark.parametrize("script", BOTH)
def test_wandb_gets_what_the_run_folder_gets(run, load, datasets, monkeypatch, script):
    told = SimpleNamespace(rows={}, summary={})

    def log(row, step):
        told.rows[step] = dict(row)

    stand_in = SimpleNamespace(init=lambda **named: told.__dict__.update(named), log=log, run=told)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    names = ("--track", "--wandb-project-name", "project", "--wandb-entity", "team", "--exp-name", "told")
    store = ("--env-id", "CartPole-v1", "--dataset-size", 3000)
    (folder,) = run(script, *store, *SMALL, *names).folders
    got = load(folder)
    assert (told.project, told.entity, told.resume, told.save_code) == ("project", "team", "allow", True)
    assert told.name == told.id == folder.name and folder.name.startswith("CartPole-v1__told__1__")
    assert told.group == f"ersac/cartpole/tau50-3k-v0 {got.result['method']}"
    assert told.config == got.args | {"dataset_id": "ersac/cartpole/tau50-3k-v0"}
    assert [*told.rows] == [4, 8] and same([*told.rows.values()], got.checkpoint["rows"])
    assert same(told.summary, got.result)
    del told.rows[8]
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert run(script, "--resume", folder).code == 0 and told.id == folder.name
    assert checkpoint["update"] == 8


@pytest.mark.parametrize("script", BOTH)
def test_a_group_averages_over_seeds_of_the_data(script, run, datasets, monkeypatch):
    groups = []
    stand_in = SimpleNamespace(init=lambda **named: groups.append(named["group"]), log=lambda *_, **__: None)
    stand_in.run = SimpleNamespace(summary={})
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    for seed in (3, 14):
        run(script, "--dataset-id", f"test/draw-s{seed}-v0", *SMALL, "--track")
    assert len(groups) == 2 and groups[0] == groups[1] and groups[0].startswith("test/draw-v0 ")


@pytest.mark.slow
def test_wandb_offline_from_start_to_resumed_end_of_a_copied_variant(datasets, tmp_path):
    """A copy names itself everywhere, and both parts of its run belong to one W&B run."""
    variant = tmp_path / "my_variant.py"
    shutil.copy(ROOT / "ersac_epinet.py", variant)
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(variant)]
    flags = [*map(str, (*DATA, *SMALL)), "--track"]
    done = subprocess.run([*command, *flags], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("runs/*")
    assert folder.name.startswith("CartPole-v1__my_variant__1__")
    assert json.loads((folder / "result.json").read_text())["script"] == "my_variant.py"
    done = subprocess.run([*command, "--resume", str(folder)], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0
    assert {path.name.split("-", 3)[-1] for path in tmp_path.glob("wandb/offline-run-*")} == {folder.name}


def test_bad_input_in_a_real_process(datasets, tmp_path):
    command = [sys.executable, str(ROOT / "ersac_epinet.py"), "--env-id", "NoSuchThing-v0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1 and list(tmp_path.iterdir()) == []
