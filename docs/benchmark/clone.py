"""Behaviour cloning on the same data with the same network and evaluation: the bar that offline RL has to clear.

    python docs/benchmark/clone.py --env-id LunarLander-v3 --seed 100
    python docs/benchmark/clone.py --dataset-id ersac/pong/alternating-v0 --batch-size 32 --lr 3e-4 --eval-episodes 20

Maximum likelihood of the data's actions; the greedy policy of the last update is evaluated, as in the other scripts.
--sample-actions draws the actions instead. --top 0.5 clones only the better half of the episodes, by their return;
--return-temperature draws good episodes more often. Images are cloned with network and evaluation of ersac_atari.py.
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
from ersac_ensemble import Actor, entropy, evaluate, load_transitions, make_eval_env, open_dataset  # noqa: E402


@dataclass
class Args:
    exp_name: str = "clone"
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
    """any Minari data set with vectors or images and discrete actions, in place of the default"""
    top: float = 1.0
    """share of the episodes to clone, the best ones by their return"""
    return_temperature: float = 0.0
    """weigh transitions by exp(z / temperature), z their episode's standardised return; 0: all alike"""
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


def chosen(returns, lengths, args, generator):
    """Numbers of the transitions to draw from: of the episodes whose return reaches the quantile 1 - top, or as many
    as there are, drawn by the weight of their episode's return. [<= |D|]"""
    returns = np.asarray(returns, float)
    if args.return_temperature > 0:
        z = (returns - returns.mean()) / max(returns.std(), 1e-8)
        weight = torch.from_numpy(np.repeat(z / args.return_temperature, lengths)).softmax(0)
        return torch.multinomial(weight, len(weight), replacement=True, generator=generator)
    kept = returns >= np.quantile(returns, 1 - args.top)
    return torch.from_numpy(np.repeat(kept, lengths)).nonzero()[:, 0]


def clone(args, actor, look, action, returns, lengths):
    """Train the actor; look(index) gives the observations of transitions. Updates per second."""
    generator = torch.Generator().manual_seed(args.seed)
    numbers = chosen(returns, lengths, args, generator)
    optimizer = torch.optim.Adam(actor.parameters(), lr=args.lr, fused=True)
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
    rewards = [episode.rewards for episode in dataset.iterate_episodes()]
    actor = Actor(obs.shape[1], int(dataset.spec.action_space.n), args.hidden_dim or 128)
    env = make_eval_env(dataset)
    if env is None:
        sys.exit(f"{dataset.spec.dataset_id}: without an environment there is nothing to compare.")
    speed = clone(args, actor, obs.__getitem__, action, [r.sum() for r in rewards], [len(r) for r in rewards])
    policy = Sampled(actor, args.seed) if args.sample_actions else actor
    with torch.no_grad():
        scores = evaluate(policy, env, args.eval_episodes, 10**6 * (args.seed + 1) + 10**5, mean, std)
        log_pi = actor(obs[:10_000]).log_softmax(-1)
    return env, scores, log_pi, speed


def clone_pixels(args, dataset):
    """The same for images."""
    number, first, action, *_ = ersac_atari.load_steps(dataset, 0.99, 1)
    rewards = [episode["rewards"][:] for episode in ersac_atari.raw_episodes(dataset)]
    frames = ersac_atari.load_frames(dataset)
    some = torch.tensor(frames[:: len(frames) // 5000 + 1]).float()  # [<= 5000, 84, 84]
    mean = some.mean(0)
    std = (some - mean).square().mean().sqrt().clamp(min=1.0)
    A = int(dataset.spec.action_space.n)
    H = args.hidden_dim or 512
    actor = ersac_atari.PixelNetwork(torch.nn.Linear(H, A), H, A, mean, std)

    def look(index):
        return ersac_atari.stack(frames, number[index], first[index])  # [B, 4, 84, 84]

    speed = clone(args, actor, look, action, [r.sum() for r in rewards], [len(r) for r in rewards])
    env = ersac_atari.make_atari_env(dataset)
    if env is None:
        sys.exit(f"{dataset.spec.dataset_id}: without an environment there is nothing to compare.")
    policy = Sampled(actor, args.seed) if args.sample_actions else actor
    with torch.no_grad():
        first_seed = 10**6 * (args.seed + 1) + 10**5
        scores = ersac_atari.play(policy, env, args.eval_episodes, first_seed, args.eval_epsilon)
        log_pi = actor(look(torch.arange(0, len(action), len(action) // 1000 + 1))).log_softmax(-1)
    return env, scores, log_pi, speed


def finish(args, method, dataset, env, scores, speed, policy_entropy):
    """Write args.json and result.json like the training scripts, print the score. d3.py does the same."""
    low = dataset.storage.metadata.get("ref_min_score")
    high = dataset.storage.metadata.get("ref_max_score")
    normalized = None
    if low is not None and high is not None:
        normalized = 100 * (scores.mean() - low) / (high - low)
    result = {
        "script": os.path.basename(sys.argv[0]),
        "method": method,
        "env_id": env.spec.id,
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
        "policy_entropy": policy_entropy,
    }
    name = f"{os.path.basename(env.spec.id)}__{args.exp_name}__{args.seed}__{int(1000 * time.time())}"
    folder = os.path.join(args.output_dir, name)
    os.makedirs(folder)
    json.dump(asdict(args), open(f"{folder}/args.json", "w"), indent=2)
    json.dump(result, open(f"{folder}/result.json", "w"), indent=2)
    if args.track:
        import wandb

        group = f"{dataset.spec.dataset_id} {method}".replace(f"-s{args.seed}-", "-")  # averages over seeds
        wandb.init(project="ersac", name=name, id=name, group=group, config=asdict(args))
        wandb.run.summary.update(result)
        wandb.finish()
    score = "" if normalized is None else f", normalized return {normalized:.1f}"
    print(f"{method} on {dataset.spec.dataset_id}: return {scores.mean():.1f} over {len(scores)} episodes{score}")
    print(f"run folder: {folder}")


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if not 0 < args.top <= 1 or args.return_temperature < 0:
        sys.exit("--top must be above 0 and at most 1, --return-temperature at least 0.")
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    dataset = open_dataset(args)
    space = dataset.spec.observation_space
    images = isinstance(space, gym.spaces.Box) and len(space.shape) > 1
    env, scores, log_pi, speed = clone_pixels(args, dataset) if images else clone_vectors(args, dataset)
    method = "BC" if args.top == 1 else f"BC-top{100 * args.top:g}"
    method += "-weighted" if args.return_temperature > 0 else ""
    method += "-sampled" if args.sample_actions else ""
    finish(args, method, dataset, env, scores, speed, entropy(log_pi.exp(), log_pi).mean().item())
