"""Protects ersac_atari.py: every method's loop against plain code, frames, stacks and n-step rewards against loops, the
evaluation, and learning."""

import functools
import itertools
import json
import math
import re
from types import SimpleNamespace

import ale_py
import gymnasium as gym
import minari
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    ROOT,
    assert_close,
    check_result,
    command_line,
    dense,
    descend,
    double,
    mean,
    normalise,
    plain_gaussian,
    plain_row,
    plain_worst_case,
    play,
    read_rows,
    store,
)
from minari.data_collector import EpisodeBuffer

import ersac_atari
from ersac_atari import EnsembleHeads, EpinetHeads, PixelNetwork, decode, load_frames, load_steps, make_atari_env, stack

SMALL = ("--total-updates", 4, "--eval-interval", 4, "--eval-episodes", 2, "--clone-updates", 1, "--critic-warmup", 1)
SMALL += ("--hidden-dim", 16, "--batch-size", 4, "--num-critics", 5, "--index-dim", 3)
T = 24  # steps of an episode of Pong


@pytest.fixture(scope="module")
def pong(datasets):
    """test/pong-v0: three episodes of T random steps, cut by the time limit; the last one is declared a termination."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    env = gym.make("ALE/Pong-v5", repeat_action_probability=0.0, frameskip=4, max_episode_steps=T)
    rng = np.random.default_rng(0)
    buffers = []
    for i in range(3):
        frames, rewards = [env.reset(seed=i)[0]], []
        actions = rng.integers(6, size=T)
        for action in actions:
            obs, reward, *_ = env.step(action)
            frames.append(obs)
            rewards.append(reward)
        rewards[20] = 3.0  # to be clipped for learning
        end = np.arange(T) == T - 1
        columns = {"observations": np.array(frames), "actions": actions, "rewards": np.array(rewards)}
        buffers.append(EpisodeBuffer(id=i, **columns, terminations=end & (i == 2), truncations=end & (i < 2)))
    store("test/pong-v0", buffers, env, ref_min_score=-21.0, ref_max_score=1.0)


# ----- the oracle: all seven methods once more, in float64, from the first state and the raw episodes
ERSAC = {"sac-n": "SAC-N", "ch-n": "CH-N", "ell-n": "Ell_0.6-N", "ell-epi-star": "Ell-Epi*"}
BASELINES = {"cql": "CQL", "iql": "IQL", "brac-bcq": "BRAC-BCQ"}
# all away from their defaults, and such that each of them matters
FLAGS = dict(dataset_id="test/walk-v0", seed=7, upsilon=0.6, num_critics=7, index_dim=3, prior_scale=0.6)
FLAGS |= dict(noise_scale=0.4, clone_updates=2, critic_warmup=1, bc_coef=0.4, total_updates=3, batch_size=6)
FLAGS |= dict(hidden_dim=8, gamma=0.8, n_step=3, q_lr=3e-3, policy_lr=2e-3, polyak=0.3, alpha=0.5)
FLAGS |= dict(eval_interval=2, eval_episodes=5, eval_epsilon=0.2)


@functools.cache
def raw_episodes(dataset_id):
    return list(minari.load_dataset(dataset_id).iterate_episodes())


def plain_transitions(dataset_id, gamma, n):
    """The transitions of a data set, stacks and n-step sums from the raw episodes."""
    rows = []
    for episode in raw_episodes(dataset_id):
        length = len(episode.actions)
        frames = [decode(frame) if frame.ndim == 3 else frame for frame in episode.observations]
        clipped = [min(max(float(r), -1.0), 1.0) for r in episode.rewards]
        for t in range(length):
            end = min(t + n, length)
            row = SimpleNamespace(t=t, steps=end - t, a=int(episode.actions[t]))
            row.s, row.s_next = (np.stack([frames[max(k, 0)] for k in range(x - 3, x + 1)]) for x in (t, end))
            row.r = sum(gamma ** (k - t) * clipped[k] for k in range(t, end))
            row.ended = bool(episode.terminations[end - 1])
            row.bootstrap = 0.0 if row.ended else gamma**row.steps
            row.clipped = max(abs(episode.rewards[t:end])) > 1
            followed = sum(gamma ** (k - t) * clipped[k] for k in range(t, length))
            row.followed = followed if episode.terminations[-1] else math.nan
            rows.append(row)
    return rows


def convolve(w, stacks):
    """What critic and actor read. [B, 3136]"""
    x = (torch.tensor(np.stack(stacks)).to(w["mean"].dtype) - w["mean"]) / w["std"]
    for layer, stride in (("0", 4), ("2", 2), ("4", 1)):
        x = F.conv2d(x, w[f"cnn.{layer}.weight"], w[f"cnn.{layer}.bias"], stride=stride).relu()
    return x.reshape(len(x), -1)


def hidden(w, prefix, x):
    """A layer of weights, normalised, without what is negative. [B, H]"""
    return torch.relu(normalise(dense(w, f"{prefix}0", x)) * w[f"{prefix}1.weight"] + w[f"{prefix}1.bias"])


def weights(part):
    """A state dict in float64, with gradients where something learns."""
    frozen = ("mean", "std", "heads.prior", "heads.sigma_P")
    return {name: x.requires_grad_(not name.startswith(frozen)) for name, x in double(part).items()}


def adam(w):
    """Adam over the parameters, frozen ones included: its state is numbered like the script's."""
    return torch.optim.Adam([x for name, x in w.items() if name not in ("mean", "std")])


