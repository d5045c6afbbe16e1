"""Protects ersac_epinet.py: its training loop against one written again from the algorithm, the closed forms against
sampling, heads that are linear in z and heads that are not, and uncertainty that shrinks with data."""

import copy
import math
import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    assert_close,
    check_learned,
    check_result,
    command_line,
    dense,
    descend,
    double,
    mean,
    normalise,
    plain_data,
    plain_gaussian,
    plain_policy,
    plain_returns,
    plain_row,
    plain_worst_case,
    read_rows,
)

from ersac_epinet import INPUT_SCALE, EpinetCritic, epinet_loss, propagated_spread, robust_target

A = 4  # actions of the chain


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ----- the training loop written again, in float64 and without the script: networks are dicts of tensors
# all away from the script's defaults, so that every flag matters
OPTIONS = dict(dataset_id="test/chain-v0", seed=7, targets="shared", method="ell-epi-star")
OPTIONS |= dict(uncertainty_set="ellipsoid", head_input="features", upsilon=0.6, index_dim=5)
OPTIONS |= dict(num_index_samples=20, prior_scale=0.8, noise_scale=0.7, lambda_mu=0.0, lambda_sigma=0.0)
OPTIONS |= dict(total_updates=3, batch_size=24, hidden_dim=8, gamma=0.8, q_lr=0.02, policy_lr=0.03)
OPTIONS |= dict(polyak=0.3, alpha=0.4, eval_interval=2, eval_episodes=23)
VARIANTS = {  # every set and form of targets reads the observation once and the features once
    "Ell-Epi*": {},
    "Ell-Epi* obs": dict(head_input="obs", upsilon=0.97, index_dim=3, seed=8),
    "Box-Epi*": dict(uncertainty_set="box"),
    "Box-Epi* obs": dict(uncertainty_set="box", head_input="obs"),
    "Ell-Epi*-own": dict(targets="own"),
    "Ell-Epi*-own obs": dict(targets="own", head_input="obs", prior_scale=2.1, noise_scale=0.2, polyak=0.6),
    "Box-Epi*-own": dict(targets="own", uncertainty_set="box", gamma=0.95),
    "Box-Epi*-own obs": dict(targets="own", uncertainty_set="box", head_input="obs"),
    "Ell-Epi* decay": dict(lambda_mu=0.3, lambda_sigma=0.1),
    "Ell-Epi* zeros": dict(prior_scale=0.0, noise_scale=0.0, gamma=0.0, alpha=0.0),
    "Ell-Epi* cut": dict(dataset_id="test/chain-cut-v0"),  # no return is known
    # 7 of 25 samples, although 0.28 * 25 is 7.000000000000001
    "Ell-Epi": dict(method="ell-epi", upsilon=0.28, num_index_samples=25, seed=8),
    "Ell-Epi obs": dict(method="ell-epi", upsilon=1.0, num_index_samples=11, head_input="obs"),
    "Box-Epi": dict(method="ell-epi", uncertainty_set="box"),
    "Box-Epi obs": dict(method="ell-epi", uncertainty_set="box", head_input="obs"),
    "CH-Epi": dict(method="ell-epi", uncertainty_set="hull", seed=9),
    "CH-Epi obs": dict(method="ell-epi", uncertainty_set="hull", head_input="obs", polyak=0.6),
    "Ell-Epi-own": dict(targets="own", method="ell-epi", prior_scale=2.1, noise_scale=0.2),
    "Ell-Epi-own obs": dict(targets="own", method="ell-epi", head_input="obs"),
    "Box-Epi-own": dict(targets="own", method="ell-epi", uncertainty_set="box"),
    "Box-Epi-own obs": dict(targets="own", method="ell-epi", uncertainty_set="box", head_input="obs"),
    "CH-Epi-own": dict(targets="own", method="ell-epi", uncertainty_set="hull", gamma=0.95),
    "CH-Epi-own obs": dict(targets="own", method="ell-epi", uncertainty_set="hull", head_input="obs"),
    "Ell-Epi decay": dict(method="ell-epi", lambda_mu=0.1, lambda_sigma=0.3),
}


