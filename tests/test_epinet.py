"""ersac_epinet.py: its training loop against one written again from the algorithm, closed forms against sampling,
uncertainty that shrinks with data, and the script end to end."""

import csv
import math
import re
import signal
import sys
import time
import warnings
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import minari
import numpy as np
import pytest
import torch
from conftest import Chain, chain_episodes, plain_data
from minari.data_collector import EpisodeBuffer
from scipy.special import gammaincinv
from scipy.stats import chi2

from ersac_epinet import (
    EpinetCritic,
    actor_loss,
    dataset_name,
    epinet_loss,
    make_eval_env,
    robust_target,
    worst_case_ellipsoid,
    worst_case_gaussian,
)

ROOT = Path(__file__).resolve().parents[1]
DATA = ("--dataset-id", "test/cartpole-v0", "--env-id", "CartPole-v1")
SHORT = ("--total-updates", 24, "--eval-interval", 12, "--eval-episodes", 3)
SMALL = (*DATA, *SHORT, "--hidden-dim", 16, "--batch-size", 32, "--num-index-samples", 20)
FEATURES = dict(head_input="features", prior_scale=0.3)  # the paper's heads


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ----- the training loop written again, in float64 and without the script: networks are dicts of tensors
A = 4  # actions of the chain
OPTIONS = dict(  # all away from the script's defaults, so that every flag matters
    dataset_id="test/chain-v0",
    seed=7,
    targets="shared",
    method="ell-epi-star",
    uncertainty_set="ellipsoid",
    head_input="features",
    input_scale=1.7,
    upsilon=0.6,
    index_dim=5,
    num_index_samples=30,
    prior_scale=0.8,
    noise_scale=0.7,
    lambda_mu=0.0,
    lambda_sigma=0.0,
    layer_norm=True,
    total_updates=3,
    batch_size=24,
    hidden_dim=8,
    gamma=0.8,
    q_lr=0.02,
    policy_lr=0.03,
    anneal_lr=True,
    polyak=0.3,
    alpha=0.4,
    autotune=False,
    target_entropy=0.6,
    return_scale=3.0,
    normalize_obs=True,
    eval_interval=2,
    eval_episodes=23,
)
VARIANTS = {
    "closed form": {},
    "closed form, another set": dict(upsilon=0.97, index_dim=3, seed=8),
    "sampled": dict(method="ell-epi"),
    # 7 of 25 samples, although 0.28 * 25 is 7.000000000000001
    "sampled, another set": dict(method="ell-epi", upsilon=0.28, num_index_samples=25, seed=8),
    "sampled, all of the samples": dict(method="ell-epi", upsilon=1.0, num_index_samples=11),
    "sampled, heads on the observation": dict(method="ell-epi", head_input="obs"),
    "entropy coefficient learned": dict(autotune=True),
    "entropy coefficient learned, sampled": dict(autotune=True, method="ell-epi", target_entropy=0.95, alpha=1.5),
    "weight decay of the base": dict(lambda_mu=0.3),
    "weight decay of the head": dict(lambda_sigma=0.3),
    "no layer norm": dict(layer_norm=False),
    "observations as they are": dict(normalize_obs=False),
    "rewards as they are": dict(return_scale=None),
    "constant step sizes": dict(anneal_lr=False),
    "scales": dict(prior_scale=2.1, noise_scale=0.2, gamma=0.95, polyak=0.6),
    "scales, sampled": dict(method="ell-epi", prior_scale=2.1, noise_scale=0.2, gamma=0.95, polyak=0.6),
    "zeros": dict(prior_scale=0.0, noise_scale=0.0, gamma=0.0, alpha=0.0),
    "box": dict(uncertainty_set="box"),
    "heads on the observation": dict(head_input="obs"),
    "own targets": dict(targets="own"),
    "own targets, box": dict(targets="own", uncertainty_set="box", head_input="obs", input_scale=0.6),
    "own targets, heads on the observation": dict(targets="own", head_input="obs", autotune=True, gamma=0.95),
    "own targets, sampled": dict(targets="own", method="ell-epi"),
    "own targets, sampled, heads on the observation": dict(targets="own", method="ell-epi", head_input="obs"),
    "all at once": dict(
        **dict(method="ell-epi", autotune=True, lambda_mu=0.1, lambda_sigma=0.2, layer_norm=False),
        **dict(normalize_obs=False, return_scale=None, anneal_lr=False, q_lr=0.01, policy_lr=0.01, index_dim=6),
    ),
}


def command_line(options):
    words = []
    for name, value in options.items():
        name = name.replace("_", "-")
        words += [f"--{'' if value else 'no-'}{name}"] if isinstance(value, bool) else [f"--{name}", value]
    return words


def dense(net, name, x):
    return x @ net[f"{name}.weight"].T + net[f"{name}.bias"]


def features(net, s, o):
    for linear, norm in (("base.0", "base.1"), ("base.3", "base.4")):
        s = dense(net, linear, s)
        assert (f"{norm}.weight" in net) == o.layer_norm
        if o.layer_norm:
            d = s - s.mean(-1, keepdim=True)
            s = d / ((d**2).mean(-1, keepdim=True) + 1e-5).sqrt() * net[f"{norm}.weight"] + net[f"{norm}.bias"]
        s = s.relu()
    return s


def spread(net, s, psi, o):
    """sigma_bar [B, A, d_z]."""
    x = o.input_scale * s if o.head_input == "obs" else psi.detach()  # sigma_bar does not move the features
    out = {}
    for name in ("learnable", "prior"):
        h = dense(net, f"{name}.2", dense(net, f"{name}.0", x).relu())
        out[name] = dense(net, f"{name}.4", h.relu()) if o.head_input == "obs" else h
    return (out["learnable"] + o.prior_scale * out["prior"]).reshape(len(x), A, o.index_dim)


