"""From TOML files and `key=value` overrides to the configuration, and back to TOML.

Layers are merged from left to right. Unknown keys are refused with the nearest known one, all offenders in one line.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from nearpolicy.config import VARIANTS, Config, known_keys
from nearpolicy.errors import UsageError, nearest

RECIPES = Path(__file__).parent / "recipes"


def is_override(part: str) -> bool:
    """Whether a word of the command line is `key=value`: it has a "=" and is no file's name."""
    return "=" in part and not os.path.isfile(part)  # Path.is_file raises on a name that is too long


def parse_override(text: str) -> tuple[list[str], Any]:
    """`a.b=1` -> (["a", "b"], 1). The value is TOML; a bare word is taken as a string.

    Raises:
        UsageError: no `=`, an empty key, or a value that is neither TOML nor a bare word.
    """
    key, sep, value = text.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not sep or not all(path):
        raise UsageError(
            "override", got=repr(text), expected="key=value, for example train.lr=1e-5", do="Write the dotted key, '=' and a TOML value."
        )
    try:
        return path, tomllib.loads(f"x = {value}")["x"]
    except ValueError:  # a TOMLDecodeError, or a number with more digits than Python reads
        if re.fullmatch(r"[\w./:@~+ -]*", value):
            return path, value.strip()
        raise UsageError(key, got=repr(value), expected="a TOML value", do='Quote strings: key="text".') from None


