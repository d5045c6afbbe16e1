"""Behaviour cloning on the same data with the same network and evaluation: the bar that offline RL has to clear.

    python docs/benchmark/clone.py --env-id LunarLander-v3 --seed 100
    python docs/benchmark/clone.py --dataset-id ersac/pong/scripted-v0 --batch-size 32 --lr 3e-4 --eval-episodes 20

Maximum likelihood of the data's actions; the greedy policy of the last update is evaluated, as in the other scripts.
--sample-actions draws the actions instead. --top 0.5 clones only the better half of the episodes, by their return. Data
sets of images are cloned with the network and the evaluation of ersac_atari.py, all others with those of
ersac_ensemble.py.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from tqdm import trange

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import ersac_atari  # noqa: E402
from ersac_ensemble import (  # noqa: E402
    Actor,
    entropy,
    evaluate,
    find_dataset,
    load_transitions,
    make_eval_env,
    start_tracking,
    write_file,
)


@dataclass
class Args:
    exp_name: str = "clone"
    """name of this experiment, part of the run folder's name"""
    seed: int = 1
    """seed of network, minibatches and evaluation"""
    output_dir: str = "runs"
    """folder that receives the run folder"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "ersac"
    """W&B project"""
    wandb_entity: str | None = None
    """W&B user or team; None is your default one"""
    env_id: str = "LunarLander-v3"
    """environment of the default data set"""
    dataset_id: str | None = None
    """any Minari data set with vectors or images and discrete actions, in place of the default"""
    dataset_size: int = 100_000
    """transitions of the default data set"""
    dataset_seed: int = 1
    """which draw of the default data set: other episodes of the same policy"""
    expectile_tau: float = 0.5
    """risk level of the default data set's policy"""
    early_fraction: float = 0.0
    """share of the data from a policy stopped early in training (LunarLander, tau 0.5)"""
    top: float = 1.0
    """share of the episodes to clone, the best ones by their return"""
    sample_actions: bool = False
    """evaluate the policy by drawing its actions, as whoever collected the data did"""
    total_updates: int = 8000
    """updates"""
    batch_size: int = 256
    """transitions in a minibatch"""
    hidden_dim: int | None = None
    """width of the hidden layers; None is 128, for images 512"""
    lr: float = 1e-3
    """Adam step size, falling linearly to 0"""
    eval_episodes: int = 100
    """episodes of the final evaluation"""
    eval_epsilon: float = 0.0
    """images: probability of a random action in evaluation"""


class Sampled:
    """A policy whose greedy action is a draw: Gumbel noise on the logits."""

    def __init__(self, actor, seed):
        self.actor = actor
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, obs):
        logits = self.actor(obs)
        return logits - torch.empty_like(logits).exponential_(generator=self.generator).log()


def best_episodes(returns, lengths, top):
    """Which transitions belong to episodes whose return reaches the quantile 1 - top. Bool [|D|]"""
    kept = np.asarray(returns) >= np.quantile(returns, 1 - top)
    return torch.from_numpy(np.repeat(kept, lengths))


