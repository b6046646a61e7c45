"""The method pages: everything that the rows of `nearpolicy.METHODS` say, plots drawn from the kernels themselves, and the hand-written notes."""

import math
import tomllib
from collections.abc import Callable
from pathlib import Path

import torch
from nearpolicy import METHODS, method
from nearpolicy.describe import default_text
from nearpolicy.methods import Row
from nearpolicy.objective.distill import Sides, iw_weight
from nearpolicy.objective.kernels import KERNELS
from nearpolicy.objective.position import profile

from _gen.plots import Curve, chart

DOCS = Path(__file__).resolve().parents[1]
KINDS = {
    "token": "token (each token by its own ratio r)",
    "sequence": "sequence (all tokens of a response by the product W of their ratios)",
    "geometric": "sequence, geometric mean (all tokens by s = W^(1/T))",
}
RANGES = {"gspo": 1.2e-3}
"""Half the width of a plot in nats, where 2 would show nothing."""
DISTILLATION = tuple(name for name, row in METHODS.items() if row.signal is not None)
M2PO_EXAMPLE = 0.5
"""|log r| from which the plot of M2PO drops candidates; the real threshold follows from the batch."""


def pages() -> dict[str, str]:
    """Path below docs/ -> text, of every method page, figure and the index."""
    values = tomllib.loads((DOCS / "notes" / "values.toml").read_text(encoding="utf-8"))
    out = {"methods/index.md": index()}
    for row in METHODS.values():
        figures = draw(row)
        out |= {f"methods/img/{row.name}-{kind}.svg": svg for kind, (svg, _) in figures.items()}
        notes = (DOCS / "notes" / f"{row.name}.md").read_text(encoding="utf-8").strip()
        out[f"methods/{row.name}.md"] = page(row, {k: alt for k, (_, alt) in figures.items()}, values.get(row.name, {}), notes)
    return out


