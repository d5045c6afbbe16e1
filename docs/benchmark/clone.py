"""Behaviour cloning on the same data with the same network and evaluation: the bar that offline RL has to clear.

    python docs/benchmark/clone.py --env-id LunarLander-v3 --seed 100

Maximum likelihood of the data's actions; the greedy policy of the last update is evaluated, as in the other scripts.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from tqdm import trange

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from ersac_ensemble import Actor, evaluate, find_dataset, load_transitions, make_eval_env, write_file  # noqa: E402


@dataclass
class Args:
    exp_name: str = "clone"
    """name of this experiment, part of the run folder's name"""
    seed: int = 1
    """seed of network, minibatches and evaluation"""
    output_dir: str = "runs"
    """folder that receives the run folder"""
    env_id: str = "LunarLander-v3"
    """environment whose default data set is used, unless --dataset-id names another one"""
    dataset_id: str | None = None
    """any Minari data set with vector observations and discrete actions; None is ersac/{env}/tau{NN}-{size}-v0"""
    dataset_size: int = 100_000
    """transitions of the default data set"""
    expectile_tau: float = 0.5
    """risk level of the default data set's behaviour policy"""
    total_updates: int = 8000
    """updates"""
    batch_size: int = 256
    """transitions in a minibatch"""
    hidden_dim: int = 128
    """width of the two hidden layers"""
    lr: float = 1e-3
    """Adam step size, falling linearly to 0"""
    eval_episodes: int = 100
    """episodes of the final evaluation"""


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    dataset = find_dataset(args)
    obs, action, *_ = load_transitions(dataset, 0.99)
    mean, std = obs.mean(0), obs.std(0, correction=0).clamp(min=1e-3)
    obs = (obs - mean) / std
    actor = Actor(obs.shape[1], int(dataset.spec.action_space.n), args.hidden_dim)
    optimizer = torch.optim.Adam(actor.parameters(), lr=args.lr, fused=True)
    started = time.time()
    for update in trange(args.total_updates, desc="cloning", mininterval=1):
        optimizer.param_groups[0]["lr"] = args.lr * (1 - update / args.total_updates)
        index = torch.randint(len(obs), (args.batch_size,), generator=generator)
        loss = F.cross_entropy(actor(obs[index]), action[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    speed = args.total_updates / (time.time() - started)
    env = make_eval_env(dataset, None if args.dataset_id else args.env_id)
    scores = evaluate(actor, env, args.eval_episodes, 10**6 * (args.seed + 1) + 10**5, mean, std)
    low, high = (dataset.storage.metadata.get(f"ref_{x}_score") for x in ("min", "max"))
    log_pi = actor(obs[:10_000]).log_softmax(-1).detach()
    result = {"script": "clone.py", "method": "BC", "env_id": args.env_id, "dataset_id": dataset.spec.dataset_id}
    result |= {"seed": args.seed, "updates": args.total_updates, "updates_per_second": speed}
    result |= {"eval_episodes": args.eval_episodes, "eval_return_mean": scores.mean(), "eval_return_std": scores.std()}
    result |= {"random_return": low, "reference_return": high}
    known = low is not None and high is not None
    result |= {"normalized_return": 100 * (scores.mean() - low) / (high - low) if known else None}
    result |= {"policy_entropy": -(log_pi.exp() * log_pi).sum(-1).mean().item()}
    name = f"{args.env_id.split('/')[-1]}__{args.exp_name}__{args.seed}__{int(time.time())}"
    folder = os.path.join(args.output_dir, name)
    os.makedirs(folder)
    write_file(folder, "result.json", json.dumps(result, indent=2).encode())
    print(f"BC on {dataset.spec.dataset_id}: return {scores.mean():.1f}, normalized {result['normalized_return']}")
    print(f"run folder: {folder}")
