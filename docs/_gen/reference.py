"""Reference pages from the code: configuration, metrics, alarms, command line."""

import inspect
import re
import types
import typing
from typing import Any, Literal, get_args, get_origin

import click
from nearpolicy import config as configuration, layers
from nearpolicy.cli import cli
from nearpolicy.metrics import QUANTILES, TABLE
from nearpolicy.suites import Benchmark
from nearpolicy.sweep import experiment
from nearpolicy.trainer.alarms import BANDS
from pydantic import BaseModel

GENERATED = "<!-- Written by docs/generate.py from the code: edit the docstrings there. -->"


def pages() -> dict[str, str]:
    """Path below docs/ -> text."""
    return {
        "reference/configuration.md": configuration_page(),
        "reference/metrics.md": metrics_page(),
        "reference/alarms.md": alarms_page(),
        "reference/command-line.md": command_line_page(),
    }


# ------------------------------------------------------------------------------------------------------------ configuration


def configuration_page() -> str:
    """Every key with type, default and meaning."""
    lines = [
        "# Configuration",
        GENERATED,
        "",
        "One tree, read from TOML files and `key=value` words that layer from left to right: a recipe, files, overrides. The value of an",
        "override is TOML; a bare word is a string, and `none` switches off what is on by default. An unknown key is refused with the nearest",
        "known one. `nearpolicy check` prints the resolved tree.",
        "",
        "## Top level",
        "",
        *_table(configuration.Config, "", sections=False),
    ]
    for name, field in configuration.Config.model_fields.items():
        for model in configuration._section_types(field.annotation):
            if model is configuration.Method:
                lines += _method_section()
                continue
            if model is configuration.ScoringModel:  # a teacher of `teacher.routes`: its keys are the teacher's own
                continue
            lines += ["", f"## `[{name}]`{_kind(name, model)}", "", _doc(model), "", *_table(model, f"{name}.")]
            if model is configuration.Distill:
                lines += ["| `distill.<option>` | as the row says | the row's | an option of the row `distill.name` |"]
    lines += ["", "## `[model.lora]`", "", _doc(configuration.Lora), "", *_table(configuration.Lora, "model.lora.")]
    for model in configuration._section_types(configuration.RelayRollout.model_fields["cut"].annotation):
        lines += ["", f"## `[rollout.cut]`{_kind('rollout.cut', model)}", "", _doc(model), "", *_table(model, "rollout.cut.")]
    lines += ["", "## `[rollout.demonstrations]`", "", _doc(configuration.Demonstrations), ""]
    lines += _table(configuration.Demonstrations, "rollout.demonstrations.")
    lines += ["", "## `[[task.rewards]]`", "", _doc(configuration.Reward), "", *_table(configuration.Reward, "")]
    lines += ["", "## `[[benchmark]]` of a suite file", "", _doc(Benchmark), "", *_table(Benchmark, "")]
    lines += ["", "## Experiment file of a sweep", "", _doc(experiment.Experiment), "", *_table(experiment.Experiment, "", sections=False)]
    for title, model in (("[[axis]]", experiment.Axis), ("a value of an axis that sets several keys", experiment.AxisValue),
                         ("[[warm_start]]", experiment.WarmStart), ("[compare]", experiment.Compare), ("[figures]", experiment.Figures),
                         ("[[expect]]", experiment.Expect)):  # fmt: skip
        name = f"`{title}`" if title.startswith("[") else title
        lines += ["", f"### Experiment file: {name}", "", _doc(model), "", *_table(model, "")]
    return "\n".join(lines) + "\n"


def _kind(name: str, model: type[BaseModel]) -> str:
    """` with kind = ...` for a section that comes in kinds."""
    tag = configuration.VARIANTS[name].tag if name in configuration.VARIANTS else None
    return f' with `{tag} = "{get_args(model.model_fields[tag].annotation)[0]}"`' if tag else ""


def _method_section() -> list[str]:
    return ["", "## `[method]`", "", _doc(configuration.Method), "", *_table(configuration.Method, "method."),
            "| `method.<option>` | as the row says | the row's | see [the methods](../methods/index.md) |"]  # fmt: skip


def _table(model: type[BaseModel], prefix: str, *, sections: bool = True) -> list[str]:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if not sections and configuration._section_types(field.annotation):
            continue
        if field.is_required():
            default = "required"
        else:
            value = field.get_default(call_default_factory=True)
            default = "the table below" if isinstance(value, BaseModel) else f"`{_value(value)}`"
        kind = _type(field.annotation) + "".join(f", {b}" for b in _bounds(field.metadata))
        lines.append(f"| `{prefix}{name}` | {_cell(kind)} | {default} | {_cell(_line(field.description or ''))} |")
    return lines


