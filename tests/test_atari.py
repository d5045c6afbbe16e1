"""ersac_atari.py: frames and stacks bit for bit, baselines by hand, one update in plain code, all seven end to end."""

import copy
import math
import os
import signal
import warnings
from collections import deque
from dataclasses import replace

import ale_py
import gymnasium as gym
import minari
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from minari.data_collector import EpisodeBuffer
from scipy import stats

import ersac_atari
from ersac_atari import (
    METHODS,
    EnsembleHeads,
    EpinetHeads,
    PixelNetwork,
    bcq_filter,
    brac_kl,
    cql_penalty,
    decode,
    expectile_loss,
    load_frames,
    make_atari_env,
    n_step,
    play,
    stack,
    worst_case_box,
    worst_case_ellipsoid,
    worst_case_gaussian,
    worst_case_hull,
)

DATA = ("--dataset-id", "test/pong-v0")
SHORT = ("--total-updates", 6, "--eval-interval", 3, "--checkpoint-interval", 2, "--eval-episodes", 2)
T = 24  # steps of an episode
SMALL = (*DATA, *SHORT, "--hidden-dim", 16, "--batch-size", 4, "--num-critics", 5, "--index-dim", 3)
SMALL += ("--clone-updates", 3, "--critic-warmup", 1)


def pong(steps=T):
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gym.register_envs(ale_py)
    return gym.make("ALE/Pong-v5", repeat_action_probability=0.0, frameskip=4, max_episode_steps=steps)


def pong_episodes(count, seed):
    """Episodes of T random steps, cut by the time limit; the last one is declared a termination."""
    env, rng, buffers = pong(), np.random.default_rng(seed), []
    for i in range(count):
        obs, _ = env.reset(seed=i)
        frames, actions, rewards = [obs], rng.integers(6, size=T), []
        for action in actions:
            obs, reward, *_ = env.step(action)
            frames.append(obs)
            rewards.append(reward)
        rewards[20] = 3.0  # to be clipped for learning
        end, last = np.arange(T) == T - 1, i == count - 1
        ends = {"terminations": end & last, "truncations": end & (not last)}
        columns = {"observations": np.array(frames), "actions": actions, "rewards": np.array(rewards)}
        buffers.append(EpisodeBuffer(id=i, **columns, **ends))
    return env, buffers


def store(name, buffers, env, **extra):
    with warnings.catch_warnings(action="ignore"):
        return minari.create_dataset_from_buffers(name, buffers, env=env, jpeg_encoding=False, **extra)


@pytest.fixture(scope="module")
def games(datasets):
    """test/pong-v0: three episodes of T steps, with reference scores; the two others must be refused."""
    if "test/pong-v0" not in minari.list_local_datasets():  # another module may have made them
        env, buffers = pong_episodes(3, 0)
        store("test/pong-v0", buffers, env, ref_min_score=-21.0, ref_max_score=1.0)
        broken = replace(buffers[0], rewards=np.full(T, np.nan))
        store("test/pong-nan-v0", [broken], env)
        store("test/pong-ragged-v0", [replace(buffer, id=0) for buffer in buffers[:2]], env)
    return datasets


# ----- frames
def test_decoding_is_luma_and_box_averaging(games):
    frame = minari.load_dataset("test/pong-v0")[0].observations[T]
    grey = frame @ np.array([0.299, 0.587, 0.114])  # ITU-R 601

    def inside(size):  # each of 84 output pixels averages the input pixels whose centres lie in it
        cells = np.ceil((np.arange(size) + 0.5) * 84 / size - 1e-9).astype(int) - 1  # on the border: to the first
        return (cells == np.arange(84)[:, None]) / np.bincount(cells)[:, None]

    ours = decode(frame)
    assert ours.shape == (84, 84) and ours.dtype == np.uint8 and len(np.unique(ours)) > 3
    assert np.abs(ours - inside(210) @ grey @ inside(160).T).max() < 2


def test_stacks_are_those_of_frame_stack_observation_in_the_recovered_environment(games, tmp_path):
    dataset = minari.load_dataset("test/pong-v0")
    frames, frame, first, action, *_ = load_frames(dataset, str(tmp_path))
    env, at = make_atari_env(dataset), 0
    assert isinstance(env, gym.wrappers.FrameStackObservation) and env.observation_space.shape == (4, 84, 84)
    for number, episode in enumerate(dataset.iterate_episodes()):
        obs, _ = env.reset(seed=number)
        now, after = (stack(frames, frame[at : at + T] + k, first[at : at + T]).numpy() for k in (0, 1))
        for t in range(T):
            assert np.array_equal(obs, now[t]), t
            obs, reward, _, truncated, _ = env.step(int(episode.actions[t]))
            assert np.array_equal(obs, after[t]), t
        assert truncated and at == T * number
        at += T


