"""Mutations of a run's configuration for `fuzz_config.py`: drawn key by key from the key's type, from a seed alone.

A case is a command line and, for mutations of YAML's syntax, another text of the config file. Values are those that a
slip, a script or somebody hostile would write: another type, the ends of the numbers, bytes that are not text, paths to
what is not a file. `sane` judges an accepted config without looking at the table of bounds in qarl/config/bounds.py.
"""

from __future__ import annotations

import random
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qarl.config import Config
from qarl.config.types import Section

BASE = """\
name: fuzz
model: {path: model}
data:
  train_files: train.jsonl
  val_files: [val.jsonl]
  train_batch_size: 4
  max_prompt_length: 16
  max_response_length: 16
rollout: {n: 2, cpu_kvcache_space_gib: 0.25}
quant: {group_size: 32}
actor:
  ppo_mini_batch_size: 2
  ppo_micro_batch_size_per_gpu: 4
  log_prob_micro_batch_size_per_gpu: 8
  seq_clip_ratio_high: 0.01
  neg_seq_clip_ratio_low: 0.01
  neg_seq_clip_ratio_high: 0.01
trainer: {total_training_steps: 1, num_threads: 1, save_final: false}
"""

ANYTHING = (
    "", "null", "~", "text", "true", "False", "yes", "[]", "[[]]", "{}", "{a: 1}", "[1, 2, 3]", "[null]", ".nan",
    ".inf", "-.inf", "NaN", "inf", "-1", "0", "1", "-0", "-0.0", "1e400", "-1e400", "1e308", "5e-324", "1e-400",
    "2147483648", "4294967296", "9223372036854775807", "9223372036854775808", "-9223372036854775809", "9" * 40,
    "9" * 5000, "1_000", "0x10", "0o17", "0123", "1:30", "1,000", "\uff11\uff12", "+7", "1.", ".5", "1e3",
    '"1"', "'1e-3'",
    '"\\0"', '"a\\0b"', '"\\ud800"', '"\\x1b[31m"', '"\\n"', "☃", "שלום", "a" * 300, "a" * 5000, "${oc.env:HOME}",
    "{{ 1 }}", "$HOME", "%s%n", "&a 1", "*a", "<<", "!!int 1", "!!python/object/apply:os.getcwd []", "[1,", "'open",
    '"open', "a: b: c", "- 1", "|", "? x", "@x", "`x`", "1 # c", "#", "\t", " 1 ", "---", "...", "[" * 2000, "{" * 500,
    "2024-01-01", "off", "None", "=", "==", "a=b",
)  # fmt: skip
NUMBERS = ("2", "3", "7", "8", "16", "17", "31", "32", "63", "64", "100", "128", "1000", "100000", "1000000007")
FRACTIONS = ("0.1", "0.5", "0.9999999", "1.0000001", "1e-3", "1e-9", "1e-12", "1e-30", "4096", "1e6", "1e30", "3.7")
PATHS = (
    "none", "none/none", "/proc/none/x", ".", "./", "..", "folder", "folder/", "empty", "empty.jsonl", "empty.parquet",
    "broken.parquet", "broken.jsonl", "binary.jsonl", "dangling", "loop", "loop/x", "linked.jsonl", "fifo.jsonl",
    "locked", "locked/x", "train.jsonl", "run.yaml", "model", "model/config.json", "/dev/null", "/dev/full",
    "/dev/null/x", "/proc/none", "/proc/self/mem", "~", "~nobody/x", "a/" * 300 + "x", "x" * 255, "x" * 256,
    "train.jsonl/x", "train.jsonl ", "TRAIN.jsonl", "file:///none", "https://none.invalid/x", "s3://none/x", "a\\b",
    "nobody/nothing", "Qwen/Qwen3-8B-Base", "gpt2", "a/b/c", "-", "--", "*", "[train.jsonl, train.jsonl]",
)  # fmt: skip
FUNCTIONS = (
    "arithmetic", "math_verify", "arithmetc", "os:getcwd", "os:nothing", "no_module:f", "rewards.py:good",
    "rewards.py:raises", "rewards.py:text", "rewards.py:nan", "rewards.py:none", "rewards.py:nothing", "none.py:f",
    "broken.py:f", "folder:f", "train.jsonl:f", ":f", "f:", ":", "os:", "os:a.b", "os.path:join", "builtins:print",
    "rewards.py:value", "..:f", "fifo.jsonl:f", "fifo.py:f", "a b:c", "rewards.py:huge", "rewards.py:class_",
    "json:", "json:loads",
)  # fmt: skip
PATTERNS = (
    "lm_head", "[lm_head]", "[lm_head, 're:.*']", "[lm_head, 're:(']", "[lm_head, 're:.*q_proj']", "[lm_head, '']",
    "[lm_head, 're:']", "[lm_head, 're:(?P<a>']", "[lm_head, 're:a{99999999999}']", "[re:.*mlp.*, lm_head]",
    "[lm_head, model.layers.0.mlp.gate_proj]", "[lm_head, lm_head]", "['re:.*(down|o)_proj', lm_head]", "[lm_head, 1]",
    "[lm_head, 're:.*[qkv]_proj']", "['re:.*lm_head', typo]", "[lm_head, null]",
    "[lm_head, 're:([a-z.]+)+[0-9]$']", "['re:(.|[a-z]+)*!', lm_head]", "[lm_head, 're:.*.*.*.*.*.*x']",
)  # fmt: skip
VERL = (
    "actor_rollout_ref.rollout.top_k=50", "trainer.total_step=1", "trainer=1", "trainer.val_only=true", "a=b",
    "actor_rollout_ref.rollout.n=-1", "actor_rollout_ref.actor.strategy=fsdp", "trainer.total_epochs=x",
    "algorithm.rollout_correction.rollout_is=token", "actor_rollout_ref.actor.optim.lr=.nan", "data.seed=[1]",
    "trainer.default_local_dir=x", "trainer.save_freq=0", "actor_rollout_ref.rollout.name=none", "x.y.z=1",
    "trainer.max_actor_ckpt_to_keep=1", "actor_rollout_ref.rollout.temperature=hot", "trainer.device=tpu",
    "ray_kwargs.ray_init.num_cpus=-5", "actor_rollout_ref.model.path='${oc.env:NO_SUCH_VARIABLE}'",
    "actor_rollout_ref.actor.fsdp_config.param_offload=maybe", "trainer.logger='${trainer.nothing}'",
)  # fmt: skip