def samples(net, s, indices, o):
    """q(s, a, z) of every index z, [N, B, A]."""
    psi = features(net, s, o)
    mu = dense(net, "mean", psi)
    sigma = spread(net, s, psi, o)
    return torch.stack([mu + (sigma * z).sum(-1) for z in indices])


def mean_and_spread(net, s, o):
    psi = features(net, s, o)
    return dense(net, "mean", psi), spread(net, s, psi, o)


@torch.no_grad()
def worst_values(net, s, pi, indices, o):
    """q* = mu - radius Sigma pi / sqrt(pi' Sigma pi), state by state."""
    worst = []
    q = samples(net, s, indices, o) if o.method == "ell-epi" else None
    mu, sigma = mean_and_spread(net, s, o) if q is None else (q.mean(0), None)
    for b in range(len(s)):
        if q is None:
            covariance = sigma[b] @ sigma[b].T
            square = 2 * gammaincinv(A / 2, o.upsilon)  # the chi-squared distribution's quantile
        if o.uncertainty_set == "box":  # as far down as the ellipsoid reaches in each action
            worst.append(torch.stack([mu[b, a] - math.sqrt(square * covariance[a, a]) for a in range(A)]))
            continue
        if q is not None:
            d = q[:, b] - mu[b]
            covariance = d.T @ d / len(d)
            distances = sorted((x @ torch.linalg.pinv(covariance, rtol=1e-9) @ x).item() for x in d)
            square = distances[math.ceil(Fraction(str(o.upsilon)) * len(d)) - 1]
        shift = covariance @ pi[b]
        worst.append(mu[b] - math.sqrt(square) * shift / (pi[b] @ shift).sqrt())
    return torch.stack(worst)


def policy(actor, s):
    """pi and log pi, [B, A]."""
    logits = dense(actor, "net.4", dense(actor, "net.2", dense(actor, "net.0", s).relu()).relu())
    log_pi = logits - logits.exp().sum(-1, keepdim=True).log()
    return log_pi.exp(), log_pi


def descend(net, loss, moments, lr, t):
    """One step of Adam on those tensors of net that have moments."""
    gradients = torch.autograd.grad(loss, [net[name] for name in moments])
    for (name, (m, v)), g in zip(moments.items(), gradients):
        moments[name] = m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        step = lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        net[name] = (net[name] - step).detach().requires_grad_()


def train(first, data, o):
    """The updates from the first checkpoint on -> networks, Adam's moments, and of every update what is logged."""
    critic, target = ({name: x.double() for name, x in first[part].items()} for part in ("critic", "target"))
    actor = {name: x.double() for name, x in first["actor"].items()} | {"log_alpha": first["log_alpha"].double()}
    learned = [[k for k in critic if not k.startswith("prior.")], [k for k in actor if k != "log_alpha" or o.autotune]]
    for net, names in zip((critic, actor), learned):
        net.update((name, net[name].requires_grad_()) for name in names)
    moments = [{name: (0.0, 0.0) for name in names} for names in learned]
    c = torch.randn(len(data.s), o.index_dim, generator=torch.Generator().manual_seed(o.seed)).double()
    c = c / c.norm(dim=1, keepdim=True)  # every transition's own direction
    generator, logged = torch.Generator().manual_seed(o.seed), []
    for t in range(1, o.total_updates + 1):
        index = torch.randint(len(data.s), (o.batch_size,), generator=generator)
        indices = None
        if o.method == "ell-epi":
            indices = torch.randn(o.num_index_samples, o.index_dim, generator=generator).double()
        rate = 1 - (t - 1) / o.total_updates if o.anneal_lr else 1.0
        s, a, alpha = data.s[index], data.a[index], math.exp(actor["log_alpha"].item())

        # target
        pi, log_pi = (x.detach() for x in policy(actor, data.s_next[index]))
        with torch.no_grad():
            if o.targets == "shared":  # one worst case for all indices
                q_next = [worst_values(target, data.s_next[index], pi, indices, o)]
            elif o.method == "ell-epi":  # every index z its own
                q_next = samples(target, data.s_next[index], indices, o)
            else:
                mu_next, sigma_next = mean_and_spread(target, data.s_next[index], o)
                q_next = [mu_next]
        y = torch.zeros(len(q_next), len(index)).double()
        carried = torch.zeros(len(index), o.index_dim).double()  # the next state's spread in an index's own target
        for b, i in enumerate(index.tolist()):
            for n, q in enumerate(q_next):
                value = sum(pi[b, k] * (q[b, k] - alpha * log_pi[b, k]) for k in range(A))
                y[n, b] = data.r[i] if data.terminated[i] else data.r[i] + o.gamma * value
            if o.targets == "own" and o.method == "ell-epi-star" and not data.terminated[i]:
                carried[b] = o.gamma * sum(pi[b, k] * sigma_next[b, k] for k in range(A))

        # critic
        losses = []
        if o.method == "ell-epi":
            q = samples(critic, s, indices, o)
            for b, i in enumerate(index.tolist()):
                own = [y[n if o.targets == "own" else 0, b] for n in range(len(indices))]
                errors = [q[n, b, a[b]] - own[n] - o.noise_scale * c[i] @ z for n, z in enumerate(indices)]
                losses.append(sum(error**2 for error in errors) / len(errors))
        else:
            mu, sigma = mean_and_spread(critic, s, o)
            for b, i in enumerate(index.tolist()):
                disturbance = carried[b] + o.noise_scale * c[i]
                losses.append((mu[b, a[b]] - y[0, b]) ** 2 + ((sigma[b, a[b]] - disturbance) ** 2).sum())
        critic_loss = sum(losses) / len(losses)
        decay = {name: o.lambda_sigma if name.startswith("learnable.") else o.lambda_mu for name in moments[0]}
        loss = critic_loss + sum(weight * (critic[name] ** 2).sum() for name, weight in decay.items())
        descend(critic, loss, moments[0], o.q_lr * rate, t)

        # actor and entropy coefficient, against the critic as it is now
        pi, log_pi = policy(actor, s)
        q_star = worst_values(critic, s, pi.detach(), indices, o)
        entropy = -(pi * log_pi).sum(1)
        actor_loss = -((pi * q_star).sum(1) + alpha * entropy).mean()
        excess = entropy.mean().item() - o.target_entropy * math.log(A)
        loss = actor_loss + (actor["log_alpha"].exp() * excess if o.autotune else 0.0)
        descend(actor, loss, moments[1], o.policy_lr * rate, t)

        for name in target:
            target[name] = (1 - o.polyak) * target[name] + o.polyak * critic[name].detach()

        # what is logged
        with torch.no_grad():
            probe = torch.randn(1000, o.index_dim, generator=torch.Generator().manual_seed(0)).double()
            q = samples(critic, s, probe, o)
            mu = q.mean(0) if o.method == "ell-epi" else mean_and_spread(critic, s, o)[0]
        std, taken = q.std(0), [(b, k) for b, k in enumerate(a.tolist())]
        other = [(b, k) for b in range(len(s)) for k in range(A) if (b, k) not in taken]
        ended = [(b, k) for b, k in taken if not data.returns[index[b]].isnan()]
        row = {
            "update": t,
            "losses/critic_loss": critic_loss,
            "losses/actor_loss": actor_loss,
            "charts/alpha": alpha,
            "charts/policy_entropy": entropy.mean(),
            "charts/q_robust": (pi * q_star).sum(1).mean(),
            "charts/q_gap": (pi * mu).sum(1).mean() - (pi * q_star).sum(1).mean(),
            "charts/q_data_actions": np.mean([mu[x].item() for x in taken]),
            "charts/q_minus_return": np.mean([(mu[x] - data.returns[index[x[0]]]).item() for x in ended] or [math.nan]),
            "charts/q_star_minus_return": np.mean(
                [(q_star[x] - data.returns[index[x[0]]]).item() for x in ended] or [math.nan]
            ),
            "charts/std_data_actions": np.mean([std[x].item() for x in taken]),
            "charts/std_other_actions": np.mean([std[x].item() for x in other]),
        }
        logged.append(
            SimpleNamespace(
                row={k: float(torch.as_tensor(v).detach()) for k, v in row.items()}, actor=dict(actor), ended=len(ended)
            )
        )
    return SimpleNamespace(critic=critic, target=target, actor=actor, moments=moments, logged=logged)