def test_stacks_never_cross_an_episodes_start(games, tmp_path):
    dataset = minari.load_dataset("test/pong-v0")
    frames, frame, first, *_ = load_frames(dataset, str(tmp_path))
    assert frames.shape == (3 * T + 3, 84, 84) and frames.dtype == np.uint8 and len(frame) == 3 * T
    expected = []
    for episode in dataset.iterate_episodes():
        seen = deque([episode.observations[0]] * 4, maxlen=4)
        for t in range(T):
            expected.append(np.stack([decode(x) for x in seen]))
            seen.append(episode.observations[t + 1])
    assert np.array_equal(stack(frames, frame, first).numpy(), np.stack(expected))


def test_transitions(games, tmp_path):
    dataset = minari.load_dataset("test/pong-v0")
    _, frame, first, action, reward, terminated = load_frames(dataset, str(tmp_path))
    assert np.array_equal(action, np.concatenate([e.actions for e in dataset.iterate_episodes()]))
    assert np.array_equal(reward, np.concatenate([e.rewards for e in dataset.iterate_episodes()]).astype(np.float32))
    assert reward.max() == 3 and terminated.nonzero()[:, 0].tolist() == [
        3 * T - 1
    ]  # raw here; truncations do not count


@pytest.mark.parametrize("n", [1, 3, 100])
def test_n_step_rewards_stay_within_their_episode(n):
    first = torch.tensor([0, 0, 0, 0, 5, 5, 8])  # episodes of 4, 2 and 1 steps
    reward = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    terminated = torch.tensor([0.0, 0, 0, 1, 0, 0, 1])  # the second one was cut
    total, discount, steps, ended = n_step(first, reward, terminated, 0.5, n)
    for start, end in ((0, 4), (4, 6), (6, 7)):
        for t in range(start, end):
            taken = list(range(t, min(t + n, end)))
            assert total[t].item() == pytest.approx(sum(0.5 ** (k - t) * reward[k].item() for k in taken))
            assert steps[t] == len(taken) and ended[t] == terminated[taken[-1]] and discount[t] == 0.5 ** len(taken)


def test_frames_are_decoded_once_and_again_when_the_data_change(games, tmp_path, monkeypatch):
    env, buffers = pong_episodes(2, 7)
    dataset, calls = store("test/growing-v0", buffers[:1], env), []
    original = ersac_atari.decode
    monkeypatch.setattr(ersac_atari, "decode", lambda x: calls.append(1) or original(x))
    frames = load_frames(dataset, str(tmp_path))[0]
    assert len(calls) == T + 1 and isinstance(frames, np.memmap) and not frames.flags.writeable
    assert len(load_frames(minari.load_dataset("test/growing-v0"), str(tmp_path))[2]) == T and len(calls) == T + 1
    dataset.update_dataset_from_buffer(buffers[1:])
    assert (
        len(load_frames(minari.load_dataset("test/growing-v0"), str(tmp_path))[2]) == 2 * T and len(calls) == 3 * T + 3
    )

    def fail(frame):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ersac_atari, "decode", fail)
    with pytest.raises(SystemExit, match="No space left"):
        load_frames(dataset, str(tmp_path / "full"))
    assert list((tmp_path / "full").iterdir()) == []  # nothing half-written


# ----- the baselines by hand
def test_cql_penalty_by_hand():
    q = torch.tensor([[[0.0, math.log(3.0)], [1.0, 1.0]], [[2.0, 2.0], [math.log(2.0), math.log(6.0)]]])  # [2, 2, 2]
    ours = cql_penalty(q, torch.tensor([0, 1]))
    # log(1 + 3) - 0; log(2e) - 1; log(2e^2) - 2; log(2 + 6) - log 6
    expected = [[math.log(4), math.log(2)], [math.log(2), math.log(4 / 3)]]
    assert ours.numpy() == pytest.approx(np.array(expected), rel=1e-6)


def test_expectile_loss_by_hand_and_against_scipy():
    assert expectile_loss(torch.tensor([2.0, -2.0, 0.5, 0.0]), 0.7).tolist() == pytest.approx([2.8, 1.2, 0.175, 0.0])
    x, v = np.random.default_rng(0).normal(size=200), torch.zeros((), dtype=torch.float64, requires_grad=True)
    for _ in range(500):  # the minimiser is the expectile
        (slope,) = torch.autograd.grad(expectile_loss(torch.tensor(x) - v, 0.7).mean(), v)
        v.data -= 0.5 * slope
    assert v.item() == pytest.approx(stats.expectile(x, alpha=0.7), abs=1e-6)