DOCTOR = (
    "doctor.device=h100", "doctor.device=H20", "doctor.device=tpu", "doctor.device=", "doctor.device=cuda",
    "doctor.gpu_memory_gib=80", "doctor.gpu_memory_gib=1e308", "doctor.gpu_memory_gib=nan", "doctor.gpu_memory_gib=-1",
    "doctor.gpu_memory_gib=1e-300", "doctor.gpu_capability=9.0", "doctor.gpu_capability=1e308", "doctor.none=1",
    "doctor.gpu_capability=1e-5", "doctor.json=found.json", "doctor.json=a\0b", "doctor.json=folder", "doctor.json",
    "doctor.json=loop", "doctor.json=/proc/none/x", "doctor.json=none/none/x.json", "doctor.json=" + "x" * 300,
)  # fmt: skip
"""Options of the doctor alone."""


@dataclass(frozen=True)
class Case:
    """`arguments` of the command line besides config=run.yaml; `text` of that file."""

    number: int
    arguments: tuple[str, ...]
    text: str | bytes = BASE

    def __str__(self) -> str:
        shown = [
            argument if len(argument) < 90 else f"{argument[:80]}... ({len(argument)})" for argument in self.arguments
        ]
        return f"{self.number}: {shown}" + ("" if self.text == BASE else f" file {self.text[-120:]!r}")


