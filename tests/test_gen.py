"""Protects the data: that gen_expectile_data.py trains, measures, collects and stores what its page says, and refuses
what it cannot do. The training is done once more in float64, with loops where the script has tables."""

import csv
import resource
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import minari
import numpy as np
import pytest
import torch
from scipy import stats

import gen_expectile_data as gen
from gen_expectile_data import Args, network

POLICIES = Path(__file__).resolve().parents[1] / "docs" / "policies"
MINE = ("--policy-dir", "mine", "--dataset-id", "my/data-v0", "--floor", -1e9)
TINY = ("--start-steps", 1, "--finish-steps", 1, "--eval-episodes", 2)


def make(env_id):
    return gym.make(env_id, disable_env_checker=True)


@pytest.fixture(autouse=True)
def datasets(monkeypatch, tmp_path):
    """Minari's folder of this test."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


def arrays(dataset_id):
    """Every array of a data set, episode by episode."""
    columns = ("observations", "actions", "rewards", "terminations", "truncations")
    episodes = minari.load_dataset(dataset_id).iterate_episodes()
    return [[getattr(episode, name) for name in columns] for episode in episodes]


def same(first, second):
    pairs = [(a, b) for e, f in zip(first, second, strict=True) for a, b in zip(e, f, strict=True)]
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


def settings(**changes):
    """Arguments of a training, all of them away from their defaults; two rollouts of the start and of a tau."""
    usual = {"seed": 3, "policy_lr": 1e-3, "gamma": 0.9, "reward_scale": 0.1, "advantage_floor": 1.4, "epsilon": 0.3}
    return SimpleNamespace(**usual | {"num_resamples": 3, "start_steps": 8000, "finish_steps": 8000} | changes)


def flags_of(s):
    return [word for name, value in vars(s).items() for word in (f"--{name.replace('_', '-')}", value)]


def load_policy(*path):
    return torch.load(Path(*path) / "policy.pt", weights_only=True)


def executed_probs(A, epsilon):
    """p[a][b]: the action a is chosen, b is executed."""
    return [[(1 - epsilon) * (a == b) + epsilon / A for b in range(A)] for a in range(A)]


# ----- the training once more, in float64: nothing of the script is used in what is called plain
def forward(net, x):
    """Two hidden layers of ReLUs, from a state dict."""
    for layer in (0, 2):
        x = torch.relu(x @ net[f"{layer}.weight"].T + net[f"{layer}.bias"])
    return x @ net["4.weight"].T + net["4.bias"]


def in_float64(net):
    return {name: x.detach().double().clone().requires_grad_() for name, x in net.items()}


def fresh_network(D, out, head_gain):
    """Orthogonal weights, drawn in single precision, and biases of 0."""
    layers = [torch.nn.Linear(*pair) for pair in ((D, 128), (128, 128), (128, out))]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, head_gain)):
        torch.nn.init.orthogonal_(layer.weight, gain)
        torch.nn.init.zeros_(layer.bias)
    return in_float64({f"{2 * i}.{k}": x for i, layer in enumerate(layers) for k, x in layer.state_dict().items()})


def pick(x, index):
    return x.gather(-1, index[..., None])[..., 0]


def plain_expectile(x, p, tau):
    """Of the means in which the k lowest outcomes weigh tau and the others 1 - tau, k = 0, 1, ..., the expectile is the
    lowest where it is risk-averse, the highest where it is risk-seeking."""
    order = x.argsort(-1)
    x, p = x.gather(-1, order), p.expand_as(x).gather(-1, order)
    means = []
    for k in range(x.shape[-1]):
        weight = p * torch.tensor([tau] * k + [1 - tau] * (x.shape[-1] - k), dtype=torch.float64)
        means.append((weight * x).sum(-1) / weight.sum(-1))
    return torch.stack(means).amin(0) if tau > 0.5 else torch.stack(means).amax(0)


def plain_weight(value, e, x, p, tau):
    """The weight of one outcome in the expectile e of x, divided by its probability."""
    side = torch.where(value < e - 1e-12, tau, 1 - tau).double()
    return side / (p * torch.where(x < e[..., None] - 1e-12, tau, 1 - tau).double()).sum(-1)


def plain_values(obs, actor, critic, tau, s, resampled):
    """Of states: the values of executed actions, of chosen ones, and of the policy."""
    out, pi = forward(critic, obs), forward(actor, obs).softmax(-1)
    A = pi.shape[-1]
    if tau is None:
        return out[..., :1].expand(pi.shape), out[..., :1].expand(pi.shape), out[..., 0]
    w = torch.stack([out[..., 0] + out[..., 1 + b] for b in range(A)], -1)
    p = torch.tensor(executed_probs(A, s.epsilon), dtype=torch.float64)
    q = w if resampled else torch.stack([plain_expectile(w, p[a], tau) for a in range(A)], -1)
    return w, q, (pi * q).sum(-1)


@torch.no_grad()
def plain_targets(roll, outcomes, actor, critic, tau, s):
    """The critic's targets and the advantages, backwards in time."""
    tensor = {key: torch.from_numpy(x) for key, x in roll.items() if key != "states"}
    a, b, terminated = tensor["chosen"], tensor["executed"], tensor["terminated"]
    w, q, v = plain_values(tensor["obs"].double(), actor, critic, tau, s, outcomes is not None)
    rho = torch.ones_like(v)
    if outcomes is not None:
        next_obs, reward, ended = map(torch.from_numpy, outcomes)
        v_next = plain_values(next_obs.double(), actor, critic, tau, s, True)[2]
        z = s.reward_scale * reward + s.gamma * torch.where(ended, 0.0, v_next)  # [T, E, N]
        p = torch.full(z.shape[-1:], 1 / z.shape[-1], dtype=torch.float64)
        happened = plain_expectile(z, p, tau)
        rho = plain_weight(z[..., 0], happened, z, p, tau)
    else:
        v_next = plain_values(tensor["next_obs"].double(), actor, critic, tau, s, False)[2]
        happened = s.reward_scale * tensor["reward"] + s.gamma * torch.where(terminated, 0.0, v_next)
        if tau is not None:
            p = torch.tensor(executed_probs(w.shape[-1], s.epsilon), dtype=torch.float64)
            rho = plain_weight(pick(w, b), pick(q, a), w, p[a], tau)
    guess = pick(q, a) if outcomes is not None else pick(w, b)
    G = torch.zeros_like(v)
    for t in reversed(range(len(G))):
        G[t] = happened[t] - guess[t]
        if t + 1 < len(G):
            cut = rho[t] if outcomes is not None else rho[t + 1]
            over = terminated[t] | tensor["truncated"][t]
            G[t] += torch.where(over, 0.0, 0.97 * s.gamma * cut.clamp(max=1) * G[t + 1])
    return guess + G, pick(q, a) - v + (G if outcomes is not None else rho * G)