def test_bcq_filter_by_hand():
    b = torch.tensor([[0.5, 0.3, 0.2], [0.7, 0.2, 0.1], [1.0, 0.0, 0.0], [0.25, 0.25, 0.5]])
    allowed = bcq_filter(b.log(), 0.3)
    # ratios: 1, 0.6, 0.4; 1, 0.29, 0.14; 1, 0, 0; 0.5, 0.5, 1
    assert allowed.tolist() == [[True] * 3, [True, False, False], [True, False, False], [True] * 3]
    assert bcq_filter(b.log(), 0.999).sum(-1).tolist() == [1, 1, 1, 1]


def test_brac_kl_against_scipy():
    pi, b = torch.tensor([[0.2, 0.8, 0.0], [1.0, 0.0, 0.0]]), torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]])
    expected = [stats.entropy(p, q) for p, q in zip(pi.numpy(), b.numpy())]
    assert brac_kl(pi, pi.log(), b.log()).numpy() == pytest.approx(expected, rel=1e-5)
    assert brac_kl(b, b.log(), b.log()).numpy() == pytest.approx([0, 0], abs=1e-6)


def test_filtered_actions_have_no_probability_and_no_gradient():
    actor, log_b = torch.randn(5, 4, requires_grad=True), torch.randn(5, 4).mul(3).log_softmax(-1)
    allowed = bcq_filter(log_b, 0.3)
    log_pi = actor.masked_fill(~allowed, -1e9).log_softmax(-1)
    loss = (-(log_pi.exp() * torch.randn(5, 4)).sum(-1) + brac_kl(log_pi.exp(), log_pi, log_b)).mean()
    (gradient,) = torch.autograd.grad(loss, actor)
    assert (log_pi.exp()[~allowed] == 0).all() and (gradient[~allowed] == 0).all() and gradient.isfinite().all()
    assert not allowed.all() and torch.allclose(log_pi.exp().sum(-1), torch.ones(5))


# ----- the sets with all of Atari's 18 actions
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_worst_cases_with_18_actions(dtype):
    rng, A, N = np.random.default_rng(0), 18, 100
    q = (rng.normal(size=(N, 4, A)) @ rng.normal(size=(A, A))).astype(np.float64)
    pi = rng.dirichlet(np.full(A, 0.3), size=4)
    pi[3] = np.eye(A)[5]  # a deterministic policy
    t = lambda x: torch.tensor(x, dtype=dtype)  # noqa: E731
    sigma = rng.normal(size=(4, A, 7))
    hull, ours = worst_case_hull(t(q), t(pi)), worst_case_ellipsoid(t(q), t(pi), 0.9)
    gauss, rel = worst_case_gaussian(t(q[0]), t(sigma), t(pi), 2.5), 1e-3 if dtype == torch.float32 else 1e-8
    for b in range(4):
        assert worst_case_box(t(q), t(pi))[b].numpy() == pytest.approx(q[:, b].min(0), rel=1e-6)
        assert hull[b].numpy() == pytest.approx(q[np.argmin(q[:, b] @ pi[b]), b], rel=1e-6)
        mu, cov = q[:, b].mean(0), np.cov(q[:, b].T, bias=True)
        distances = np.einsum("na,ac,nc->n", q[:, b] - mu, np.linalg.inv(cov), q[:, b] - mu)
        expected = mu - np.sqrt(np.sort(distances)[89]) * cov @ pi[b] / np.sqrt(pi[b] @ cov @ pi[b])
        assert ours[b].numpy() == pytest.approx(expected, rel=rel, abs=rel * np.abs(expected).max())
        cov = sigma[b] @ sigma[b].T
        expected = q[0, b] - 2.5 * cov @ pi[b] / np.sqrt(pi[b] @ cov @ pi[b])
        assert gauss[b].numpy() == pytest.approx(expected, rel=1e-4, abs=1e-4)


# ----- the networks
def test_encoder_is_the_nature_cnn_channels_last():
    mean, std = torch.full((84, 84), 90.0), torch.tensor(20.0)
    critic = PixelNetwork(EnsembleHeads(512, 6, 3, 0.1), 512, 6, mean, std)
    counts = [sum(p.numel() for p in layer.parameters()) for layer in critic.cnn]
    assert [n for n in counts if n] == [8224, 32832, 36928, 1606144, 1024]  # the last is the layer norm
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in critic.cnn.parameters() if p.dim() == 4)
    obs = torch.randint(256, (2, 4, 84, 84), dtype=torch.uint8)
    assert critic.encoder(obs).shape == (2, 512) and critic(obs).shape == (3, 2, 6)


