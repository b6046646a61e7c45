"""nearpolicy on the workers of a Ray cluster: Ray Train's TorchTrainer sets what torchrun sets, so `build.train` finds its ranks.

Needs `pip install "ray[train]"`, and a folder that all machines see under the same path. Run on the head node:

    python examples/ray_train.py /shared/runs/first
"""

import os
import sys


def main(out: str, workers: int = 2, gpus: bool = False) -> None:
    """Train with `workers` ranks, one a worker."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    parts = ["tiny", "train.steps=64"]
    resume = os.path.exists(os.path.join(out, "run.toml"))  # Ray starts the function again after a failure
    settings = {"parts": parts, "out": out, "resume": resume, "device": "cuda" if gpus else "cpu"}
    TorchTrainer(work, train_loop_config=settings, scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpus)).fit()


def work(settings: dict) -> None:
    """What each worker runs. Ray Train has made a process group of its own; ours is joined from the same environment."""
    import torch.distributed as dist

    from nearpolicy.build import config_for, train

    if dist.is_initialized():
        dist.destroy_process_group()
    config = config_for([*settings["parts"], f"device={settings['device']}"], settings["out"] if settings["resume"] else None)
    train(config, settings["out"], resume=settings["resume"])


if __name__ == "__main__":
    main(sys.argv[1])