class Oracle:
    def __init__(self, state, method, flags):
        self.method, self.flags = method, SimpleNamespace(**flags)
        self.critic, self.target, self.actor = (weights(state[x]) for x in ("critic", "target", "actor"))
        self.q_adam, self.policy_adam = adam(self.critic), adam(self.actor)
        self.clipped = self.forbidden = 0

    def outputs(self, w, psi):
        """What the heads make of the features: q [N, B, A], or mean [B, A] and spread [B, A, d_z]."""
        prior_scale = self.flags.prior_scale
        if self.method == "ell-epi-star":
            parts = []
            for name in ("sigma_L", "sigma_P"):
                h = dense(w, f"heads.{name}.0", psi.detach()).relu()
                parts.append(dense(w, f"heads.{name}.2", h).reshape(len(psi), 4, self.flags.index_dim))
            return dense(w, "heads.mu", psi), parts[0] + prior_scale * parts[1]
        own, prior = dense(w, "heads.learnable", psi), dense(w, "heads.prior", psi.detach())
        every = own + (prior_scale * prior if self.method in ERSAC else 0)
        return torch.stack([every[:, k : k + 4] for k in range(0, every.shape[1], 4)])

    def policy(self, w, x):
        """pi, log pi and BRAC-BCQ's log b, from x, the convolutions of network w. Where pi = 0, log pi is finite and
        means nothing. [B, A] each"""
        logits = dense(self.actor, "3", hidden(self.actor, "", x))
        allowed, log_b = torch.ones_like(logits), None
        if self.method == "brac-bcq":
            log_b = dense(w, "behaviour", hidden(w, "psi.", x)).detach().log_softmax(-1)
            b = log_b.exp()
            allowed = (b > 0.3 * b.max(-1, keepdim=True).values).double()
            self.forbidden += (1 - allowed).sum().item()
        log_pi = logits - (allowed * logits.exp()).sum(-1, keepdim=True).log()
        return allowed * log_pi.exp(), log_pi, log_b

    def worst(self, output, pi):
        """The worst case of one state after the other, without gradient. [B, A]"""
        parts = [x.detach().numpy() for x in (*output, pi)] if self.method == "ell-epi-star" else None
        rows = []
        for b, p in enumerate(pi.detach().numpy()):
            if parts:
                rows.append(plain_gaussian("ellipsoid", *(x[b] for x in parts), self.flags.upsilon))
            else:
                kind = {"ch-n": "hull", "ell-n": "ellipsoid"}.get(self.method, "box")
                rows.append(plain_worst_case(kind, output[:, b].detach().numpy(), p, self.flags.upsilon))
        return torch.tensor(np.stack(rows))

    def value(self, pi, log_pi, log_b, q_star):
        """What a policy is worth: <pi, q*> + alpha H(pi), for BRAC-BCQ less the divergence from b. [B]"""
        worth = (pi * q_star).sum(-1) - self.flags.alpha * (pi * log_pi).sum(-1)
        if self.method == "brac-bcq":
            worth = worth - 0.1 * (pi * (log_pi - log_b)).sum(-1)
        return worth

    def clone(self, batches):
        """The cloned start: the actor and the convolutions it reads, which the target critic gets as well."""
        convolutions = [value for key, value in self.critic.items() if key.startswith("cnn")]
        both = torch.optim.Adam([*self.actor.values(), *convolutions])
        for k, batch in enumerate(batches):
            h = hidden(self.actor, "", convolve(self.critic, [x.s for x in batch]))
            log_pi = dense(self.actor, "3", h).log_softmax(-1)
            loss = -sum(log_pi[i, x.a] for i, x in enumerate(batch)) / len(batch)
            descend(both, loss, self.flags.policy_lr * (len(batches) - k) / len(batches))
        for key, value in self.critic.items():
            self.target[key].data = value.data.clone()

    def update(self, number, batch, directions):
        """One update of critic, actor and target critic; what is logged of it."""
        flags, method, B = self.flags, self.method, len(batch)
        s, s_next = [x.s for x in batch], [x.s_next for x in batch]
        star = method == "ell-epi-star"
        left = (flags.total_updates - number + 1) / flags.total_updates

        # targets
        with torch.no_grad():
            if method == "iql":
                psi = hidden(self.critic, "psi.", convolve(self.critic, s_next))
                follow = dense(self.critic, "value", psi)[:, 0]
                both = self.outputs(self.target, hidden(self.target, "psi.", convolve(self.target, s)))
                q_old = torch.stack([min(both[0, i, x.a], both[1, i, x.a]) for i, x in enumerate(batch)])
            else:
                x_next = convolve(self.target, s_next)
                pi, log_pi, log_b = self.policy(self.target, x_next)
                q_star = self.worst(self.outputs(self.target, hidden(self.target, "psi.", x_next)), pi)
                follow = self.value(pi, log_pi, log_b, q_star)
            y = [x.r + x.bootstrap * follow[i] for i, x in enumerate(batch)]

        # critic
        seen = convolve(self.critic, s)
        psi = hidden(self.critic, "psi.", seen)
        output = self.outputs(self.critic, psi)
        losses, besides = [], torch.zeros(())
        for i, x in enumerate(batch):
            if star:
                noise = flags.noise_scale * directions[i]
                losses.append((output[0][i, x.a] - y[i]) ** 2 + ((output[1][i, x.a] - noise) ** 2).sum())
                continue
            for q in output:
                losses.append((q[i, x.a] - y[i]) ** 2)
                if method == "cql":
                    besides = besides + (q[i].exp().sum().log() - q[i, x.a]) / B
        if method == "iql":
            for error in q_old - dense(self.critic, "value", psi)[:, 0]:
                besides = besides + (0.7 if error > 0 else 0.3) * error**2 / B
        if method == "brac-bcq":
            logits = dense(self.critic, "behaviour", psi)
            for i, x in enumerate(batch):
                besides = besides - logits.log_softmax(-1)[i, x.a] / B
            besides = besides + 0.01 * (logits**2).mean()
        descend(self.q_adam, sum(losses) / B + besides, flags.q_lr * left)

        # actor: the convolutions from before the critic's step, all else from after it
        pi, log_pi, log_b = self.policy(self.critic, seen.detach())
        with torch.no_grad():
            psi = hidden(self.critic, "psi.", seen)
            output, v = self.outputs(self.critic, psi), dense(self.critic, "value", psi)[:, 0]
            q_star = self.worst(output, pi)
        loss = -self.value(pi, log_pi, log_b, q_star).mean()
        for i, x in enumerate(batch):
            if method in ERSAC:
                loss = loss - flags.bc_coef * log_pi[i, x.a] / B
        if method == "iql":
            likely = [min(math.exp(3 * (q_old[i] - v[i])), 100.0) for i in range(B)]
            loss = -sum(likely[i] * log_pi[i, x.a] for i, x in enumerate(batch)) / B
            self.clipped += likely.count(100.0)
        if number > flags.critic_warmup:
            descend(self.policy_adam, loss, flags.policy_lr * left)

        # target critic
        for key, value in self.target.items():
            value.data += flags.polyak * (self.critic[key].data - value.data)

        # metrics
        mu = output[0] if star else sum(output) / len(output)
        std = (output[1] ** 2).sum(-1).sqrt() if star else (sum((q - mu) ** 2 for q in output) / len(output)).sqrt()
        row = {"update": number, "losses/critic_loss": mean(losses), "losses/actor_loss": loss.item()}
        row |= plain_row(pi, log_pi, mu, std, q_star, [x.a for x in batch], [x.followed for x in batch])
        name = {"cql": "losses/cql_penalty", "iql": "losses/value_loss", "brac-bcq": "losses/behaviour_loss"}
        return row | ({name[method]: besides.item()} if method in BASELINES else {})

    @torch.no_grad()
    def returns(self, episodes, first_seed, epsilon):
        """Greedy play, an episode after the other: up to 30 no-ops, then the likeliest action, or a random one."""
        totals = []
        for seed in range(first_seed, first_seed + episodes):
            env, rng = gym.make("test/Walk-v0", max_episode_steps=40), np.random.default_rng(seed)
            no_ops, total = rng.integers(31), 0.0
            seen = [env.reset(seed=seed)[0]] * 4
            for t in itertools.count():
                action = rng.integers(4) if rng.random() < epsilon else None
                if t < no_ops:
                    action = 0
                elif action is None:
                    x = convolve(self.critic, [np.stack(seen[-4:])])
                    action = self.policy(self.critic, x)[0][0].argmax().item()
                obs, reward, terminated, truncated, _ = env.step(action)
                seen.append(obs)
                total += reward
                if terminated or truncated:
                    break
            totals.append(total)
        return np.array(totals)