def clone(args, actor, look, action, kept):
    """Train the actor; look(index) gives the observations of transitions. Updates per second."""
    generator = torch.Generator().manual_seed(args.seed)
    optimizer = torch.optim.Adam(actor.parameters(), lr=args.lr, fused=True)
    numbers = kept.nonzero()[:, 0]
    started = time.time()
    for update in trange(args.total_updates, desc="cloning", mininterval=1):
        optimizer.param_groups[0]["lr"] = args.lr * (1 - update / args.total_updates)
        index = numbers[torch.randint(len(numbers), (args.batch_size,), generator=generator)]
        loss = F.cross_entropy(actor(look(index)), action[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return args.total_updates / (time.time() - started)


def clone_vectors(args, dataset):
    """Environment, returns [episodes], log pi at some states and the speed."""
    obs, action, *_ = load_transitions(dataset, 0.99)
    mean = obs.mean(0)
    std = obs.std(0, correction=0).clamp(min=1e-3)
    obs = (obs - mean) / std
    episodes = list(dataset.iterate_episodes())
    returns = [episode.rewards.sum() for episode in episodes]
    kept = best_episodes(returns, [len(episode.rewards) for episode in episodes], args.top)
    actor = Actor(obs.shape[1], int(dataset.spec.action_space.n), args.hidden_dim or 128)
    speed = clone(args, actor, obs.__getitem__, action, kept)
    env = make_eval_env(dataset)
    if env is None:
        sys.exit(f"{dataset.spec.dataset_id}: without an environment there is nothing to compare.")
    policy = Sampled(actor, args.seed) if args.sample_actions else actor
    scores = evaluate(policy, env, args.eval_episodes, 10**6 * (args.seed + 1) + 10**5, mean, std)
    with torch.no_grad():
        log_pi = actor(obs[:10_000]).log_softmax(-1)
    return env, scores, log_pi, speed


def clone_pixels(args, dataset):
    """The same for images."""
    number, first, action, *_ = ersac_atari.load_steps(dataset, 0.99, 1)
    rewards = [episode["rewards"][:] for episode in ersac_atari.raw_episodes(dataset)]
    kept = best_episodes([r.sum() for r in rewards], [len(r) for r in rewards], args.top)
    frames = ersac_atari.load_frames(dataset)
    some = torch.tensor(frames[:: len(frames) // 5000 + 1]).float()  # [<= 5000, 84, 84]
    mean = some.mean(0)
    std = (some - mean).square().mean().sqrt().clamp(min=1.0)
    A = int(dataset.spec.action_space.n)
    H = args.hidden_dim or 512
    actor = ersac_atari.PixelNetwork(torch.nn.Linear(H, A), H, A, mean, std)

    def look(index):
        return ersac_atari.stack(frames, number[index], first[index])  # [B, 4, 84, 84]

    speed = clone(args, actor, look, action, kept)
    env = ersac_atari.make_atari_env(dataset)
    policy = Sampled(actor, args.seed) if args.sample_actions else actor
    first_seed = 10**6 * (args.seed + 1) + 10**5
    scores = ersac_atari.play(policy, env, args.eval_episodes, first_seed, args.eval_epsilon)
    with torch.no_grad():
        log_pi = actor(look(torch.arange(0, len(action), len(action) // 1000 + 1))).log_softmax(-1)
    return env, scores, log_pi, speed


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if not 0 < args.top <= 1:
        sys.exit(f"--top {args.top}: it must be above 0 and at most 1.")
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    dataset = find_dataset(args)
    space = dataset.spec.observation_space
    images = isinstance(space, gym.spaces.Box) and len(space.shape) > 1
    env, scores, log_pi, speed = clone_pixels(args, dataset) if images else clone_vectors(args, dataset)
    args.env_id = env.spec.id
    low = dataset.storage.metadata.get("ref_min_score")
    high = dataset.storage.metadata.get("ref_max_score")
    normalized = None
    if low is not None and high is not None:
        normalized = 100 * (scores.mean() - low) / (high - low)
    method = "BC" if args.top == 1 else f"BC-top{100 * args.top:g}"
    if args.sample_actions:
        method += "-sampled"
    result = {
        "script": os.path.basename(__file__),
        "method": method,
        "env_id": args.env_id,
        "dataset_id": dataset.spec.dataset_id,
        "seed": args.seed,
        "updates": args.total_updates,
        "updates_per_second": speed,
        "eval_episodes": args.eval_episodes,
        "eval_return_mean": scores.mean(),
        "eval_return_std": scores.std(),
        "eval_returns": scores.tolist(),
        "random_return": low,
        "reference_return": high,
        "normalized_return": normalized,
        "policy_entropy": entropy(log_pi.exp(), log_pi).mean().item(),
    }
    name = f"{args.env_id.split('/')[-1]}__{args.exp_name}__{args.seed}__{int(1000 * time.time())}"
    folder = os.path.join(args.output_dir, name)
    write_file(folder, "args.json", json.dumps(asdict(args), indent=2).encode())
    write_file(folder, "result.json", json.dumps(result, indent=2).encode())
    track = start_tracking(args, name, result["dataset_id"], result["method"], result["script"])
    if track:
        track.summary.update(result)
        track.finish()
    print(f"{result['method']} on {dataset.spec.dataset_id}: return {scores.mean():.1f}, normalized {normalized}")
    print(f"run folder: {folder}")
