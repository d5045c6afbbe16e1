"""Record a Minari data set of Pong or Breakout without any download: raw RGB frames, no sticky actions, frameskip 4.

    python docs/benchmark/record_atari.py --steps 60000
    python docs/benchmark/record_atari.py --game breakout --steps 60000 --random-episodes 0.5
    python docs/benchmark/record_atari.py --switch-prob 0.02 --random-share 0.1

The policy reads ALE's memory (paddle and ball) and steers the paddle to where the ball is or will be; for a share of
steps it plays a random action instead and holds it for a while. --random-episodes mixes in episodes of random play,
which cloning imitates as well. With --switch-prob it takes turns inside an episode with one that steers away from the
ball. Reference scores are the mean returns of random play (0 on the normalised scale) and of the policy alone (100).
Frames are stored without loss, compressed, so that evaluation sees what the data show.
"""

import os
import shutil
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import ale_py
import gymnasium as gym
import h5py
import minari
import numpy as np
import tyro
from minari.data_collector import EpisodeBuffer
from minari.storage.datasets_root_dir import get_dataset_path
from tqdm import tqdm


@dataclass
class Args:
    game: Literal["pong", "breakout"] = "pong"
    """the game"""
    dataset_id: str | None = None
    """name of the data set to make; None is ersac/GAME/scripted-v0, mixed-v0 with random episodes, alternating-v0"""
    steps: int = 60_000
    """transitions to record at least; the last episode is played to its end"""
    random_share: float = 0.2
    """share of steps with a uniformly random action"""
    random_episodes: float = 0.0
    """share of the episodes with random play"""
    switch_prob: float = 0.0
    """probability per step that it is drawn again who acts, the policy or the one that steers away; 0: no turns"""
    good_share: float = 0.5
    """share of the policy in these draws"""
    hold: int = 8
    """steps for which a random action is held, so that it shows in what follows"""
    seed: int = 0
    """seed of the policy's random actions and of the start of each episode"""
    max_episode_steps: int | None = None
    """cut episodes after so many steps, in the data and in the recovered environment; None plays to the end"""
    reference_episodes: int = 20
    """episodes of random play behind the lower reference score; with turns, of the policy behind the upper one"""
    overwrite: bool = False
    """replace a data set of this name"""


def breakout_action(ram):
    """Serve (1), right (2), left (3) or stay (0): keep the paddle under the ball. Numbers found by trying."""
    paddle, ball, height = (int(x) for x in (ram[72], ram[99], ram[101]))
    if height == 0:  # no ball in play
        return 1
    error = ball - 4 - paddle
    return 0 if abs(error) <= 3 else 2 if error > 0 else 3


def pong_action(ram, before, aim):
    """Up (2), down (3) or stay (0): steer the paddle to where the ball will be, from two moments of ALE's memory.
    aim shifts the point of the paddle that meets the ball, which sends it back steeply; numbers found by trying."""
    paddle, ball, old_paddle, old_ball = (int(x) for x in (ram[51], ram[54], before[51], before[54]))  # heights
    ball_speed = ball - old_ball if abs(ball - old_ball) <= 30 else 0  # a jump is a new ball
    paddle_speed = paddle - old_paddle if abs(paddle - old_paddle) <= 60 else 0
    error = ball + ball_speed - 5 + aim - paddle - 0.5 * paddle_speed
    return 0 if abs(error) <= 3 else 3 if error > 0 else 2


def episode(env, game, rng, random_share, hold, switch=0.0, share=1.0):
    """One episode of the policy, as EpisodeBuffer wants it. It begins with 0 to 30 no-ops; in Breakout with random
    actions, because a clone of no-ops at the start would never serve. In turns with one that steers away: serves, but
    moves up for down, left for right, and never waits for the ball."""
    obs, _ = env.reset(seed=int(rng.integers(2**31)))
    record = {name: [] for name in ("observations", "actions", "rewards", "terminations", "truncations")}
    record["observations"].append(obs)
    wait, aim, held, good, done = int(rng.integers(31)), 5, 0, switch == 0 or rng.random() < share, False
    begin = random_share / (hold * (1 - random_share) + random_share)  # chance that a random action begins
    before = ram = env.unwrapped.ale.getRAM()
    while not done:
        if game == "pong" and ram[49] < before[49]:  # the ball flies away: choose how to meet it next time
            aim = int(rng.choice((-5, 5)))
        if held == 0 and rng.random() < begin:
            held, random_action = hold, int(rng.integers(env.action_space.n))
        action = breakout_action(ram) if game == "breakout" else pong_action(ram, before, aim)
        if switch > 0 and rng.random() < switch:
            good = rng.random() < share
        if not good:
            action = {0: 2, 2: 3, 3: 2}.get(action, action)
        action = random_action if held > 0 else action
        held = max(held - 1, 0)
        if wait > 0:
            action = int(rng.integers(env.action_space.n)) if game == "breakout" else 0
        wait -= 1
        obs, reward, terminated, truncated, _ = env.step(action)
        before, ram, done = ram, env.unwrapped.ale.getRAM(), terminated or truncated
        for name, value in zip(record, (obs, action, reward, terminated, truncated)):
            record[name].append(value)
    return {name: np.array(values) for name, values in record.items()}