def play(actor, data, episodes, seed):
    """Returns of the greedy policy on the chain, and the actions that it took."""
    env, returns, actions = gym.make("test/Chain-v0"), [], set()
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed + episode)
        returns.append(0.0)
        done = False
        while not done:
            pi, _ = policy(actor, ((torch.tensor(obs).double() - data.mean) / data.std)[None])
            actions.add(pi.argmax().item())
            obs, reward, terminated, truncated, _ = env.step(pi.argmax().item())
            returns[-1] += reward
            done = terminated or truncated
    return np.array(returns), actions


def close(ours, theirs, what, rtol=2e-4, atol=5e-6):
    ours, theirs = (torch.as_tensor(x).detach().double() for x in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{what}: {text}")


def metrics(folder):
    with open(folder / "metrics.csv") as f:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(f)]


def ran(done):
    assert done.code == 0, done.err
    return done


def check_networks(last, expected):
    """Parameters and Adam's moments of the last checkpoint. Adam's first steps are as long as the step size whatever
    the size of the loss; its moments know the size."""
    for part in ("critic", "target", "actor"):
        for name, x in last[part].items():
            close(x, getattr(expected, part)[name], f"{part} {name}")
    close(last["log_alpha"], expected.actor["log_alpha"], "log_alpha")
    for optimizer, moments in zip(("q_optimizer", "policy_optimizer"), expected.moments):
        state = last[optimizer]["state"]
        assert len(state) == len(moments)
        for x, (name, (m, v)) in zip(state.values(), moments.items()):
            assert x["step"] == last["update"]
            close(x["exp_avg"], m, f"first moment of {name}", atol=1e-4 * m.abs().max().item())
            close(x["exp_avg_sq"], v, f"second moment of {name}", atol=1e-4 * v.abs().max().item())