def features(net, s):
    for layer, norm in (("psi.0", "psi.1"), ("psi.3", "psi.4")):
        s = torch.relu(normalise(dense(net, layer, s)) * net[f"{norm}.weight"] + net[f"{norm}.bias"])
    return s


def layers(net, name, x, count):
    """Linear layers named 0, 2, 4, ... with ReLU in between."""
    for k in range(count):
        x = dense(net, f"{name}.{2 * k}", torch.relu(x) if k else x)
    return x


def mean_and_spread(net, s, o):
    """Linear heads: mu [B, A] and sigma_bar [B, A, d_z]."""
    psi = features(net, s)
    x, count = (3.0 * s, 3) if o.head_input == "obs" else (psi.detach(), 2)  # no gradient from heads to features
    sigma = layers(net, "sigma_L", x, count) + o.prior_scale * layers(net, "sigma_P", x, count)
    return dense(net, "mu", psi), sigma.reshape(len(s), A, o.index_dim)


def samples(net, s, indices, o):
    """General heads: q(s, a, z) of every index z and state, one at a time, [N, B, A]."""
    psi = features(net, s)
    x, count = (3.0 * s, 1) if o.head_input == "obs" else (psi.detach(), 0)
    q = []
    for z in indices:
        sigma = {}
        for name in ("sigma_L", "sigma_P"):
            xz = torch.cat([torch.relu(layers(net, f"{name}.from_x", x, count)), z.expand(len(x), -1)], 1)
            h = torch.relu(dense(net, f"{name}.hidden", xz))  # [B, W]
            sigma[name] = torch.stack([g.reshape(A, o.index_dim) @ z for g in dense(net, f"{name}.g", h)])
        q.append(dense(net, "mu", psi) + sigma["sigma_L"] + o.prior_scale * sigma["sigma_P"])
    return torch.stack(q)


@torch.no_grad()
def worst_values(net, s, pi, indices, o):
    """q* of the set, state by state. [B, A]"""
    if o.method == "ell-epi":
        q = samples(net, s, indices, o).numpy()
        worst = [plain_worst_case(o.uncertainty_set, q[:, b], pi[b].numpy(), o.upsilon) for b in range(len(s))]
    else:
        parts = [x.numpy() for x in (*mean_and_spread(net, s, o), pi)]
        worst = [plain_gaussian(o.uncertainty_set, *state, o.upsilon) for state in zip(*parts)]
    return torch.tensor(np.stack(worst))


def train(first, data, o):
    """Algorithm 4, and Section 5's loss for general heads, from the first checkpoint on. Returns what is logged and
    the actor, both for every update, and all that is learned."""
    critic, target, actor = (double(first[part]) for part in ("critic", "target", "actor"))
    learned = {name: x.requires_grad_() for name, x in critic.items() if not name.startswith("sigma_P.")}
    q_adam = torch.optim.Adam(learned.values())
    policy_adam = torch.optim.Adam(x.requires_grad_() for x in actor.values())
    c = torch.randn(len(data.s), o.index_dim, generator=torch.Generator().manual_seed(o.seed)).double()
    c = c / c.norm(dim=1, keepdim=True)  # every transition's own direction
    generator, rows, actors = torch.Generator().manual_seed(o.seed), [], []
    for t in range(1, o.total_updates + 1):
        index = torch.randint(len(data.s), (o.batch_size,), generator=generator)
        indices = None
        if o.method == "ell-epi":
            indices = torch.randn(o.num_index_samples, o.index_dim, generator=generator).double()
        rate = 1 - (t - 1) / o.total_updates
        s, a, alpha = data.s[index], data.a[index], o.alpha

        # target
        pi, log_pi = (x.detach() for x in plain_policy(actor, data.s_next[index]))
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
        loss = sum(losses) / len(losses)
        row = {"update": t, "losses/critic_loss": loss.item()}
        for name, x in learned.items():
            loss = loss + (o.lambda_sigma if name.startswith("sigma_L.") else o.lambda_mu) * (x**2).sum()
        descend(q_adam, loss, o.q_lr * rate)

        # actor, against the critic as it is now
        pi, log_pi = plain_policy(actor, s)
        q_star = worst_values(critic, s, pi.detach(), indices, o)
        loss = -((pi * q_star).sum(1) - alpha * (pi * log_pi).sum(1)).mean()
        row["losses/actor_loss"] = loss.item()
        descend(policy_adam, loss, o.policy_lr * rate)

        for name in target:
            target[name] = (1 - o.polyak) * target[name] + o.polyak * critic[name].detach()

        if o.method == "ell-epi":
            q = samples(critic, s, indices, o)
            mu, std = q.mean(0), q.std(0, correction=0)
        else:
            mu, sigma = mean_and_spread(critic, s, o)
            std = (sigma**2).sum(-1).sqrt()  # of <sigma_bar, z>
        rows.append(row | plain_row(pi, log_pi, mu, std, q_star, a, data.returns[index]))
        actors.append(double(actor))
    networks = {"critic": critic, "target": target, "actor": actor}
    return rows, actors, networks, {"q_optimizer": q_adam, "policy_optimizer": policy_adam}