def close(ours, theirs, start, share, what):
    """Tensor by tensor: the way from the start is the same up to a share of its length; what rests, rests exactly."""
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        way, off = (ours[key].detach() - start[key]).norm(), (ours[key].detach() - value).norm()
        assert off <= share * way, (what, key, off.item(), way.item())


VARIANTS = [(method, {}) for method in ERSAC | BASELINES]
VARIANTS += [
    ("ell-epi-star", {"n_step": 1}),
    ("sac-n", {"clone_updates": 0, "critic_warmup": 0}),
    ("ell-epi-star", {"clone_updates": 3, "critic_warmup": 2}),
    ("iql", {"q_lr": 0.3}),  # some weights are above 100
    ("brac-bcq", {"q_lr": 0.1, "polyak": 0.9}),  # some actions are not allowed
]


@pytest.mark.parametrize("method, changes", VARIANTS, ids=[f"{method}-{changes}" for method, changes in VARIANTS])
def test_three_updates_in_plain_code(run, load, first_state, datasets, method, changes):
    flags = FLAGS | changes
    first = first_state("ersac_atari", *command_line(flags | {"critic_warmup": 0}), "--method", method)
    done = run("ersac_atari", *command_line(flags), "--method", method)
    assert done.code == 0, done.err
    folder = load(done.folders[0])
    last = folder.checkpoint

    # the start: frames scaled by all frames of the data, N heads or two, the target critic a copy, priors of their own
    frames = np.concatenate([episode.observations for episode in raw_episodes("test/walk-v0")]).astype(np.float64)
    for part in ("critic", "target"):
        assert_close(first[part]["mean"], frames.mean(0), "mean")
        assert_close(first[part]["std"], np.sqrt(np.mean((frames - frames.mean(0)) ** 2)), "std")
    if method != "ell-epi-star":
        assert len(first["critic"]["heads.learnable.bias"]) == 4 * (flags["num_critics"] if method in ERSAC else 2)
    assert all(torch.equal(value, first["target"][key]) for key, value in first["critic"].items())
    assert not torch.equal(first["critic"]["psi.0.weight"], first["actor"]["0.weight"])
    for key, value in first["critic"].items():
        for frozen, learned in (("prior", "learnable"), ("sigma_P", "sigma_L")):
            assert frozen not in key or not torch.equal(value, first["critic"][key.replace(frozen, learned)])

    # the draws: minibatches from a generator of their own, directions first of all from the global one
    seed, B = flags["seed"], flags["batch_size"]
    data = plain_transitions("test/walk-v0", flags["gamma"], flags["n_step"])
    generator, clones = torch.Generator().manual_seed(seed), flags["clone_updates"]
    drawn = [torch.randint(len(data), (B,), generator=generator) for _ in range(clones + 3)]
    batches = [[data[i] for i in index] for index in drawn]
    c = torch.randn(len(data), flags["index_dim"], generator=torch.Generator().manual_seed(seed)).double()
    c = c / c.norm(dim=-1, keepdim=True)
    used = [x for batch in batches[clones:] for x in batch]
    assert {x.ended for x in used} == {x.clipped for x in used} == {False, True}
    assert {0, 1, 2, 3} <= {min(x.t, 3) for x in used} and len({x.steps for x in used}) == flags["n_step"]

    # the updates, and an evaluation for every row
    oracle, rows = Oracle(first, method, flags), []
    oracle.clone(batches[:clones])
    for k in (1, 2, 3):
        rows.append(oracle.update(k, batches[clones + k - 1], c[drawn[clones + k - 1]]))
        if k > 1:  # every second update, and the last one
            # a quarter of the 5 episodes, rounded up
            rows[-1]["eval/return"] = np.mean(oracle.returns(2, 10**6 * (seed + 1), flags["eval_epsilon"]))
    for part in ("critic", "target", "actor"):
        close(getattr(oracle, part), last[part], first[part], 0.05, part)
    for name, adam in (("q_optimizer", oracle.q_adam), ("policy_optimizer", oracle.policy_adam)):
        ours, theirs = adam.state_dict()["state"], last[name]["state"]
        for moment in ("exp_avg", "exp_avg_sq", "step"):
            x, y = ({i: state[moment] for i, state in states.items()} for states in (ours, theirs))
            close(x, y, dict.fromkeys(x, 0.0), 0.01 if moment != "step" else 0, (name, moment))
    assert torch.equal(last["generator"], generator.get_state()) and last["update"] == 3
    if "q_lr" in changes:
        assert 0 < oracle.clipped < 3 * B or oracle.forbidden > 5

    # metrics.csv, result.json, args.json, what is printed
    theirs = read_rows(done.folders[0])
    assert [row.pop("charts/updates_per_second") > 0.1 for row in theirs] == [True, True]
    for ours, row in zip(rows[1:], theirs, strict=True):
        assert row == pytest.approx(ours, rel=1e-3, abs=1e-6)
    with torch.no_grad():
        pi, log_pi, _ = oracle.policy(oracle.critic, convolve(oracle.critic, [x.s for x in data]))
    name, scores = (ERSAC | BASELINES)[method], oracle.returns(5, 10**6 * (seed + 1) + 10**5, flags["eval_epsilon"])
    words = {"script": "ersac_atari.py", "method": name, "env_id": "test/Walk-v0", "dataset_id": "test/walk-v0"}
    words |= {"seed": seed, "updates": 3, "policy_entropy": -(pi * log_pi).sum(-1).mean().item()}
    check_result(done.folders[0], scores, -7.0, 1.5, done.out, **words)
    assert {name: folder.args[name] for name in flags} == flags and folder.args["method"] == method
    assert done.folders[0].name.startswith(f"test-walk-v0__ersac_atari__{seed}__")