def test_heads_against_loops_and_where_gradients_go():
    torch.manual_seed(0)
    psi = torch.randn(4, 16, requires_grad=True)
    heads = EnsembleHeads(16, 3, 5, 0.5)
    q = heads(psi)
    for n in range(5):
        rows = slice(3 * n, 3 * n + 3)  # head n is its own linear layer, with its own prior
        own, prior = (F.linear(psi, layer.weight[rows], layer.bias[rows]) for layer in (heads.learnable, heads.prior))
        assert torch.allclose(q[n], own + 0.5 * prior, atol=1e-6)
    without = EnsembleHeads(16, 3, 5, 0.0)
    without.load_state_dict(heads.state_dict())
    gradients = [torch.autograd.grad(h(psi).sum(), psi)[0] for h in (heads, without)]
    assert torch.equal(*gradients)  # the prior sends none into the features
    epinet = EpinetHeads(16, 3, 2, 0.5)
    mu, sigma = epinet(psi)
    assert mu.shape == (4, 3) and sigma.shape == (4, 3, 2) and not epinet.prior[0].weight.requires_grad
    assert torch.autograd.grad(sigma.sum(), psi, allow_unused=True)[0] is None


# ----- one update of the script in plain code
def features(w, obs):
    x = (obs.float() - w["mean"]) / w["std"]
    for layer, stride in (("0", 4), ("2", 2), ("4", 1)):
        x = F.relu(F.conv2d(x, w[f"cnn.{layer}.weight"], w[f"cnn.{layer}.bias"], stride=stride))
    x = F.linear(x.flatten(1), w["cnn.7.weight"], w["cnn.7.bias"])
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    return F.relu(x * w["cnn.8.weight"] + w["cnn.8.bias"])


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def two_heads(w, psi):
    return linear(w, "heads.learnable", psi).reshape(-1, 2, 6).transpose(0, 1)