@pytest.mark.parametrize("variant", VARIANTS)
def test_three_updates_are_those_of_a_plain_loop(variant, run, load, first_state, datasets):
    o = SimpleNamespace(**OPTIONS | VARIANTS[variant])
    first = first_state("ersac_epinet", *command_line(vars(o)))
    assert all(torch.equal(x, first["target"][name]) for name, x in first["critic"].items())
    done = run("ersac_epinet", *command_line(vars(o)))
    assert done.code == 0, done.err
    (folder,) = done.folders
    data, last = plain_data(o.dataset_id, o.gamma), load(folder).checkpoint
    assert last["update"] == 3 and load(folder).args.items() >= vars(o).items()
    rows, actors, networks, optimizers = train(first, data, o)
    check_learned(last, networks, optimizers)
    assert_close(last["obs_mean"], data.mean, "mean")
    assert_close(last["obs_std"], data.std, "standard deviation")

    # metrics.csv, result.json and the last lines
    cut = o.dataset_id == "test/chain-cut-v0"
    env, seed = gym.make("test/Chain-v0", max_episode_steps=4 if cut else 10), 10**6 * (o.seed + 1)

    def returns(actor, episodes, seed):
        def act(obs):
            return int(plain_policy(actor, (torch.tensor(obs).double() - data.mean) / data.std)[0].argmax())

        return plain_returns(act, env, episodes, seed)

    logged = read_rows(folder)
    assert [row["update"] for row in logged] == [2, 3]
    for row, actor, expected in zip(logged, actors[1:], rows[1:], strict=True):
        expected["eval/return"] = mean(returns(actor, 3, seed))  # a tenth of the 23 episodes, rounded up
        assert math.isnan(expected["charts/q_minus_return"]) == cut
        assert row.pop("charts/updates_per_second") > 0.1
        assert row == pytest.approx(expected, rel=2e-4, abs=5e-6, nan_ok=True)
    words = {"script": "ersac_epinet.py", "method": variant.split()[0], "env_id": "test/Chain-v0"}
    words |= {"dataset_id": o.dataset_id, "seed": o.seed, "updates": 3}
    pi, log_pi = plain_policy(actors[-1], data.s)
    words["policy_entropy"] = -(pi * log_pi).sum(-1).mean().item()
    scores = (None, None) if cut else (-14.0, 25.0)
    check_result(folder, returns(actors[-1], 23, seed + 10**5), *scores, done.out, **words)