def compress(path):
    """Rewrite Minari's file with compressed frames: Minari itself stores them raw or with JPEG's loss."""
    with h5py.File(path, "r") as source, h5py.File(f"{path}.packed", "w", track_order=True) as packed:
        for name, group in source.items():
            copy = packed.create_group(name)
            copy.attrs.update(group.attrs)
            for key in group:
                if key != "observations":
                    source.copy(group[key], copy)
            frames = group["observations"][()]
            packing = {"chunks": (8, *frames.shape[1:]), "compression": "gzip", "compression_opts": 1}
            copy.create_dataset("observations", data=frames, **packing)
    os.replace(f"{path}.packed", path)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if min(args.steps, args.hold, args.reference_episodes, args.max_episode_steps or 1) < 1 or args.seed < 0:
        sys.exit("--steps, --hold, --reference-episodes, --max-episode-steps must be at least 1, --seed at least 0.")
    if not (0 <= args.random_share <= 1 and 0 <= args.random_episodes < 1):
        sys.exit("--random-share: at least 0 and at most 1; --random-episodes: at least 0 and below 1.")
    if not (0 <= args.switch_prob <= 1 and 0 < args.good_share < 1) or (args.switch_prob and args.random_episodes):
        sys.exit("--switch-prob: 0 to 1, and not beside --random-episodes; --good-share: between 0 and 1.")
    if args.dataset_id is None:
        kind = "mixed" if args.random_episodes > 0 else "alternating" if args.switch_prob > 0 else "scripted"
        args.dataset_id = f"ersac/{args.game}/{kind}-v0"
    if args.dataset_id in minari.list_local_datasets() and not args.overwrite:
        sys.exit(f"--dataset-id {args.dataset_id} exists; choose another or give --overwrite.")
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gym.register_envs(ale_py)
    limit = {"max_episode_steps": args.max_episode_steps} if args.max_episode_steps else {}
    env = gym.make(f"ALE/{args.game.capitalize()}-v5", repeat_action_probability=0.0, frameskip=4, **limit)
    rng = np.random.default_rng(args.seed)
    games = tqdm(range(args.reference_episodes), "random play", unit="episode")
    random_returns = [episode(env, args.game, rng, 1.0, 1)["rewards"].sum() for _ in games]
    noise, turns = (args.random_share, args.hold), (args.switch_prob, args.good_share)
    alone = tqdm(range(args.reference_episodes if args.switch_prob > 0 else 0), "policy alone", unit="episode")
    best_returns = [episode(env, args.game, rng, *noise)["rewards"].sum() for _ in alone]

    # written episode by episode into a folder of its own, moved to its place when it is complete
    final = Path(get_dataset_path(args.dataset_id))
    os.makedirs(final.parent, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".recording-", dir=get_dataset_path()) as work:
        os.environ["MINARI_DATASETS_PATH"] = work
        steps, played, dataset = 0, 0, None
        returns = []  # of the scripted episodes
        bar = tqdm(total=args.steps, desc="recording", unit="step")
        while steps < args.steps or not returns:
            scripted = played - len(returns) >= args.random_episodes * (played + 1)  # random ones so far: enough?
            record = episode(env, args.game, rng, *noise, *turns) if scripted else episode(env, args.game, rng, 1.0, 1)
            if scripted:
                returns.append(float(record["rewards"].sum()))
            buffer = [EpisodeBuffer(id=played, **record)]
            if dataset is None:
                with warnings.catch_warnings(action="ignore"):
                    about = {"algorithm_name": " ".join(sys.argv), "jpeg_encoding": False}
                    dataset = minari.create_dataset_from_buffers(args.dataset_id, buffer, env=env, **about)
            else:
                dataset.update_dataset_from_buffer(buffer)
            played += 1
            steps += len(record["rewards"])
            bar.update(len(record["rewards"]))
        bar.close()
        low, high = float(np.mean(random_returns)), float(np.mean(best_returns or returns))
        if high > low:  # else there is no scale
            dataset.storage.update_metadata({"ref_min_score": low, "ref_max_score": high})
        compress(dataset.storage.data_path / "main_data.hdf5")
        dataset.storage.update_metadata({"dataset_size": dataset.storage.get_size()})
        if final.exists():
            shutil.rmtree(final)
        os.replace(get_dataset_path(args.dataset_id), final)
    count = f"{steps} steps, {played} episodes, {len(returns)} of them scripted"
    print(
        f"{args.dataset_id}: {count} with mean return {np.mean(returns):.1f}; random play {low:.1f}, 100 is {high:.1f}"
    )
