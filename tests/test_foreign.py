"""Data sets made outside of this project, and their environments: Minari and Gymnasium as a user meets them."""

import csv
import importlib
import json
import math
import re
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import gymnasium as gym
import h5py
import minari
import numpy as np
import pytest
import torch
from conftest import chain_episodes
from minari.data_collector import EpisodeBuffer

ROOT = Path(__file__).resolve().parents[1]
BOTH = ("ersac_ensemble", "ersac_epinet")
FEW = ("--total-updates", 4, "--eval-interval", 2, "--eval-episodes", 2, "--hidden-dim", 8, "--batch-size", 16)


class Grid(gym.Env):
    """Observed as minigrid is: a small image, a direction and a mission in words. Walk to the right end in 12 steps."""

    image = gym.spaces.Box(0, 255, (3, 3, 2), np.uint8)
    observation_space = gym.spaces.Dict(image=image, direction=gym.spaces.Discrete(4), mission=gym.spaces.Text(20))
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(4))
        self.direction = int(self.np_random.integers(4))
        return self.observe(), {}

    def observe(self):
        image = np.full((3, 3, 2), 10 * self.place, np.uint8)
        image[0, 1, 0] = 7
        return {"image": image, "direction": self.direction, "mission": "go right"}

    def step(self, action):
        self.direction = (self.direction + 1) % 4
        self.place = int(np.clip(self.place + action - 1, 0, 9))
        return self.observe(), float(self.place == 9), self.place == 9, False, {}


if "test/Grid-v0" not in gym.registry:
    gym.register("test/Grid-v0", "test_foreign:Grid", max_episode_steps=12)


def stack(observations):
    """Minari's form of an episode: arrays, or a dictionary of them; text stays a list."""
    if isinstance(observations[0], dict):
        return {key: stack([obs[key] for obs in observations]) for key in observations[0]}
    return observations if isinstance(observations[0], str) else np.array(observations)


def random_play(env, episodes, limit=60):
    rng, buffers = np.random.default_rng(0), []
    for number in range(episodes):
        observations, steps, done = [env.reset(seed=number)[0]], [], False
        while not done:
            action = int(rng.integers(env.action_space.n))
            obs, reward, terminated, truncated, _ = env.step(action)
            observations.append(obs)
            truncated = truncated or len(steps) + 1 == limit
            steps.append((action, reward, terminated, truncated))
            done = terminated or truncated
        names = ("actions", "rewards", "terminations", "truncations")
        columns = dict(zip(names, map(np.array, zip(*steps))))
        buffers.append(EpisodeBuffer(id=number, observations=stack(observations), **columns))
    return buffers


@pytest.fixture(scope="module")
def foreign(datasets):
    acrobot, grid, lake = gym.make("Acrobot-v1"), gym.make("test/Grid-v0"), gym.make("FrozenLake-v1")
    spaces = {"observation_space": acrobot.observation_space, "action_space": acrobot.action_space}
    with warnings.catch_warnings(action="ignore"):
        minari.create_dataset_from_buffers("other/acrobot/random-v0", random_play(acrobot, 5), env=acrobot)
        minari.create_dataset_from_buffers("other/grid/random-v0", random_play(grid, 8), env=grid)
        minari.create_dataset_from_buffers("other/lake/random-v0", random_play(lake, 20), env=lake)
        minari.create_dataset_from_buffers("other/logs-v0", random_play(acrobot, 5), **spaces)
    return datasets


# ----- what both scripts can read
@pytest.mark.parametrize("script", BOTH)
@pytest.mark.parametrize("name, size, actions", [("acrobot", 6, 3), ("grid", 3 * 3 * 2 + 4, 3), ("lake", 16, 4)])
def test_random_play_of_other_environments(run, load, foreign, script, name, size, actions):
    dataset_id = f"other/{name}/random-v0"
    done = run(script, "--dataset-id", dataset_id, *FEW)
    assert done.code == 0, done.err
    got = load(done.folders[0])
    assert got.checkpoint["obs_mean"].shape == (size,) and got.checkpoint["num_actions"] == actions
    assert got.result["dataset_id"] == dataset_id and len(got.result["eval_returns"]) == 2
    assert all(math.isfinite(x) for x in got.result["eval_returns"]) and got.result["normalized_return"] is None
    assert ("the text in its observations is left out" in done.out) == (name == "grid")
    assert run(script, "--resume", done.folders[0]).code == 0