def plain_update(roll, outcomes, actor, critic, adam, tau, train_actor, generator, s):
    """Four passes over a rollout in minibatches of 512. Returns the losses, and how often each limit mattered."""
    obs, a, b = (torch.from_numpy(roll[key]).flatten(0, 1) for key in ("obs", "chosen", "executed"))
    obs, parameters = obs.double(), [*actor.values(), *critic.values()]
    old_log_pi = pick(forward(actor, obs).log_softmax(-1), a).detach()
    logged, clips = [], []
    for _ in range(4):
        target, advantage = (x.flatten() for x in plain_targets(roll, outcomes, actor, critic, tau, s))
        order = torch.randperm(len(obs), generator=generator)
        for start in range(0, len(obs), 512):
            i = order[start : start + 512]
            log_pi = forward(actor, obs[i]).log_softmax(-1)
            x_free = (pick(log_pi, a[i]) - old_log_pi[i]).exp()
            centred = advantage[i] - advantage[i].sum() / len(i)
            spread = (centred.square().sum() / len(i)).sqrt()
            adv = centred / torch.clamp(spread, min=s.advantage_floor or 1e-30)
            x = torch.where(adv > 0, x_free.clamp(max=1.2), x_free.clamp(min=0.8))
            actor_loss = -(x * adv).sum() / len(i)
            entropy = -(log_pi.exp() * log_pi).sum() / len(i)
            out = forward(critic, obs[i])
            value = out[:, 0]
            if tau is not None:
                value = value + pick(out[:, 1:], b[i] if outcomes is None else a[i])
            critic_loss = (value - target[i]).square().sum() / len(i)
            loss = 0.5 * critic_loss
            if train_actor:
                loss = loss + actor_loss - (0.01 if tau is None else 0.005) * entropy
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients)]
            norm = sum(g.square().sum() for g in gradients).sqrt().item()
            for p, g in zip(parameters, gradients):
                p.grad = g * min(1, 0.5 / (norm + 1e-6))
            adam.step()
            logged.append([critic_loss.item(), actor_loss.item(), entropy.item()])
            clips.append((norm > 0.5, (x != x_free).any().item(), (spread < s.advantage_floor).item()))
    return np.mean(logged, 0), np.mean(clips, 0)


