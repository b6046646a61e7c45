"""Refusing teachers that do not fit method and data, and the mixture that a configuration asks for. Reads no files."""

from collections.abc import Mapping

from nearpolicy.config import Config, ScoringModel
from nearpolicy.errors import UsageError
from nearpolicy.methods import Method, method
from nearpolicy.mixture import Mixture


def build_mixture(config: Config) -> Mixture | None:
    """The mixture of `distill.*`, or None.

    Raises:
        UsageError: an unknown option of the row, or a row that has no weight to weigh with.
    """
    d = config.distill
    return None if d is None else Mixture(row=method(d.name, **d.options), coefficient=d.coefficient, use=d.use)


def needed(chosen: Method, mixture: Mixture | None) -> frozenset[str]:
    """Optional columns that the trainer must provide."""
    return chosen.needs | (mixture.needs if mixture is not None else frozenset())


def reads_reference(config: Config, chosen: Method, mixture: Mixture | None) -> bool:
    """True where something compares with the base model."""
    return bool(config.train.kl_coefficient) or "logp_reference" in needed(chosen, mixture)


def scoring_models(config: Config) -> dict[str, ScoringModel]:
    """Every teacher by the key that names it in messages."""
    t = config.teacher
    if t is None:
        return {}
    return {f"teacher.routes.{name}": route for name, route in t.routes.items()} if t.column is not None else {"teacher": t}


def refuse_teacher(config: Config, chosen: Method, mixture: Mixture | None) -> list[str]:
    """Raise UsageError where method, teacher and data do not fit together; return warnings about settings that do nothing."""
    t, d, needs = config.teacher, config.distill, needed(chosen, mixture)
    if d is not None and not chosen.needs_advantage:
        raise UsageError("distill", got=f"it with method.name = {chosen.name}", expected="a method that trains on rewards",
                         do=f"{chosen.name} is the distillation itself: remove distill, or take another method.")  # fmt: skip
    if t is None:
        if "logp_teacher" in needs:
            raise UsageError("teacher.path", got="none", expected=f"a teacher for {chosen.name if d is None else f'distill.name = {d.name}'}",
                             do="Set teacher.path to a model folder, for example teacher.path=tiny-teacher.")  # fmt: skip
        return _reference_warnings(config, chosen, mixture)
    if d is not None and d.use == "weigh" and d.coefficient != 1:
        raise UsageError("distill.coefficient", got=f"{d.coefficient:g} with distill.use = weigh", expected="1", do="The weight has no coefficient: "
                         "set the row's gamma.")  # fmt: skip
    if not chosen.needs_advantage and config.rollout.overlong_buffer is not None:
        raise UsageError("rollout.overlong_buffer", got=f"it with {chosen.name}", expected="a method that trains on rewards", do="Remove it.")
    if config.rollout.demonstrations is not None and "logp_teacher" in needs:
        raise UsageError("rollout.demonstrations", got="them beside a teacher", expected="responses that the student wrote",
                         do="A teacher's signal is about the student's own tokens: remove one of the two.")  # fmt: skip
    _refuse_places(config)
    row, given, where = (chosen, config.method.options, "method") if d is None or mixture is None else (mixture.row, d.options, "distill")
    warnings = _weight_warnings(row, given, where)
    if t.signal == "full_vocabulary":
        _refuse_full(config, chosen, mixture)
    warnings += _reference_warnings(config, chosen, mixture)
    if d is not None and d.coefficient == 0:
        warnings.append("distill.coefficient = 0: the teacher is only measured")
    if "logp_teacher" not in needs:
        warnings.append(f"{chosen.name} does not read the teacher: it is only measured (set distill.name to train on it)")
    return warnings


def _weight_warnings(row: Method, given: Mapping[str, object], where: str) -> list[str]:
    """Options of a distillation row that were given and cannot act beside the others.

    Raises:
        UsageError: a profile that picks nothing of the response.
    """
    options = row.options
    profile = options.get("profile")
    if profile in ("prefix", "suffix") and options["fraction"] == 0:
        raise UsageError(f"{where}.fraction", got=f"0 with {where}.profile = {profile}", expected="more than 0", do="Nothing would be trained on.")
    acts = {
        "fraction": profile is not None, "curriculum": profile == "curriculum", "multiplier": profile == "amplify_prefix",
        **dict.fromkeys(("alpha", "partition"), options.get("weight") == "ideal"),
    }  # fmt: skip
    need = {"fraction": "profile", "curriculum": "profile = curriculum", "multiplier": "profile = amplify_prefix"}
    idle = [name for name, act in acts.items() if name in given and not act]
    return [f"{where}.{name} does nothing without {where}.{need.get(name, 'weight = ideal')}" for name in idle]


def _reference_warnings(config: Config, chosen: Method, mixture: Mixture | None) -> list[str]:
    unread = config.reference.path is not None and not reads_reference(config, chosen, mixture)
    return ["reference.path does nothing: no extrapolation and no KL penalty"] if unread else []


def _refuse_places(config: Config) -> None:
    """Refuse teachers without a place, routes without a column, and temperatures that a server does not have."""
    t = config.teacher
    assert t is not None
    if t.column is None and t.routes:
        raise UsageError("teacher.routes", got="routes without teacher.column", expected="the column that names them", do="Set teacher.column.")
    if t.column is not None:
        if not t.routes or t.path is not None or t.server is not None:
            raise UsageError("teacher.routes", got=f"{len(t.routes)} routes" + (" beside teacher.path" if t.path or t.server else ""),
                             expected="with teacher.column, every teacher under teacher.routes",
                             do='Write for example teacher.routes.math = {path = "..."}.')  # fmt: skip
        if config.task.kind != "rows":
            raise UsageError("teacher.column", got=f"it with task.kind = {config.task.kind}", expected="data read from files",
                             do="Only rows have columns: remove it, or take task.kind=rows.")  # fmt: skip
    temperature = t.temperature or config.rollout.temperature
    for key, scorer in scoring_models(config).items():
        if scorer.path is None:
            raise UsageError(f"{key}.path", got="none", expected="the teacher's folder (with a server: that of its tokenizer)",
                             do="Without its vocabulary no log-prob can be compared.")  # fmt: skip
        if scorer.server is not None and scorer.extra_rows == "drop":
            raise UsageError(f"{key}.extra_rows", got="drop with a server", expected="refuse", do="A server's distribution is over all its "
                             "rows: load the teacher into this process.")  # fmt: skip
        if scorer.server is not None and temperature != 1:
            raise UsageError(f"{key}.server", got=f"temperature {temperature:g}", expected="1: a server gives log-probs of the unscaled distribution",
                             do="Set teacher.temperature=1 or rollout.temperature=1, or load the teacher into this process.")  # fmt: skip


def _refuse_full(config: Config, chosen: Method, mixture: Mixture | None) -> None:
    t, row = config.teacher, mixture.row if mixture is not None else chosen
    assert t is not None
    problem = None
    if t.server is not None or t.column is not None:
        problem = "a teacher that is not one model in this process"
    elif row.name not in ("opd", "iw_opd"):
        problem = f"{row.name}"
    elif mixture is not None and mixture.use == "weigh":
        problem = "distill.use = weigh"
    if problem:
        raise UsageError("teacher.signal", got=f"'full_vocabulary' with {problem}", expected="opd or iw_opd and one teacher in this process",
                         do="Take teacher.signal=token.")  # fmt: skip