def _merge(base: dict[str, Any], over: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Layer `over` on `base`. A section whose kind (or method `name`) changes keeps only what the new variant knows."""
    out = dict(base)
    for key, value in over.items():
        old, name = out.get(key), section + key
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            kinds = VARIANTS.get(name)
            if name == "method" and "name" in value and value["name"] != old.get("name"):
                old = {}
            elif kinds is not None and kinds.tag in value and value[kinds.tag] != old.get(kinds.tag, kinds.default):
                fields = kinds.fields.get(str(value[kinds.tag]))
                old = {k: v for k, v in old.items() if fields is not None and k in fields}
            out[key] = _merge(dict(old), value, f"{name}.")
        else:
            out[key] = _merge({}, value, f"{name}.") if isinstance(value, Mapping) else value
    return out


def _explain(error: ValidationError) -> UsageError:
    """One line for everything pydantic found."""
    known = known_keys()
    parts, hints = [], []
    if error.error_count() == 1 and (range_ := _range(error.errors()[0]["msg"])):
        e = error.errors()[0]
        key = ".".join(_without_kinds([str(p) for p in e["loc"]]))
        return UsageError("configuration", got=f"{key} = {_short(e['input'])}", expected=range_, do="`nearpolicy check` shows the resolved tree.")
    for e in error.errors():
        loc = _without_kinds([str(p) for p in e["loc"]])
        key = ".".join(loc)
        if e["type"] == "extra_forbidden":
            tag, owners = _owners(loc)
            if owners:
                parts.append(f"{key} is no key of this {tag}")
                hints.append(f"{key} belongs to {tag} = {' or '.join(owners)}.")
                continue
            parts.append(f"{key} is no known key")
            hint = nearest(key, known)
            hints += [hint] if hint.startswith("Did") else []
        elif e["type"] == "union_tag_invalid":
            parts.append(f"{key}.{VARIANTS[key].tag} = {e['ctx']['tag']!r}")
            hints.append(nearest(str(e["ctx"]["tag"]), VARIANTS[key].fields))
        else:
            why = e["msg"].removeprefix("Value error, ")
            parts.append(f"{key} is missing" if e["type"] == "missing" else f"{key} = {_short(e['input'])} ({why})")
    hint = " ".join(dict.fromkeys(hints)) or "See `nearpolicy check` for the resolved tree and docs/reference for every key."
    return UsageError("configuration", got="; ".join(parts), expected="known keys with values in range", do=hint)


_RANGES = {"greater than or equal to": "at least", "less than or equal to": "at most", "greater than": "more than"}


def _range(message: str) -> str | None:
    """What a value should have been, in plain words, where pydantic's message says nothing else."""
    message = message.removeprefix("Value error, ")
    for start in ("Input should be ", "must be "):
        if message.startswith(start):
            rest = message.removeprefix(start)
            return next((rest.replace(long, short, 1) for long, short in _RANGES.items() if rest.startswith(long)), rest)
    return None


def _short(value: Any) -> str:
    """At most 80 characters of its repr."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**80 else "a number of more than 80 digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _without_kinds(loc: Sequence[str]) -> list[str]:
    """The place of an error without the kinds that pydantic puts behind the name of a section."""
    out: list[str] = []
    fresh = False  # whether the last word named a section
    for word in loc:
        kinds = VARIANTS.get(".".join(out))
        if fresh and kinds is not None and word in kinds.fields:
            fresh = False
            continue
        out.append(word)
        fresh = True
    return out


def _owners(loc: Sequence[str]) -> tuple[str, list[str]]:
    """The tag of a key's section and the kinds that have this key (known to be foreign to the kind at hand)."""
    section = ".".join(loc[:-1])
    kinds = VARIANTS.get(section)
    if kinds is None:
        return "", []
    return f"{section}.{kinds.tag}", [kind for kind, fields in kinds.fields.items() if loc[-1] in fields]


def _default_kinds(tree: dict[str, Any]) -> None:
    """Name the default kind in sections that name none."""
    for section, kinds in VARIANTS.items():
        at: Any = tree
        for word in section.split("."):
            at = at.get(word) if isinstance(at, dict) else None
        if isinstance(at, dict):
            at.setdefault(kinds.tag, kinds.default)


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a tree; a byte-order mark is skipped. Raises UsageError with the line when it does not parse."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(str(path), got=f"no TOML: {error}", expected="a TOML file", do="Mend that line.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(str(path), got=str(error), expected="a readable TOML file", do="Check the path.") from None


def recipe_names() -> list[str]:
    """Recipes that ship with the package, those of the papers (`papers/...`) last."""
    names = [p.relative_to(RECIPES).as_posix().removesuffix(".toml") for p in RECIPES.rglob("*.toml")]
    return sorted(names, key=lambda name: ("/" in name, name))


def find_recipe(name: str) -> Path:
    """A shipped recipe by name, or a file. Raises UsageError naming the nearest recipe."""
    path = Path(name)
    if path.suffix == ".toml":
        return path
    shipped = RECIPES / f"{name}.toml"
    if shipped.exists():
        return shipped
    raise UsageError(
        f"recipe {name!r}", got="no such recipe", expected="a recipe's name, a .toml file or key=value", do=nearest(name, recipe_names())
    )


def load_config(*parts: str) -> Config:
    """Layer recipes, TOML files and `key=value` overrides from left to right.

    Example: `load_config("tiny", "mine.toml", "train.lr=1e-4")`.
    Raises:
        UsageError: an unknown key, recipe or value out of range; one line naming all offenders.
    """
    return resolve(layers(parts))


def layers(parts: Iterable[str]) -> list[dict[str, Any]]:
    """The trees of each part, to be merged in order."""
    out: list[dict[str, Any]] = []
    for part in parts:
        if is_override(part):
            path, value = parse_override(part)
            tree: dict[str, Any] = {path[-1]: value}
            for key in reversed(path[:-1]):
                tree = {key: tree}
            out.append(tree)
        else:
            out.append(read_toml(find_recipe(part)))
    return out


def resolve(trees: Sequence[Mapping[str, Any]]) -> Config:
    """Merge and validate."""
    merged: dict[str, Any] = {}
    for tree in trees:
        merged = _merge(merged, tree)
    _default_kinds(merged)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise _explain(error) from None


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ, for a resume with another configuration."""
    out: list[str] = []
    for key in sorted({*old, *new}):
        a, b = ({} if tree.get(key) is None else tree[key] for tree in (old, new))  # a table without keys is not written
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            out += changed_keys(a, b, f"{prefix}{key}.")
        elif a != b:
            out.append(f"{prefix}{key}")
    return out


def to_tree(config: BaseModel) -> dict[str, Any]:
    """Plain TOML values of the whole tree. A None is left out where it is the default, and the word "none" elsewhere."""
    out: dict[str, Any] = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if value is not None:
            out[name] = _plain(value)
        elif field.default is not None:
            out[name] = "none"
    return out | _plain(config.__pydantic_extra__ or {})


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return to_tree(value)
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def to_toml(tree: Mapping[str, Any]) -> str:
    """The tree as TOML text; `read` gives it back."""
    lines: list[str] = []
    _write_table({k: v for k, v in tree.items() if v != {}}, (), lines)
    return "\n".join(lines).strip() + "\n"


def _write_table(tree: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    tables = {k: v for k, v in tree.items() if isinstance(v, Mapping) and v}
    if path and len(tables) < len(tree):
        lines += ["", "[" + ".".join(_key(p) for p in path) + "]"]
    lines += [f"{_key(k)} = {_value(v)}" for k, v in tree.items() if k not in tables]
    for k, v in tables.items():
        _write_table(v, (*path, k), lines)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _value(name)


def _value(v: Any) -> str:
    if isinstance(v, bool):
        return "true" if v else "false"
    if isinstance(v, int | float):
        return repr(v)
    if isinstance(v, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(x)}" for k, x in v.items()) + "}"
    if isinstance(v, list | tuple):
        return "[" + ", ".join(_value(x) for x in v) + "]"
    escaped = "".join(c if c >= " " and c not in '"\\\x7f' else f"\\u{ord(c):04x}" for c in str(v))
    return f'"{escaped}"'