def test_learning_to_walk_from_random_play(run, load, datasets):
    """80 small updates suffice to walk to the middle from either side; an actor that climbs down walks away from it."""
    flags = FLAGS | {"dataset_id": "test/walk-large-v0", "seed": 2, "upsilon": 0.9, "prior_scale": 0.03}
    flags |= {"noise_scale": 0.001, "clone_updates": 0, "critic_warmup": 0, "bc_coef": 0.0, "total_updates": 80}
    flags |= {"batch_size": 8, "hidden_dim": 32, "n_step": 4, "q_lr": 2e-3, "policy_lr": 2e-3, "polyak": 0.2}
    flags |= {"alpha": 0.02, "eval_interval": 100, "eval_episodes": 60, "eval_epsilon": 0.0}
    done = run("ersac_atari", *command_line(flags))
    assert done.code == 0, done.err
    got, (row,) = load(done.folders[0]), read_rows(done.folders[0])
    best = []
    for seed in range(3_100_000, 3_100_060):
        no_ops, env = np.random.default_rng(seed).integers(31), gym.make("test/Walk-v0").unwrapped
        env.reset(seed=seed)
        best.append(3 - 0.25 * (no_ops + abs(env.place - 4)))
    assert got.result["eval_return_mean"] > np.mean(best) - 0.7
    # the last policy, on other episodes than in between, of which there is a quarter
    oracle = Oracle(got.checkpoint, "ell-epi-star", flags)
    assert row["eval/return"] == np.mean(oracle.returns(15, 3_000_000, 0.0))
    assert got.result["eval_returns"][:5] == pytest.approx(oracle.returns(5, 3_100_000, 0.0))
    assert len(set(got.result["eval_returns"])) > 3


