"""Time, peak memory and gradient of the chunked log-prob and entropy against the plain path (log-softmax over all logits).

Each run is a process of its own, so that its peak resident memory is its own; runs of the two paths take turns. The peak is the high-water mark of
the process after the inputs exist, minus what was resident then, minus the weight gradient (which both paths must hold). On a machine that
others use, read the CPU time of a run with OMP_NUM_THREADS=1; on a quiet one, the wall time.

    python bench/logprob.py                     # 2,048 tokens, hidden 1,024, vocabulary 151,936
    python bench/logprob.py --tokens 1440 --hidden 64 --vocab 32 --repeat 200
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
from torch import Tensor

from nearpolicy.objective.logprob import token_logp_entropy


def plain(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    """log_softmax over [N, V], gather, and the entropy of its detached value."""
    logp_NV = torch.log_softmax((hidden_ND @ weight_VD.t()).float(), -1)
    detached = logp_NV.detach()
    return logp_NV.gather(1, target_N[:, None])[:, 0], -(detached.exp() * detached).sum(-1)


PATHS = {"plain": plain, "chunked": token_logp_entropy}


def resident() -> float:
    """Resident memory of this process, MB."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize() / 2**20


def reset_peak() -> None:
    """Set the high-water mark to what is resident now."""
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")


def peak() -> float:
    """High-water mark of resident memory, MB."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) / 1024 for line in f if line.startswith("VmHWM"))


def measure(path: str, tokens: int, hidden: int, vocab: int, repeat: int, seed: int) -> dict[str, float]:
    """One process: the median time of `repeat` forward + backward passes and the peak of the first."""
    torch.manual_seed(seed)
    h = torch.randn(tokens, hidden).requires_grad_()
    w = (torch.randn(vocab, hidden) / hidden**0.5).requires_grad_()
    y, g = torch.randint(vocab, (tokens,)), torch.randn(tokens)
    small = torch.randn(8, hidden).requires_grad_()
    PATHS[path](small, w[:64].detach(), torch.zeros(8, dtype=torch.long))[0].sum().backward()  # start the thread pool and the matrix library
    before = resident()
    reset_peak()
    times, cpu, first = [], [], 0.0
    for i in range(repeat):
        h.grad = w.grad = None
        start, start_cpu = time.perf_counter(), time.process_time()
        logp, _ = PATHS[path](h, w, y)
        (logp * g).sum().backward()
        times.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
        if i == 0:
            first = peak()
    assert h.grad is not None
    assert w.grad is not None
    gradient_mb = w.nbytes / 2**20
    return {"time_s": statistics.median(times), "cpu_s": statistics.median(cpu), "peak_mb": first - before - gradient_mb, "gradient_mb": gradient_mb}


def gradient_error(tokens: int, hidden: int, vocab: int) -> float:
    """Largest relative L2 distance of the two paths' gradients (hidden states, weight)."""
    grads = []
    for path in PATHS.values():
        torch.manual_seed(0)
        h = torch.randn(tokens, hidden).requires_grad_()
        w = (torch.randn(vocab, hidden) / hidden**0.5).requires_grad_()
        y, g = torch.randint(vocab, (tokens,)), torch.randn(tokens)
        grads.append(torch.autograd.grad((path(h, w, y)[0] * g).sum(), [h, w]))
    return max(float((a - b).norm() / a.norm()) for a, b in zip(*grads, strict=True))


def main() -> None:
    """Interleave the paths, print one line a run and the ratios of the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--child", choices=sorted(PATHS))
    args = parser.parse_args()
    size = (args.tokens, args.hidden, args.vocab)
    if args.child:
        print(json.dumps(measure(args.child, *size, args.repeat, 0)))
        return
    error = gradient_error(*size)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in PATHS}
    for pair in range(args.pairs):
        for name in PATHS:
            command = [sys.executable, __file__, "--child", name, "--repeat", str(args.repeat)]
            command += [f"--{key}={value}" for key, value in zip(("tokens", "hidden", "vocab"), size, strict=True)]
            runs[name].append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
            last = runs[name][-1]
            print(f"pair {pair + 1} {name:8s} {last['time_s']:10.4f} s  CPU {last['cpu_s']:10.4f} s  peak {last['peak_mb']:8.0f} MB", flush=True)
    peaks = {name: statistics.median(r["peak_mb"] for r in runs[name]) for name in PATHS}
    print(f"tokens {size[0]}, hidden {size[1]}, vocabulary {size[2]}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for key, what in (("time_s", "wall time"), ("cpu_s", "CPU time")):
        ratios = [c[key] / p[key] for p, c in zip(runs["plain"], runs["chunked"], strict=True)]
        print(f"{what} chunked / plain: median {statistics.median(ratios):.3f} (min {min(ratios):.3f}, max {max(ratios):.3f}, {args.pairs} pairs)")
    print(f"peak above inputs and weight gradient: plain {peaks['plain']:.0f} MB, chunked {peaks['chunked']:.0f} MB", end="")
    print(f", chunked / plain {peaks['chunked'] / peaks['plain']:.3f}" if peaks["plain"] > 1 else " (too small to compare)")
    print(f"gradient error (relative L2): {error:.1e}")


if __name__ == "__main__":
    main()
