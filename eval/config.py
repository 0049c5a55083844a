"""What to run, read from YAML and checked at the door."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eval import fields
from eval.haystacks import KINDS
from eval.prompt import PROTOCOLS
from eval.tasks import TASKS

_BYTES = re.compile(r"bytes:\s*(\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """One task. Generated: `samples` for every subset, haystack, length and depth. Read from
    files: at most `samples` contexts of every subset, all where it is None."""

    name: str
    subsets: tuple[str, ...] = ()  # () for all
    haystacks: tuple[str, ...] = ()  # () for those that the task is defined with
    lengths: tuple[int, ...] = ()
    depths: tuple[float, ...] = ()  # () where the seed draws them
    samples: int | None = None
    path: str | None = None  # file or directory with the data
    max_length: int | None = None  # tokens; the middle of a longer context is cut


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """A policy's name and the options that differ from its defaults."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        if not self.options:
            return self.name
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in self.options)})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One evaluation. The full cache is always run, first, whether listed or not."""

    model: str
    tasks: tuple[TaskConfig, ...]
    policies: tuple[PolicyConfig, ...]
    budgets: tuple[int | float | str, ...]  # tokens, fraction of the prompt, or "bytes: N"
    question: str = "hidden"
    max_new_tokens: int | None = None  # None: each sample's own
    seed: int = 0
    output: str = "runs/eval"

    @property
    def hash(self) -> str:
        """Of all that changes a result; more samples, another directory leave it as it is."""
        content = dataclasses.asdict(self)
        del content["output"]
        for task in content["tasks"]:
            del task["samples"]
        text = json.dumps(content, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def mapping(self) -> dict[str, Any]:
        """The config as `from_mapping` reads it."""
        content = dataclasses.asdict(self)
        content["tasks"] = [
            {key: list(v) if isinstance(v, tuple) else v for key, v in task.items() if v}
            for task in content["tasks"]
        ]
        content["policies"] = [
            {policy.name: dict(policy.options)} if policy.options else policy.name
            for policy in self.policies
        ]
        content["budgets"] = list(self.budgets)
        return {key: value for key, value in content.items() if value is not None}

    def max_length(self, task: str) -> int | None:
        """The most tokens of a prompt of `task`, where the config bounds them."""
        name = task.split("/")[0]
        bounds = [t.max_length for t in self.tasks if t.name == name and t.max_length]
        return min(bounds, default=None)


def load(path: str | Path) -> Config:
    """The config of a YAML file with one model; errors as in `load_all`."""
    configs = load_all(path)
    if len(configs) > 1:
        raise ValueError(f"config {str(path)!r} has {len(configs)} models: allowed here is one")
    return configs[0]


def load_all(path: str | Path, model: str | None = None) -> tuple[Config, ...]:
    """One config per model of a YAML file: `model: NAME`, or `models: [NAME, ...]`.

    With several models each has a directory of its own within `output`. `model` alone takes their
    place, and has such a directory too.

    Raises:
      ValueError: in one line: the key, what was given, what is allowed.
    """
    content = fields.yaml_file(path)
    try:
        if not isinstance(content, Mapping) or "models" not in content:
            config = from_mapping(content)
            return (config if model is None else dataclasses.replace(config, model=model),)
        return _with_each_model(content, model)
    except ValueError as error:
        raise ValueError(f"config {str(path)!r}: {error}") from error


def _with_each_model(content: Mapping[str, Any], only: str | None) -> tuple[Config, ...]:
    if "model" in content:
        raise ValueError("keys 'model' and 'models' are both given; give one")
    models = [
        fields.text(f"models[{i}]", m)
        for i, m in enumerate(fields.items("models", content["models"]))
    ]
    fields.unique("models", models)
    rest = {key: value for key, value in content.items() if key != "models"}
    asked = models if only is None else [only]
    configs = [from_mapping({**rest, "model": model}) for model in asked]
    if len(models) == 1:
        return tuple(configs)
    configs = [
        dataclasses.replace(config, output=f"{config.output}/{config.model.replace('/', '--')}")
        for config in configs
    ]
    fields.unique("the models' directories", [config.output for config in configs])
    return tuple(configs)


def from_mapping(content: Any) -> Config:
    """Checks and builds; errors as in `load`, without the path."""
    given = fields.mapping(
        "the file", content, Config, required=("model", "tasks", "policies", "budgets")
    )
    values: dict[str, Any] = {
        "model": fields.text("model", given["model"]),
        "tasks": tuple(
            _task(f"tasks[{i}]", item)
            for i, item in enumerate(fields.items("tasks", given["tasks"]))
        ),
        "policies": tuple(
            policy(f"policies[{i}]", item)
            for i, item in enumerate(fields.items("policies", given["policies"]))
        ),
        "budgets": tuple(
            _budget(f"budgets[{i}]", item)
            for i, item in enumerate(fields.items("budgets", given["budgets"]))
        ),
    }
    if "question" in given:
        values["question"] = fields.choice("question", given["question"], PROTOCOLS)
    if "max_new_tokens" in given:
        values["max_new_tokens"] = fields.integer("max_new_tokens", given["max_new_tokens"], 1)
    if "seed" in given:
        values["seed"] = fields.integer("seed", given["seed"], 0)
    if "output" in given:
        values["output"] = fields.directory("output", given["output"])
    labels = [policy.label for policy in values["policies"]]
    fields.unique("policies", labels)
    fields.unique("budgets", values["budgets"])
    fields.unique("tasks", values["tasks"])
    return Config(**values)


def _task(key: str, content: Any) -> TaskConfig:
    given = fields.mapping(
        key,
        content,
        TaskConfig,
        required=("name",),
        # The singular reads better in a file with one of them.
        aliases={"haystack": "haystacks", "length": "lengths", "subset": "subsets"},
    )
    task = TASKS[fields.choice(f"{key}.name", given["name"], tuple(TASKS))]
    generated = ("lengths", "samples", *(("depths",) if task.depths else ()))
    needed = generated if task.make is not None else ("path",)
    taken = ("name", *needed, "samples", "path", *(("subsets",) if task.subsets else ()))
    taken += ("haystacks",) if task.make is not None else ("max_length",)
    for field in given:
        if field not in taken:
            raise ValueError(
                f"{key}.{field}: task {task.name} does not take it; it takes "
                f"{', '.join(dict.fromkeys(taken))}"
            )
    for field in needed:
        if field not in given:
            raise ValueError(
                f"missing key {field!r} in {key}: task {task.name} needs {', '.join(needed)}"
            )

    def each(field: str, read: Callable[[str, Any], Any]) -> tuple[Any, ...]:
        if field not in given:
            return ()
        value = given[field]
        value = [value] if isinstance(value, str | int | float) else value
        items = fields.items(f"{key}.{field}", value)
        return tuple(read(f"{key}.{field}[{i}]", item) for i, item in enumerate(items))

    config = TaskConfig(
        name=task.name,
        subsets=each("subsets", lambda k, v: fields.choice(k, v, task.subsets)),
        haystacks=each("haystacks", haystack),
        lengths=each("lengths", lambda k, v: fields.integer(k, v, 1)),
        depths=each("depths", fields.fraction),
        samples=fields.integer(f"{key}.samples", given["samples"], 1)
        if "samples" in given
        else None,
        path=fields.text(f"{key}.path", given["path"]) if "path" in given else None,
        max_length=(
            fields.integer(f"{key}.max_length", given["max_length"], 1)
            if "max_length" in given
            else None
        ),
    )
    for field in ("subsets", "haystacks", "lengths", "depths"):
        fields.unique(f"{key}.{field}", getattr(config, field))
    return config


def policy(key: str, content: Any) -> PolicyConfig:
    if isinstance(content, str) and content:
        return PolicyConfig(name=content)
    if isinstance(content, Mapping) and len(content) == 1:
        (name, options) = next(iter(content.items()))
        if isinstance(name, str) and (options is None or isinstance(options, Mapping)):
            for option, value in (options or {}).items():
                if not isinstance(option, str):
                    raise fields.error(f"{key}.{name}", option, "options by name, which is a text")
                if not isinstance(value, str | int | float | bool):
                    raise fields.error(
                        f"{key}.{name}.{option}", value, "numbers, texts, true and false"
                    )
            return PolicyConfig(name=name, options=tuple(sorted((options or {}).items())))
    raise fields.error(key, content, "a policy name or one mapping {name: {option: value}}")


def _budget(key: str, content: Any) -> int | float | str:
    allowed = 'tokens (an integer >= 1), a fraction in (0, 1], or "bytes: N"'
    if isinstance(content, Mapping) and set(content) == {"bytes"}:
        content = f"bytes: {content['bytes']}"
    if isinstance(content, str):
        match = _BYTES.fullmatch(content.strip())
        if match and int(match[1]) >= 1:
            return f"bytes: {int(match[1])}"
    elif isinstance(content, bool):
        pass
    elif (isinstance(content, int) and content >= 1) or (
        isinstance(content, float) and 0 < content <= 1
    ):
        return content
    raise fields.error(key, content, allowed)


def haystack(key: str, content: Any) -> str:
    """The name of a haystack, as `eval.haystacks.load` takes it."""
    text = fields.text(key, content)
    if text not in KINDS and not (text.startswith("file:") and len(text) > 5):
        raise fields.error(
            key, content, f"{', '.join(KINDS)} or file:PATH{fields.suggestion(text, KINDS)}"
        )
    return text
