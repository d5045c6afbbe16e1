"""The recorder of Pong and Breakout: the same seed gives the same arrays, mixtures hold the share they promise, and the
scripted policies play better than random ones."""

import runpy

import ale_py
import gymnasium as gym
import minari
import numpy as np
import pytest
from conftest import ROOT

SHORT = ("--steps", 80, "--max-episode-steps", 40, "--reference-episodes", 1)


@pytest.fixture
def record(run, monkeypatch, tmp_path):
    def call(name, *flags):
        monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / name))
        done = run("docs/benchmark/record_atari", *SHORT, *flags)
        assert done.code == 0, done.err
        monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / name))  # the script changes it
        return done.out

    return call


def arrays(dataset_id):
    episodes = minari.load_dataset(dataset_id).iterate_episodes()
    return [(e.observations, e.actions, e.rewards, e.terminations, e.truncations) for e in episodes]


@pytest.mark.parametrize("game", ["pong", "breakout"])
def test_the_same_seed_records_the_same_arrays(record, game):
    first = record("first", "--game", game, "--random-episodes", 0.5, "--seed", 3)
    one = arrays(f"ersac/{game}/mixed-v0")
    assert record("second", "--game", game, "--random-episodes", 0.5, "--seed", 3) == first
    two = arrays(f"ersac/{game}/mixed-v0")
    assert len(one) == len(two) == 2
    for a, b in zip(one, two):
        assert all(np.array_equal(x, y) for x, y in zip(a, b))
    record("third", "--game", game, "--random-episodes", 0.5, "--seed", 4)
    assert any(not np.array_equal(a[1], b[1]) for a, b in zip(one, arrays(f"ersac/{game}/mixed-v0")))


def test_a_mixture_has_the_share_it_promises(record):
    out = record("x", "--game", "breakout", "--random-episodes", 0.75, "--steps", 320)
    assert "320 steps, 8 episodes, 2 of them scripted" in out
    assert "ersac/breakout/mixed-v0" in out


def recorder(game, steps):
    """The recorder's function that plays an episode, and the game it plays, cut after so many steps."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gym.register_envs(ale_py)
    name = f"ALE/{game.capitalize()}-v5"
    env = gym.make(name, repeat_action_probability=0.0, frameskip=4, max_episode_steps=steps)
    return runpy.run_path(str(ROOT / "docs/benchmark/record_atari.py"))["episode"], env


@pytest.mark.parametrize("game, margin", [("pong", 3), ("breakout", 3)])
def test_the_script_plays_better_than_chance(game, margin):
    """400 steps of each: the scripted policy has collected clearly more."""
    episode, env = recorder(game, 400)
    rng = np.random.default_rng(0)
    scripted = np.mean([episode(env, game, rng, 0.0, 8)["rewards"].sum() for _ in range(2)])
    chance = np.mean([episode(env, game, rng, 1.0, 1)["rewards"].sum() for _ in range(2)])
    assert scripted > chance + margin


def test_in_breakout_the_commonest_action_without_a_ball_is_to_serve():
    """A greedy clone does what the data do most often; if that were a no-op, no ball would ever come into play."""
    episode, env = recorder("breakout", 100)
    rng = np.random.default_rng(0)
    counts = np.zeros(4, int)
    for _ in range(10):
        actions = episode(env, "breakout", rng, 0.2, 8)["actions"]
        env.reset()
        for action in actions:
            if env.unwrapped.ale.getRAM()[101] == 0:  # no ball in play
                counts[action] += 1
            env.step(int(action))
    assert counts.argmax() == 1 and counts.sum() >= 10
