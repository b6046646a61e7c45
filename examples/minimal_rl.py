"""VESPO in one file: a small transformer learns to reverse digits by reinforcement on stale data.

    python examples/minimal_rl.py                          # under a minute on one CPU core
    python examples/minimal_rl.py --updates-per-rollout 1  # on-policy
    python examples/minimal_rl.py --method reinforce       # the same data without importance weights

What comes from nearpolicy is what is easy to get wrong: log-probs of sampled tokens, advantages within groups, and the loss. The rest is
plain torch, written here. Read it from the bottom up: main() is the loop *prompt, sample, score, advantage, weight, loss, update*.
"""

import argparse
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nearpolicy import policy_loss
from nearpolicy.metrics import merge, to_floats
from nearpolicy.objective.advantages import group_advantages
from nearpolicy.objective.logprob import logits_logp_entropy, shift

# Vocabulary: the digits 0-9, then "=" (ends the prompt) and EOS (ends the response).
DIGITS, EQUALS, EOS, VOCAB = 10, 10, 11, 12


# ---------------------------------------------------------------------------------------------------------------- the model


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(B, T, D))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A causal transformer: token ids [B, T] -> logits [B, T, V]."""

    def __init__(self, max_length: int, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCAB, width), nn.Embedding(max_length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB)

    def forward(self, token_BT: Tensor) -> Tensor:
        x = self.token(token_BT) + self.place(torch.arange(token_BT.shape[1]))
        return self.head(self.norm(self.blocks(x)))


# ----------------------------------------------------------------------------------------------------------------- the task


def prompts(count: int, length: int, generator: torch.Generator) -> Tensor:
    """`count` random prompts "d1 d2 ... =", int64 [count, length + 1]."""
    digits = torch.randint(DIGITS, (count, length), generator=generator)
    return torch.cat([digits, torch.full((count, 1), EQUALS)], 1)


def rewards(token_BT: Tensor, mask_BT: Tensor, length: int) -> Tensor:
    """Share of positions at which the response is the reversed prompt with EOS after it, [B]. A verifier: no model judges."""
    want = torch.cat([token_BT[:, :length].flip(1), torch.full((len(token_BT), 1), EOS)], 1)
    return ((token_BT == torch.cat([token_BT[:, : length + 1], want], 1)) & mask_BT)[:, length + 1 :].float().mean(1)


# ------------------------------------------------------------------------------------------------------------- the rollouts


class Rollouts(NamedTuple):
    """Responses as they were sampled. Column t describes token t: logp_behavior_BT[b, t] = log pi(token[b, t] | tokens[b, <t])."""

    token_BT: Tensor
    mask_BT: Tensor
    """True at response tokens; prompt and padding are False. Made from where responses ended, never from token values."""
    logp_behavior_BT: Tensor
    """Under the policy that sampled the token. Written down now: after the first update it cannot be had again."""
    group_B: Tensor
    advantage_B: Tensor
    reward_B: Tensor

    def rows(self, index: Tensor) -> "Rollouts":
        return Rollouts(*(column[index] for column in self))


@torch.no_grad()
def sample(model: Model, prompt_BP: Tensor, max_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sample at temperature 1; returns tokens, mask and behaviour log-probs, [B, T]. No cache: responses are four tokens long."""
    token_BT, alive_B = prompt_BP, torch.ones(len(prompt_BP), dtype=torch.bool)
    logp, mask = [torch.zeros(prompt_BP.shape)], [torch.zeros(prompt_BP.shape, dtype=torch.bool)]
    for _ in range(max_tokens):
        logp_BV = model(token_BT)[:, -1].log_softmax(-1)
        new_B = torch.multinomial(logp_BV.exp(), 1)[:, 0]
        new_B = torch.where(alive_B, new_B, 0)  # padding holds anything
        token_BT = torch.cat([token_BT, new_B[:, None]], 1)
        logp.append(logp_BV.gather(1, new_B[:, None]))
        mask.append(alive_B[:, None])
        alive_B = alive_B & (new_B != EOS)
    return token_BT, torch.cat(mask, 1), torch.cat(logp, 1)