# ----- frames, stacks and n-step rewards
def test_decoding_is_luma_and_box_averaging(pong):
    frame = minari.load_dataset("test/pong-v0")[0].observations[T]
    grey = frame @ np.array([0.299, 0.587, 0.114])  # ITU-R 601

    def inside(size):  # each of 84 output pixels averages the input pixels whose centres lie in it
        cells = np.ceil((np.arange(size) + 0.5) * 84 / size - 1e-9).astype(int) - 1  # on the border: to the first
        return (cells == np.arange(84)[:, None]) / np.bincount(cells)[:, None]

    ours = decode(frame)
    assert ours.shape == (84, 84) and ours.dtype == np.uint8 and len(np.unique(ours)) > 3
    assert np.abs(ours - inside(210) @ grey @ inside(160).T).max() < 2


def test_stacks_are_those_of_frame_stack_observation_in_the_recovered_environment(pong):
    dataset = minari.load_dataset("test/pong-v0")
    frames, (number, first, *_) = load_frames(dataset), load_steps(dataset, 0.9, 1)
    assert frames.shape == (3 * T + 3, 84, 84) and isinstance(frames, np.memmap) and not frames.flags.writeable
    env = make_atari_env(dataset)
    assert isinstance(env, gym.wrappers.FrameStackObservation) and env.observation_space.shape == (4, 84, 84)
    for i, episode in enumerate(dataset.iterate_episodes()):
        obs, _ = env.reset(seed=i)
        here = slice(T * i, T * i + T)
        now, after = (stack(frames, number[here] + k, first[here]).numpy() for k in (0, 1))
        for t in range(T):
            assert np.array_equal(obs, now[t]), t
            obs, _, _, truncated, _ = env.step(int(episode.actions[t]))
            assert np.array_equal(obs, after[t]), t
        assert truncated


