"""Faults of ersac_atari.py that its tests must notice: what to replace, by what, and the fault in words."""

FAULTS = [
    ("r.clip(-1.0, 1.0)", "r", "rewards are not clipped"),
    ("torch.maximum(numbers, first[:, None])", "numbers.clamp(min=0)", "stacks cross an episode's start"),
    ("discount = (args.gamma**steps)", "discount = (args.gamma**(0 * steps + 1))", "n steps are discounted as one"),
    ("target_critic.heads(target_critic.psi(x_next))", "critic.heads(critic.psi(x_next))", "no target critic"),
    ("robust_target(r, ended, pi,", "robust_target(r, 0 * ended, pi,", "terminations are ignored"),
    ("        x = x.detach()\n", "", "the actor's loss runs back into the convolutions of the critic's step"),
    (
        "            psi = critic.psi(x)  # [B, H]\n            output = critic.heads(psi)\n            q_star",
        "            output = critic.heads(psi)\n            q_star",
        "the actor's worst case reads features from before the critic's step",
    ),
    ("both = [*actor.parameters(), *critic.cnn.parameters()]", "both = [*actor.parameters()]", "only the actor clones"),
    ("torch.where(error < 0, 1 -", "torch.where(error > 0, 1 -", "IQL leans to the worse actions"),
    ("q_star + w_log_b, alpha, gamma)", "q_star - w_log_b, alpha, gamma)", "BRAC's divergence with the wrong sign"),
]
