"""Protects ersac_epinet.py: its training loop against one written again from the algorithm, the closed forms against
sampling, heads that are linear in z and heads that are not, and uncertainty that shrinks with data."""

import csv
import json
import math
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import plain_data
from scipy.special import gammaincinv

from ersac_epinet import INPUT_SCALE, EpinetCritic, epinet_loss

ROOT = Path(__file__).resolve().parents[1]
A = 4  # actions of the chain


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ----- the training loop written again, in float64 and without the script: networks are dicts of tensors
OPTIONS = dict(  # all away from the script's defaults, so that every flag matters
    dataset_id="test/chain-v0",
    seed=7,
    targets="shared",
    method="ell-epi-star",
    uncertainty_set="ellipsoid",
    head_input="features",
    upsilon=0.6,
    index_dim=5,
    num_index_samples=30,
    prior_scale=0.8,
    noise_scale=0.7,
    lambda_mu=0.0,
    lambda_sigma=0.0,
    total_updates=3,
    batch_size=24,
    hidden_dim=8,
    gamma=0.8,
    q_lr=0.02,
    policy_lr=0.03,
    polyak=0.3,
    alpha=0.4,
    eval_interval=2,
    eval_episodes=23,
)
VARIANTS = {
    "closed form": {},
    "closed form, another set": dict(upsilon=0.97, index_dim=3, seed=8),
    "closed form, box": dict(uncertainty_set="box", head_input="obs"),
    "closed form, heads on the observation": dict(head_input="obs"),
    "closed form, own targets": dict(targets="own"),
    "closed form, own targets, box": dict(targets="own", uncertainty_set="box", head_input="obs", gamma=0.95),
    "sampled": dict(method="ell-epi"),
    # 7 of 25 samples, although 0.28 * 25 is 7.000000000000001
    "sampled, another set": dict(method="ell-epi", upsilon=0.28, num_index_samples=25, seed=8),
    "sampled, all of the samples": dict(method="ell-epi", upsilon=1.0, num_index_samples=11, head_input="obs"),
    "sampled, box": dict(method="ell-epi", uncertainty_set="box", head_input="obs"),
    "sampled, hull": dict(method="ell-epi", uncertainty_set="hull", seed=9),
    "sampled, own targets": dict(targets="own", method="ell-epi", head_input="obs"),
    "sampled, own targets, box": dict(targets="own", method="ell-epi", uncertainty_set="box"),
    "sampled, own targets, hull": dict(targets="own", method="ell-epi", uncertainty_set="hull", gamma=0.95),
    "weight decay": dict(lambda_mu=0.3, lambda_sigma=0.1),
    "weight decay, sampled": dict(method="ell-epi", lambda_mu=0.1, lambda_sigma=0.3),
    "scales": dict(prior_scale=2.1, noise_scale=0.2, gamma=0.95, polyak=0.6),
    "scales, sampled": dict(method="ell-epi", prior_scale=2.1, noise_scale=0.2, gamma=0.95, polyak=0.6),
    "zeros": dict(prior_scale=0.0, noise_scale=0.0, gamma=0.0, alpha=0.0),
}


def command_line(options):
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]


def dense(net, name, x):
    return x @ net[f"{name}.weight"].T + net[f"{name}.bias"]


def features(net, s):
    for linear, norm in (("psi.0", "psi.1"), ("psi.3", "psi.4")):
        s = dense(net, linear, s)
        d = s - s.mean(-1, keepdim=True)
        s = d / ((d**2).mean(-1, keepdim=True) + 1e-5).sqrt() * net[f"{norm}.weight"] + net[f"{norm}.bias"]
        s = s.relu()
    return s


def head_reads(s, psi, o):
    return 3.0 * s if o.head_input == "obs" else psi.detach()  # the heads do not move the features


def mean_and_spread(net, s, o):
    """Linear heads: mu [B, A] and sigma_bar [B, A, d_z]."""
    psi = features(net, s)
    x = head_reads(s, psi, o)
    out = {}
    for name in ("sigma_L", "sigma_P"):
        h = dense(net, f"{name}.2", dense(net, f"{name}.0", x).relu())
        out[name] = dense(net, f"{name}.4", h.relu()) if o.head_input == "obs" else h
    sigma = (out["sigma_L"] + o.prior_scale * out["sigma_P"]).reshape(len(x), A, o.index_dim)
    return dense(net, "mu", psi), sigma


def samples(net, s, indices, o):
    """General heads: q(s, a, z) of every index z, one at a time, [N, B, A]."""
    psi = features(net, s)
    x = head_reads(s, psi, o)
    q = []
    for z in indices:
        out = {}
        for name in ("sigma_L", "sigma_P"):
            h = torch.stack([dense(net, f"{name}.from_x", state) + dense(net, f"{name}.from_z", z) for state in x])
            out[name] = dense(net, f"{name}.out.2", dense(net, f"{name}.out.0", h.relu()).relu())
        q.append(dense(net, "mu", psi) + out["sigma_L"] + o.prior_scale * out["sigma_P"])
    return torch.stack(q)