@pytest.mark.parametrize("name", ["test/walk-v0", "test/pong-v0"])
@pytest.mark.parametrize("n", [1, 3, 100])
def test_transitions_against_a_loop(pong, datasets, name, n):
    """Stacks and n-step rewards stay within their episode; cut episodes bootstrap, and their return is unknown."""
    dataset = minari.load_dataset(name)
    frames, (number, first, *columns) = load_frames(dataset), load_steps(dataset, 0.5, n)
    expected = plain_transitions(name, 0.5, n)
    steps = columns[1]
    assert np.array_equal(stack(frames, number, first), [x.s for x in expected])
    assert np.array_equal(stack(frames, number + steps, first), [x.s_next for x in expected])
    for x, *ours in zip(expected, *columns, strict=True):
        a, steps, r, ended, followed = (value.item() for value in ours)
        assert (a, steps, ended) == (x.a, x.steps, x.ended) and r == pytest.approx(x.r, abs=1e-6)
        assert followed == pytest.approx(x.followed, abs=1e-6, nan_ok=True)


def test_files_of_all_kinds_give_the_same_frames_without_holding_an_episode(pong, monkeypatch):
    """HDF5, with and without JPEG, and Arrow. Minari would decode an episode of HDF5 whole."""
    image, rng = gym.spaces.Box(0, 255, (40, 40, 3), np.uint8), np.random.default_rng(0)
    pictures = np.broadcast_to(rng.integers(256, size=(9, 1, 40, 1), dtype=np.uint8), (9, 40, 40, 3))
    end = np.arange(8) == 7
    columns = {"actions": rng.integers(3, size=8), "rewards": rng.normal(size=8), "terminations": end}
    buffer = EpisodeBuffer(id=0, observations=pictures, truncations=end & False, **columns)
    spaces = {"observation_space": image, "action_space": gym.spaces.Discrete(3)}
    for name, kind in (("raw", "hdf5"), ("jpeg", "hdf5"), ("arrow", "arrow")):
        store(f"test/file-{name}-v0", [buffer], None, jpeg_encoding=name == "jpeg", data_format=kind, **spaces)
    datasets = {name: minari.load_dataset(f"test/file-{name}-v0") for name in ("arrow", "raw", "jpeg")}
    frames = {"arrow": load_frames(datasets["arrow"]).astype(int)}
    others = [load_steps(datasets["arrow"], 0.9, 2)]
    monkeypatch.setattr(minari.MinariDataset, "iterate_episodes", None)
    for name in ("raw", "jpeg"):
        frames[name] = load_frames(datasets[name]).astype(int)
        others.append(load_steps(datasets[name], 0.9, 2))
    assert np.array_equal(frames["raw"], frames["arrow"]) and len(np.unique(frames["raw"])) > 50
    off = np.abs(frames["raw"] - frames["jpeg"])
    assert 0 < off.mean() < 4
    for column in zip(*others, strict=True):
        assert all(torch.equal(x, column[0]) for x in column)


