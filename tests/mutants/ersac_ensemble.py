"""Faults of ersac_ensemble.py that its tests must notice: what to replace, by what, and the fault in words."""

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
    (
        "x = args.input_scale * obs",
        "x = args.input_scale * obs if network is critic else obs",
        "--input-scale for the critics and not for their targets",
    ),
    (
        "        if args.prior_scale > 0:\n            return network",
        "        if args.prior_scale > 0 and network is critic:\n            return network",
        "a prior in the critics and not in their targets",
    ),
    ("kthvalue(k, dim=-1).values.sqrt()", "kthvalue(k, dim=-1).values", "the radius lacks its square root"),
    ("(q, pi, args.upsilon)", "(q, pi, 0.9)", "--upsilon has no effect on the set"),
    (
        "return worst_case_ellipsoid(q, pi, args.upsilon)",
        "return worst_case_hull(q, pi)",
        "hull in place of ellipsoid",
    ),
    ("return worst_case_hull(q, pi)", "return worst_case_box(q, pi)", "box in place of hull"),
    (
        "torch.randint(len(obs), (args.batch_size,)",
        "torch.randint(args.batch_size, (args.batch_size,)",
        "minibatches of the first transitions only",
    ),
    ("q_values(target_critic, s_next)", "q_values(critic, s_next)", "online critics in the target"),
    ("q_values(target_critic, s_next)", "q_values(target_critic, s)", "the target's critics read s, not s_next"),
    ("log_pi = actor(s_next)", "log_pi = actor(s)", "the target's policy reads s, not s_next"),
    ("q_next = worst_case(q_next, pi)", "q_next = worst_case(q_next, torch.full_like(pi, 1 / A))", "uniform policy"),
    ('            if args.targets == "shared":\n', "            if True:\n", "own targets are shared"),
    ('            if args.targets == "shared":\n', "            if False:\n", "shared targets are own"),
    ("robust_target(r, ended,", "robust_target(r, 0 * ended,", "terminations are ignored"),
    ("q_next, alpha, args.gamma)", "q_next, alpha, 0.99)", "--gamma has no effect on the targets"),
    ("losses * weights[:, index]", "losses * weights[:, : len(index)]", "bootstrap weights of the first transitions"),
    (
        "            q = q_values(critic, s)  # [N, B, A]\n            q_star",
        "            q = q.detach()  # [N, B, A]\n            q_star",
        "the actor's worst case from before the critics' step",
    ),
    (
        "            q = q_values(critic, s)  # [N, B, A]\n            q_star",
        "            q = q_values(target_critic, s)  # [N, B, A]\n            q_star",
        "the actor's worst case from the target critics",
    ),
    (
        "pi_loss = actor_loss(pi, log_pi, q_star, alpha).mean()",
        "pi_loss = -actor_loss(pi, log_pi, q_star, alpha).mean()",
        "the actor climbs the wrong way",
    ),
    ("        policy_optimizer.step()\n", "", "the actor is never stepped"),
    ("p_target.lerp_(p, args.polyak)", "p.lerp_(p_target, args.polyak)", "the critics follow their targets"),
    ("p_target.lerp_(p, args.polyak)", "pass", "the target critics are never updated"),
    ("(q_star[taken] - returns[index])", "(mu[taken] - returns[index])", "q_star_minus_return from the mean"),
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
