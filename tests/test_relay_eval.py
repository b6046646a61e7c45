"""`nearpolicy eval --relay-from`: numbers, page and JSON from two model folders, and every refusal as one line."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from nearpolicy import cli, jobs
from nearpolicy.policy.tiny import character_tokenizer, make_tiny, tiny_model

SMALL = ("task.num_ops=1", "task.heldout=4", "rollout.max_tokens=6", "threads=1", "device=cpu", "eval.samples=4", "eval.k=[1,2,4]")


def call(*words):
    result = CliRunner().invoke(cli.cli, ["eval", *map(str, words)])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    made = {name: make_tiny(folder / name, seed=seed) for name, seed in (("late", 1), ("early", 2))}
    tiny_model(seed=3, intermediate_size=32).save_pretrained(folder / "narrow")
    character_tokenizer().save_pretrained(folder / "narrow")
    tiny_model(seed=3, vocab_size=6).save_pretrained(folder / "letters")
    character_tokenizer("abc").save_pretrained(folder / "letters")
    return {**made, "narrow": folder / "narrow", "letters": folder / "letters"}


def test_relayed_against_single(models, tmp_path):
    numbers, page = tmp_path / "n.json", tmp_path / "p.html"
    words = (models["late"], *SMALL, "--relay-from", models["early"], "--relay-fraction", "1,0,0.5", "--json", numbers, "--plot", page)
    code, out, err = call(*words)
    assert (code, err) == (0, "")
    assert f"plot: {page}" in out
    assert out.count("pass@4") == 5
    assert out.count("minus single") == 3 * 3
    made = json.loads(numbers.read_text())["eval"]
    assert made["fractions"] == [0.0, 0.5, 1.0]
    assert made["earlier"] == str(models["early"])
    assert made["counts"]["relay 0"] == made["counts"]["single"]
    assert made["counts"]["relay 1"] == made["counts"]["earlier"]
    assert made["length"]["relay 1"] == made["length"]["earlier"] == made["kept"]["1"]
    assert "<svg" in page.read_text()
    again = tmp_path / "again.json"
    assert call(*words[:-4], "--json", again, "--plot", page)[0] == 0
    assert again.read_bytes() == numbers.read_bytes()


def test_lengths_are_those_of_the_models_and_the_plain_evaluation(models, tmp_path):
    """The single curve is the evaluation of the checkpoint alone."""
    alone = jobs.evaluate_checkpoint(models["late"], SMALL, say=lambda _: None)
    made = jobs.relay_checkpoints(models["late"], models["early"], SMALL, fractions="0.5", say=lambda _: None)["eval"]
    for k in (1, 2, 4):
        own = made["curves"]["single"][str(k)]
        assert (own["mean"], own["low"], own["high"]) == tuple(alone[f"eval/pass@{k}{end}"] for end in ("", "/low", "/high"))
    assert made["length"]["single"] == alone["eval/length"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--relay-fraction", "1.5"), 2, "--relay-fraction: got '1.5'; expected numbers from 0 to 1"),
        (("--relay-fraction", "nan"), 2, "--relay-fraction"),
        (("--relay-fraction", "0.3333333,0.33333334"), 2, "differ in six digits"),
        (("--relay-fraction", "0.5,"), 2, "--relay-fraction"),
        (("--relay-fraction", "-0.1"), 2, "--relay-fraction"),
        (("--samples", "2", "--k", "4"), 2, "samples = 2"),
        (("--plot", "nowhere/p.html"), 2, "no such folder"),
        (("--json", "nowhere/n.json"), 2, "no such folder"),
    ],
)
def test_refusals(models, words, code, says, monkeypatch):
    monkeypatch.setattr(jobs, "assemble", None)  # refused before any model is loaded
    got, out, err = call(models["late"], *SMALL, "--relay-from", models["early"], *words)
    assert (got, out, err.count("\n")) == (code, "", 1)
    assert says in err


@pytest.mark.parametrize(
    ("earlier", "says"),
    [("letters", "another vocabulary"), ("narrow", "another architecture"), ("nowhere", "nowhere")],
)
def test_an_earlier_checkpoint_of_another_kind_is_refused(models, tmp_path, earlier, says):
    folder = models.get(earlier, tmp_path / earlier)
    code, _, err = call(models["late"], *SMALL, "--relay-from", folder, "--plot", tmp_path / "p.html")
    assert (code, err.count("\n")) == (1, 1)
    assert says in err
    assert not (tmp_path / "p.html").exists()


@pytest.mark.parametrize("words", [("--relay-fraction", "0.5"), ("--plot", "p.html")])
def test_options_of_a_relay_need_an_earlier_checkpoint(models, words):
    code, _, err = call(models["late"], *SMALL, *words)
    assert code == 2
    assert f"{words[0]}: got no --relay-from" in err


def test_the_page_lies_in_the_run_unless_it_is_named(models, tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(jobs, "relay_checkpoints", lambda *_, **options: seen.update(options))
    run = tmp_path / "run"
    (run / "checkpoints" / "step-000008").mkdir(parents=True)
    (run / "run.toml").write_text("")
    assert call(run / "checkpoints" / "step-000008", "--relay-from", models["early"])[0] == 0
    assert seen["plot"] == run.resolve() / "relay.html"
    assert seen["fractions"] == "0.5"
    monkeypatch.chdir(tmp_path)
    assert call(models["late"], "--relay-from", models["early"], "--plot", "mine.html")[0] == 0
    assert seen["plot"] == Path("mine.html")