def test_frames_are_decoded_once_and_a_failure_leaves_nothing(datasets, monkeypatch):
    buffers = play(gym.make("test/Walk-v0"), 20, 9)
    dataset, calls = store("test/growing-v0", buffers[:1], gym.make("test/Walk-v0")), []
    folder, original = dataset.storage.data_path.parent, ersac_atari.decode

    def count(frame):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return original(frame)

    monkeypatch.setattr(ersac_atari, "decode", count)
    with pytest.raises(OSError):
        load_frames(dataset)
    assert [path.name for path in folder.iterdir()] == ["data"]
    calls[:] = [1] * 3
    frames = load_frames(dataset)
    assert len(calls) == 3 + len(frames) and np.array_equal(load_frames(dataset), frames)
    assert len(calls) == 3 + len(frames) == 3 + len(buffers[0].actions) + 1
    dataset.update_dataset_from_buffer(buffers[1:])  # other data, other frames
    assert len(load_frames(minari.load_dataset("test/growing-v0"))) > len(frames)


def test_a_game_without_a_time_limit_gets_ales(datasets):
    forever, limited = (make_atari_env(minari.load_dataset(f"test/walk-{x}-v0")) for x in ("forever", "large"))
    assert forever.spec.max_episode_steps == 27_000 and limited.spec.max_episode_steps == 40


# ----- the networks
def test_encoder_is_the_nature_cnn_channels_last():
    mean, std = torch.full((84, 84), 90.0), torch.tensor(20.0)
    critic = PixelNetwork(EnsembleHeads(512, 6, 3, 0.1), 512, 6, mean, std)
    counts = [sum(p.numel() for p in layer.parameters()) for layer in (*critic.cnn, *critic.psi)]
    assert [n for n in counts if n] == [8224, 32832, 36928, 1606144, 1024]  # the last is the layer norm
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in critic.cnn.parameters() if p.dim() == 4)
    obs = torch.randint(256, (2, 4, 84, 84), dtype=torch.uint8)
    assert critic.convolve(obs).shape == (2, 3136) and critic(obs).shape == (3, 2, 6)


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
    mu, sigma_bar = epinet(psi)
    assert mu.shape == (4, 3) and sigma_bar.shape == (4, 3, 2) and not epinet.sigma_P[0].weight.requires_grad
    assert torch.autograd.grad(sigma_bar.sum(), psi, allow_unused=True)[0] is None