def index() -> str:
    """The table of all methods."""
    lines = [
        "# Methods",
        "",
        "Every method is a weight phi on `A * grad log pi`, one row of `nearpolicy.METHODS`. The gradient of the loss with respect to the",
        "log-prob of a token is `-aggregate * phi * A`. Letters: r is a token's ratio to the policy that sampled it, W the product of the",
        "ratios of a response, s = W^(1/T) their geometric mean, A the advantage, T the number of tokens. `[...]` is 1 where the condition",
        "holds and 0 elsewhere.",
        "",
        "| method | weight phi | aggregate | advantages | source |",
        "|---|---|---|---|---|",
    ]
    for row in METHODS.values():
        advantage = "teacher's log-probs" if row.signal else "divided by the std" if row.normalize_std else "not divided by the std"
        lines.append(f"| [{row.name}]({row.name}.md) | `{row.formula}` | `{row.aggregate}` | {advantage} | {row.source} |")
    common = method("grpo").row.all_options()
    lines += [
        "",
        "Of a teacher train " + ", ".join(f"`{n}`" for n in DISTILLATION) + "; every other method can have its signal mixed in: see",
        "[distillation](../distillation.md).",
        "",
        "## Options of every row",
        "",
        "| option | default | values | meaning |",
        "|---|---|---|---|",
        *(f"| `{n}` | the row's | {_cell(o.expects)} | {o.text} |" if n == "aggregate" else
          f"| `{n}` | `{default_text(o.default)}` | {_cell(o.expects)} | {o.text} |"
          for n, o in common.items() if n not in method("grpo").row.options),
        "",
        "`ratio.denominator` and `ratio.scope` set the options `denominator` and `ratio_scope` from a configuration.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def page(row: Row, figures: dict[str, str], values: dict[str, list[str]], notes: str) -> str:
    """One method."""
    chosen = method(row.name)
    lines = [f"# {row.name}", "", f"Source: {row.source}.", "", "```text", row.formula, "```", ""]
    lines += [f"- Ratio level: {KINDS[chosen.level]}" + (", of the kernel `ppo`; `kernel` names another." if row.signal else ".")]
    lines += [f"- Aggregation: `{row.aggregate}`."]
    if row.signal:
        lines += ["- Advantage: the distillation signal; a reward's advantage, if one is given, is added.",
                  f"- Columns besides behaviour log-probs: {', '.join(f'`{n}`' for n in sorted(chosen.needs))}."]  # fmt: skip
    else:
        lines += [f"- Advantages by the paper: {'divided' if row.normalize_std else 'not divided'} by the group's standard deviation "
                  "(`advantage.normalize_std` changes it)."]  # fmt: skip
    lines += ["", *(f"![{alt}](img/{row.name}-{kind}.svg)" for kind, alt in figures.items()), "", *shape_table(row)]
    lines += ["## Options", "", "| option | default here | paper | TRL 1.16 | verl 0.9 | meaning |", "|---|---|---|---|---|---|"]
    options = row.all_options()
    own = [n for n in options if n in row.options or n == "aggregate"]
    for name in own:
        paper, trl, verl = values.get(name, ["?" if name == "aggregate" else "-", "-", "-"])
        default = default_text(chosen.options[name])
        lines.append(f"| `{name}` | `{default}` | {_cell(paper)} | {_cell(trl)} | {_cell(verl)} | {_cell(options[name].text)} |")
    if "advantages" in values:
        paper, trl, verl = values["advantages"]
        ours = "divided by the std" if row.normalize_std else "not divided"
        lines.append(f"| `advantage.normalize_std` | {ours} | {_cell(paper)} | {_cell(trl)} | {_cell(verl)} | scale of group advantages |")
    extra = "the options of its `kernel` and " if row.signal else ""
    lines += ["", f"It also takes {extra}[the options of every row](index.md#options-of-every-row).", ""]
    lines += ["## Where public code differs", "", row.differences, "", "## How to use it", "", *usage(row), "", notes]
    return "\n".join(lines) + "\n"


def usage(row: Row) -> list[str]:
    """A command, and a call of `policy_loss` that runs."""
    out = []
    start = "iw-opd" if row.signal else "tiny"
    out += ["```console", f"$ nearpolicy train {start} method.name={row.name}", "```", ""]
    out += ["```python", "import torch", "", "import nearpolicy", "", "logp = torch.randn(4, 8).sub(6).requires_grad_()  # [responses, tokens]"]
    arguments = ["logp=logp", "logp_behavior=logp.detach() + 0.1 * torch.randn(4, 8)", "mask=torch.ones(4, 8, dtype=torch.bool)"]
    options = ""
    needs = method(row.name).needs
    if row.signal:
        arguments += ["logp_teacher=logp.detach() + 0.5 * torch.randn(4, 8)"]
        if "logp_reference" in needs:
            arguments += ["logp_reference=logp.detach() + 0.5 * torch.randn(4, 8)"]
    else:
        arguments += ["advantage=torch.tensor([1.0, -1.0, 0.5, -0.5])"]
    if row.aggregate == "constant":
        options = 'options={"max_length": 8}'
    if row.name == "luffy":
        arguments += ["off_policy=torch.tensor([True, False, False, False])  # row 0 is a demonstration"]
    out += ["out = nearpolicy.policy_loss("]
    body = [f'"{row.name}"', *arguments, *([options] if options else [])]
    out += [f"    {a.replace('  #', ',  #') if '  #' in a else a + ','}" for a in body]
    return [*out, ")", "out.loss.backward()", "print(out.weight.mean(1))", "```"]


def shape_table(row: Row) -> list[str]:
    """phi at a few ratios for both signs; nothing for rows whose weight is not a function of one ratio."""
    if row.name in ("m2po", "gmpo") or row.signal:
        return []
    letter = {"token": "r", "sequence": "W", "geometric": "s"}[method(row.name).level]
    ratios = (0.9990, 0.9996, 1.0, 1.0003, 1.0010) if row.name in RANGES else (0.1, 0.5, 0.9, 1.0, 1.1, 1.5, 3.0, 10.0)
    x = torch.tensor(ratios, dtype=torch.float64).log()
    cells = [[f"{v:.4g}" for v in _phi(row)(x, torch.full_like(x, sign, dtype=torch.bool)).tolist()] for sign in (True, False)]
    return [f"| {letter} | {' | '.join(f'{r:g}' for r in ratios)} |", "|---|" + "---|" * len(ratios),
            f"| phi, A >= 0 | {' | '.join(cells[0])} |", f"| phi, A < 0 | {' | '.join(cells[1])} |", ""]  # fmt: skip


def draw(row: Row) -> dict[str, tuple[str, str]]:
    """Figures by name: SVG text and what it shows."""
    half = RANGES.get(row.name, 2.0)
    x = torch.linspace(-half, half, 241, dtype=torch.float64)
    label = {"token": "log r (token), nats", "sequence": "log W (response), nats", "geometric": "log s (mean over the response), nats"}[
        method(row.name).level
    ]
    title = f"{row.name}: weight phi" + (" of its default kernel ppo" if row.signal else "")
    phi = [_curve(name, x, _phi(row)(x, torch.full_like(x, sign, dtype=torch.bool))) for name, sign in (("A >= 0", True), ("A < 0", False))]
    if row.name == "m2po":
        kept = x.abs() < M2PO_EXAMPLE
        phi = [_curve(name, x, torch.where((x * sign > 0) & ~kept, 0.0, x.exp())) for name, sign in (("A > 0", 1), ("A < 0", -1))]
        title += f" (threshold at |log r| = {M2PO_EXAMPLE:g})"
    if row.name == "gmpo":
        title = "gmpo: one token of a response, the others at ratio 1 (T = 4)"
        phi = [_curve(name, x, _gmpo(x, sign)) for name, sign in (("A >= 0", True), ("A < 0", False))]
        label = "log r of that token, nats"
    out = {"phi": (chart(title, phi, x_label=label, y_label="phi", y_top=4.0), f"phi of {row.name} against the log ratio for both signs of A")}
    f = KERNELS[row.kernel].objective
    if f is not None and row.name not in ("gmpo", "m2po"):
        arguments = KERNELS[row.kernel].arguments(method(row.name).options)
        curves = [
            _curve(name, x, f(x, torch.full_like(x, sign, dtype=torch.bool), **arguments)) for name, sign in (("A >= 0", True), ("A < 0", False))
        ]
        title = f"{row.name}: objective f, with phi = w f'(w)"
        out["f"] = (chart(title, curves, x_label=label, y_label="f", y_top=4.0), f"objective f of {row.name} against the log ratio")
    if row.name == "luffy":
        out["demonstration"] = (_demonstration(row), "phi and f of luffy on demonstrations against the token's probability")
    if row.signal:
        out["position"] = (_positions(row), f"position weights of {row.name}")
    return out


def _phi(row: Row) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    kernel = KERNELS[row.kernel]
    arguments = kernel.arguments(method(row.name).options)
    return lambda x, positive: kernel.phi(x, positive, **arguments)


def _curve(label: str, x: torch.Tensor, y: torch.Tensor) -> Curve:
    """A jump to or from exactly 0 is drawn as a gap, so that a clip does not look like a slope."""
    values = y.tolist()
    dead = [v == 0 for v in values]
    shown = [math.nan if k and dead[k] != dead[k - 1] else v for k, v in enumerate(values)]
    return Curve(label, x.tolist(), shown)


def _gmpo(x: torch.Tensor, positive: bool) -> torch.Tensor:
    options = method("gmpo").options
    clip = KERNELS["gmpo"].clip
    assert clip is not None
    clipped = clip(x, torch.full_like(x, positive, dtype=torch.bool), clip_low=options["clip_low"], clip_high=options["clip_high"])
    return (clipped / 4).exp() * (clipped == x)


def _demonstration(row: Row) -> str:
    pair = KERNELS["luffy"].demonstration
    assert pair is not None
    p = torch.linspace(0.002, 1, 200, dtype=torch.float64)
    gamma = method(row.name).options["gamma"]
    curves = [Curve("phi", p.tolist(), pair[0](p.log(), gamma=gamma).tolist()), Curve("f", p.tolist(), pair[1](p.log(), gamma=gamma).tolist())]
    return chart("luffy: demonstration tokens", curves, x_label="probability of the token under the policy", y_label="phi, f")


def _positions(row: Row) -> str:
    """Weights over a response of 40 tokens: the fixed profiles, or the prefix weight under three courses of the drift."""
    T = 40
    mask = torch.ones(1, T, dtype=torch.bool)
    at = list(range(1, T + 1))
    if row.name == "opd":
        o = method("opd").options
        kinds = ("prefix", "suffix", "amplify_prefix")
        made = {k: profile(mask, kind=k, fraction=o["fraction"], multiplier=o["multiplier"])[0].tolist() for k in kinds}
        curves = [Curve(k, at, w) for k, w in made.items()]
        return chart("opd: weight by position under each profile", curves, x_label="token of the response (T = 40)", y_label="weight")
    if row.name == "exopd":
        x = torch.linspace(-2, 2, 81, dtype=torch.float64).tolist()
        curves = [Curve(f"lambda = {lam:g}", x, [0.5 + (lam - 1) * e for e in x]) for lam in (1.0, 1.25, 2.0)]
        return chart("exopd: advantage at teacher - student = 0.5", curves, x_label="log teacher - log reference, nats", y_label="A")
    t = torch.arange(T, dtype=torch.float64)
    courses = {"even": torch.ones(T), "early": (-t / 6).exp(), "late": ((t - T) / 6).exp()}
    options = {"gamma": method(row.name).options["gamma"], "normalizer": method(row.name).options["normalizer"]}
    curves = []
    for name, size in courses.items():
        sides = Sides(size.double()[None], torch.zeros(1, T, dtype=torch.float64), None, mask)
        w = iw_weight(sides, signed=False, weight="surrogate", alpha=1.0, partition="one", blend=True, log_partition_L=None, **options)
        curves.append(Curve(f"{name} drift", at, w[0].tolist()))
    return chart(f"{row.name}: prefix weight w", curves, x_label="token of the response (T = 40)", y_label="w")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
