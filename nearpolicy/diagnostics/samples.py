"""Sample responses as records for `rollouts/` and the report's sample view."""

from collections.abc import Callable, Sequence

from torch import Tensor

from nearpolicy.rollout import Batch, Scored, Source


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(float(v), 5) for v in values]


def sample_records(
    step: int,
    batch: Batch,
    weight_BT: Tensor,
    rows: Sequence[int],
    *,
    decode: Callable[[Sequence[int]], list[str]],
    scored: dict[tuple[int, int], Scored],
) -> list[dict[str, object]]:
    """One record for each of these rows of the batch: tokens with log-prob, version and the weight they were trained with.

    Args:
        decode: ids -> one piece of text each.
        scored: (group, position in the group) -> what was scored, where it is still known (text, outcome, reward parts).
    """
    out: list[dict[str, object]] = []
    for b in rows:
        response = batch.response_mask_BT[b]
        ids = batch.token_BT[b][response].tolist()
        prompt = batch.token_BT[b, : int(batch.prompt_length_B[b])].tolist()
        group = int(batch.group_B[b])
        place = int((batch.group_B[:b] == group).sum())
        known = scored.get((group, place))
        reward = float(batch.reward_B[b])
        out.append(
            {
                "step": step,
                "group": group,
                "sample": known.rollout.sample if known else place,
                "prompt_id": known.rollout.prompt_id if known else "",
                "prompt": "".join(decode(prompt)),
                "text": known.rollout.text if known else "".join(decode(ids)),
                "tokens": decode(ids),
                "logp_behavior": None if batch.source_B[b] is Source.DEMONSTRATION else _rounded(batch.logp_behavior_BT[b][response].tolist()),
                "version": batch.version_BT[b][response].tolist(),
                "weight": _rounded(weight_BT[b][response].tolist()),
                "advantage": round(float(batch.advantage_BT[b][response].mean()), 5) if ids else 0.0,
                "reward": None if reward != reward else reward,
                "outcome": str(known.score.outcome) if known else "",
                "stop": str(batch.stop_B[b]),
                "prefix_length": int(batch.prefix_length_B[b]),
                "source": str(batch.source_B[b]),
            }
        )
    return out