def leaf_types(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and annotation of every key that holds a value."""
    for name, info in section.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from leaf_types(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind


def plain_types(annotation: Any) -> set[Any]:
    """The types and literals that an annotation is made of."""
    if typing.get_origin(annotation) is typing.Literal:
        return set(typing.get_args(annotation))
    parts = typing.get_args(annotation)
    return set().union(*map(plain_types, parts)) if parts else {annotation}


def values_for(key: str, annotation: Any) -> tuple[str, ...]:
    """Values to try for a key of this type, besides `ANYTHING`."""
    kinds = plain_types(annotation)
    found: tuple[str, ...] = ()
    if key.endswith(("path", "files", "_dir")):
        found = PATHS
    elif key == "reward.function":
        found = FUNCTIONS
    elif key == "quant.ignore":
        found = PATTERNS
    elif float in kinds or int in kinds:
        found = NUMBERS + (FRACTIONS if float in kinds else FRACTIONS[:2])
        if typing.get_origin(annotation) is tuple:
            pairs = [f"[{a}, {b}]" for a in FRACTIONS[:8] for b in FRACTIONS[:8:3]]
            found = (*pairs, "[0.9]", "[0.9, 0.9, 0.9]")
    elif bool in kinds:
        found = ("true", "false", "True", "TRUE", "on", "1", "0", '"true"', "[true]")
    words = [kind for kind in kinds if isinstance(kind, str)]
    wrong = (
        [word.upper() for word in words]
        + [word[:-1] for word in words]
        + [f"[{', '.join(sorted(words))}]"] * bool(words)
    )
    return found + tuple(sorted([*words, *wrong]))


def draw_argument(random_: random.Random, keys: Mapping[str, Any], key: str | None = None) -> str:
    """One override."""
    key = key or random_.choice(sorted(keys))
    if key == "verl":
        return f"verl.{random_.choice(VERL)}"
    own = values_for(key, keys[key])
    value = random_.choice(own if own and random_.random() < 0.75 else ANYTHING)
    if random_.random() < 0.15 and {int, float} & plain_types(keys[key]):
        value = repr(random_.choice([1, -1]) * 10.0 ** random_.uniform(-40, 40))
    elif random_.random() < 0.1 and int in plain_types(keys[key]):
        value = str(random_.randrange(2 ** random_.randrange(1, 70)))
    return f"{key}={value}"


def draw_odd_argument(random_: random.Random, keys: Mapping[str, Any]) -> str:
    """An override whose key is wrong, or that is not an override."""
    key = random_.choice(sorted(keys))
    section = key.partition(".")[0]
    place = random_.randrange(len(key))
    return random_.choice([
        f"{key}x=1", f"{key}.sub=1", f"{section}=1", f"{section}=null", f"{section}=[]", f"x{key}=1", key, f"={key}",
        f"--{key}=1", f"{key}==1", f"{key[:place]}{key[place + 1:]}=1", f".{key}=1", f"{key}.=1", f"{key.upper()}=1",
        f"{key} =1", "config=other.yaml", "config=", "config=folder", "config=/dev/null", "config=binary.jsonl",
        "config=fifo.jsonl", "",
        "☃=1", "a\0b=1", f"{key}\n=1", "doctor.json", "__class__=1", "model_config=1", "run_dir=x", f"{section}.__=1",
    ])  # fmt: skip


def draw_text(random_: random.Random, keys: Mapping[str, Any]) -> str | bytes:
    """The config file with its syntax mutated."""
    lines = BASE.splitlines(keepends=True)
    key = random_.choice(sorted(keys))
    top, _, leaf = key.rpartition(".")
    value = random_.choice(values_for(key, keys[key]) or ANYTHING)
    entry = f"{top}: {{{leaf}: {value}}}\n" if top else f"{leaf}: {value}\n"
    place = random_.randrange(len(BASE))
    raw = BASE.encode()
    texts: list[str | bytes] = [
        BASE + entry, entry, BASE.replace("\n", "\r\n"), BASE.replace("  ", "\t"), "\ufeff" + BASE, raw + b"\xff\xfe",
        BASE.encode("utf-16"), BASE.encode("latin-1") + b"# \xe9\n", BASE[:place], BASE[place:], "", "# nothing\n",
        raw[:place] + bytes([random_.randrange(256)]) + raw[place + 1 :], BASE + "---\nname: b\n",
        "%YAML 1.1\n---\n" + BASE, "%TAG ! x\n---\n" + BASE, BASE + random_.choice(lines),
        "".join(random_.sample(lines, len(lines))),
        BASE + "optim: &a {lr: 1e-5}\nverl: *a\n", BASE + "optim:\n  <<: {lr: 1}\n", BASE + "seed: !!int 3\n",
        BASE + "verl: {a: [&x 1, *x]}\n", BASE + "? [a, b]\n: 1\n", BASE + "1: 2\n", BASE + "null: 2\n", "- a\n- b\n",
        "text\n", "[" * 3000, "a: " * 200, BASE + "verl:\n" + "".join("  " * i + f"a{i}:\n" for i in range(1, 400)),
        BASE + "seed: |\n  1\n", BASE + "seed: 1 seed: 2\n", BASE + '"see\\x64": 3\n', BASE + "seed : 3\n", "\0" + BASE,
        BASE + "a" * 100_000 + ": 1\n", BASE + "optim: {lr: 1e-5, lr: 1e-6}\n", BASE + "optim:\n", BASE + "optim: []\n",
    ]  # fmt: skip
    return random_.choice(texts)


def draw_case(seed: int, number: int) -> Case:
    """Case `number` of `seed`: one to three mutations."""
    random_ = random.Random(f"{seed}-{number}")
    keys = dict(leaf_types())
    kind = random_.random()
    if kind < 0.12:
        return Case(number, (), draw_text(random_, keys))
    if kind < 0.20:
        more = [draw_argument(random_, keys)] * (random_.random() < 0.3)
        return Case(number, (draw_odd_argument(random_, keys), *more))
    ordered = sorted(keys)
    # The first mutation visits every key in turn, so that none is left to chance.
    arguments = [draw_argument(random_, keys, ordered[number % len(ordered)])]
    arguments += [draw_argument(random_, keys) for _ in range(random_.choice([0, 0, 0, 0, 1, 2]))]
    if random_.random() < 0.08 or arguments[0].startswith("verl."):
        arguments.append("backend=verl")
    if random_.random() < 0.04:
        arguments = [*arguments[random_.randrange(2) :], *random_.sample(DOCTOR, random_.choice([1, 1, 2]))]
    return Case(number, tuple(arguments))


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


LIMITS: dict[str, tuple[float, float]] = {
    "lr": (1e-12, 1), "muon_lr": (0, 1e9), "eps": (0, 1), "weight_decay": (0, 100), "ppo_epochs": (1, 1000),
    "n": (2, 10_000), "temperature": (0.01, 10), "val_temperature": (0, 10), "grad_clip": (1e-8, 1e12),
    "seq_tis_imp_ratio_cap": (1, 10_000), "total_training_steps": (1, 1e8), "num_threads": (1, 4096),
    "group_size": (8, 2**31), "cpu_kvcache_space_gib": (1e-4, 1e5), "gpu_memory_utilization": (1e-3, 1),
    "max_prompt_length": (1, 1e7), "max_response_length": (1, 1e7), "nnodes": (1, 1e5), "n_gpus_per_node": (1, 1e4),
    "tensor_model_parallel_size": (1, 1e3), "top_p": (0.01, 1), "lr_warmup_steps": (0, 1e7), "seed": (0, 2**32 - 1),
}  # fmt: skip
"""Numbers that nobody wants, by common sense and much wider than the program's own table; else up to 1e9."""
NEVER_TOO_MANY = {"val_max_prompts", "max_ckpt_to_keep", "test_freq", "save_freq", "seed"}


def sane(config: Mapping[str, Any]) -> list[str]:
    """Nonsense in a config that was accepted without a word."""
    found = []
    unused = ["optim.muon_lr", "optim.muon_momentum"] if config["optim"]["name"] != "muon" else []
    for path, value in flat({key: value for key, value in config.items() if key != "verl"}):
        if path in unused:
            continue
        leaf = path.rpartition(".")[2]
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, str) and ("\0" in one or not one.isprintable() or len(one) > 4096):
                found.append(f"{path} is {one[:40]!r}")
            elif isinstance(one, bool) or not isinstance(one, int | float) or leaf in NEVER_TOO_MANY - {"seed"}:
                continue
            elif not LIMITS.get(leaf, (-1, 1e9))[0] <= one <= LIMITS.get(leaf, (-1, 1e9))[1]:
                found.append(f"{path}={one}")
    return found