@pytest.mark.parametrize("algo", ["cql", "iql", "brac-bcq", "ersac-ell-epi-star"])
def test_one_update_in_plain_code(run, games, monkeypatch, algo):
    states, save = [], torch.save
    monkeypatch.setattr(torch, "save", lambda state, f: states.append(copy.deepcopy(state)) or save(state, f))
    lr, alpha, B = 1e-3, 0.05, 16
    one = ("--total-updates", 1, "--eval-interval", 5, "--eval-episodes", 1, "--no-anneal-lr", "--alpha", alpha)
    flags = f"--gamma 0.9 --n-step 2 --polyak 0.5 --q-lr {lr} --policy-lr {lr} --hidden-dim 16 --seed 3 --index-dim 3 "
    flags += "--clone-updates 0 --critic-warmup 0 --bc-coef 0.4 --noise-scale 0.1 --prior-scale 0.5 --brac-weight 0.7 "
    flags = (*flags.split(), "--cql-weight", 2.0)
    done = run("ersac_atari", *DATA, *one, *flags, "--batch-size", B, "--algo", algo)
    assert done.code == 0, done.err
    (before, after), dataset = states, minari.load_dataset("test/pong-v0")

    # the batch, from the raw episodes
    index = torch.randint(3 * T, (B,), generator=torch.Generator().manual_seed(3))
    rows = []
    for i in index.tolist():
        episode, t = dataset[i // T], i % T
        two = min(t + 2, T)  # n-step targets with n = 2
        seen = [
            torch.stack([torch.from_numpy(decode(episode.observations[max(k, 0)]).copy()) for k in range(x - 3, x + 1)])
            for x in (t, two)
        ]
        reward = sum(0.9**k * float(np.clip(r, -1, 1)) for k, r in enumerate(episode.rewards[t:two]))
        rows.append((*seen, int(episode.actions[t]), reward, float(episode.terminations[two - 1]), 0.9 ** (two - t)))
    s, s_next, a, r, end, gamma = (torch.stack(x) if torch.is_tensor(x[0]) else torch.tensor(x) for x in zip(*rows))
    fixed = ("heads.prior", "mean", "std")
    w = {k: v.clone().requires_grad_(not k.startswith(fixed)) for k, v in before["critic"].items()}
    every = torch.from_numpy(np.stack([decode(x) for e in dataset.iterate_episodes() for x in e.observations])).double()
    assert torch.allclose(w["mean"].double(), every.mean(0)) and w["std"] == pytest.approx(
        (every - every.mean(0)).square().mean().sqrt().item(), rel=1e-5
    )
    phi = {k: v.clone().requires_grad_(not k.startswith(fixed)) for k, v in before["actor"].items()}
    take = lambda q: q[torch.arange(B), a]  # noqa: E731
    # each transition's direction: the first draw after the script's seed
    c = F.normalize(torch.randn(3 * T, 3, generator=torch.Generator().manual_seed(3)), dim=-1)[index]

    def policy(obs):
        x = linear(phi, "heads", features(phi, obs))
        b = linear(w, "behaviour", features(w, obs)).softmax(-1).detach()
        if algo == "brac-bcq":
            x = torch.where(b / b.max(-1, keepdim=True).values > 0.3, x, torch.tensor(-math.inf))
        return x.softmax(-1), b

    def epinet(psi):
        parts = []
        for name in ("learnable", "prior"):
            hidden = F.relu(linear(w, f"heads.{name}.0", psi.detach()))
            parts.append(linear(w, f"heads.{name}.2", hidden).reshape(-1, 6, 3))
        return linear(w, "heads.mean", psi), parts[0] + 0.5 * parts[1]

    def lowest(psi, pi):
        """What the policy is judged by: the ellipsoid's worst case in matrices, or the lower of two critics."""
        if algo != "ersac-ell-epi-star":
            return two_heads(w, psi).min(0).values
        mu, sigma = epinet(psi)
        cov = sigma @ sigma.mT
        spread = (pi[:, None] @ cov @ pi[..., None])[:, 0].sqrt()  # [B, 1]
        return mu - math.sqrt(stats.chi2.ppf(0.9, 6)) * (cov @ pi[..., None])[..., 0] / spread

    def bonus(pi, b):
        logs = torch.where(pi > 0, pi, 1.0).log()
        h = -(pi * logs).sum(-1)
        kl = (pi * (logs - b.log())).sum(-1)
        return alpha * h - (0.7 * kl if algo == "brac-bcq" else 0)

    with torch.no_grad():  # the target critic still equals the critic
        psi_next = features(w, s_next)
        pi, b = policy(s_next)
        y = r + gamma * (1 - end) * ((pi * lowest(psi_next, pi)).sum(-1) + bonus(pi, b))
        if algo == "iql":
            y = r + gamma * (1 - end) * linear(w, "value", psi_next)[:, 0]
            q_old = take(two_heads(w, features(w, s)).min(0).values)
    psi = features(w, s)
    if algo == "ersac-ell-epi-star":
        mu, sigma = epinet(psi)
        loss = ((take(mu) - y) ** 2 + ((take(sigma) - 0.1 * c) ** 2).sum(-1)).mean()
    else:
        q = two_heads(w, psi)
        loss = sum(((take(x) - y) ** 2).mean() for x in q)
    if algo == "cql":
        loss = loss + 2.0 * sum((x.exp().sum(-1).log() - take(x)).mean() for x in q)
    if algo == "iql":
        error = q_old - linear(w, "value", psi)[:, 0]
        loss = loss + ((0.7 - (error < 0).float()).abs() * error**2).mean()
    if algo == "brac-bcq":
        x = linear(w, "behaviour", psi)
        loss = loss - take(x.log_softmax(-1)).mean() + 0.01 * (x**2).mean()

    def step(loss, weights):
        """Adam's first step from zero moments: lr g / (|g| + eps)."""
        learned = {k: p for k, p in weights.items() if p.requires_grad}
        gradients = torch.autograd.grad(loss, list(learned.values()), allow_unused=True)
        for p, g in zip(learned.values(), gradients):
            if g is not None:
                p.data -= lr * g / (g.abs() + 1e-8)

    step(loss, w)
    with torch.no_grad():
        psi = features(w, s)
    pi, b = policy(s)
    q_star = lowest(psi, pi).detach()
    objective = ((pi * q_star).sum(-1) + bonus(pi, b)).mean()
    if algo == "ersac-ell-epi-star":
        objective = objective + 0.4 * take(pi).log().mean()
    if algo == "iql":
        advantage = (q_old - linear(w, "value", psi)[:, 0]).detach()
        objective = ((3.0 * advantage).exp().clamp(max=100) * take(pi).log()).mean()
    step(-objective, phi)

    for name, ours in (("critic", w), ("actor", phi)):
        moved = 0
        for key, value in after[name].items():
            off = (value - ours[key].detach()).abs()
            # where a gradient is zero up to rounding, its sign and so the step are arbitrary: few such weights
            assert (off < 0.02 * lr).float().mean() > 0.98 and off.max() < 2.1 * lr, (name, key, off.max())
            moved += (value != before[name][key]).sum().item()
            if key.startswith(fixed):
                assert torch.equal(value, before[name][key])
        assert moved > 50
    for key, value in after["target"].items():
        expected = 0.5 * before["critic"][key] + 0.5 * after["critic"][key]
        assert torch.allclose(value, expected, atol=1e-6), key


# ----- evaluation
class Corridor(gym.Env):
    """Counts the no-ops before the first other action; the reward is their number."""

    observation_space, action_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        self.waited, self.seeds = 0, [*getattr(self, "seeds", []), seed]
        return np.zeros((4, 84, 84), np.uint8), {}

    def step(self, action):
        self.waited += action == 0
        return np.zeros((4, 84, 84), np.uint8), float(self.waited) if action else 0.0, action != 0, False, {}


def test_evaluation_is_greedy_after_seeded_no_ops_and_the_same_side_by_side():
    env, many = Corridor(), [Corridor() for _ in range(7)]
    policy = lambda obs: (torch.tensor([[0.1, 0.2, 0.7]]).log().expand(len(obs), -1), None)  # noqa: E731
    returns = play(policy, [env], 200, 5, "cpu")
    assert env.seeds == list(range(5, 205)) and np.array_equal(returns, play(policy, many, 200, 5, "cpu"))
    assert sorted(seed for one in many for seed in one.seeds) == list(range(5, 205))
    assert set(returns) <= set(range(31)) and len(np.unique(returns)) > 25 and returns.min() == 0
    # random actions with probability epsilon: a third of them is one more no-op, seeded and the same side by side
    noisy = play(policy, [env], 200, 5, "cpu", epsilon=0.6)
    assert np.array_equal(noisy, play(policy, many, 200, 5, "cpu", epsilon=0.6)) and (noisy >= returns).all()
    assert abs((noisy > returns).mean() - 0.2) < 5 * (0.2 * 0.8 / 200) ** 0.5


# ----- the script
@pytest.mark.parametrize("algo", METHODS)
def test_algorithms_end_to_end_and_resumed_to_the_same_bits(run, load, games, monkeypatch, algo):
    done = run("ersac_atari", *SMALL, "--algo", algo)
    assert done.code == 0, done.err
    whole = load(done.folders[0])
    assert whole.result["method"] == METHODS[algo] and done.folders[0].name.startswith("Pong-v5__")
    needed = "script method env_id dataset_id seed updates updates_per_second eval_episodes eval_return_mean "
    needed += "eval_return_std eval_distinct_returns random_return reference_return normalized_return policy_entropy"
    assert set(needed.split()) == set(whole.result) and whole.result["env_id"] == "ALE/Pong-v5"
    mean = whole.result["eval_return_mean"]
    assert whole.result["normalized_return"] == pytest.approx(100 * (mean + 21) / 22)
    assert [line.split(",")[0] for line in whole.metrics] == ["update", "3", "6"]
    original, calls = torch._foreach_lerp_, []

    def interrupt(*arguments):
        calls.append(1)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return original(*arguments)

    monkeypatch.setattr(torch, "_foreach_lerp_", interrupt)
    part = run("ersac_atari", *SMALL, "--algo", algo, "--exp-name", "part")
    monkeypatch.setattr(torch, "_foreach_lerp_", original)
    assert part.code == 130 and "--resume" in part.out
    (folder,) = part.folders
    assert load(folder).checkpoint["update"] == 4 and load(folder).result is None
    assert run("ersac_atari", "--resume", folder).code == 0
    again = load(folder)
    assert again.metrics == whole.metrics
    for name in ("critic", "target", "actor"):
        for key, value in whole.checkpoint[name].items():
            assert torch.equal(value, again.checkpoint[name][key]), (name, key)
    untimed = lambda result: {k: v for k, v in result.items() if k != "updates_per_second"}  # noqa: E731
    assert untimed(again.result) == untimed(whole.result)
    # evaluating the finished run prints the same return and writes nothing
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    only = run("ersac_atari", "--resume", folder, "--eval-only")
    assert only.code == 0 and f"return {mean:.1f}" in only.out
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_sets_differ_and_settings_are_kept(run, load, games):
    one = (*SMALL, "--total-updates", 1, "--critic-warmup", 0, "--eval-episodes", 1, "--upsilon", 0.5)
    runs = [load(run("ersac_atari", *one, "--algo", algo, "--exp-name", algo).folders[0]) for algo in list(METHODS)[:3]]
    assert (
        len({done.metrics[1].split(",", 4)[3] for done in runs}) == 3
    )  # the actor's loss against box, hull, ellipsoid
    assert [done.args["algo"] for done in runs] == list(METHODS)[:3] and runs[0].args["upsilon"] == 0.5


def test_cloning_moves_the_actor_alone_and_warmup_spares_it(run, games, monkeypatch):
    states, save = [], torch.save
    monkeypatch.setattr(torch, "save", lambda state, f: states.append(copy.deepcopy(state)) or save(state, f))
    flags = (*SMALL, "--total-updates", 2, "--checkpoint-interval", 1, "--eval-interval", 5, "--eval-episodes", 1)
    for clone in (0, 3):
        assert run("ersac_atari", *flags, "--clone-updates", clone, "--exp-name", f"clone{clone}").code == 0
    same = lambda x, y, part: all(torch.equal(v, y[part][k]) for k, v in x[part].items())  # noqa: E731
    random, _, _, start, cloned, warm, last = states  # updates 0, 1 (critic alone) and 2 of both runs
    assert same(random, start, "actor") and not start["cloned"] and cloned["cloned"]
    assert same(random, cloned, "critic") and not same(random, cloned, "actor")
    assert same(cloned, warm, "actor") and not same(cloned, warm, "critic") and not same(warm, last, "actor")
    assert cloned["policy_optimizer"]["state"] == {}  # a fresh optimiser


def test_diverging_run_stops_in_one_line_and_keeps_its_checkpoint(run, load, games):
    done = run("ersac_atari", *SMALL, "--q-lr", 1e30, "--checkpoint-interval", 1)
    assert done.code == 1 and "not finite" in done.err.splitlines()[-1] and "--q-lr" in done.err.splitlines()[-1]
    state = load(done.folders[0]).checkpoint
    bad = int(done.err.splitlines()[-1].split()[1].strip(":"))
    assert state["update"] < bad and all(v.isfinite().all() for v in load(done.folders[0]).checkpoint["actor"].values())


def test_changed_data_are_noticed_on_resume(run, games):
    env, buffers = pong_episodes(2, 9)
    dataset = store("test/changing-v0", buffers[:1], env)
    small = ("--dataset-id", "test/changing-v0", *SMALL[2:])
    (folder,) = run("ersac_atari", *small).folders
    dataset.update_dataset_from_buffer(buffers[1:])
    done = run("ersac_atari", "--resume", folder)
    assert done.code == 1 and "has changed" in done.err.splitlines()[-1]


BAD = [
    ("--upsilon 1", "infinite"),
    ("--upsilon 0 --algo ersac-ell-n", "upsilon"),
    ("--algo edac", "algo"),
    ("--num-critics 0", "num-critics"),
    ("--gamma 1", "gamma"),
    ("--n-step 0", "n-step"),
    ("--clone-updates -1", "clone-updates"),
    ("--alpha nan", "alpha"),
    ("--polyak 0", "polyak"),
    ("--q-lr inf", "q-lr"),
    ("--batch-size 0", "batch-size"),
    ("--cql-weight -1", "cql-weight"),
    ("--iql-expectile 1", "iql-expectile"),
    ("--eval-epsilon 1.5", "eval-epsilon"),
    ("--bcq-threshold 1", "bcq-threshold"),
    ("--brac-weight inf", "brac-weight"),
    ("--eval-only", "resume"),
    ("--resume nowhere", "nowhere"),
    ("--env-id Tetris", "Breakout, Pong, Qbert, Seaquest, Hero"),
    ("--dataset-id test/pendulum-v0", "discrete actions"),
    ("--dataset-id test/cartpole-v0", "uint8 images"),
    ("--dataset-id test/lake-v0", "uint8 images"),
    ("--output-dir /proc/nowhere", "output-dir"),
    ("--cache-dir /proc/nowhere", "cache-dir"),
]


@pytest.mark.parametrize("arguments, named", BAD)
def test_bad_input_ends_in_one_clear_line(run, games, tmp_path, arguments, named):
    data = () if "-id" in arguments else DATA
    done = run("ersac_atari", *data, *SHORT, *arguments.split())
    assert done.code in (1, 2) and named in done.err and "Traceback" not in done.err, done.err
    assert done.code == 2 or len(done.err.strip().splitlines()) == 1
    assert list(tmp_path.glob("runs/**/*.json")) == []


@pytest.mark.parametrize("name, word", [("nan", "not finite"), ("ragged", "T + 1")])
def test_bad_episodes_are_refused_and_nothing_is_kept(run, games, tmp_path, name, word):
    done = run("ersac_atari", "--dataset-id", f"test/pong-{name}-v0", *SHORT, "--cache-dir", tmp_path / "cache")
    assert done.code == 1 and word in done.err.splitlines()[-1]
    assert list((tmp_path / "cache").iterdir()) == [] and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("game", ersac_atari.GAMES)
def test_missing_download_says_what_to_do(run, games, monkeypatch, game):
    asked = []

    def offline(dataset_id):
        asked.append(dataset_id)
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(minari, "download_dataset", offline)
    done = run("ersac_atari", "--env-id", game)
    assert asked == [f"atari/{game.lower()}/expert-v0"] and done.code == 1
    assert len(done.err.strip().splitlines()) == 1 and "record_atari.py" in done.err and "minari download" in done.err


def test_foreign_and_damaged_checkpoints_are_refused(run, games, tmp_path):
    (folder,) = run("ersac_atari", *SMALL, "--total-updates", 1).folders
    done = run("ersac_atari", "--resume", folder, "--gamma", 0.5)
    assert done.code == 1 and "--gamma 0.5 contradicts" in done.err
    content = (folder / "checkpoint.pt").read_bytes()
    (folder / "checkpoint.pt").write_bytes(content[: len(content) // 2])
    assert "damaged" in run("ersac_atari", "--resume", folder).err
    torch.save({"script": "ersac_ensemble.py"}, folder / "checkpoint.pt")
    assert "was not written by ersac_atari.py" in run("ersac_atari", "--resume", folder).err


def test_video_of_the_final_evaluation_and_a_checkpoint_that_acts(run, games):
    done = run("ersac_atari", *SMALL, "--capture-video", "--total-updates", 1)
    assert done.code == 0, done.err
    (video,) = (done.folders[0] / "video").glob("*.mp4")
    assert video.stat().st_size > 1000
    # the snippet of docs/ersac_atari.md
    checkpoint = torch.load(done.folders[0] / "checkpoint.pt", weights_only=True)
    mean, std = checkpoint["actor"]["mean"], checkpoint["actor"]["std"]
    actor = PixelNetwork(torch.nn.Linear(16, 6), 16, 6, mean, std)
    actor.load_state_dict(checkpoint["actor"])
    obs, _ = make_atari_env(minari.load_dataset("test/pong-v0")).reset(seed=0)
    assert actor(torch.tensor(obs)[None]).shape == (1, 6)


# ----- the recorder
def test_recorder_makes_a_lossless_data_set_with_reference_scores(run, games, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", os.environ["MINARI_DATASETS_PATH"])  # the script changes it
    flags = ("--steps", 60, "--max-episode-steps", 40, "--reference-episodes", 2, "--random-share", 0.5)
    done = run("docs/benchmark/record_atari", "--dataset-id", "test/recorded-v0", *flags)
    assert done.code == 0 and "80 steps, 2 episodes" in done.out, done.err
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(games))
    dataset = minari.load_dataset("test/recorded-v0")
    assert dataset.total_steps == 80 and dataset.total_episodes == 2
    env = dataset.recover_environment()
    assert env.spec.kwargs["repeat_action_probability"] == 0 and env.spec.kwargs["frameskip"] == 4
    for episode in dataset.iterate_episodes():
        obs, _ = env.reset()
        assert np.array_equal(obs, episode.observations[0]) and len(episode.observations) == 41
        for t, action in enumerate(episode.actions):
            obs, reward, *_ = env.step(int(action))
            assert np.array_equal(obs, episode.observations[t + 1]) and reward == episode.rewards[t]
        assert episode.truncations[-1] and not episode.terminations.any()
    assert [p.name for p in games.iterdir() if p.name.startswith(".recording")] == []
    again = run("docs/benchmark/record_atari", "--dataset-id", "test/recorded-v0", *flags)
    assert again.code == 1 and "--overwrite" in again.err and len(again.err.strip().splitlines()) == 1
    bad = run("docs/benchmark/record_atari", "--random-share", 1.5)
    assert bad.code == 1 and "--random-share" in bad.err


@pytest.mark.slow
def test_a_million_frames_stay_below_eight_gigabytes(tmp_path):
    """A file of a million frames, drawn from until every page was touched: the process stays near the file's size."""
    import resource

    frames = np.lib.format.open_memmap(tmp_path / "frames.npy", "w+", np.uint8, (10**6, 84, 84))
    frames.flush()
    frames, g = np.load(tmp_path / "frames.npy", mmap_mode="r"), torch.Generator().manual_seed(0)
    first = torch.zeros(1000, dtype=torch.long)
    for start in range(0, 10**6, 1000):
        stack(frames, torch.arange(start, start + 1000), first)
        stack(frames, torch.randint(10**6, (32,), generator=g), first[:32])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 8 * 2**30