@torch.no_grad()
def plain_rollout(envs, obs, totals, actor, epsilon, generator):
    """256 steps of all environments from where they are, and the returns of the episodes that ended meanwhile."""
    columns = ("obs", "chosen", "executed", "next_obs", "reward", "terminated", "truncated")
    roll, ended = {key: [] for key in (*columns, "states")}, []
    for _ in range(256):
        now = np.array(obs)
        pi = forward(actor, torch.from_numpy(now).double()).softmax(-1).float()
        chosen = torch.multinomial(pi, 1, generator=generator).flatten().tolist()
        random_action = torch.randint(pi.shape[1], (len(envs),), generator=generator).tolist()
        noisy = (torch.rand(len(envs), generator=generator) < epsilon).tolist()
        executed = [random_action[e] if noisy[e] else chosen[e] for e in range(len(envs))]
        roll["states"].append([np.array(getattr(env.unwrapped, "state", 0.0)) for env in envs])
        results = [env.step(action)[:4] for env, action in zip(envs, executed)]
        for e, (obs[e], reward, terminated, truncated) in enumerate(results):
            totals[e] += reward
            if terminated or truncated:
                ended.append(totals[e])
                seed = torch.randint(2**31, (1,), generator=generator).item()
                obs[e], totals[e] = envs[e].reset(seed=seed)[0], 0.0
        for key, value in zip(columns, (now, chosen, executed, *zip(*results))):
            roll[key].append(value)
    return {key: np.array(roll[key]) for key in columns} | {"states": roll["states"]}, ended


def plain_resample(env_id, roll, number, epsilon, rng):
    """What happened and number - 1 more outcomes of the same states and chosen actions, for classic control."""
    env = make(env_id).unwrapped
    env.reset(seed=0)
    columns = [np.repeat(roll[key][:, :, None], number, 2) for key in ("next_obs", "reward", "terminated")]
    T, E = roll["chosen"].shape
    for e in range(E):
        for t in range(T):
            for n in range(1, number):
                noisy = rng.random() < epsilon
                action = int(rng.integers(env.action_space.n)) if noisy else int(roll["chosen"][t, e])
                env.state, env.steps_beyond_terminated = roll["states"][t][e], None
                for column, value in zip(columns, env.step(action)):
                    column[t, e, n] = value
    return columns