@pytest.mark.parametrize("method", ["ell-epi-star", "ell-epi"])
def test_the_loop_learns(method, run, load, datasets):
    """To go right is best, 26.5 on average; random play has -14, the other end -22."""
    flags = "--dataset-id test/chain-large-v0 --total-updates 250 --batch-size 64 --hidden-dim 32 --gamma 0.9"
    flags += " --q-lr 0.003 --policy-lr 0.003 --noise-scale 0.3 --num-index-samples 20 --eval-episodes 40"
    if method == "ell-epi":
        flags += " --prior-scale 0.3"
    done = run("ersac_epinet", *flags.split(), "--method", method)
    assert done.code == 0, done.err
    assert load(done.folders[0]).result["eval_return_mean"] > 24


# ----- the closed form against sampling: linear heads through the samples' path
@pytest.mark.parametrize("head_input", ["features", "obs"])
@pytest.mark.parametrize("targets", ["shared", "own"])
def test_linear_heads_through_samples_agree_with_the_closed_form(head_input, targets):
    """Loss and gradient of a hundred thousand samples are those of epinet_loss; with own targets every index z has a
    target of its own, from a critic of its own at s_next."""
    torch.manual_seed(0)
    B, d, n = 6, 3, 100_000
    critic = EpinetCritic(5, A, d, 8, prior_scale=0.5, head_input=head_input).double()
    target = copy.deepcopy(critic).requires_grad_(False)
    for p in target.parameters():
        p.add_(0.2 * torch.randn_like(p))
    s, s_next, r, c, z = (draw(*shape, seed=k) for k, shape in enumerate([(B, 5), (B, 5), (B,), (B, d), (n, d)]))
    action, ended = torch.arange(B) % A, (torch.arange(B) == 2).double()
    pi = draw(B, A, seed=5).softmax(-1)
    mu_next, sigma_next = target(s_next)
    y = robust_target(r, ended, pi, pi.log(), mu_next, 0.3, 0.9)  # [B]
    spread, targets_of_samples = 0.0, y
    if targets == "own":
        spread = propagated_spread(ended, pi, sigma_next, 0.9)
        targets_of_samples = robust_target(r, ended, pi, pi.log(), target.sample(s_next, z), 0.3, 0.9)  # [n, B]
    mu, sigma_bar = critic(s)
    exact = epinet_loss(mu, sigma_bar, action, y, c, 0.4, spread)  # [B]
    q = critic.sample(s, z)[:, torch.arange(B), action]  # [n, B]
    sampled = (q - targets_of_samples - 0.4 * z @ c.T).square()
    assert ((sampled.mean(0) - exact).abs() < 5 * sampled.std(0) / math.sqrt(n)).all()
    learned = [p for p in critic.parameters() if p.requires_grad]
    ours, theirs = (torch.autograd.grad(loss.mean(), learned) for loss in (exact, sampled))
    for x, x_sampled in zip(ours, theirs, strict=True):
        assert (x - x_sampled).norm() < 0.03 * x.norm() + 1e-4


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
@pytest.mark.parametrize("linear, counts", [(True, (1, 10, 100)), (False, (1, 3, 10))])
def test_learned_spread_falls_like_one_over_root_n_and_stays_where_there_are_no_data(linear, counts):
    """General heads cannot undo all of their prior: with more data they stop at about 0.1."""
    sys.path.insert(0, str(ROOT / "docs" / "benchmark"))
    from epinet_toy import std_against_count

    rows = [std_against_count(n, 100, linear) for n in counts]
    mean = {name: [row[name] for row in rows] for name in rows[0]}
    slope = np.polyfit(np.log(counts), np.log(mean["seen"]), 1)[0]
    assert -0.58 < slope < -0.42  # 1/sqrt(n) is -0.5; nothing in the critic knows n
    np.testing.assert_allclose(mean["seen"], mean["theory"], rtol=0.25)
    for place in ("other_action", "far_state"):
        kept = np.array(mean[place]) / mean[f"{place}_before"]
        assert (kept > 0.6).all() and (kept < 1.6).all(), (place, kept)
        assert mean[place][-1] > 4 * mean["seen"][-1]
