"""Rivals on the same data with the same network size and evaluation: discrete CQL, BCQ and double DQN of d3rlpy.

    pip install --no-deps -r docs/benchmark/requirements-speed.txt
    python docs/benchmark/d3.py --algo cql --env-id LunarLander-v3 --seed 100

Rewards and observations are scaled as in the training scripts; the last policy is evaluated greedily.
"""

import math
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro

warnings.filterwarnings("ignore")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "benchmark")]
from clone import finish  # noqa: E402

from ersac_ensemble import evaluate, load_transitions, make_eval_env, open_dataset  # noqa: E402

RETURN_SCALE = 10.0  # as in the training scripts: root mean square of the data's discounted returns


@dataclass
class Args:
    exp_name: str = "d3"
    """name of this experiment, part of the run folder's name"""
    seed: int = 1
    """seed of network, minibatches and evaluation"""
    output_dir: str = "runs"
    """folder that receives the run folder"""
    track: bool = False
    """also log the result to Weights & Biases"""
    env_id: str = "LunarLander-v3"
    """environment of the default data set"""
    dataset_size: int = 100_000
    """transitions of the default data set"""
    dataset_seed: int = 1
    """which draw of the default data set: other episodes of the same policy"""
    expectile_tau: float = 0.5
    """risk level of the default data set's policy"""
    dataset_id: str | None = None
    """any Minari data set with vector observations and discrete actions, in place of the default"""
    algo: Literal["cql", "bcq", "ddqn"] = "cql"
    """conservative Q-learning, batch-constrained Q-learning, double DQN (no pessimism at all)"""
    alpha: float = 0.1
    """cql: weight of the penalty"""
    threshold: float = 0.3
    """bcq: b(a|s) / max b(.|s) of the cloned policy b from which on a may be taken"""
    target_interval: int = 1
    """updates between two updates of the target network"""
    polyak: float = 0.02
    """how far the target network then follows; 1 copies"""
    total_updates: int = 10_000
    """updates"""
    batch_size: int = 256
    """transitions in a minibatch"""
    hidden_dim: int = 128
    """width of the two hidden layers"""
    lr: float = 3e-4
    """Adam step size"""
    eval_episodes: int = 100
    """episodes of the final evaluation"""


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    try:
        import d3rlpy
        from d3rlpy.torch_utility import soft_sync
    except ImportError:
        sys.exit("d3rlpy is missing: pip install --no-deps -r docs/benchmark/requirements-speed.txt")
    torch.set_num_threads(1)
    d3rlpy.seed(args.seed)
    dataset = open_dataset(args)
    env = make_eval_env(dataset)
    if env is None:
        sys.exit(f"{dataset.spec.dataset_id}: without an environment there is nothing to compare.")

    # ----- data, scaled as in the training scripts
    obs, action, reward, _, terminated, returns = load_transitions(dataset, 0.99)
    mean = obs.mean(0)
    std = obs.std(0, correction=0).clamp(min=1e-3)
    seen = returns[returns.isfinite()]
    if len(seen) == 0:
        seen = reward / (1 - 0.99)
    ends = np.cumsum([len(episode.rewards) for episode in dataset.iterate_episodes()]) - 1
    timeouts = np.zeros(len(obs), np.float32)
    timeouts[ends] = 1 - terminated.numpy()[ends]
    A = int(dataset.spec.action_space.n)
    data = d3rlpy.dataset.MDPDataset(
        observations=((obs - mean) / std).numpy(),
        actions=action.numpy()[:, None],
        rewards=(reward * RETURN_SCALE / math.sqrt(seen.square().mean().item())).numpy()[:, None],
        terminals=terminated.numpy(),
        timeouts=timeouts,
        action_space=d3rlpy.constants.ActionSpace.DISCRETE,
        action_size=A,
    )

    # ----- training
    settings = {
        "batch_size": args.batch_size,
        "gamma": 0.99,
        "learning_rate": args.lr,
        "encoder_factory": d3rlpy.models.VectorEncoderFactory([args.hidden_dim, args.hidden_dim]),
        "target_update_interval": args.target_interval,
    }
    if args.algo == "cql":
        config = d3rlpy.algos.DiscreteCQLConfig(alpha=args.alpha, **settings)
    elif args.algo == "bcq":
        config = d3rlpy.algos.DiscreteBCQConfig(action_flexibility=args.threshold, **settings)
    else:
        config = d3rlpy.algos.DoubleDQNConfig(**settings)
    algo = config.create(device="cpu:0")
    algo.build_with_dataset(data)
    networks = algo.impl.modules

    def follow():
        soft_sync(networks.targ_q_funcs, networks.q_funcs, args.polyak)

    algo.impl.update_target = follow  # d3rlpy's own copies the network
    started = time.time()
    algo.fit(
        data,
        n_steps=args.total_updates,
        n_steps_per_epoch=args.total_updates,
        logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
        show_progress=False,
    )
    speed = args.total_updates / (time.time() - started)

    # ----- the last policy, greedy
    def policy(obs):
        """A one-hot vector of the action, where evaluate expects logits."""
        return torch.eye(A)[int(algo.predict(obs.numpy()[None])[0])]

    scores = evaluate(policy, env, args.eval_episodes, 10**6 * (args.seed + 1) + 10**5, mean, std)
    finish(args, args.algo.upper(), dataset, env, scores, speed, policy_entropy=0.0)