# ----- evaluation
class Corridor(gym.Env):
    """Counts the no-ops before the first other action; the reward is their number."""

    observation_space, action_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Discrete(3)
    seeds = ()

    def reset(self, *, seed=None, options=None):
        self.waited, self.seeds = 0, [*self.seeds, seed]
        return np.zeros((4, 84, 84), np.uint8), {}

    def step(self, action):
        self.waited += action == 0
        return np.zeros((4, 84, 84), np.uint8), float(self.waited) if action else 0.0, action != 0, False, {}


def test_evaluation_is_greedy_after_seeded_no_ops():
    env = Corridor()
    policy = lambda obs: torch.tensor([[0.1, 0.2, 0.7]]).log()  # noqa: E731
    returns = ersac_atari.play(policy, env, 200, 5)
    assert env.seeds == list(range(5, 205)) and np.array_equal(returns, ersac_atari.play(policy, env, 200, 5))
    assert set(returns) <= set(range(31)) and len(np.unique(returns)) > 25 and returns.min() == 0
    # random actions with probability epsilon: a third of them is one more no-op
    noisy = ersac_atari.play(policy, env, 200, 5, epsilon=0.6)
    assert (noisy >= returns).all() and abs((noisy > returns).mean() - 0.2) < 5 * (0.2 * 0.8 / 200) ** 0.5


# ----- the script
def test_a_game_of_ale_with_a_video_and_a_checkpoint_that_acts(run, load, pong):
    done = run("ersac_atari", "--dataset-id", "test/pong-v0", *SMALL, "--capture-video")
    assert done.code == 0, done.err
    assert load(done.folders[0]).result["env_id"] == "ALE/Pong-v5" and done.folders[0].name.startswith("test-pong-v0__")
    assert next((done.folders[0] / "video").glob("*.mp4")).stat().st_size > 1000
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "ersac_atari.md").read_text(), re.DOTALL)
    names = {}
    exec(snippet.replace("runs/...", str(done.folders[0])), names)
    assert names["action"] in range(6)


# ----- cloning of images, the bar in the tables
@pytest.mark.parametrize("top", [1.0, 0.3])
def test_cloning_of_images_in_plain_code(run, datasets, top):
    """Three updates against a loop, on all episodes and on those with the best returns."""
    flags = ("--dataset-id", "test/walk-v0", "--seed", 4, "--hidden-dim", 8, "--batch-size", 5, "--total-updates", 3)
    done = run("docs/benchmark/clone", *flags, "--lr", 0.01, "--eval-episodes", 2, "--top", top)
    assert done.code == 0, done.err
    result = json.loads((done.folders[0] / "result.json").read_text())
    assert result["method"] == ("BC" if top == 1 else "BC-top30") and len(result["eval_returns"]) == 2

    episodes = raw_episodes("test/walk-v0")
    bar = np.quantile([episode.rewards.sum() for episode in episodes], 1 - top)
    kept, number = [], 0
    for episode in episodes:
        for _ in episode.actions:
            kept += [number] if episode.rewards.sum() >= bar else []
            number += 1
    assert len(kept) == number if top == 1 else 0 < len(kept) < number
    transitions = plain_transitions("test/walk-v0", 0.9, 1)
    frames = np.concatenate([episode.observations for episode in episodes]).astype(float)
    torch.manual_seed(4)
    mean = torch.tensor(frames.mean(0)).float()
    std = torch.tensor(np.sqrt(((frames - frames.mean(0)) ** 2).mean())).float()
    network = PixelNetwork(torch.nn.Linear(8, 4), 8, 4, mean, std)
    w = weights(network.state_dict())
    optimizer, generator = adam(w), torch.Generator().manual_seed(4)
    for update in range(3):
        batch = [transitions[kept[i]] for i in torch.randint(len(kept), (5,), generator=generator)]
        logits = dense(w, "heads", hidden(w, "psi.", convolve(w, [x.s for x in batch])))
        loss = -sum(logits.log_softmax(-1)[i, x.a] for i, x in enumerate(batch)) / 5
        descend(optimizer, loss, 0.01 * (3 - update) / 3)
    log_pi = dense(w, "heads", hidden(w, "psi.", convolve(w, [x.s for x in transitions]))).log_softmax(-1)
    entropy = -(log_pi.exp() * log_pi).sum(-1).mean().item()
    assert result["policy_entropy"] == pytest.approx(entropy, rel=1e-4)
