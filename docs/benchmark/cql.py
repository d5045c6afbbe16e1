"""Discrete CQL of d3rlpy on the same data with the same network size and evaluation: an independent peer.

    pip install --no-deps -r docs/benchmark/requirements-speed.txt
    python docs/benchmark/cql.py --env-id LunarLander-v3 --seed 100

Rewards and observations are scaled as in the training scripts; the last policy is evaluated greedily.
"""

import json
import math
import os
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

warnings.filterwarnings("ignore")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from ersac_ensemble import (  # noqa: E402
    evaluate,
    find_dataset,
    load_transitions,
    make_eval_env,
    start_tracking,
    write_file,
)


@dataclass
class Args:
    exp_name: str = "cql"
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
    """any Minari data set with vector observations and discrete actions, in place of the default"""
    dataset_size: int = 100_000
    """transitions of the default data set"""
    dataset_seed: int = 1
    """which draw of the default data set: other episodes of the same policy"""
    expectile_tau: float = 0.5
    """risk level of the default data set's policy"""
    early_fraction: float = 0.0
    """share of the data from a policy stopped early in training (LunarLander, tau 0.5)"""
    total_updates: int = 10_000
    """updates"""
    batch_size: int = 256
    """transitions in a minibatch"""
    hidden_dim: int = 128
    """width of the two hidden layers"""
    lr: float = 3e-4
    """Adam step size"""
    alpha: float = 1.0
    """weight of CQL's penalty"""
    return_scale: float = 10.0
    """scale rewards so that the data's discounted returns have this root mean square"""
    eval_episodes: int = 100
    """episodes of the final evaluation"""


class Greedy:
    """d3rlpy's policy where evaluate expects logits: a one-hot vector of its action."""

    def __init__(self, algo, num_actions):
        self.algo = algo
        self.num_actions = num_actions

    def __call__(self, obs):
        action = self.algo.predict(obs.numpy()[None])[0]
        return torch.eye(self.num_actions)[int(action)]


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    try:
        import d3rlpy
    except ImportError:
        sys.exit("d3rlpy is missing: pip install --no-deps -r docs/benchmark/requirements-speed.txt")
    torch.set_num_threads(1)
    d3rlpy.seed(args.seed)
    dataset = find_dataset(args)
    obs, action, reward, _, terminated, returns = load_transitions(dataset, 0.99)
    mean = obs.mean(0)
    std = obs.std(0, correction=0).clamp(min=1e-3)
    seen = returns[returns.isfinite()]
    if len(seen) == 0:
        seen = reward / (1 - 0.99)
    reward = reward * args.return_scale / math.sqrt(seen.square().mean().item())
    ends = np.cumsum([len(episode.rewards) for episode in dataset.iterate_episodes()]) - 1
    timeouts = np.zeros(len(obs), np.float32)
    timeouts[ends] = 1 - terminated.numpy()[ends]
    A = int(dataset.spec.action_space.n)
    data = d3rlpy.dataset.MDPDataset(
        observations=((obs - mean) / std).numpy(),
        actions=action.numpy()[:, None],
        rewards=reward.numpy()[:, None],
        terminals=terminated.numpy(),
        timeouts=timeouts,
        action_space=d3rlpy.constants.ActionSpace.DISCRETE,
        action_size=A,
    )
    algo = d3rlpy.algos.DiscreteCQLConfig(
        batch_size=args.batch_size,
        gamma=0.99,
        learning_rate=args.lr,
        encoder_factory=d3rlpy.models.VectorEncoderFactory([args.hidden_dim, args.hidden_dim]),
        target_update_interval=1000,
        alpha=args.alpha,
    ).create(device="cpu:0")
    started = time.time()
    algo.fit(
        data,
        n_steps=args.total_updates,
        n_steps_per_epoch=args.total_updates,
        logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
        show_progress=False,
    )
    speed = args.total_updates / (time.time() - started)
    env = make_eval_env(dataset)
    if env is None:
        sys.exit(f"{dataset.spec.dataset_id}: without an environment there is nothing to compare.")
    args.env_id = env.spec.id
    policy = Greedy(algo, A)
    scores = evaluate(policy, env, args.eval_episodes, 10**6 * (args.seed + 1) + 10**5, mean, std)
    low = dataset.storage.metadata.get("ref_min_score")
    high = dataset.storage.metadata.get("ref_max_score")
    normalized = None
    if low is not None and high is not None:
        normalized = 100 * (scores.mean() - low) / (high - low)
    result = {
        "script": os.path.basename(__file__),
        "method": "CQL",
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
        "policy_entropy": 0.0,
    }
    name = f"{args.env_id.split('/')[-1]}__{args.exp_name}__{args.seed}__{int(1000 * time.time())}"
    folder = os.path.join(args.output_dir, name)
    write_file(folder, "args.json", json.dumps(asdict(args), indent=2).encode())
    write_file(folder, "result.json", json.dumps(result, indent=2).encode())
    track = start_tracking(args, name, result["dataset_id"], result["method"], result["script"])
    if track:
        track.summary.update(result)
        track.finish()
    print(f"CQL on {dataset.spec.dataset_id}: return {scores.mean():.1f}, normalized {normalized}")
    print(f"run folder: {folder}")