def _value(value: Any) -> str:
    return "none" if value is None else layers._value(layers._plain(value)) if value != "" else '""'


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return ", ".join([_type(arguments[0]), *_bounds(arguments[1:])])
    if origin is Literal:
        return " or ".join(f"`{a}`" for a in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("none" if a is type(None) else _type(a) for a in arguments)
    if origin is tuple:
        return f"list of {_type(arguments[0])}" if arguments[-1] is ... else f"{len(arguments)} numbers"
    if origin is dict:
        return "table"
    names = {Any: "anything", bool: "true or false", int: "whole number", float: "number", str: "text", type(None): "none"}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    return names[annotation]


def _bounds(metadata: Any) -> list[str]:
    out = []
    for m in metadata:
        m = m if not hasattr(m, "metadata") else m.metadata
        for item in m if isinstance(m, list) else [m]:
            signs = {name: sign for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")) if hasattr(item, name)}
            bounds = {sign: getattr(item, name) for name, sign in signs.items()}
            out += [f"{sign} {bound}" if isinstance(bound, int) else f"{sign} {bound:g}" for sign, bound in bounds.items()]
    return out


# ------------------------------------------------------------------------------------------------------- metrics and alarms


def metrics_page() -> str:
    """The one table of metric names."""
    lines = [
        "# Metrics",
        GENERATED,
        "",
        "What `metrics.jsonl`, the trackers and the report call by name. A row of the file holds `step`, `kind`, `time` and values by name;",
        "`kind` is `train`, `eval`, `alarm` or `event`, `step` counts optimizer updates. Values merge exactly over micro-batches: a mean carries",
        "its numerator and denominator, a quantile comes from a histogram with fixed edges. A value that was not measured is null, never 0.",
        "",
        "Direction: up = more is better, down = less is better, band = leave neither side, none = no judgement. The last column names what TRL logs",
        "for the same or the nearest quantity.",
        "",
        "| name | unit | direction | meaning | TRL |",
        "|---|---|---|---|---|",
        *(f"| `{s.name}` | {s.unit} | {s.direction} | {_cell(s.text)} | {f'`{s.trl}`' if s.trl else ''} |" for s in TABLE.values()),
        "",
        "Histograms (`ratio/log_token`, `weight/log_sequence`) are written at every step as quantiles "
        + ", ".join(f"`/{q}`" for q in QUANTILES),
        "and, in about fifty rows of a run, as counts under `/hist`; `histogram_edges.json` has the edges. Evaluation rows carry `eval/pass@k`",
        "and `eval/avg@n` with `/low` and `/high`, a 95 % interval by bootstrap over prompts, and `eval/unscored_frac`.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def alarms_page() -> str:
    """The bands that are watched."""
    lines = [
        "# Alarms",
        GENERATED,
        "",
        "Each update's metrics are held against these bands. A metric that leaves its band gives one line on the terminal, a row of kind `alarm`",
        "in `metrics.jsonl` and a mark in the report; it fires again only after a return. Training goes on. The newest checkpoint from before an",
        "alarm is kept whatever `checkpoint.keep` says. Relative bounds are multiples of the median of the metric's first values.",
        "",
        "| metric | alarm when | what it usually means |",
        "|---|---|---|",
    ]
    for band in BANDS:
        when = [f"below {band.low:g}"] if band.low is not None else []
        when += [f"above {band.high:g}"] if band.high is not None else []
        start = f"the median of its first {band.settle} values"
        when += [f"below {band.relative_low:g} x {start}"] if band.relative_low is not None else []
        when += [f"above {band.relative_high:g} x {start}"] if band.relative_high is not None else []
        patience = f", {band.patience} updates in a row" if band.patience > 1 else ""
        lines.append(f"| `{band.metric}` | {' or '.join(when)}{patience} | {_cell(band.means)} |")
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------------------- command line


def command_line_page() -> str:
    """Every command with arguments and options."""
    lines = [
        "# Command line",
        GENERATED,
        "",
        str(cli.help),
        "",
        "Words that are not options are recipes (`nearpolicy recipes`), TOML files or `key=value` overrides; they layer from left to right. With",
        "overrides alone the recipe `tiny` lies below them. Exit codes: 0 done; 1 data, model, engine or disk; 2 a wrong argument, option or key;",
        "70 unexpected; 130 stopped by Ctrl-C or SIGTERM after a checkpoint. Every error is one line on stderr.",
        "",
    ]
    for name, command in cli.commands.items():
        arguments = [p for p in command.params if isinstance(p, click.Argument)]
        options = [p for p in command.params if isinstance(p, click.Option)]
        words = " ".join(_argument(a) for a in arguments)
        lines += [
            f"## nearpolicy {name}",
            "",
            "```text",
            f"nearpolicy {name} {words}".strip() + " [OPTIONS]",
            "```",
            "",
            _line(command.help or ""),
            "",
        ]
        lines += ["| option | value | meaning |", "|---|---|---|"]
        lines += [f"| {', '.join(f'`{o}`' for o in p.opts)} | {_metavar(p)} | {_cell(p.help or '')} |" for p in options]
        lines += ["| `-h`, `--help` | | Show the command's help. |", ""]
    return "\n".join(lines).rstrip() + "\n"


def _argument(argument: click.Argument) -> str:
    name = argument.metavar or argument.name.upper() + ("..." if argument.nargs == -1 else "")  # type: ignore[union-attr]
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _metavar(option: click.Option) -> str:
    if option.is_flag:
        return ""
    kind = option.type
    if isinstance(kind, click.IntRange):
        return f"whole number >= {kind.min}"
    return {"path": "path", "float": "number", "integer": "whole number"}.get(kind.name, "text")


# ------------------------------------------------------------------------------------------------------------------ shared


def _doc(model: type[BaseModel]) -> str:
    return _line(inspect.getdoc(model) or "")


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