def check_rows(rows, logged):
    for row, expected in zip(rows, logged, strict=True):
        assert row.pop("charts/updates_per_second") > 0
        assert row.keys() == expected.row.keys() | {"eval/return"}
        for name, value in expected.row.items():
            close(row[name], value, name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_three_updates_are_those_of_a_plain_loop(variant, run, datasets):
    o = SimpleNamespace(**OPTIONS | VARIANTS[variant])
    done = ran(run("ersac_epinet", *command_line(vars(o))))
    data = plain_data(o.dataset_id, o.gamma, o.return_scale, o.normalize_obs)
    first, last = done.states[0], done.states[-1]
    assert (first["update"], last["update"]) == (0, 3)
    assert first["log_alpha"].exp().item() == pytest.approx(o.alpha, rel=1e-6, abs=1e-12)
    expected = train(first, data, o)
    check_networks(last, expected)

    shape = "Box" if o.uncertainty_set == "box" else "Ell"
    name = f"ERSAC-{shape}-Epi" + "*" * (o.method == "ell-epi-star") + "-own" * (o.targets == "own")
    assert f"{name.removeprefix('ERSAC-')} on test/chain-v0" in done.out
    rows = metrics(done.folders[0])
    assert [row["update"] for row in rows] == [2, 3]
    check_rows(rows, expected.logged[1:])
    for row, logged in zip(rows, expected.logged[1:]):
        assert 0 < logged.ended < o.batch_size  # returns that are known and others
        returns, _ = play(logged.actor, data, 2, 10**6 * (o.seed + 1))  # 2 of the 23 episodes
        assert row["eval/return"] == pytest.approx(returns.mean(), rel=1e-9)


@pytest.mark.parametrize(
    "changes, method",
    [
        (dict(), "ERSAC-Ell-Epi*"),
        (dict(method="ell-epi", seed=15, eval_episodes=9), "ERSAC-Ell-Epi"),
        (dict(normalize_obs=False, autotune=True), "ERSAC-Ell-Epi*"),
        (dict(targets="own"), "ERSAC-Ell-Epi*-own"),
    ],
)
def test_checkpoint_and_result_hold_what_the_page_says(changes, method, run, load, datasets):
    o = SimpleNamespace(**OPTIONS | changes)
    done = ran(run("ersac_epinet", *command_line(vars(o))))
    data = plain_data(o.dataset_id, o.gamma, o.return_scale, o.normalize_obs)
    got = load(done.folders[0])
    assert got.args.items() >= vars(o).items() and got.checkpoint["args"] == got.args

    # the start: weights of nn.Linear, the target a copy, prior and learnable head apart
    first, last = done.states[0], got.checkpoint
    for part in ("critic", "actor"):
        for name, x in first[part].items():
            if x.dim() == 2:
                assert 0.8 < x.abs().max() * math.sqrt(x.shape[1]) <= 1, name
    assert all(torch.equal(x, first["target"][name]) for name, x in first["critic"].items())
    for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
        assert not torch.equal(first["critic"][f"learnable.{name}"], first["critic"][f"prior.{name}"])
        assert torch.equal(first["critic"][f"prior.{name}"], last["critic"][f"prior.{name}"])
    close(last["obs_mean"], data.mean, "mean")
    close(last["obs_std"], data.std, "standard deviation")
    assert last["reward_scale"] == pytest.approx(data.scale, rel=1e-5)

    # the last policy, greedy, on episodes of their own
    actor = {name: x.double() for name, x in last["actor"].items()}
    returns, actions = play(actor, data, o.eval_episodes, 10**6 * (o.seed + 1) + 10**5)
    assert len(actions) > 1 and len(set(returns)) > 4, "the episodes would not tell one policy from another"
    on_the_way, _ = play(actor, data, max(o.eval_episodes // 10, 1), 10**6 * (o.seed + 1))
    assert metrics(done.folders[0])[-1]["eval/return"] == pytest.approx(on_the_way.mean())
    pi, log_pi = policy(actor, data.s)
    assert got.result.pop("updates_per_second") > 0
    assert got.result == {
        "script": "ersac_epinet.py",
        "method": method,
        "label": method.removeprefix("ERSAC-"),
        "env_id": "test/Chain-v0",
        "seed": o.seed,
        "dataset_id": "test/chain-v0",
        "updates": 3,
        "eval_episodes": o.eval_episodes,
        "eval_return_mean": pytest.approx(returns.mean()),
        "eval_return_std": pytest.approx(math.sqrt(((returns - returns.mean()) ** 2).mean())),
        "eval_returns": pytest.approx(returns.tolist()),
        "random_return": -14.0,
        "reference_return": 25.0,
        "normalized_return": pytest.approx(100 * (returns.mean() + 14) / (25 + 14)),
        "policy_entropy": pytest.approx(-(pi * log_pi).sum(1).mean().item(), rel=1e-4),
    }
    named = f"ersac_epinet.py, {method.removeprefix('ERSAC-')} on test/chain-v0"
    assert f"{named}: return {returns.mean():.1f} over {o.eval_episodes} episodes\n" in done.out
    scale = "(0 is a return of -14.0, 100 is 25.0: the data set's reference scores)"
    assert f"normalized return {got.result['normalized_return']:.1f} {scale}\n" in done.out
    assert f"run folder: {Path('runs') / done.folders[0].name}" in done.out


@pytest.mark.parametrize("method", ["ell-epi-star", "ell-epi"])
def test_the_loop_learns(method, run, load, datasets):
    """To go right is best, 26.5 on average; random play has -14, the other end -22."""
    flags = "--dataset-id test/chain-large-v0 --total-updates 250 --batch-size 64 --hidden-dim 32 --gamma 0.9"
    flags += " --q-lr 0.003 --policy-lr 0.003 --noise-scale 0.3 --num-index-samples 20 --eval-episodes 40"
    done = ran(run("ersac_epinet", *flags.split(), "--method", method))
    assert load(done.folders[0]).result["eval_return_mean"] > 24


# ----- data sets of other kinds
@pytest.fixture(scope="module")
def odd_data(datasets):
    """The chain with all episodes cut and no reference scores, and with rewards of 0."""
    for name, reward in (("cut", 1), ("zero", 0)):
        buffers = []
        for i, episode in enumerate(chain_episodes(60, 2)):
            x = {key: np.array(value) for key, value in episode.items()}
            if name == "cut":
                x["terminations"][-1], x["truncations"][-1] = False, True
            buffers.append(EpisodeBuffer(id=i, **x | {"rewards": reward * x["rewards"]}))
        with warnings.catch_warnings(action="ignore"):
            minari.create_dataset_from_buffers(f"test/chain-{name}-v0", buffers, env=gym.make("test/Chain-v0"))


def test_no_return_is_known_and_no_reference_score(run, load, odd_data):
    """Then rewards are scaled as if each of them went on for ever."""
    o = SimpleNamespace(**OPTIONS | dict(dataset_id="test/chain-cut-v0", eval_interval=1))
    done = ran(run("ersac_epinet", *command_line(vars(o))))
    data = plain_data(o.dataset_id, o.gamma, None)
    data.r *= 3 / math.sqrt(((data.r / (1 - o.gamma)) ** 2).mean())
    assert not data.terminated.any() and data.returns.isnan().all()
    expected = train(done.states[0], data, o)
    check_networks(done.states[-1], expected)
    rows, result = metrics(done.folders[0]), load(done.folders[0]).result
    check_rows(rows, expected.logged)
    assert math.isnan(rows[0]["charts/q_minus_return"])
    assert [result[f"{x}_return"] for x in ("random", "reference", "normalized")] == [None] * 3
    assert "normalized return" not in done.out


def test_what_the_data_set_declares_counts(run, load, datasets, monkeypatch):
    """An action that no transition took, an evaluation environment of its own, a reference score of 0."""
    step, steps = Chain.step, []
    monkeypatch.setattr(Chain, "step", lambda env, action: (steps.append(action), step(env, action))[1])
    done = ran(run("ersac_epinet", *command_line(OPTIONS | dict(dataset_id="test/declared-v0"))))
    result = load(done.folders[0]).result
    assert done.states[-1]["actor"]["net.4.weight"].shape[0] == A
    assert len(steps) == 2 + 2 + 23  # two evaluations in between and the last one, an episode is one step
    assert result["normalized_return"] == pytest.approx(100 * result["eval_return_mean"] / 25)


def test_rewards_that_are_all_zero(run, odd_data):
    done = ran(run("ersac_epinet", *command_line(OPTIONS | dict(dataset_id="test/chain-zero-v0"))))
    assert math.isfinite(metrics(done.folders[0])[-1]["losses/critic_loss"])


def test_default_data_set_of_an_environment(run, load, datasets, monkeypatch):
    """Found by its name; made by gen_expectile_data.py if it is missing."""
    assert dataset_name("LunarLander-v3", 0.05, 100_000) == "ersac/lunarlander/tau05-100k-v0"
    assert dataset_name("some/Thing-v12", 0.125, 1500) == "ersac/thing/tau12p5-1500-v0"
    assert dataset_name("LunarLander-v3", 0.5, 10_000, 0.5, 101) == "ersac/lunarlander/tau50-early50-10k-s101-v0"
    assert dataset_name("LunarLander-v3", 0.9, 10_000, dataset_seed=7) == "ersac/lunarlander/tau90-10k-s7-v0"
    flags = ("--env-id", "CartPole-v1", "--total-updates", 2, "--hidden-dim", 8, "--eval-episodes", 2)
    result = load(ran(run("ersac_epinet", *flags, "--dataset-size", 3000)).folders[0]).result
    assert result["dataset_id"] == "ersac/cartpole/tau50-3k-v0" and result["env_id"] == "CartPole-v1"
    commands = []
    monkeypatch.setattr("subprocess.run", lambda x, **_: (commands.append(x), SimpleNamespace(returncode=1))[1])
    done = run("ersac_epinet", *flags, "--dataset-size", 2000, "--expectile-tau", 0.9)
    assert done.code == 1 and "ersac/cartpole/tau90-2k-v0 could not be made" in done.err
    ((python, script, *rest),) = commands
    assert python == sys.executable and Path(script).name == "gen_expectile_data.py" and Path(script).exists()
    wanted = "--env-id=CartPole-v1 --expectile-tau=0.9 --dataset-size=2000 --early-fraction=0.0 --dataset-seed=1"
    assert rest == wanted.split()


def test_missing_foreign_data_set_is_downloaded(run, datasets, monkeypatch):
    asked = []

    def download(name, **_):
        asked.append(name)
        raise ConnectionError("no network")

    monkeypatch.setattr("minari.storage.hosting.download_dataset", download)
    done = run("ersac_epinet", "--dataset-id", "some/where-v3")
    assert done.code == 1 and asked == ["some/where-v3"]
    assert "some/where-v3" in done.err and "no network" in done.err


def test_an_environment_without_a_limit_gets_one():
    def named(env_id):
        spec = SimpleNamespace(dataset_id="test/named-v0", observation_space=Chain.observation_space)
        return SimpleNamespace(recover_environment=lambda **_: gym.make(env_id), spec=spec)

    if "test/Endless-v0" not in gym.registry:
        gym.register("test/Endless-v0", "conftest:Chain")
    env, steps, done = make_eval_env(named("test/Endless-v0")), 0, False
    env.reset(seed=0)
    while not done:
        _, _, terminated, truncated, _ = env.step(2)  # wait
        steps, done = steps + 1, terminated or truncated
    assert steps == 10_000
    env = make_eval_env(named("test/Chain-v0"))
    env.reset(seed=0)
    assert [env.step(2)[3] for _ in range(10)] == [False] * 9 + [True]


# ----- closed forms against sampling
def test_loss_and_gradient_against_monte_carlo():
    B, A, d, n = 5, 3, 4, 100_000
    mu, sigma, y = draw(B, A).requires_grad_(), draw(B, A, d, seed=1).requires_grad_(), draw(B, seed=2)
    c, action, z = draw(B, d, seed=3), torch.tensor([0, 2, 1, 1, 0]), draw(n, d, seed=4)
    exact = epinet_loss(mu, sigma, action, y, c, 0.7)  # [B]
    rows = torch.arange(B)
    q = mu[rows, action] + z @ sigma[rows, action].T  # [n, B]
    sampled = (q - y - 0.7 * z @ c.T).square()
    assert ((sampled.mean(0) - exact).abs() < 5 * sampled.std(0) / math.sqrt(n)).all()
    for ours, theirs in zip(
        torch.autograd.grad(exact.sum(), (mu, sigma)), torch.autograd.grad(sampled.mean(0).sum(), (mu, sigma))
    ):
        assert (ours - theirs).abs().max() < 0.02 * ours.abs().max()


@pytest.mark.parametrize("A", [2, 4, 18])
def test_gaussian_set_against_a_hundred_thousand_samples(A):
    d, n = A + 2, 100_000
    mu, sigma, z = draw(2, A), draw(2, A, d, seed=1), draw(n, d, seed=2)
    pi = draw(2, A, seed=3).softmax(-1)
    q = mu + torch.einsum("bad,nd->nba", sigma, z)  # [n, B, A]
    covariance = torch.einsum("bad,bcd->bac", sigma, sigma)
    for b in range(2):
        assert np.allclose(
            np.cov(q[:, b].T.numpy()), covariance[b].numpy(), atol=0.05 * covariance[b].abs().max().item()
        )
    for upsilon in (0.5, 0.9):
        radius = math.sqrt(chi2.ppf(upsilon, A))
        ours = (pi * worst_case_gaussian(mu, sigma, pi, radius)).sum(-1)
        sampled = (pi * worst_case_ellipsoid(q, pi, upsilon)).sum(-1)
        mean = (pi * mu).sum(-1)
        assert ((ours - sampled).abs() < 0.02 * (mean - ours)).all()
        inside = torch.einsum("nba,bac,nbc->nb", q - mu, torch.linalg.inv(covariance), q - mu) <= radius**2
        assert (inside.double().mean(0) - upsilon).abs().max() < 5 * math.sqrt(upsilon * (1 - upsilon) / n)


def test_fewer_indices_than_actions_cover_more():
    A, d, n, upsilon = 4, 2, 100_000, 0.9
    sigma, z = draw(1, A, d, seed=1), draw(n, d, seed=2)
    radius = math.sqrt(chi2.ppf(upsilon, A))
    # q lies in a plane; there the set is |z| <= radius, and chi2 with A degrees of freedom is too generous
    share = (z.square().sum(-1) <= radius**2).double().mean().item()
    assert share == pytest.approx(chi2.cdf(radius**2, d), abs=0.005) and share > 0.97
    pi = torch.full((1, A), 1 / A, dtype=torch.float64)
    q_star = worst_case_gaussian(torch.zeros(1, A).double(), sigma, pi, radius)
    best = (torch.einsum("bad,nd->nba", sigma, radius * z / z.norm(dim=-1, keepdim=True)) * pi).sum(-1).min()
    assert (pi * q_star).sum().item() == pytest.approx(best.item(), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gaussian_set_in_degenerate_cases(dtype):
    mu, pi = torch.randn(3, 4, dtype=dtype), torch.eye(4, dtype=dtype)[:3]
    assert torch.equal(worst_case_gaussian(mu, torch.zeros(3, 4, 5, dtype=dtype), pi, 2.0), mu)
    for scale in (1e-30, 1e-10, 1e10):
        sigma = (torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)
        q_star = worst_case_gaussian(torch.zeros_like(mu), sigma, pi, 2.0)
        expected = -2 * sigma[torch.arange(3), torch.arange(3)].double().norm(dim=-1)  # a deterministic policy
        assert (pi * q_star).sum(-1).double().numpy() == pytest.approx(expected.numpy(), rel=1e-5)


# ----- the critic
def test_samples_and_gradients_of_the_critic():
    critic = EpinetCritic(5, 3, 4, 16, **FEATURES).double()
    obs, z = draw(7, 5), draw(6, 4, seed=1)
    q = critic.sample(obs, z)
    assert q.shape == (6, 7, 3)
    mu, sigma = critic(obs)
    assert mu.shape == (7, 3) and sigma.shape == (7, 3, 4)
    for n, b, a in np.ndindex(6, 7, 3):
        assert q[n, b, a].item() == pytest.approx((mu[b, a] + sigma[b, a] @ z[n]).item())
    # the stochastic head sends no gradient into the features
    gradients = torch.autograd.grad(sigma.sum(), list(critic.base.parameters()), allow_unused=True)
    assert all(g is None or (g == 0).all() for g in gradients)
    assert not any(p.requires_grad for p in critic.prior.parameters())
    assert torch.equal(critic.sample(obs, 0 * z)[0], critic.mean(critic.base(obs)))


def test_heads_on_the_observation_and_the_size_of_their_prior():
    torch.manual_seed(0)
    critic = EpinetCritic(5, 3, 16, 16, prior_scale=1.0, head_input="obs")
    obs = torch.randn(500, 5)
    prior = critic.prior(critic.input_scale * obs).unflatten(-1, (3, 16))
    size = prior.square().sum(-1).mean().sqrt()  # root mean square of |sigma_P(s, a)|
    other = EpinetCritic(5, 3, 4, 16, prior_scale=1.0, head_input="obs")
    other = other.prior(other.input_scale * obs).unflatten(-1, (3, 4)).square().sum(-1).mean().sqrt()
    assert 1.5 < size < 4 and 0.6 < size / other < 1.6  # about the size of its inputs, whatever d_z
    assert not any(p.requires_grad for p in critic.prior.parameters()) and (critic.prior[4].bias == 0).all()
    _, sigma_bar = critic(obs)
    torch.testing.assert_close(sigma_bar, (critic.learnable(3 * obs) + critic.prior(3 * obs)).unflatten(-1, (3, 16)))
    gradients = torch.autograd.grad(sigma_bar.sum(), list(critic.base.parameters()), allow_unused=True)
    assert all(g is None for g in gradients)


def test_pixel_script_has_the_same_heads_and_losses():
    from ersac_atari import EpinetHeads
    from ersac_atari import actor_loss as pixel_actor_loss
    from ersac_atari import epinet_loss as pixel_loss
    from ersac_atari import robust_target as pixel_target
    from ersac_atari import worst_case_gaussian as pixel_worst_case

    B, d = 7, 3
    critic = EpinetCritic(5, A, d, 16, prior_scale=0.6, head_input="features").double()
    heads = EpinetHeads(16, A, d, prior_scale=0.6).double()
    heads.load_state_dict({k: v for k, v in critic.state_dict().items() if not k.startswith("base.")})
    obs, pi, action = draw(B, 5), draw(B, A, seed=1).softmax(-1), torch.arange(B) % A
    reward, ended, c = draw(B, seed=2), torch.arange(B) % 2, draw(B, d, seed=3)
    results = []
    for forward, worst_case, target, loss, loss_of_actor in (
        (critic, worst_case_gaussian, robust_target, epinet_loss, actor_loss),
        (lambda x: heads(critic.base(x)), pixel_worst_case, pixel_target, pixel_loss, pixel_actor_loss),
    ):
        mu, sigma_bar = forward(obs)
        q_star = worst_case(mu, sigma_bar, pi, 1.7).detach()
        y = target(reward, ended, pi, pi.log(), q_star, 0.4, 0.8)
        losses = loss(mu, sigma_bar, action, y, c, 0.3)
        parts = critic if forward is critic else heads
        learned = [*critic.base.parameters(), *parts.mean.parameters(), *parts.learnable.parameters()]
        gradients = torch.autograd.grad(losses.mean(), learned)
        assert not any(p.requires_grad for p in parts.prior.parameters())
        results.append([mu, sigma_bar, q_star, y, losses, loss_of_actor(pi, pi.log(), q_star, 0.4), *gradients])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


# ----- the claim that the method rests on
def test_learned_spread_falls_like_one_over_root_n_and_stays_where_there_are_no_data():
    sys.path.insert(0, str(ROOT / "docs" / "benchmark"))
    from epinet_toy import std_against_count

    counts = (1, 10, 100)
    rows = {n: [std_against_count(n, seed) for seed in range(100, 104)] for n in counts}
    mean = {name: [np.mean([row[name] for row in rows[n]]) for n in counts] for name in rows[1][0]}
    slope = np.polyfit(np.log(counts), np.log(mean["seen"]), 1)[0]
    assert -0.58 < slope < -0.42  # 1/sqrt(n) is -0.5; nothing in the critic knows n
    np.testing.assert_allclose(mean["seen"], mean["theory"], rtol=0.25)
    for place in ("other_action", "far_state"):
        kept = np.array(mean[place]) / mean[f"{place}_before"]
        assert (kept > 0.6).all() and (kept < 1.6).all(), (place, kept)
        assert mean[place][-1] > 4 * mean["seen"][-1]


# ----- the script
def equal(x, y):
    """Equal to the last bit, timing and the run's own name aside."""
    if isinstance(x, dict):
        aside = ("seconds", "updates_per_second", "charts/updates_per_second", "run_name", "exp_name")
        return x.keys() == y.keys() and all(equal(x[name], y[name]) for name in x if name not in aside)
    if isinstance(x, list):
        return len(x) == len(y) and all(map(equal, x, y))
    return torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def interrupted(monkeypatch, when):
    """Ctrl-C while minibatch number `when` is drawn."""
    original, calls = torch.randint, []

    def randint(*arguments, **named):
        calls.append(1)
        if len(calls) == when:
            signal.raise_signal(signal.SIGINT)
        return original(*arguments, **named)

    monkeypatch.setattr(torch, "randint", randint)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--method", "ell-epi", "--upsilon", 1.0),
        ("--method", "ell-epi", "--lambda-mu", 1e-4, "--lambda-sigma", 1e-4),
        ("--index-dim", 1, "--autotune"),
    ],
)
def test_stopped_run_resumes_to_the_same_bits(run, load, datasets, monkeypatch, flags):
    whole = load(ran(run("ersac_epinet", *SMALL, *flags)).folders[0])
    assert len(whole.metrics) == 3
    with monkeypatch.context() as patch:
        interrupted(patch, 15)
        part = run("ersac_epinet", *SMALL, *flags, "--exp-name", "part")
    (folder,) = part.folders
    assert part.code == 130 and f"--resume {folder.relative_to(folder.parents[1])}" in part.out
    assert part.states[-1]["update"] == 12 and load(folder).result is None  # the last row's checkpoint
    ran(run("ersac_epinet", "--resume", folder))
    again = load(folder)
    assert again.metrics == whole.metrics and equal(again.result, whole.result)
    assert equal(again.checkpoint, whole.checkpoint)


def test_ctrl_c_before_the_training_leaves_nothing(run, datasets, monkeypatch):
    monkeypatch.setattr(minari.storage, "get_dataset_path", lambda _: signal.raise_signal(signal.SIGINT))
    done = run("ersac_epinet", "--env-id", "CartPole-v1")
    assert done.code == 130 and done.folders == [] and done.out + done.err == ""


def test_a_finished_run_is_evaluated_again_or_extended(run, load, datasets):
    (folder,) = ran(run("ersac_epinet", *SMALL)).folders
    first = load(folder)
    ran(run("ersac_epinet", "--resume", folder, "--eval-episodes", 5, "--capture-video"))
    again = load(folder)
    assert equal(again.checkpoint, first.checkpoint) and len(again.result["eval_returns"]) == 5
    assert again.result["eval_returns"][:3] == first.result["eval_returns"]
    assert len(list((folder / "video").glob("*.mp4"))) == 1
    ran(run("ersac_epinet", "--resume", folder, "--total-updates", 30))
    more = load(folder)
    assert more.checkpoint["update"] == 30 and more.metrics[:3] == first.metrics and len(more.metrics) == 4
    for words, named in (("--total-updates 20", "30"), ("--gamma 0.5", "--gamma"), ("--seed=1", "--seed")):
        done = run("ersac_epinet", "--resume", folder, *words.split())
        assert done.code == 1 and named in done.err and len(done.err.strip().splitlines()) == 1
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    checkpoint["args"]["no_longer_a_flag"] = 3
    torch.save(checkpoint, folder / "checkpoint.pt")
    done = run("ersac_epinet", "--resume", folder)
    assert done.code == 1 and "another version" in done.err


def test_speed_is_that_of_the_updates(run, load, datasets, monkeypatch):
    """A clock of our own: an update takes a second, a step in the environment takes fifty."""
    clock, randint, step = [1000.0], torch.randint, Chain.step

    def minibatch(*arguments, **named):
        clock[0] += 1
        return randint(*arguments, **named)

    def slow(env, action):
        clock[0] += 50
        return step(env, action)

    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(torch, "randint", minibatch)
    monkeypatch.setattr(Chain, "step", slow)
    done = ran(run("ersac_epinet", *command_line(OPTIONS | dict(total_updates=5))))
    (folder,) = done.folders
    assert [row["charts/updates_per_second"] for row in metrics(folder)] == [1.0] * 3
    assert load(folder).result["updates_per_second"] == 1.0
    clock[0] += 10**6
    ran(run("ersac_epinet", "--resume", folder))
    assert load(folder).result["updates_per_second"] == 1.0


def test_wandb_gets_the_same_numbers(run, load, datasets, monkeypatch):
    told = SimpleNamespace(rows=[], summary={}, finished=0)

    def init(**named):
        told.named = named

        def finish():
            told.finished += 1

        def log(row, step):
            told.rows.append((step, row))

        return SimpleNamespace(log=log, summary=told.summary, finish=finish, step=0)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    names = ("--track", "--wandb-project-name", "project", "--wandb-entity", "team", "--exp-name", "told")
    (folder,) = ran(run("ersac_epinet", *command_line(OPTIONS), *names)).folders
    assert folder.name.startswith("Chain-v0__told__7__")
    got = load(folder)
    expected = {"project": "project", "entity": "team", "name": folder.name, "id": folder.name, "resume": "allow"}
    expected |= {"group": "test/chain-v0 Ell-Epi* ersac_epinet.py", "tags": ["Ell-Epi*", "ersac_epinet.py"]}
    assert told.named.items() >= (expected | {"save_code": True}).items()
    config = told.named["config"]
    assert config.items() >= (got.args | {"dataset_id": "test/chain-v0", "label": "Ell-Epi*"}).items()
    assert re.fullmatch("[0-9a-f]{7,}(-dirty)?|", config["commit"]) and config["script"] == "ersac_epinet.py"
    assert told.rows == [(row["update"], row) for row in metrics(folder)]
    assert told.summary == got.result and told.finished == 1


def test_video_of_the_final_evaluation(run, load, datasets):
    done = ran(run("ersac_epinet", *SMALL, "--capture-video"))
    (video,) = (done.folders[0] / "video").glob("*.mp4")
    assert video.stat().st_size > 1000
    plain = ran(run("ersac_epinet", *SMALL, "--exp-name", "plain"))
    assert equal(load(done.folders[0]).result, load(plain.folders[0]).result)


def test_device_and_deterministic_algorithms_are_as_asked(run, datasets, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # there is none: a run on it would fail
    for flag, wanted in (("--no-torch-deterministic", False), ("--torch-deterministic", True)):
        ran(run("ersac_epinet", *SMALL, "--no-cuda", flag, "--exp-name", wanted))
        assert torch.are_deterministic_algorithms_enabled() == wanted


@pytest.mark.parametrize("flag, where", [("--q-lr", "update 1: "), ("--policy-lr", "update 2: ")])
def test_diverging_run_stops_and_keeps_a_finite_checkpoint(run, datasets, flag, where):
    done = run("ersac_epinet", *SMALL, flag, 1e30)
    assert done.code == 1 and f"{where}loss not finite" in done.err
    assert all(x.isfinite().all() for part in ("critic", "actor") for x in done.states[-1][part].values())


BAD = [
    ("--dataset-id test/ragged-v0", "T + 1"),
    ("--dataset-id test/nan-v0", "not finite"),
    ("--dataset-id test/text-v0", "not vectors"),
    ("--dataset-id test/pictures-v0", "ersac_atari.py"),
    ("--dataset-id cartpole", "end in a version"),
    ("--dataset-id test/pendulum-v0", "discrete actions"),
    ("--upsilon 1", "infinite"),
    ("--upsilon 1.1 --method ell-epi", "upsilon"),
    ("--upsilon 0", "upsilon"),
    ("--uncertainty-set box --method ell-epi", "closed form"),
    ("--targets his", "targets"),
    ("--method ell-n", "method"),
    ("--total-updates 0", "total-updates"),
    ("--eval-interval 0", "eval-interval"),
    ("--eval-episodes 0", "eval-episodes"),
    ("--alpha 0 --autotune", "alpha"),
    ("--gamma 1", "gamma"),
    ("--gamma -0.1", "gamma"),
]


@pytest.mark.parametrize("arguments, named", BAD)
def test_bad_input_ends_in_one_clear_line(run, datasets, arguments, named):
    done = run("ersac_epinet", *(() if "dataset-id" in arguments else DATA), *SHORT, *arguments.split())
    assert done.code in (1, 2) and named in done.err and "Traceback" not in done.err, done.err
    assert done.code == 2 or len(done.err.strip().splitlines()) == 1
    assert done.folders == []
