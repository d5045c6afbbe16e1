"""Protects the recorder of Pong and Breakout: the same seed gives the same arrays, mixtures hold the share they
promise, and the scripted policies play better than random ones."""

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


def test_the_same_seed_records_the_same_arrays_and_a_mixture_has_its_share(record):
    recorded = []
    for name, seed in (("first", 3), ("second", 3), ("third", 4)):
        out = record(name, "--game", "breakout", "--random-episodes", 0.75, "--steps", 160, "--seed", seed)
        assert "160 steps, 4 episodes, 1 of them scripted" in out and "ersac/breakout/mixed-v0" in out
        episodes = minari.load_dataset("ersac/breakout/mixed-v0").iterate_episodes()
        recorded.append([(e.observations, e.actions, e.rewards, e.terminations, e.truncations) for e in episodes])
    first, second, third = recorded
    assert all(np.array_equal(x, y) for a, b in zip(first, second, strict=True) for x, y in zip(a, b))
    assert any(not np.array_equal(a[1], b[1]) for a, b in zip(first, third))


@pytest.mark.parametrize("game", ["pong", "breakout"])
def test_the_script_plays_better_than_chance(game):
    """400 steps of each: the scripted policy has collected clearly more."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gym.register_envs(ale_py)
    env = gym.make(f"ALE/{game.capitalize()}-v5", repeat_action_probability=0.0, frameskip=4, max_episode_steps=400)
    episode = runpy.run_path(str(ROOT / "docs/benchmark/record_atari.py"))["episode"]
    rng = np.random.default_rng(0)
    scripted = np.mean([episode(env, game, rng, 0.0, 8)["rewards"].sum() for _ in range(2)])
    chance = np.mean([episode(env, game, rng, 1.0, 1)["rewards"].sum() for _ in range(2)])
    away = np.mean([episode(env, game, rng, 0.0, 8, 1e-9, 0.0)["rewards"].sum() for _ in range(2)])
    turns = np.mean([episode(env, game, rng, 0.0, 8, 0.02, 0.5)["rewards"].sum() for _ in range(2)])
    assert scripted > chance + 3 and scripted > turns > away, (scripted, chance, turns, away)