def plain_training(env_id, tau, s, start=None, resampled=False):
    """A training: a row of metrics for each rollout, actor and critic, and how often the limits mattered. A tau begins
    where the neutral start ended, and its first eight rollouts leave the actor alone."""
    env = make(env_id)
    D, A = env.observation_space.shape[0], int(env.action_space.n)
    torch.manual_seed(s.seed)
    actor, critic = fresh_network(D, A, 0.01), fresh_network(D, 1 + A, 1.0)
    critic["4.weight"].data[1:] = 0.0
    epsilon, lr, steps = 0.0, s.policy_lr, s.start_steps
    if tau is not None:
        actor, critic = map(in_float64, start)
        epsilon, lr, steps = s.epsilon, s.policy_lr / 2, s.finish_steps
    adam = torch.optim.Adam([*actor.values(), *critic.values()], lr, eps=1e-5)
    generator = torch.Generator().manual_seed(s.seed)
    envs, ended, rows, clips = [make(env_id) for _ in range(16)], [], [], []
    seeds = [torch.randint(2**31, (1,), generator=generator).item() for _ in envs]
    obs, totals = [env.reset(seed=seed)[0] for env, seed in zip(envs, seeds)], [0.0] * 16
    rollouts = -(-steps // 4096)  # rounded up
    for i in range(rollouts):
        roll, new = plain_rollout(envs, obs, totals, actor, epsilon, generator)
        outcomes = None
        if resampled and tau is not None:
            rng = np.random.default_rng([s.seed, 3, i])
            outcomes = plain_resample(env_id, roll, s.num_resamples, epsilon, rng)
        adam.param_groups[0]["lr"] = lr * (rollouts - i) / rollouts
        train_actor = tau is None or i >= 8
        metrics, clipped = plain_update(roll, outcomes, actor, critic, adam, tau, train_actor, generator, s)
        ended = (ended + new)[-100:]
        rows.append([4096 * (i + 1), np.mean(ended), *metrics])
        clips.append(clipped)
    return rows, actor, critic, np.mean(clips, 0)


def plain_episode(env, net, rng, epsilon=0.0, greedy=False, limit=10**9, turns=None):
    """An episode of a policy, or of the random one, or of two that take turns. A step draws who acts, a random action,
    whether it is replaced, by which. Returns the seed, the columns of a data set, and where the early policy acted."""
    seed = int(rng.integers(2**31))
    observations, steps, early = [env.reset(seed=seed)[0]], [], []
    while not steps or not (steps[-1][2] or steps[-1][3]):
        acting = net
        if turns is not None:
            other, share, switch = turns
            draw = not early or rng.random() < switch
            early.append(rng.random() < share if draw else early[-1])
            acting = other if early[-1] else net
        action = int(rng.integers(env.action_space.n))
        if acting is not None and rng.random() >= epsilon:
            pi = forward(acting, torch.from_numpy(observations[-1]).double()).softmax(-1).tolist()
            action = pi.index(max(pi))
            if not greedy:
                u, action = rng.random(), 0
                while action + 1 < len(pi) and sum(pi[: action + 1]) < u:
                    action += 1
        obs, reward, terminated, truncated, _ = env.step(action)
        observations.append(obs)
        steps.append((action, float(reward), terminated, truncated or (len(steps) + 1 == limit and not terminated)))
    return seed, [np.array(observations), *map(np.array, zip(*steps))], early


def plain_score(env_id, net, episodes, seed):
    """Mean return of greedy episodes, or of random ones."""
    env, rng = make(env_id), np.random.default_rng(seed)
    return np.mean([plain_episode(env, net, rng, greedy=True)[1][2].sum() for _ in range(episodes)])


def plain_collection(env_id, net, size, epsilon, seed, turns=None):
    """The episodes of a data set, the last one cut."""
    env, rng, episodes = make(env_id), np.random.default_rng([seed, 0]), []
    while size > 0:
        episodes.append(plain_episode(env, net, rng, epsilon, limit=size, turns=turns))
        size -= len(episodes[-1][1][1])
    return episodes


# ----- the script's training, measurement and collection are the plain ones
def agree(got, expected):
    """Single precision against float64. Rounding makes 1e-6, until a transition falls on the other side of an expectile
    or of a clip: which ones do depends on the processor. So one weight in a thousand may be further away, by less than
    two steps of Adam."""
    assert got.keys() == expected.keys()
    for name in expected:
        x, y = (z[name].detach().double() for z in (got, expected))
        far = (x - y).abs() > 2e-4 + 2e-3 * y.abs()
        assert far.double().mean() <= 1e-3 and (x - y).abs().max() < 1e-3, name


def check_training(folder, s, rows, actor, critic):
    """The rows of a training in metrics.csv, and the policy."""
    with open(folder / "metrics.csv") as f:
        header, *lines = csv.reader(f)
    assert header == list(gen.METRICS) and len(lines) == len(rows)
    np.testing.assert_allclose(np.array(lines, float), rows, rtol=1e-3, atol=1e-5)
    policy = load_policy(folder)
    agree(policy["actor"], actor)
    agree(policy["critic"], critic)
    assert vars(s).items() <= policy["args"].items()
    return policy


def test_the_script_trains_measures_and_collects_like_the_plain_training(run, tmp_path):
    """From the arguments to the data set: start, reference, a risk-seeking policy, on an environment with four actions
    and both ways to end."""
    s, env_id, tau = settings(finish_steps=1), "test/Chain-v0", 0.1
    flags = ("--env-id", env_id, "--expectile-tau", tau, "--dataset-size", 333, *MINE, *flags_of(s))
    done = run("gen_expectile_data", *flags, "--dataset-seed", 8, "--eval-episodes", 7)
    assert done.code == 0, done.err
    start, scores = None, {}
    for level, name in ((None, "start"), (0.5, "tau50"), (tau, "tau10")):
        rows, actor, critic, clips = plain_training(env_id, level, s, start)
        start = start or (actor, critic)
        policy = check_training(tmp_path / "mine" / f"test/chain-v0-{name}", s, rows, actor, critic)
        if level is None:  # each limit must matter in some steps and not in others
            assert (clips > 0).all() and (clips < 1).all(), clips
        net = in_float64(policy["actor"])
        scores[level] = [plain_score(env_id, net, 7, [3, 4, len(rows) - 1]), plain_score(env_id, None, 7, [3, 1])]
        assert [policy["greedy_return"], policy["random_return"]] == pytest.approx(scores[level])

    episodes = plain_collection(env_id, net, 333, s.epsilon, 8)
    assert same([columns for _, columns, _ in episodes], arrays("my/data-v0"))
    storage = minari.load_dataset("my/data-v0").storage
    stored = storage.get_episode_metadata(range(len(episodes)))
    assert [episode["seed"] for episode in stored] == [seed for seed, *_ in episodes]
    about = storage.metadata
    assert [about["ref_max_score"], about["ref_min_score"]] == pytest.approx(scores[0.5])
    assert "--dataset-seed 8" in about["description"] and f"{policy['args']}" in about["description"]
    mean = np.mean([columns[2].sum() for _, columns, _ in episodes])
    assert f"my/data-v0: 333 transitions, {len(episodes)} episodes, mean return {mean:.1f}" in done.out


def test_a_tau_trains_its_critic_first_and_its_actor_from_the_ninth_rollout(run, tmp_path):
    """A risk-averse policy from a given start, with resampled outcomes."""
    s, env_id = settings(finish_steps=9 * 4096, num_resamples=2, policy_lr=5e-4, advantage_floor=0.0), "CartPole-v1"
    torch.manual_seed(5)
    start = fresh_network(4, 2, 0.1), fresh_network(4, 3, 1.0)
    for level in ("start", "tau50"):
        policy = {"args": {"estimator": "resample", **vars(s)}, "random_return": -5.0, "greedy_return": 7.0}
        (tmp_path / f"mine/cartpole-{level}").mkdir(parents=True)
        for net, weights in zip(("actor", "critic"), start):
            policy[net] = {name: x.detach().float() for name, x in weights.items()}
        torch.save(policy, tmp_path / f"mine/cartpole-{level}/policy.pt")
    flags = ("--env-id", env_id, "--expectile-tau", 0.8, "--dataset-size", 60, *MINE, *flags_of(s))
    done = run("gen_expectile_data", *flags, "--estimator", "resample", "--eval-episodes", 2)
    assert done.code == 0, done.err
    rows, actor, critic, _ = plain_training(env_id, 0.8, s, start, resampled=True)
    policy = check_training(tmp_path / "mine/cartpole-tau80", s, rows, actor, critic)
    assert max((x - start[0][name]).abs().max() for name, x in policy["actor"].items()) > 1e-4


# ----- the expectile target, against scipy and plain loops
def test_risk_weights_agree_with_scipy():
    rng = np.random.default_rng(0)
    for _ in range(300):
        A, tau, epsilon = rng.integers(2, 7), rng.uniform(0.02, 0.98), rng.uniform(0.01, 1)
        w, p = rng.normal(size=(3, A)), np.array(executed_probs(A, epsilon))
        q, rho = gen.risk_weights(w[:, None, :], p, tau)  # [3, A], [3, A, A]
        for i, a in np.ndindex(3, A):
            assert q[i, a] == pytest.approx(stats.expectile(w[i], alpha=1 - tau, weights=p[a]), abs=1e-9)
        assert (p * rho).sum(-1) == pytest.approx(1) and (p * rho * w[:, None]).sum(-1) == pytest.approx(q, abs=1e-9)


@pytest.mark.parametrize("tau", [None, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("resampled", [False, True])
def test_targets_and_advantages_of_made_up_numbers(tau, resampled):
    rng, T, E, D, A, N = np.random.default_rng(2), 60, 3, 4, 3, 5
    torch.manual_seed(0)
    actor, critic, s = network(D, A, 1.0), network(D, 1 + A, 1.0), settings()
    roll = {name: rng.normal(size=(T, E, D)) for name in ("obs", "next_obs")} | {"reward": rng.normal(size=(T, E))}
    roll |= {name: rng.integers(A, size=(T, E)) for name in ("chosen", "executed")}
    roll |= {name: rng.random((T, E)) < 0.1 for name in ("terminated", "truncated")}
    outcomes = None
    if resampled and tau is not None:
        outcomes = [rng.normal(size=(T, E, N, D)), rng.normal(size=(T, E, N)), rng.random((T, E, N)) < 0.1]
    got = gen.targets_and_advantages(roll, outcomes, actor, critic, tau, s)
    expected = plain_targets(roll, outcomes, in_float64(actor.state_dict()), in_float64(critic.state_dict()), tau, s)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y.numpy(), rtol=1e-4, atol=1e-5)


# ----- restored states
@pytest.mark.parametrize("env_id", ["CartPole-v1", "MountainCar-v0", "Acrobot-v1"])
def test_outcomes_start_from_restored_states(env_id):
    """Without noise these environments have no randomness: all outcomes are what happened."""
    env = make(env_id)
    obs, _ = env.reset(seed=1)
    actor = fresh_network(len(obs), int(env.action_space.n), 1.0)
    roll, _ = plain_rollout([env], [obs], [0.0], actor, 0.0, torch.Generator().manual_seed(0))
    outcomes = gen.resample(make(env_id), roll, roll["states"], 3, 0.0, np.random.default_rng(4))
    for name, outcome in zip(("next_obs", "reward", "terminated"), outcomes, strict=True):
        assert outcome.shape[:3] == (256, 1, 3)
        assert all(np.array_equal(outcome[:, :, n], roll[name]) for n in range(3))


# ----- collection and data sets
@pytest.mark.parametrize("env_id, name", [("CartPole-v1", "cartpole"), ("LunarLander-v3", "lunarlander")])
def test_data_set_of_a_committed_policy(run, env_id, name):
    """Collected once more in float64; the recovered environment and the scores are there."""
    arguments = ("--env-id", env_id, "--expectile-tau", 0.9, "--dataset-size", 1000, "--dataset-seed", 4)
    done = run("gen_expectile_data", *arguments)
    assert done.code == 0, done.err
    dataset = minari.load_dataset(f"ersac/{name}/tau90-1k-s4-v0")
    expected = plain_collection(env_id, in_float64(load_policy(POLICIES, f"{name}-tau90")["actor"]), 1000, 0.1, 4)
    assert same([columns for _, columns, _ in expected], arrays(dataset.spec.dataset_id))
    assert dataset.recover_environment().spec.id == env_id
    reference = load_policy(POLICIES, f"{name}-tau50")
    ends = np.array([reference["random_return"], reference["greedy_return"]])
    assert minari.get_normalized_score(dataset, ends) == pytest.approx([0, 1])


NAMES = [
    ({"env_id": "LunarLander-v3", "expectile_tau": 0.9, "dataset_size": 10_000}, "ersac/lunarlander/tau90-10k-v0"),
    ({"early_fraction": 0.5, "dataset_seed": 101}, "ersac/lunarlander/tau50-early50-100k-s101-v0"),
    ({"early_fraction": 0.8, "switch_prob": 0.1}, "ersac/lunarlander/tau50-early80-switch10-100k-v0"),
    ({"early_fraction": 0.05, "dataset_size": 1500}, "ersac/lunarlander/tau50-early05-1500-v0"),
    ({"epsilon": 0.5}, "ersac/lunarlander/tau50-eps50-100k-v0"),
    ({"env_id": "CartPole-v0"}, "ersac/cartpole-v0/tau50-100k-v0"),
    ({"env_id": "test/Chain-v0", "expectile_tau": 0.125}, "ersac/test/chain-v0/tau12p5-100k-v0"),
]


@pytest.mark.parametrize("arguments, name", NAMES)
def test_names_of_data_sets(arguments, name):
    assert gen.dataset_name(Args(**arguments)) == name


def test_a_mixture_ends_with_the_episodes_of_the_early_policy(run):
    """First the neutral policy's episodes, then the early one's, each as they would be collected alone."""
    assert run("gen_expectile_data", "--dataset-size", 600, "--early-fraction", 0.3, "--dataset-seed", 5).code == 0
    expected = []
    for place, count in ((POLICIES, 420), (POLICIES / "early", 180)):
        net = in_float64(load_policy(place, "lunarlander-tau50")["actor"])
        expected += plain_collection("LunarLander-v3", net, count, 0.1, 5)
    assert same([columns for _, columns, _ in expected], arrays("ersac/lunarlander/tau50-early30-600-s5-v0"))


def test_two_policies_take_turns(run):
    """As collected by a plain loop; and in the stored infos the early policy has its share of the steps, and who acts
    is drawn again at the given rate: then it is the other one with the other one's share."""
    share, switch = 0.8, 0.1
    flags = ("--dataset-size", 12_000, "--early-fraction", share, "--switch-prob", switch)
    assert run("gen_expectile_data", *flags).code == 0
    dataset = minari.load_dataset("ersac/lunarlander/tau50-early80-switch10-12k-v0")
    nets = [in_float64(load_policy(p, "lunarlander-tau50")["actor"]) for p in (POLICIES, POLICIES / "early")]
    turns = (nets[1], share, switch)
    expected = plain_collection("LunarLander-v3", nets[0], 700, 0.1, 1, turns)[:-1]
    episodes, stored = list(dataset.iterate_episodes()), arrays(dataset.spec.dataset_id)
    early = [np.asarray(episode.infos["early"]) for episode in episodes]
    assert dataset.total_steps == 12_000 and len(expected) > 0
    for i, (_, columns, acted) in enumerate(expected):
        assert same([columns], [stored[i]]) and early[i].tolist() == acted
    # the share varies from draw to draw: about switch * steps draws are independent
    error = np.sqrt(share * (1 - share) / (switch * 12_000))
    assert np.concatenate(early).mean() == pytest.approx(share, abs=4 * error)
    pairs = np.array([[x[t], x[t + 1]] for x in early for t in range(len(x) - 1)])
    for now, other in ((True, 1 - share), (False, share)):
        changed = pairs[pairs[:, 0] == now, 1] != now
        rate = switch * other
        assert changed.mean() == pytest.approx(rate, abs=4 * np.sqrt(rate / len(changed)))


def test_a_data_set_appears_whole_or_not_at_all(run, monkeypatch, datasets):
    """It is built out of sight, and whatever goes wrong there ends in one line and leaves nothing: a Ctrl-C, a disk
    without room (here a limit on the size of a file)."""
    create, seen = minari.create_dataset_from_buffers, []

    def watched(*arguments, **more):
        create(*arguments, **more)
        seen.append((datasets / "ersac").exists())
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(minari, "create_dataset_from_buffers", watched)
    flags = ("--env-id", "CartPole-v1", "--dataset-size", 300)
    assert run("gen_expectile_data", *flags).code == 0 and seen == [False]
    again = run("gen_expectile_data", *flags)
    assert again.code == 0 and "left alone" in again.out and seen == [False]
    named = run("gen_expectile_data", *flags, "--dataset-id", "ersac/cartpole/tau50-300-v0")
    assert named.code == 1 and "left alone" in named.out
    (datasets / "ersac" / "group-v1").mkdir()
    above = run("gen_expectile_data", "--dataset-id", "ersac/group-v1", "--overwrite")
    assert above.code == 1 and "folder of other data sets" in above.err
    (datasets / "ersac" / "group-v1").rmdir()
    stopped = run("gen_expectile_data", *flags, "--dataset-seed", 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        full = run("gen_expectile_data", *flags, "--dataset-seed", 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for done, why in ((stopped, "KeyboardInterrupt"), (full, "OSError")):
        (last,) = [line for line in done.err.splitlines() if line and "collection" not in line]
        assert done.code == 1 and last.startswith(why) and last.endswith("no data set was stored.")
    assert len(seen) == 2 and [*minari.list_local_datasets()] == ["ersac/cartpole/tau50-300-v0"]
    assert [path.name for path in datasets.iterdir()] == ["ersac"]


# ----- policies
def policy_files(folder):
    return {path.parent.name: path.read_bytes() for path in folder.glob("**/policy.pt")}


def test_policies_are_trained_once_kept_and_retrained_to_the_same_bits(run, tmp_path):
    flags = ("--env-id", "CartPole-v1", "--expectile-tau", 0.9, "--dataset-size", 100, *MINE, *TINY)
    first = run("gen_expectile_data", *flags)
    assert first.code == 0 and "rollouts of 4096 steps" in first.out, first.err
    before, stored = policy_files(tmp_path / "mine"), arrays("my/data-v0")
    assert set(before) == {"cartpole-start", "cartpole-tau50", "cartpole-tau90"}
    again = run("gen_expectile_data", *flags, "--overwrite")
    assert again.code == 0 and "rollouts" not in again.out and same(stored, arrays("my/data-v0"))
    third = run("gen_expectile_data", *flags, "--overwrite", "--retrain")
    assert third.code == 0 and same(stored, arrays("my/data-v0"))
    assert policy_files(tmp_path / "mine") == before == policy_files(third.folders[0])


def test_a_policy_below_the_floor_is_not_kept(run, tmp_path, datasets):
    """Without --floor that is Gymnasium's threshold. The message says what may help."""
    flags = ("--env-id", "MountainCar-v0", "--policy-dir", "mine", "--dataset-id", "my/car-v0", *TINY)
    done = run("gen_expectile_data", *flags)
    last = done.err.splitlines()[-1]
    assert done.code == 1 and "the floor is -110" in done.out and "--floor" in last and "data of your own" in last
    assert policy_files(tmp_path / "mine") == {} and minari.list_local_datasets() == {}
    assert (tmp_path / "mine/mountaincar-v0-start/metrics.csv").exists()


BAD = """
--expectile-tau nan | expectile-tau
--epsilon 1.5 | epsilon
--early-fraction -0.1 | early-fraction
--switch-prob 0.1 | two to take turns
--dataset-size 0 | dataset-size
--env-id NoSuchThing-v0 | NoSuchThing
--env-id Pendulum-v1 | Discrete
--env-id LunarLander-v3 --estimator resample --dataset-id my/data-v0 | cannot be restored
--seed 2 | other policies
--seed 2 --dataset-id my/data-v0 | another seed
--env-id CartPole-v1 --gamma 0.9 --dataset-id my/data-v0 | another gamma
--epsilon 0.5 | another epsilon
--early-fraction 0.5 --env-id CartPole-v1 | early
--dataset-id x/y-v0 | no name
--dataset-id= | no name
--policy-dir damaged --env-id CartPole-v1 | damaged
--policy-dir /proc/nowhere --env-id Acrobot-v1 | /proc/nowhere
"""


@pytest.mark.parametrize("line", BAD.strip().splitlines())
def test_bad_input_ends_in_one_clear_line(run, tmp_path, datasets, line):
    arguments, named = line.split(" | ")
    for level in ("start", "tau50"):
        (tmp_path / f"damaged/cartpole-{level}").mkdir(parents=True)
        (tmp_path / f"damaged/cartpole-{level}/policy.pt").write_bytes(b"not a policy")
    done = run("gen_expectile_data", *arguments.split())
    assert done.code in (1, 2) and named in done.err and "Traceback" not in done.err
    assert done.code == 2 or len(done.err.strip().splitlines()) == 1
    assert done.folders == [] and not list(datasets.glob("**/*.hdf5"))


# ----- the claims
@pytest.mark.parametrize("name, floor", [("cartpole", 475), ("lunarlander", 220)])
def test_committed_policies_are_above_their_floor(name, floor):
    for level in ("start", "tau10", "tau50", "tau90"):
        policy = load_policy(POLICIES, f"{name}-{level}")
        assert policy["greedy_return"] >= floor and policy["args"]["seed"] == 1
        assert (POLICIES / f"{name}-{level}/metrics.csv").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "env_id, name, seconds", [("CartPole-v1", "cartpole", 150), ("LunarLander-v3", "lunarlander", 400)]
)
def test_training_takes_minutes_and_gives_the_committed_policy(run, env_id, name, seconds):
    """What takes so long is processor time; the last digits depend on the machine."""
    started = time.process_time()
    done = run("gen_expectile_data", "--env-id", env_id, "--retrain", "--dataset-size", 1000)
    assert done.code == 0 and time.process_time() - started < seconds
    committed = load_policy(POLICIES, f"{name}-tau50")
    assert load_policy(done.folders[0], f"{name}-tau50")["greedy_return"] >= committed["greedy_return"] - 40