@torch.no_grad()
def worst_values(net, s, pi, indices, o):
    """q* of the set, state by state. [B, A]"""
    worst = []
    q = samples(net, s, indices, o) if o.method == "ell-epi" else None
    mu, sigma = mean_and_spread(net, s, o) if q is None else (q.mean(0), None)
    for b in range(len(s)):
        if q is not None and o.uncertainty_set == "box":
            worst.append(torch.stack([min(q[:, b, a]) for a in range(A)]))
            continue
        if q is not None and o.uncertainty_set == "hull":
            worst.append(min(q[:, b], key=lambda sample: (pi[b] @ sample).item()))
            continue
        if q is None:
            covariance = sigma[b] @ sigma[b].T
            square = 2 * gammaincinv(A / 2, o.upsilon)  # the chi-squared distribution's quantile
        else:
            d = q[:, b] - mu[b]
            covariance = d.T @ d / len(d)
            distances = sorted((x @ torch.linalg.pinv(covariance, rtol=1e-9) @ x).item() for x in d)
            square = distances[math.ceil(Fraction(str(o.upsilon)) * len(d)) - 1]
        if o.uncertainty_set == "box":  # as far down as the ellipsoid reaches in each action
            worst.append(torch.stack([mu[b, a] - math.sqrt(square * covariance[a, a]) for a in range(A)]))
            continue
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
    actor = {name: x.double() for name, x in first["actor"].items()}
    learned = [[name for name in critic if not name.startswith("sigma_P.")], list(actor)]
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
        rate = 1 - (t - 1) / o.total_updates
        s, a, alpha = data.s[index], data.a[index], o.alpha

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
        decay = {name: o.lambda_sigma if name.startswith("sigma_L.") else o.lambda_mu for name in moments[0]}
        loss = critic_loss + sum(weight * (critic[name] ** 2).sum() for name, weight in decay.items())
        descend(critic, loss, moments[0], o.q_lr * rate, t)

        # actor, against the critic as it is now
        pi, log_pi = policy(actor, s)
        q_star = worst_values(critic, s, pi.detach(), indices, o)
        entropy = -(pi * log_pi).sum(1)
        actor_loss = -((pi * q_star).sum(1) + alpha * entropy).mean()
        descend(actor, actor_loss, moments[1], o.policy_lr * rate, t)

        for name in target:
            target[name] = (1 - o.polyak) * target[name] + o.polyak * critic[name].detach()

        # what is logged
        with torch.no_grad():
            if o.method == "ell-epi":
                q = samples(critic, s, indices, o)
                mu, std = q.mean(0), q.std(0, correction=0)
            else:
                mu, sigma = mean_and_spread(critic, s, o)
                std = (sigma**2).sum(-1).sqrt()  # of <sigma_bar, z>
        taken = [(b, k) for b, k in enumerate(a.tolist())]
        other = [(b, k) for b in range(len(s)) for k in range(A) if (b, k) not in taken]
        ended = [(b, k) for b, k in taken if not data.returns[index[b]].isnan()]
        row = {
            "update": t,
            "losses/critic_loss": critic_loss,
            "losses/actor_loss": actor_loss,
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
    """Returns of the greedy policy on the chain."""
    env, returns = gym.make("test/Chain-v0"), []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed + episode)
        returns.append(0.0)
        done = False
        while not done:
            pi, _ = policy(actor, ((torch.tensor(obs).double() - data.mean) / data.std)[None])
            obs, reward, terminated, truncated, _ = env.step(pi.argmax().item())
            returns[-1] += reward
            done = terminated or truncated
    return np.array(returns)


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
    the size of the gradient: its moments know the size, and where a gradient is no more than rounding (1e-5 of the
    largest one) single and double precision may step apart."""
    for optimizer, moments in zip(("q_optimizer", "policy_optimizer"), expected.moments):
        state = last[optimizer]["state"]
        assert len(state) == len(moments)
        for x, (name, (m, v)) in zip(state.values(), moments.items()):
            assert x["step"] == last["update"]
            close(x["exp_avg"], m, f"first moment of {name}", atol=1e-4 * m.abs().max().item())
            close(x["exp_avg_sq"], v, f"second moment of {name}", atol=1e-4 * v.abs().max().item())
    moments = {"critic": expected.moments[0], "target": expected.moments[0], "actor": expected.moments[1]}
    for part in ("critic", "target", "actor"):
        for name, x in last[part].items():
            theirs = getattr(expected, part)[name]
            if name in moments[part]:
                size = moments[part][name][1].sqrt()
                sure = (size == 0) | (size > 1e-5 * size.max())
                assert sure.double().mean() > 0.98
                x, theirs = x[sure], theirs[sure]
            close(x, theirs, f"{part} {name}")


def check_rows(rows, logged):
    for row, expected in zip(rows, logged, strict=True):
        assert row.pop("charts/updates_per_second") > 0
        assert row.keys() == expected.row.keys() | {"eval/return"}
        for name, value in expected.row.items():
            close(row[name], value, name)


def check_result(folder, last, data, o, method):
    """result.json: the last policy, greedy, on episodes of their own."""
    actor = {name: x.double() for name, x in last["actor"].items()}
    returns = play(actor, data, o.eval_episodes, 10**6 * (o.seed + 1) + 10**5)
    pi, log_pi = policy(actor, data.s)
    result = json.loads((folder / "result.json").read_text())
    assert result.pop("updates_per_second") > 0
    assert result == {
        "script": "ersac_epinet.py",
        "method": method,
        "env_id": "test/Chain-v0",
        "seed": o.seed,
        "dataset_id": o.dataset_id,
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


@pytest.mark.parametrize("variant", VARIANTS)
def test_three_updates_are_those_of_a_plain_loop(variant, run, load, first_state, datasets):
    o = SimpleNamespace(**OPTIONS | VARIANTS[variant])
    first = first_state("ersac_epinet", *command_line(vars(o)))
    done = ran(run("ersac_epinet", *command_line(vars(o))))
    (folder,) = done.folders
    data = plain_data(o.dataset_id, o.gamma)
    last = load(folder).checkpoint
    assert last["update"] == 3 and load(folder).args.items() >= vars(o).items()
    assert all(torch.equal(x, first["target"][name]) for name, x in first["critic"].items())
    expected = train(first, data, o)
    check_networks(last, expected)
    close(last["obs_mean"], data.mean, "mean")
    close(last["obs_std"], data.std, "standard deviation")

    shape = {"ellipsoid": "Ell", "hull": "CH", "box": "Box"}[o.uncertainty_set]
    method = f"{shape}-Epi" + "*" * (o.method == "ell-epi-star") + "-own" * (o.targets == "own")
    assert f"{method} on test/chain-v0" in done.out
    rows = metrics(folder)
    assert [row["update"] for row in rows] == [2, 3]
    for row, logged in zip(rows, expected.logged[1:]):
        assert 0 < logged.ended < o.batch_size  # returns that are known and others
        returns = play(logged.actor, data, 3, 10**6 * (o.seed + 1))  # 3 is a tenth of the 23 episodes, rounded up
        assert row["eval/return"] == pytest.approx(returns.mean(), rel=1e-9)
    check_rows(rows, expected.logged[1:])
    check_result(folder, last, data, o, method)


def test_a_run_whose_episodes_are_all_cut(run, load, first_state, datasets):
    """No return is known; rewards are scaled as if each of them went on for ever."""
    o = SimpleNamespace(**OPTIONS | dict(dataset_id="test/chain-cut-v0", eval_interval=1))
    first = first_state("ersac_epinet", *command_line(vars(o)))
    done = ran(run("ersac_epinet", *command_line(vars(o))))
    data = plain_data(o.dataset_id, o.gamma)
    assert not data.terminated.any() and data.returns.isnan().all()
    expected = train(first, data, o)
    check_networks(load(done.folders[0]).checkpoint, expected)
    rows = metrics(done.folders[0])
    check_rows(rows, expected.logged)
    assert math.isnan(rows[0]["charts/q_minus_return"])


@pytest.mark.parametrize("method", ["ell-epi-star", "ell-epi"])
def test_the_loop_learns(method, run, load, datasets):
    """To go right is best, 26.5 on average; random play has -14, the other end -22."""
    flags = "--dataset-id test/chain-large-v0 --total-updates 250 --batch-size 64 --hidden-dim 32 --gamma 0.9"
    flags += " --q-lr 0.003 --policy-lr 0.003 --noise-scale 0.3 --num-index-samples 20 --eval-episodes 40"
    if method == "ell-epi":
        flags += " --prior-scale 0.3"
    done = ran(run("ersac_epinet", *flags.split(), "--method", method))
    assert load(done.folders[0]).result["eval_return_mean"] > 24


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


def test_linear_heads_through_samples_agree_with_the_closed_form():
    """The loss of many samples of a critic with linear heads, and its gradient, are those of epinet_loss."""
    torch.manual_seed(0)
    B, d, n = 6, 3, 100_000
    critic = EpinetCritic(5, A, d, 8, prior_scale=0.5, head_input="features").double()
    obs, y, c, action = draw(B, 5), draw(B, seed=1), draw(B, d, seed=2), torch.arange(B) % A
    mu, sigma_bar = critic(obs)
    exact = epinet_loss(mu, sigma_bar, action, y, c, 0.4)  # [B]
    z = draw(n, d, seed=3)
    q = critic.sample(obs, z)[:, torch.arange(B), action]  # [n, B]
    sampled = (q - y - 0.4 * z @ c.T).square()
    assert ((sampled.mean(0) - exact).abs() < 5 * sampled.std(0) / math.sqrt(n)).all()
    learned = [p for p in critic.parameters() if p.requires_grad]
    ours = torch.autograd.grad(exact.mean(), learned)
    theirs = torch.autograd.grad(sampled.mean(), learned)
    for x, x_sampled in zip(ours, theirs):
        assert (x - x_sampled).abs().max() < 0.03 * x.abs().max() + 1e-4


# ----- the critic
@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("head_input", ["obs", "features"])
def test_start_and_gradients_of_the_critic(head_input, linear):
    torch.manual_seed(0)
    critic = EpinetCritic(5, 3, 4, 64, prior_scale=0.7, head_input=head_input, linear=linear).double()
    obs, z = draw(7, 5), draw(6, 4, seed=1)
    q = critic.sample(obs, z)
    assert q.shape == (6, 7, 3)
    # no gradient from the stochastic heads into the features, none into the prior
    stochastic = (q - critic.mu(critic.psi(obs))).sum()
    gradients = torch.autograd.grad(stochastic, list(critic.psi.parameters()), allow_unused=True)
    assert all(g is None or g.abs().max() < 1e-12 for g in gradients)
    assert not any(p.requires_grad for p in critic.sigma_P.parameters())
    # learnable weights start as those of nn.Linear
    for name, p in [*critic.psi.named_parameters(), *critic.mu.named_parameters(), *critic.sigma_L.named_parameters()]:
        if p.dim() == 2:
            assert 0.8 < p.abs().max() * math.sqrt(p.shape[1]) <= 1, name


def test_heads_that_are_nonlinear_in_z_differ_from_their_linearisation():
    """A linear head is its own linearisation around z = 0; a general one is far from it."""
    obs, z = draw(7, 5), draw(50, 4, seed=1)
    gap = {}
    for linear in (True, False):
        torch.manual_seed(0)
        critic = EpinetCritic(5, 3, 4, 16, prior_scale=1.0, head_input="obs", linear=linear).double()
        q = critic.sample(obs, z)
        zero = torch.zeros(1, 4, dtype=torch.float64)
        jacobian = torch.autograd.functional.jacobian(lambda x, critic=critic: critic.sample(obs, x)[0], zero)[:, :, 0]
        linearised = critic.sample(obs, zero)[0] + torch.einsum("bad,nd->nba", jacobian, z)
        gap[linear] = ((q - linearised).std() / (q - q.mean(0)).std()).item()
    assert gap[True] < 1e-10 and gap[False] > 0.1


def test_the_prior_of_heads_on_the_observation_has_the_size_of_what_it_reads():
    torch.manual_seed(0)
    obs, size = torch.randn(500, 5), {}
    for d_z in (4, 16):
        critic = EpinetCritic(5, 3, d_z, 16, prior_scale=1.0, head_input="obs")
        sigma = critic.sigma_P(INPUT_SCALE * obs).unflatten(-1, (3, d_z))
        size[d_z] = sigma.square().sum(-1).mean().sqrt().item()  # root mean square of |sigma_P(s, a)|
        assert (critic.sigma_P[4].bias == 0).all()
    assert 1.5 < size[16] < 4 and 0.6 < size[16] / size[4] < 1.6


# ----- the claim that the method rests on
def test_learned_spread_falls_like_one_over_root_n_and_stays_where_there_are_no_data():
    sys.path.insert(0, str(ROOT / "docs" / "benchmark"))
    from epinet_toy import std_against_count

    counts = (1, 10, 100)
    rows = {n: [std_against_count(n, seed) for seed in range(100, 102)] for n in counts}
    mean = {name: [np.mean([row[name] for row in rows[n]]) for n in counts] for name in rows[1][0]}
    slope = np.polyfit(np.log(counts), np.log(mean["seen"]), 1)[0]
    assert -0.58 < slope < -0.42  # 1/sqrt(n) is -0.5; nothing in the critic knows n
    np.testing.assert_allclose(mean["seen"], mean["theory"], rtol=0.25)
    for place in ("other_action", "far_state"):
        kept = np.array(mean[place]) / mean[f"{place}_before"]
        assert (kept > 0.6).all() and (kept < 1.6).all(), (place, kept)
        assert mean[place][-1] > 4 * mean["seen"][-1]
