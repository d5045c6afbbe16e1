"""Faults of ersac_atari.py that its tests must notice: what to replace, by what, and the fault in words."""

FAULTS = [
    ("    reward = reward.clamp(-1, 1)  # for learning only\n", "", "rewards are not clipped"),
    ("torch.maximum(numbers, first[:, None])", "numbers.clamp(min=0)", "stacks cross an episode's start"),
    (
        "stack(frames, (frame + steps)[batch]",
        "stack(frames, (frame + 1)[batch]",
        "the next state is one step away",
    ),
    ("gamma**k * reward[later]", "reward[later]", "n-step rewards are not discounted"),
    ("q_star = worst_case(target_critic(s_next), pi)", "q_star = worst_case(critic(s_next), pi)", "no target critic"),
    ("robust_target(r, ended, pi,", "robust_target(r, 0 * ended, pi,", "terminations are ignored"),
    ("p_target.lerp_(p, args.polyak)", "p_target.lerp_(p, 1 - args.polyak)", "Polyak the wrong way round"),
    (
        "            psi = critic.encoder(s)  # [B, H]\n            output = critic.heads(psi)\n            v",
        "            output = critic.heads(psi)\n            v",
        "the actor reads features from before the critic's step",
    ),
    (
        "pi_loss = actor_loss(pi, log_pi, q_star, args.alpha).mean()",
        "pi_loss = -actor_loss(pi, log_pi, q_star, args.alpha).mean()",
        "the actor climbs down",
    ),
    (
        "F.cross_entropy(logits, action[batch].to(device)).backward()",
        "(-F.cross_entropy(logits, action[batch].to(device))).backward()",
        "cloning with the wrong sign",
    ),
    ("        if update > args.critic_warmup:\n", "        if True:\n", "no warm-up of the critic"),
    ("a, y, c[batch], args.noise_scale", "a, y, c[: len(batch)], args.noise_scale", "others' directions"),
    ("chi2.ppf(args.upsilon, A)", "chi2.ppf(args.upsilon, args.index_dim)", "degrees of freedom of the index"),
    ("args.cql_weight * cql_penalty(", "cql_penalty(", "CQL's weight is ignored"),
    ("(args.iql_beta * (q_old - v))", "(3.0 * (q_old - v))", "IQL's beta is ignored"),
    ("torch.where(error < 0, 1 - tau, tau)", "torch.where(error < 0, tau, 1 - tau)", "IQL leans to the worse actions"),
    ("bcq_filter(log_b, args.bcq_threshold)", "bcq_filter(log_b, 0.3)", "BCQ's threshold is ignored"),
    (
        "y = y - gamma_n * (1 - ended) * args.brac_weight * brac_kl(pi, log_pi, log_b)",
        "y = y + gamma_n * (1 - ended) * args.brac_weight * brac_kl(pi, log_pi, log_b)",
        "BRAC's penalty of the target has the wrong sign",
    ),
    ('        generator.set_state(checkpoint["generator"])\n', "", "a resumed run draws the first minibatches again"),
    ('cloned = checkpoint["cloned"]', "cloned = start > 0", "a resumed run clones a second time"),
    ("max(args.eval_episodes // 50, 1)", "max(args.eval_episodes // 10, 1)", "too many episodes in between"),
    ("10**6 * (args.seed + 1) + 10**5", "10**6 * (args.seed + 1)", "the final episodes are those in between"),
    ('"charts/q_robust": (pi * q_star)', '"charts/q_robust": (pi * mu)', "a metric of the wrong thing"),
    (
        "            tick, tick_update = time.time(), update\n",
        "            tick_update = update\n",
        "the speed is that since the beginning",
    ),
    (
        "        if fingerprint != checkpoint[",
        "        if False and fingerprint != checkpoint[",
        "changed data go unnoticed",
    ),
    ("following = 0.0 if ended else math.nan", "following = 0.0", "returns of episodes that were cut"),
    ("(q_star[taken] - followed)", "(mu[taken] - followed)", "q_star_minus_return from the mean"),
]
