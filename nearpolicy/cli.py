"""The command line: thin. It parses words, calls `nearpolicy.build` and prints; imports are late so that `--help` starts at once."""

import functools
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from nearpolicy.errors import NearPolicyError, UsageError

Command = Callable[..., Any]


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
            click.echo(f"error: {error}", err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("stopped at once; the newest checkpoint stands", err=True)
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


PARTS = click.argument("parts", nargs=-1, metavar="[RECIPE | FILE.toml | key=value]...")
OUT = click.option("--out", type=click.Path(path_type=Path), help="Run directory (default: runs/<recipe>-<time>).")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="nearpolicy")
def cli() -> None:
    """Train language models by RL and on-policy distillation on nearly on-policy data."""


@cli.command()
@PARTS
@OUT
@click.option("--resume", is_flag=True, help="Go on with the run in --out; without parts, its own configuration is taken.")
@_guard
def train(parts: Sequence[str], out: Path | None, resume: bool) -> None:
    """Train; without arguments the embedded default (recipe `tiny`)."""
    from nearpolicy import build

    if resume and out is None:
        raise UsageError("--resume", got="no --out", expected="the run to go on with", do="Give --out DIR.")
    report = build.train(build.config_for(parts, out if resume else None), out or default_out(parts), resume=resume, say=click.echo)
    click.echo(f"report: {report}")


@cli.command()
@PARTS
@OUT
@click.option("--steps", type=click.IntRange(1), help="Updates.")
@click.option("--lr", type=float, help="Peak learning rate.")
@click.option("--batch-size", type=click.IntRange(1), help="Demonstrations in an update.")
@click.option("--from-scratch", is_flag=True, help="Start from random weights of the tiny architecture (recipe `tiny`).")
@_guard
def sft(parts: Sequence[str], out: Path | None, **options: Any) -> None:
    """Supervised warm start on the task's demonstrations: a Hugging Face folder that `model.path` takes."""
    from nearpolicy import build

    folder = build.sft(build.config_for(parts, None), out or default_out(parts, "sft"), say=click.echo, **options)
    click.echo(f"model: {folder}")


@cli.command("eval")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@PARTS
@click.option("--suite", type=click.Path(path_type=Path), help="TOML file naming benchmarks, or the name of one that ships.")
@click.option("--samples", type=click.IntRange(1), help="Responses to each prompt (n).")
@click.option("--k", "ks", help="Comma-separated k of pass@k.")
@click.option("--temperature", type=float, help="Sampling temperature; 0 is greedy.")
@click.option("--top-p", type=float, help="Nucleus.")
@click.option("--json", "json_out", type=click.Path(path_type=Path), help="Write the numbers here too.")
@_guard
def evaluate(checkpoint: Path, parts: Sequence[str], **options: Any) -> None:
    """Evaluate a checkpoint: avg@n and unbiased pass@k with 95 % intervals."""
    from nearpolicy import build

    build.evaluate_checkpoint(checkpoint, parts, say=click.echo, **options)


@cli.command()
@PARTS
@_guard
def check(parts: Sequence[str]) -> None:
    """Print the resolved configuration and derived numbers; refuse what cannot act."""
    from nearpolicy import build

    click.echo(build.check(build.config_for(parts, None)))


@cli.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="The page (default: report.html in the first run).")
@_guard
def report(runs: Sequence[Path], out: Path | None) -> None:
    """Write one self-contained HTML page about one run or several side by side."""
    from nearpolicy.report import write_report

    click.echo(f"report: {write_report(list(runs), out or runs[0] / 'report.html')}")


@cli.command()
@click.argument("name", required=False)
@_guard
def methods(name: str | None) -> None:
    """List the methods: formula, defaults, source."""
    from nearpolicy.describe import describe

    click.echo(describe(name))


@cli.command()
def recipes() -> None:
    """List the recipes that ship with the package."""
    from nearpolicy.layers import RECIPES, recipe_names

    for name in recipe_names():
        first = (RECIPES / f"{name}.toml").read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        click.echo(f"{name:24} {first}")


def default_out(parts: Sequence[str], kind: str = "") -> Path:
    """runs/<recipe>-<time>."""
    import time

    named = [Path(p).stem for p in parts if "=" not in p]
    return Path("runs") / "-".join([*(named[-1:] or ["tiny"]), *([kind] if kind else []), time.strftime("%Y%m%d-%H%M%S")])


def main() -> None:
    """Entry point."""
    cli()


if __name__ == "__main__":
    main()
