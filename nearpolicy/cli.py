"""The command line: thin. It parses words, calls `nearpolicy.build` and prints; imports are late so that `--help` starts at once."""

import sys

try:
    import functools
    import os
    import traceback
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Any

    import click

    from nearpolicy.errors import NearPolicyError, UsageError, nearest
except KeyboardInterrupt:  # `main` is not there yet to say it
    sys.stderr.write("error: interrupted; nothing was written\n")
    sys.exit(130)

if os.environ.get("WORLD_SIZE", "1") != "1":
    # When a rank is gone, torch warns with a stack trace for each connection, before we say what happened; read when torch is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

Command = Callable[..., Any]
MOST_UPDATES = 100_000_000
"""Of `sft`."""
_NO_ARGS: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""Before click 8.2 a group without a command printed its help and ended well."""
WRITES = "nearpolicy.writes"
"""Key in click's context of what the running command is about to write: a word for it, and its path."""


def _guard(command: Command) -> Command:
    """One clear line for every error a user can cause; `--debug` shows the traceback."""

    @click.option("--debug", is_flag=True, help="Show the traceback of an error.")
    @functools.wraps(command)
    def guarded(*args: Any, debug: bool, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except NearPolicyError as error:
            if debug:
                traceback.print_exc()
            if not _follows():
                click.echo(f"error: {error}", err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo(f"error: {_interrupted(click.get_current_context().meta.get(WRITES))}", err=True)
            sys.exit(130)
        except OSError as error:
            if debug:
                traceback.print_exc()
            where = f" ({error.filename})" if error.filename else ""
            click.echo(f"error: {error.strerror or error}{where}", err=True)
            sys.exit(1)
        except Exception as error:
            if debug:
                raise
            click.echo(f"error: unexpected {type(error).__name__}: {' '.join(str(error).split())} (--debug shows where)", err=True)
            sys.exit(70)

    return guarded


def _follows() -> bool:
    """True on ranks but the first of a training under torchrun, which all read the same words: what is wrong with them is said once."""
    return os.environ.get("WORLD_SIZE", "1") != "1" and os.environ.get("RANK", "0") != "0"


def _writes(kind: str, path: Path) -> Path:
    """Note for an interrupt what is written where."""
    click.get_current_context().meta[WRITES] = (kind, path, path.exists())
    return path


def _interrupted(writes: tuple[str, Path, bool] | None) -> str:
    """What an interrupt leaves behind, read from the disk."""
    if writes is None or not writes[1].exists():
        return "interrupted; nothing was written"
    kind, path, was_there = writes
    if kind == "run":
        steps = [p for p in sorted((path / "checkpoints").glob("step-*")) if p.name.removeprefix("step-").isdigit()]
        if steps:
            return f"interrupted; {steps[-1]} stands: go on with nearpolicy train --resume --out {path}"
        return f"interrupted before the first checkpoint; {path} " + ("is as it was" if was_there else "begins again with --resume")
    return f"interrupted; {path} " + ("was there before and may be the old one" if was_there else "may be incomplete")


class OneLine(click.Group):
    """A group whose usage errors are one line `error: ...` with exit code 2, like every other error."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """The command of these words; an unknown one is refused with the nearest."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise click.UsageError(f"no command {args[0]!r}. {nearest(args[0], self.list_commands(ctx))}", ctx)
        return super().resolve_command(ctx, args)

    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = None, complete_var: str | None = None, standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:  # fmt: skip
        """Run; when on its own (`standalone_mode`), leave through `sys.exit` with the command's exit code."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except _NO_ARGS as error:
            error.show()  # the help itself, on stderr
            code = error.exit_code
        except click.ClickException as error:
            text = " ".join(error.format_message().split())
            hint = f" See `{error.ctx.command_path} --help`." if isinstance(error, click.UsageError) and error.ctx else ""
            click.echo(f"error: {text}{'' if text.endswith(('.', '?')) else '.'}{hint}", err=True)
            code = error.exit_code
        except (click.Abort, KeyboardInterrupt):
            click.echo(f"error: {_interrupted(None)}", err=True)
            code = 130
        except BrokenPipeError:  # the reader of a pipe went away; the interpreter would complain once more while it closes stdout
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 1
        sys.exit(code if isinstance(code, int) else 0)


PARTS = click.argument("parts", nargs=-1, metavar="[RECIPE | FILE.toml | key=value]...")
OUT = click.option("--out", type=click.Path(path_type=Path), help="Run directory (default: runs/<recipe>-<time>).")


@click.group(cls=OneLine, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="nearpolicy")
def cli() -> None:
    """Train language models by RL and on-policy distillation on nearly on-policy data."""


@cli.command()
@PARTS
@OUT
@click.option("--resume", is_flag=True, help="Go on with the run in --out; without parts, its own configuration is taken.")
@_guard
def train(parts: Sequence[str], out: Path | None, resume: bool) -> None:
    """Train; without arguments the embedded default (recipe `tiny`). Several ranks: torchrun --nproc-per-node N -m nearpolicy train ..."""
    from nearpolicy import build

    if resume and out is None:
        raise UsageError("--resume", got="no --out", expected="the run to go on with", do="Give --out DIR.")
    target = _writes("run", out or default_out(parts))
    report = build.train(build.config_for(parts, out if resume else None), target, resume=resume, say=click.echo)
    if not _follows():
        click.echo(f"report: {report}")


@cli.command()
@PARTS
@OUT
@click.option("--steps", type=click.IntRange(1, MOST_UPDATES), help="Updates.")
@click.option("--lr", type=float, help="Peak learning rate.")
@click.option("--batch-size", type=click.IntRange(1, 65_536), help="Demonstrations in an update.")
@click.option("--from-scratch", is_flag=True, help="Start from random weights of the tiny architecture (recipe `tiny`).")
@_guard
def sft(parts: Sequence[str], out: Path | None, **options: Any) -> None:
    """Supervised warm start on the task's demonstrations: a Hugging Face folder that `model.path` takes."""
    from nearpolicy import build, jobs

    target = _writes("model", out or default_out(parts, "sft"))
    folder = jobs.sft(build.config_for(parts, None), target, say=click.echo, **options)
    click.echo(f"model: {folder}")


@cli.command("eval")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@PARTS
@click.option("--suite", type=click.Path(path_type=Path), help="TOML file naming benchmarks, or the name of one that ships.")
@click.option("--samples", type=click.IntRange(1, 65_536), help="Responses to each prompt (n).")
@click.option("--k", "ks", help="Comma-separated k of pass@k.")
@click.option("--temperature", type=float, help="Sampling temperature; 0 is greedy.")
@click.option("--top-p", type=float, help="Nucleus.")
@click.option("--json", "json_out", type=click.Path(path_type=Path), help="Write the numbers here too.")
@click.option(
    "--relay-from",
    "earlier",
    type=click.Path(path_type=Path),
    help="Relay inference: this earlier checkpoint writes the first part of each response.",
)
@click.option("--relay-fraction", "fractions", help="Share of each response that it writes (default 0.5); several with commas between.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    help="Page with the pass@k curves of a relay inference (default: relay.html in the checkpoint's run, else in this folder).",
)
@click.option("--teacher", help="Compare with this model: token KL and prefix drift by position.")
@click.option("--continuation-gap", is_flag=True, help="With --teacher: have both finish the student's responses from --fractions of them.")
@click.option("--fractions", "shares", help="Shares of a response (default 0.1,...,0.9).")
@_guard
def evaluate(checkpoint: Path, parts: Sequence[str], earlier: Path | None, fractions: str | None, plot: Path | None, **options: Any) -> None:
    """Evaluate a checkpoint: avg@n and unbiased pass@k with 95 % intervals; relayed (--relay-from), or beside a teacher (--teacher)."""
    from nearpolicy import jobs

    if options["json_out"] is not None:
        _writes("numbers", options["json_out"])
    if _beside_a_teacher(checkpoint, parts, {"--relay-from": earlier, "--relay-fraction": fractions, "--plot": plot}, options):
        return
    if earlier is None:
        if given := [name for name, value in (("--relay-fraction", fractions), ("--plot", plot)) if value is not None]:
            raise UsageError(given[0], got="no --relay-from", expected="an earlier checkpoint", do="Give --relay-from CHECKPOINT.")
        jobs.evaluate_checkpoint(checkpoint, parts, say=click.echo, **options)
        return
    from nearpolicy.trainer.rundir import run_of

    page = _writes("page", plot or (run_of(checkpoint) or Path()) / "relay.html")
    jobs.relay_checkpoints(checkpoint, earlier, parts, fractions=fractions or "0.5", plot=page, say=click.echo, **options)


def _beside_a_teacher(checkpoint: Path, parts: Sequence[str], others: dict[str, Any], options: dict[str, Any]) -> bool:
    """The part of `eval` with --teacher; takes its options out of `options`. False when there is none."""
    teacher, gap, shares = (options.pop(name) for name in ("teacher", "continuation_gap", "shares"))
    if teacher is None:
        if gap or shares:
            raise UsageError("--continuation-gap" if gap else "--fractions", got="no --teacher", expected="a model to compare with",
                             do="Give --teacher FOLDER.")  # fmt: skip
        return False
    others = others | {f"--{name.replace('_', '-')}": options[name] for name in ("suite", "top_p")} | {"--k": options["ks"]}
    if given := [name for name, value in others.items() if value is not None]:
        raise UsageError(given[0], got="it with --teacher", expected="one evaluation at a time", do="Leave one of them out.")
    from nearpolicy.teacher_jobs import FRACTIONS, evaluate_with_teacher

    taken = {name: options[name] for name in ("samples", "temperature", "json_out")}
    evaluate_with_teacher(checkpoint, teacher, parts, gap=gap, fractions=shares or FRACTIONS, say=click.echo, **taken)
    return True


@cli.command()
@PARTS
@_guard
def check(parts: Sequence[str]) -> None:
    """Print the resolved configuration and derived numbers; refuse what cannot act."""
    from nearpolicy import build

    click.echo(build.check(build.config_for(parts, None)))


@cli.command()
@PARTS
@click.option("--prompts", type=click.IntRange(1, 65_536), help="Prompts sampled (default: rollout.prompts, at most 32).")
@_guard
def health(parts: Sequence[str], prompts: int | None) -> None:
    """Sample once with the engine, score with the trainer: do they agree? Trains and writes nothing; exit code 1 when they do not."""
    from nearpolicy import build
    from nearpolicy.health import health as examined

    examined(build.config_for(parts, None), prompts=prompts, say=click.echo)


@cli.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="The page (default: report.html in the first run).")
@_guard
def report(runs: Sequence[Path], out: Path | None) -> None:
    """Write one self-contained HTML page about one run or several side by side."""
    from nearpolicy.report import write_report

    click.echo(f"report: {write_report(list(runs), _writes('page', out or runs[0] / 'report.html'))}")


@cli.command()
@click.argument("experiment", type=click.Path(path_type=Path))
@click.option("--jobs", type=click.IntRange(1, 1024), help="Runs at the same time, one torch thread each (default: the usable cores).")
@click.option("--resume", is_flag=True, help="Go on: finished runs stay, interrupted ones go on, failed ones are tried again.")
@click.option("--out", type=click.Path(path_type=Path), help="The sweep's directory (default: runs/<experiment>).")
@click.option("--results", type=click.Path(path_type=Path), help="Where tables and figures go (default: results in the sweep's directory).")
@click.option("--yes", is_flag=True, help="Start a grid of more than 10,000 cells.")
@click.option("--plan", "plan_only", is_flag=True, help="Print the runs and start nothing.")
@_guard
def sweep(experiment: Path, plan_only: bool, yes: bool, **options: Any) -> None:
    """Run a grid of settings and seeds, and compare its cells with intervals."""
    from nearpolicy.sweep import run
    from nearpolicy.sweep.experiment import make_plan, read_experiment

    if plan_only:
        click.echo(run.listing(make_plan(read_experiment(experiment), where=experiment.parent, many=yes)))
        return
    page = run.sweep(experiment, many=yes, say=click.echo, **options)
    click.echo(f"results: {page}")


@cli.command()
@click.argument("name", required=False)
@_guard
def methods(name: str | None) -> None:
    """List the methods: formula, defaults, source."""
    from nearpolicy.describe import describe

    click.echo(describe(name))


@cli.command()
@_guard
def recipes() -> None:
    """List the recipes that ship with the package."""
    from nearpolicy.layers import RECIPES, recipe_names

    names = recipe_names()
    width = max(map(len, names))
    for name in names:
        first = (RECIPES / f"{name}.toml").read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        click.echo(f"{name:{width}} {first}")


def default_out(parts: Sequence[str], kind: str = "") -> Path:
    """runs/<recipe>-<time>."""
    import time

    from nearpolicy.layers import is_override

    named = [Path(p).name.removesuffix(".toml") for p in parts if not is_override(p)]
    return Path("runs") / "-".join([*(named[-1:] or ["tiny"]), *([kind] if kind else []), time.strftime("%Y%m%d-%H%M%S")])


def main() -> None:
    """Entry point. An interrupt at any moment is one line and exit code 130."""
    try:
        cli()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