def collect(model: Model, args: argparse.Namespace, generator: torch.Generator) -> Rollouts:
    """One rollout batch: P prompts, G responses to each, scored, with advantages. Groups are whole here, so this is the place for them."""
    prompt_BP = prompts(args.prompts, args.length, generator).repeat_interleave(args.group_size, 0)
    token_BT, mask_BT, logp_BT = sample(model, prompt_BP, args.length + 1)
    reward_B = rewards(token_BT, mask_BT, args.length)
    group_B = torch.arange(args.prompts).repeat_interleave(args.group_size)
    advantage = group_advantages(reward_B, group_B, baseline="mean", normalize_std=False)
    return Rollouts(token_BT, mask_BT, logp_BT, group_B, advantage.advantage_B, reward_B)


# --------------------------------------------------------------------------------------------------------------- the update


def update(model: Model, optimizer: torch.optim.Optimizer, batch: Rollouts, method: str) -> dict[str, float]:
    """One optimizer step on one mini-batch, which may be older than the model; returns the metrics of the loss."""
    # The shift by one, once: the logits at column t-1 say what the model thinks of the token at column t.
    logp_BT, entropy_BT = logits_logp_entropy(shift(model(batch.token_BT)), batch.token_BT)
    out = policy_loss(
        method,
        logp=logp_BT,  # carries the gradient
        logp_behavior=batch.logp_behavior_BT,  # what it is weighed against
        advantage=batch.advantage_B,
        mask=batch.mask_BT,
    )
    optimizer.zero_grad()
    out.loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    values = to_floats(merge([out.metrics]), counts=False)
    values["entropy"] = float(entropy_BT[batch.mask_BT].mean())
    return {name: value for name, value in values.items() if isinstance(value, float)}


# ----------------------------------------------------------------------------------------------------------------- the loop


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The settings."""
    parser = argparse.ArgumentParser(description="VESPO in one file.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--method", default="vespo", help="any reward-trained row of nearpolicy.METHODS")
    parser.add_argument("--steps", type=int, default=256, help="optimizer updates")
    parser.add_argument("--updates-per-rollout", type=int, default=8, help="N: the last mini-batch of a rollout batch is N - 1 updates old")
    parser.add_argument("--prompts", type=int, default=64, help="prompts in a rollout batch (P)")
    parser.add_argument("--group-size", type=int, default=8, help="responses to each prompt (G)")
    parser.add_argument("--length", type=int, default=3, help="digits in a prompt")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(words)
    if args.prompts * args.group_size % args.updates_per_rollout:
        parser.error("--updates-per-rollout must divide prompts x group size")
    return args


def main(words: list[str] | None = None) -> list[float]:
    """Train and return the mean reward of every rollout batch."""
    args = parse(words)
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    model = Model(2 * args.length + 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.0)
    history: list[float] = []
    step, start = 0, time.perf_counter()
    while step < args.steps:
        # Prompt, sample, score, advantage: one rollout batch by the policy as it is now.
        rollouts = collect(model, args, generator)
        history.append(float(rollouts.reward_B.mean()))
        # Weight, loss, update: N times on its parts. Part i is i updates old when its turn comes, and the kernel weighs it accordingly.
        for index in torch.arange(len(rollouts.token_BT)).chunk(args.updates_per_rollout):
            values = update(model, optimizer, rollouts.rows(index), args.method)
            step += 1
        if len(history) % 4 == 1 or step >= args.steps:
            print(
                f"step {step:4d}  reward {history[-1]:.3f}  entropy {values['entropy']:.3f}  raw ESS {values['weight/ess_raw']:.2f}"
                f"  mean weight {values['weight/mean']:.2f}  {time.perf_counter() - start:5.1f} s",
                flush=True,
            )
    return history


if __name__ == "__main__":
    main()
