"""Faults of ersac_epinet.py that its tests must notice: what to replace, by what, and the fault in words."""

FAULTS = [
    (
        "return_to_go = 0.0 if episode.terminations[-1] else math.nan",
        "return_to_go = 0.0",
        "returns of truncated episodes count as known",
    ),
    ("    if args.normalize_obs:\n", "    if True:\n", "--no-normalize-obs has no effect"),
    ("next_obs = (next_obs - obs_mean) / obs_std", "next_obs = next_obs + 0", "s_next is not normalised"),
    (
        "    reward_scale = 1.0\n",
        "    reward_scale = 10.0 / returns[returns.isfinite()].square().mean().sqrt().item()\n",
        "--return-scale None has no effect",
    ),
    ("else psi.detach()", "else psi", "the stochastic heads move the features"),
    (
        "target_critic = copy.deepcopy(critic).requires_grad_(False)\n",
        "target_critic = copy.deepcopy(critic).requires_grad_(False)\n    target_critic.input_scale = 1.0\n",
        "--input-scale for the critic and not for its target",
    ),
    (
        "target_critic = copy.deepcopy(critic).requires_grad_(False)\n",
        "target_critic = copy.deepcopy(critic).requires_grad_(False)\n    target_critic.prior_scale = 0.0\n",
        "a prior in the critic and not in its target",
    ),
    ('"weight_decay": 2 * args.lambda_sigma', '"weight_decay": 2 * args.lambda_mu', "--lambda-mu for --lambda-sigma"),
    ("math.sqrt(chi2.ppf(args.upsilon, A))", "chi2.ppf(args.upsilon, A)", "closed form: no square root in the radius"),
    ("chi2.ppf(args.upsilon, A)", "chi2.ppf(0.9, A)", "closed form: --upsilon has no effect"),
    ("chi2.ppf(args.upsilon, A)", "chi2.ppf(args.upsilon, args.index_dim)", "degrees of freedom of the index"),
    (
        "(network.sample(obs, z, prior), pi, args.upsilon)",
        "(network.sample(obs, z, prior), pi, 0.9)",
        "sampled: --upsilon ignored",
    ),
    (
        '        if args.uncertainty_set == "box":\n            return',
        '        if args.uncertainty_set != "box":\n            return',
        "box and ellipsoid are swapped",
    ),
    (
        "torch.randint(len(obs), (args.batch_size,)",
        "torch.randint(args.batch_size, (args.batch_size,)",
        "minibatches of the first transitions only",
    ),
    (
        "worst_case(target_critic, s_next, pi, z, prior_next)",
        "worst_case(critic, s_next, pi, z, prior_next)",
        "shared: no target critic",
    ),
    (
        "sigma_bar = target_critic(s_next, prior_next)",
        "sigma_bar = critic(s_next, prior_next)",
        "own: no target critic",
    ),
    (
        "worst_case(target_critic, s_next, pi, z, prior_next)",
        "worst_case(target_critic, s, pi, z, prior_next)",
        "shared: s, not s_next",
    ),
    ("target_critic(s_next, prior_next)", "target_critic(s_next, prior)", "own: the prior of s, not of s_next"),
    (
        "target_critic.sample(s_next, z, prior_next)",
        "target_critic.sample(s, z, prior_next)",
        "own, sampled: s in place of s_next",
    ),
    (
        "worst_case(target_critic, s_next, pi, z, prior_next)",
        "worst_case(target_critic, s_next, torch.full_like(pi, 1 / A), z, prior_next)",
        "the target's worst case is that of the uniform policy",
    ),
    ('            if args.targets == "shared":\n', "            if True:\n", "own targets are shared"),
    ('            if args.targets == "shared":\n', "            if False:\n", "shared targets are own"),
    (
        "spread = propagated_spread(ended, pi, sigma_bar, args.gamma)",
        "spread = 0.0",
        "own targets lack the propagated spread",
    ),
    ("gamma * (1 - terminated)[:, None] * torch", "gamma * torch", "spread beyond a termination"),
    ("robust_target(r, ended,", "robust_target(r, 0 * ended,", "terminations are ignored"),
    ("q_next, alpha, args.gamma)", "q_next, alpha, 0.99)", "--gamma has no effect on the targets"),
    ("a, y, c[batch], args.noise_scale", "a, y, c[: len(batch)], args.noise_scale", "directions of other transitions"),
    ("q_loss = (q - y - noise)", "q_loss = (q - y)", "sampled: the noise is left out"),
    (
        "q_star = worst_case(critic, s, pi, z, prior)",
        "q_star = worst_case(target_critic, s, pi, z, prior)",
        "the actor's worst case from the target critic",
    ),
    (
        "        q_optimizer.step()\n\n"
        "        # actor update against the worst case of the updated critic, and entropy coefficient\n"
        "        log_pi = actor(s).log_softmax(-1)  # [B, A]\n"
        "        pi = log_pi.exp()\n"
        "        with torch.no_grad():\n"
        "            q_star = worst_case(critic, s, pi, z, prior)  # [B, A]\n",
        "        log_pi = actor(s).log_softmax(-1)  # [B, A]\n"
        "        pi = log_pi.exp()\n"
        "        with torch.no_grad():\n"
        "            q_star = worst_case(critic, s, pi, z, prior)  # [B, A]\n"
        "        q_optimizer.step()\n",
        "the actor's worst case from before the critic's step",
    ),
    (
        "pi_loss = actor_loss(pi, log_pi, q_star, alpha).mean()",
        "pi_loss = -actor_loss(pi, log_pi, q_star, alpha).mean()",
        "the actor climbs the wrong way",
    ),
    ("        policy_optimizer.step()\n", "", "the actor is never stepped"),
    ("p_target.lerp_(p, args.polyak)", "p.lerp_(p_target, args.polyak)", "the critic follows its target"),
    ("p_target.lerp_(p, args.polyak)", "pass", "the target critic is never updated"),
    ("(q_star[taken] - returns[batch])", "(mu[taken] - returns[batch])", "q_star_minus_return from the mean"),
    ("10**6 * (args.seed + 1) + 10**5", "10**6 * (args.seed + 1)", "the final episodes are those in between"),
    ("int(dataset.spec.action_space.n)", "int(action.max()) + 1", "actions that no transition took do not exist"),
    (
        "if env and low is not None and high is not None:",
        "if env and low and high:",
        "a reference score of 0 counts as missing",
    ),
    (
        "dataset.recover_environment(eval_env=True",
        "dataset.recover_environment(eval_env=False",
        "the evaluation is not in the environment that the data set names for it",
    ),
]