@pytest.mark.parametrize("script", BOTH)
def test_dictionaries_are_flattened_alike_in_data_and_evaluation(foreign, script):
    module = importlib.import_module(script)
    dataset = minari.load_dataset("other/grid/random-v0")
    obs, _, _, next_obs, _, _ = module.load_transitions(dataset, 0.9)
    env = module.make_eval_env(dataset)
    first, _ = env.reset(seed=0)  # the first episode of the data
    assert env.observation_space.shape == first.shape == (22,)
    assert torch.equal(obs[0], torch.as_tensor(first).float())
    direction = np.eye(4)[env.unwrapped.direction]
    assert np.array_equal(first, [*direction, *env.unwrapped.observe()["image"].ravel()])
    action = next(iter(dataset.iterate_episodes())).actions[0]
    assert torch.equal(next_obs[0], torch.as_tensor(env.step(action)[0]).float())
    assert len(obs.unique(dim=0)) > 10


@pytest.mark.parametrize("script", BOTH)
def test_data_without_an_environment_train_and_are_not_evaluated(run, load, foreign, script):
    done = run(script, "--dataset-id", "other/logs-v0", *FEW, "--capture-video")
    assert done.code == 0, done.err
    got = load(done.folders[0])
    assert "other/logs-v0: no environment, so the policy is not evaluated" in done.out
    assert f"{script}.py, {got.result['label']} on other/logs-v0: not evaluated\n" in done.out
    for name in ("env_id", "eval_return_mean", "eval_return_std", "normalized_return"):
        assert got.result[name] is None
    assert got.result["eval_episodes"] == 0 and got.result["eval_returns"] == []
    assert done.folders[0].name.startswith("logs-v0__") and got.checkpoint["update"] == 4
    with open(done.folders[0] / "metrics.csv") as f:
        assert [row["eval/return"] for row in csv.DictReader(f)] == ["nan", "nan"]
    assert run(script, "--resume", done.folders[0]).code == 0


def test_arrow_files_are_read_too(run, load, foreign, tmp_path):
    """Minari writes HDF5 by default and Arrow on request: the same transitions, the same frames."""
    acrobot = gym.make("Acrobot-v1")
    with warnings.catch_warnings(action="ignore"):
        buffers = random_play(acrobot, 5)
        minari.create_dataset_from_buffers("other/arrow-v0", buffers, env=acrobot, data_format="arrow")
    import ersac_atari
    import ersac_ensemble

    names = ("other/arrow-v0", "other/acrobot/random-v0")
    arrow, hdf5 = (ersac_ensemble.load_transitions(minari.load_dataset(name), 0.9) for name in names)
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(arrow, hdf5, strict=True))
    assert run("ersac_ensemble", "--dataset-id", "other/arrow-v0", *FEW, "--num-critics", 2).code == 0

    rng = np.random.default_rng(0)
    pictures = rng.integers(256, size=(9, 40, 40, 3), dtype=np.uint8)
    columns = {"actions": rng.integers(3, size=8), "rewards": rng.normal(size=8)}
    columns |= {"terminations": np.arange(8) == 7, "truncations": np.zeros(8, bool)}
    image = gym.spaces.Box(0, 255, (40, 40, 3), np.uint8)
    spaces = {"observation_space": image, "action_space": gym.spaces.Discrete(3)}
    frames = []
    for kind in ("arrow", "hdf5"):
        buffer = EpisodeBuffer(id=0, observations=pictures, **columns)
        with warnings.catch_warnings(action="ignore"):
            name = f"other/pictures/{kind}-v0"
            dataset = minari.create_dataset_from_buffers(name, [buffer], data_format=kind, **spaces)
        (tmp_path / kind).mkdir()
        ersac_atari.decode_episodes(dataset, tmp_path / kind)
        frames.append(np.load(tmp_path / kind / "frames.npy"))
    assert frames[0].shape == (9, 84, 84) and np.array_equal(*frames) and len(np.unique(frames[0])) > 50


