"""Faults of ersac_atari.py that its tests must notice: what to replace, by what, and the fault in words."""

FAULTS = [
    ("    reward = reward.clamp(-1, 1)  # for learning only\n", "", "rewards are not clipped"),
    ("torch.maximum(numbers, first[:, None])", "numbers.clamp(min=0)", "stacks cross an episode's start"),
    ("for x in (frame, frame + steps))", "for x in (frame, frame + 1))", "the next state is one step away, not n"),
    ("worst_case(target(s_next), log_pi.exp())", "worst_case(critic(s_next), log_pi.exp())", "no target critic"),
    ("robust_target(r, ended, log_pi.exp()", "robust_target(r, 0 * ended, log_pi.exp()", "terminations are ignored"),
    ("critic.parameters()), args.polyak)", "critic.parameters()), 1 - args.polyak)", "Polyak the wrong way round"),
    (
        "            psi = critic.encoder(s)  # [B, H]\n            output, v",
        "            output, v",
        "the actor reads features from before the critic's step",
    ),
    (
        "pi_loss = actor_loss(pi, log_pi, q_star, args.alpha).mean()",
        "pi_loss = -actor_loss(pi, log_pi, q_star, args.alpha).mean()",
        "the actor climbs down",
    ),
    (
        "F.cross_entropy(logits, action[index].to(device)).backward()",
        "(-F.cross_entropy(logits, action[index].to(device))).backward()",
        "cloning with the wrong sign",
    ),
    ("epinet_loss(*output, a, y, c[index],", "epinet_loss(*output, a, y, c[: len(index)],", "others' directions"),
    ("(args.iql_beta * (q_old - v))", "(3.0 * (q_old - v))", "IQL's beta is ignored"),
    ("bcq_filter(log_b, args.bcq_threshold)", "bcq_filter(log_b, 0.3)", "BCQ's threshold is ignored"),
    ("10**6 * (args.seed + 1) + 10**5", "10**6 * (args.seed + 1)", "the final episodes are those in between"),
    ('"charts/q_robust": (pi * q_star)', '"charts/q_robust": (pi * mu)', "a metric of the wrong thing"),
]