# ----- what cannot be had
@pytest.mark.parametrize("script", [*BOTH, "ersac_atari"])
def test_missing_damaged_and_misspelt_are_three_sentences(run, foreign, monkeypatch, script):
    def download(name, **_):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("minari.storage.hosting.download_dataset", download)
    done = run(script, "--dataset-id", "some/where-v3")
    assert done.code == 1 and len(done.err.strip().splitlines()) == 1
    assert "some/where-v3: not on this machine, and no download over the network (Name or service" in done.err
    (foreign / "other" / "empty-v0" / "data").mkdir(parents=True, exist_ok=True)
    done = run(script, "--dataset-id", "other/empty-v0")
    assert done.code == 1 and "other/empty-v0: damaged (" in done.err and "minari delete other/empty-v0" in done.err
    assert len(done.err.strip().splitlines()) == 1 and "network" not in done.err
    done = run(script, "--dataset-id", "cartpole")
    assert done.code == 1 and "--dataset-id cartpole: Minari's ids end in a version" in done.err


def test_the_code_that_downloads_is_installed():
    """huggingface_hub for the server, h5py and pyarrow for the two kinds of files, as requirements.txt pins them."""
    assert importlib.import_module("minari.storage.remotes.huggingface").HuggingFaceStorage("farama-minari")
    importlib.import_module("minari.dataset._storages.arrow_storage")
    pins = dict(re.findall(r"^([\w-]+)(?:\[.*\])?==(\S+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    for name in ("huggingface_hub", "pyarrow", "h5py", "minari"):
        assert importlib.metadata.version(name) == pins[name]


# ----- Atari as Minari publishes it
def record_like_the_published_sets(dataset_id, steps, episodes):
    """ALE/Pong-v5 without sticky actions, four frames a step, raw frames, JPEG, no reference scores; the same frames
    over and over, so that a full-length episode is quick to write."""
    import ale_py

    gym.register_envs(ale_py)
    env = gym.make("ALE/Pong-v5", repeat_action_probability=0, frameskip=4)
    rng = np.random.default_rng(0)
    frames = [env.reset(seed=0)[0]] + [env.step(int(rng.integers(6)))[0] for _ in range(40)]
    short = 40
    columns = {
        "actions": rng.integers(6, size=short),
        "rewards": rng.integers(-1, 2, size=short).astype(float),
        "terminations": np.arange(short) == short - 1,
        "truncations": np.zeros(short, bool),
    }
    buffers = [EpisodeBuffer(id=i, observations=np.array(frames), **columns) for i in range(episodes)]
    with warnings.catch_warnings(action="ignore"):
        dataset = minari.create_dataset_from_buffers(dataset_id, buffers, env=env)
    with h5py.File(dataset.storage.data_path / "main_data.hdf5", "r+") as file:  # lengthen the episodes
        for episode in file.values():
            for name, values in columns.items():
                del episode[name]
                episode[name] = np.resize(values, steps)
            jpegs = np.empty(41, object)
            for i, jpeg in enumerate(episode["observations"][:]):
                jpegs[i] = jpeg
            del episode["observations"]
            dtype = h5py.vlen_dtype(np.uint8)
            longer = episode.create_dataset("observations", (steps + 1,), dtype, chunks=True)
            for at in range(0, steps + 1, 800):
                longer[at : at + 800] = jpegs[np.arange(at, min(at + 800, steps + 1)) % 41]
    path = dataset.storage.data_path / "metadata.json"
    metadata = json.loads(path.read_text()) | {"total_steps": steps * episodes, "minari_version": "0.5.2"}
    del metadata["jpeg_encoding"]  # Minari 0.5.2 did not write it
    path.write_text(json.dumps(metadata))
    return frames


def test_a_full_length_episode_is_never_decoded_whole(run, load, datasets, tmp_path):
    """27,000 steps of 210 x 160 x 3 pixels are 2.7 GB; a process that may have 2 GB must do."""
    frames = record_like_the_published_sets("other/pong/expert-v0", 27_000, 1)
    dataset = minari.load_dataset("other/pong/expert-v0")
    assert dataset.env_spec.id == "ALE/Pong-v5" and dataset.env_spec.kwargs["repeat_action_probability"] == 0
    code = "import sys, minari, ersac_atari, resource\n"
    code += "x = ersac_atari.load_frames(minari.load_dataset('other/pong/expert-v0'), sys.argv[1])\n"
    code += "print(len(x[0]), len(x[1]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    limit = resource.getrlimit(resource.RLIMIT_DATA)[1]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "cache")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (2 * 10**9, limit)),
    )
    assert done.returncode == 0, done.stderr
    count, transitions, kilobytes = map(int, done.stdout.split())
    assert count == 27_001 and transitions == 27_000
    assert kilobytes < 2_000_000

    import ersac_atari

    decoded = ersac_atari.load_frames(dataset, tmp_path / "cache")[0]
    jpeg = ersac_atari.decode(frames[3]).astype(int)
    assert np.abs(decoded[3].astype(int) - jpeg).max() < 16  # JPEG loses a little
    assert np.array_equal(decoded[3], decoded[3 + 41])
    flags = ("--total-updates", 2, "--batch-size", 4, "--hidden-dim", 8, "--clone-updates", 1, "--eval-episodes", 1)
    short = record_like_the_published_sets("other/pong/short-v0", 61, 2)
    assert len(short) == 41
    done = run("ersac_atari", "--dataset-id", "other/pong/short-v0", "--algo", "sac-n", *flags)
    assert done.code == 0 and load(done.folders[0]).result["normalized_return"] is None, done.err


# ----- a set of one's own, as the docs show it
def test_the_docs_ten_lines_make_a_data_set_that_trains(run, load, datasets):
    page = (ROOT / "docs" / "ersac_ensemble.md").read_text()
    (snippet,) = re.findall(r"```python\n(import gymnasium[^`]*create_dataset_from_buffers[^`]*)```", page)
    assert len(snippet.strip().splitlines()) <= 15
    with warnings.catch_warnings(action="ignore"):
        exec(snippet, {})
    (name,) = re.findall(r'create_dataset_from_buffers\("([^"]*)"', snippet)
    done = run("ersac_ensemble", "--dataset-id", name, *FEW)
    assert done.code == 0, done.err
    assert load(done.folders[0]).result["dataset_id"] == name


@pytest.mark.parametrize("script", BOTH)
def test_a_run_of_changed_data_is_not_resumed(run, datasets, script):
    """Whichever column changes, also where no statistic of the data is kept."""

    def store(column=None):
        episodes = chain_episodes(40, 0)
        if column in ("observations", "rewards"):
            episodes[0][column][0] = episodes[0][column][0] + 0.5
        if column == "actions":
            episodes[0][column][0] = (episodes[0][column][0] + 1) % 4
        if column == "terminations":
            episodes[0][column][-1] = not episodes[0][column][-1]
        if column == "fewer":
            episodes = episodes[:-1]
        buffers = [
            EpisodeBuffer(id=i, **{key: np.array(x) for key, x in episode.items()})
            for i, episode in enumerate(episodes)
        ]
        if "test/changing-v0" in minari.list_local_datasets():
            minari.delete_dataset("test/changing-v0")
        with warnings.catch_warnings(action="ignore"):
            minari.create_dataset_from_buffers("test/changing-v0", buffers, env=gym.make("test/Chain-v0"))

    store()
    plain = ("--dataset-id", "test/changing-v0", "--no-normalize-obs", "--return-scale", "None")
    done = run(script, *FEW, *plain)
    assert done.code == 0
    (folder,) = done.folders
    for column in ("observations", "actions", "rewards", "terminations", "fewer"):
        store(column)
        done = run(script, "--resume", folder)
        assert done.code == 1 and "has changed since" in done.err, column
    store()
    assert run(script, "--resume", folder).code == 0
