"""Loads config and tokenizer of a model from a folder or the Hub, and checks a folder's weights by their headers.

Every fault becomes a UserError. Except for tied embeddings, `Policy.load` raises the same errors for faults that it
finds while it loads weights.

Without a network, huggingface_hub tries a request six times, with pauses of 1, 2, 4, 8 and 8 seconds, before it uses
its cache (`http_backoff` in version 1.33). It does this for every name. Here one request decides for the whole process.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qarl.config import Config
from qarl.config.demos import DEMO_HINT, from_here
from qarl.data.git_lfs import refuse_pointers
from qarl.data.rows import check_data_file
from qarl.errors import UserError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

SECONDS = 3.0
"""Time limit for the Hub's answer in seconds. A name lookup has the limit of the machine's resolver instead."""
CARRIED = Path(__file__).resolve().parents[1] / "bench" / "models"
"""Folder with the config of some public models, NAME/config.json. The benchmarks read layer shapes from these files."""
_SAME_SIZES = {
    "Qwen/Qwen3-8B-Base": ("Qwen3-8B", {"max_position_embeddings": 32768, "eos_token_id": 151643}),
    "Qwen/Qwen3-30B-A3B-Base": (
        "Qwen3-30B-A3B",
        {"max_position_embeddings": 32768, "eos_token_id": 151643},
    ),
}
"""Models without a folder in `CARRIED`: name -> (folder of a similar model, the config keys that differ)."""
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


_READ = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
"""Files of a model folder that are read. Others, such as weights in another format, may be pointers of git-lfs."""


@functools.cache
def why_unreachable() -> str | None:
    """Return why this machine cannot reach the Hub, or None if the Hub answers. The request is made once per process.

    If HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, no request is made. Proxies and HF_ENDPOINT are respected.
    """
    from huggingface_hub import constants, get_session

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception as error:  # the HTTP library, its proxies and TLS raise different types
        return f"{constants.ENDPOINT}: {type(error).__name__}: {error}"
    return None


def loading_options(path: str) -> dict[str, Any]:
    """Return keyword arguments for `from_pretrained(path)`. If the Hub cannot be reached, they allow only the cache."""
    return {} if Path(path).is_dir() or not why_unreachable() else {"local_files_only": True}


def carried_config(path: str) -> tuple[str, dict[str, Any]] | None:
    """Return this package's copy of the config of the Hub model `path` as (name, mapping), or None without a copy."""
    owner, _, name = path.partition("/")
    carried, changes = _SAME_SIZES.get(path, (name, {}))
    file = CARRIED / carried / "config.json"
    if owner not in ("Qwen", "HuggingFaceTB") or not file.is_file():
        return None
    return carried, json.loads(file.read_text(encoding="utf-8")) | changes


def load_tokenizer(
    path: str, trust_remote_code: bool = False, *, hf_config: Any = None
) -> tuple[Any, Any]:
    """Return the tokenizer and the Hugging Face config of a model folder or Hub name. `hf_config`: the config, if it
    has been loaded. Code in the folder runs only if `trust_remote_code` is true."""
    from transformers import AutoTokenizer

    check_model_folder(path)
    check_tokenizer_files(path)
    hf_config = hf_config or load_hf_config(path, trust_remote_code)
    options = loading_options(path)
    try:
        return AutoTokenizer.from_pretrained(
            path, trust_remote_code=trust_remote_code, **options
        ), hf_config
    except (
        Exception
    ) as error:  # the type that transformers raises depends on the file and its fault
        raise _unreadable(path, error) from error


def load_hf_config(path: str, trust_remote_code: bool = False) -> Any:
    """Return the Hugging Face config of a model folder or Hub name. This reads neither tokenizer nor weights."""
    from transformers import AutoConfig

    check_model_folder(path)
    try:
        return AutoConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code, **loading_options(path)
        )
    except Exception as error:
        raise _unreadable(path, error) from error


def hf_config_or_carried(
    path: str, trust_remote_code: bool = False
) -> tuple[Any, UserError | None]:
    """Return the model's config and None. If the Hub cannot be reached, return QaRL's copy of the config and the error.

    The copy is enough for sizes and checks, but not for training.
    """
    from transformers import AutoConfig

    try:
        return load_hf_config(path, trust_remote_code), None
    except UserError as error:
        carried = None if Path(path).is_dir() or not why_unreachable() else carried_config(path)
        if carried is None:
            raise
        return AutoConfig.for_model(**carried[1]), error


def check_files(config: Config) -> None:
    """Raise UserError if the model's folder or a data file of `config` is missing, or a pointer of git-lfs.

    This is fast: no large file is read."""
    check_model_folder(config.model.path)
    for file in (*config.data.train_files, *config.data.val_files):
        check_data_file(file)


def check_model_folder(path: str) -> None:
    """Raise UserError if `path` names a folder that is missing, or whose files are pointers of git-lfs."""
    looks_local = path.startswith((".", "/", "models/")) or (
        Path(path).parent.is_dir() and path.count("/") != 1
    )
    if not Path(path).is_dir() and looks_local:
        fix = f"give a Hugging Face folder{from_here(path)}; {DEMO_HINT}"
        raise UserError(f"there is no model folder {path!r}", where="model.path", fix=fix)
    files = (file for pattern in _READ for file in sorted(Path(path).glob(pattern)))
    refuse_pointers(files, where="model.path")


def has_tokenizer(path: str) -> bool:
    return any((Path(path) / name).is_file() for name in TOKENIZER_FILES)


def check_tokenizer_files(path: str) -> None:
    if Path(path).is_dir() and not has_tokenizer(path):
        # Otherwise transformers would make an empty tokenizer of the model's family.
        raise UserError(
            f"the model folder {path!r} has no tokenizer",
            where="model.path",
            why=f"it has none of {', '.join(TOKENIZER_FILES)}",
            fix="copy tokenizer.json and tokenizer_config.json of the original model into the folder",
        )


def _unreadable(path: str, error: Exception) -> UserError:
    fix = "give a folder with config.json and tokenizer.json, or a name on the Hub that this machine can reach"
    if "trust_remote_code" in str(error):
        return UserError(
            f"the model in {path!r} contains Python code, which is not run",
            where="model.trust_remote_code=false",
            why="its config.json or tokenizer_config.json names Python files (auto_map), and transformers has no class "
            "for this model. Such code would run with all your rights",
            fix="give a model that transformers knows; or read the code, and set model.trust_remote_code=true",
        )
    if not Path(path).is_dir() and (unreachable := why_unreachable()):
        what = f"the model {path!r} is not on this machine and cannot be downloaded from the Hub"
        return UserError(what, where="model.path", why=unreachable, fix=fix)
    why = " ".join(str(error).split())[:400]
    return UserError(
        f"config or tokenizer cannot be loaded from {path!r}", where="model.path", why=why, fix=fix
    )


def cannot_load(path: str, why: str) -> UserError:
    fix = "give a Hugging Face folder with config.json and safetensors"
    return UserError(
        f"the model cannot be loaded from {path!r}", where="model.path", why=why, fix=fix
    )


def refuse_no_weights(path: str) -> None:
    """Raise UserError if `path` is a folder without weights."""
    if Path(path).is_dir() and not any(Path(path).glob("*.bin")):
        raise cannot_load(path, "it holds neither *.safetensors nor *.bin files")


def lacks_tensors(path: str, names: Sequence[str]) -> UserError:
    what = f"the checkpoint lacks {len(names)} tensors of the model"
    where = f"{path}: {', '.join(sorted(names)[:4])}"
    why = "transformers would fill them with random numbers"
    return UserError(what, where=where, why=why, fix="give a complete checkpoint")


def cannot_build(path: str, why: str) -> UserError:
    fix = "give config.json and weights of the same model; if memory ran out, train a smaller model"
    return UserError(
        f"the model in {path!r} cannot be built from its weights",
        where="model.path",
        why=why,
        fix=fix,
    )


def compared_tensors(files: Sequence[Path], model: nn.Module) -> int | None:
    """Compare the stored tensors with `model`, which config.json describes. Return the number of compared tensors.

    If more than half of the model's tensor names are missing, compare nothing and return None. Otherwise, raise
    UserError if a tensor is missing or has a different shape.
    """
    from qarl.checkpoint.model_files import header_shapes
    from qarl.quant.convert import tied_names
    from qarl.quant.experts import unstacked_shapes

    tied = tied_names(model)
    expected = unstacked_shapes(
        {name: tuple(t.shape) for name, t in model.state_dict().items() if name not in tied}
    )
    stored = header_shapes(list(files))  # this includes files that no index lists
    common = expected.keys() & stored.keys()
    if 2 * len(common) < len(expected):
        return None
    path = str(files[0].parent)
    if missing := [name for name in expected if name not in stored]:
        raise lacks_tensors(path, missing)
    if wrong := [name for name in expected if stored[name] != expected[name]]:
        name = wrong[0]
        why = f"the shapes of {len(wrong)} tensors differ from config.json: {name} is {list(stored[name])}, "
        raise cannot_build(path, f"{why}and should be {list(expected[name])}")
    return len(common)


def check_tied(weight_files: Sequence[Path], model: nn.Module) -> None:
    """Raise UserError if the model ties the embeddings, but the files have an output embedding with other values.

    transformers would then train two tensors, and vLLM would use one."""
    import torch
    from safetensors import safe_open

    from qarl.checkpoint.model_files import header_shapes
    from qarl.quant.convert import tied_names

    embedding = cast("PreTrainedModel", model).get_input_embeddings().weight
    inputs = [name for name, parameter in model.named_parameters() if parameter is embedding]
    names = {*inputs, *tied_names(model)} & header_shapes(list(weight_files)).keys()
    if len(names) < 2:
        return
    stored: dict[str, torch.Tensor] = {}
    for file in weight_files:
        with safe_open(file, framework="pt") as tensors:
            stored |= {
                name: tensors.get_tensor(name).bfloat16() for name in names & set(tensors.keys())
            }
    first, *others = sorted(stored, key=lambda name: name not in inputs)
    for name in others:
        if not torch.equal(stored[first], stored[name]):
            raise UserError(
                f"config.json ties {name} to {first}, but the weight files have different tensors for them",
                where=f"model.path: {weight_files[0].parent}",
                why="transformers would train both, and vLLM would use one of them",
                fix=f'remove {name} from the files, or set "tie_word_embeddings": false if the family can be untied',
            )


def weight_files(path: str) -> list[Path]:
    """Return the safetensors files of a local model that transformers reads. Raise UserError if one is missing or
    cannot be opened."""
    from safetensors import SafetensorError, safe_open

    files = _read_by_transformers(Path(path))
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            why = str(error).splitlines()[0]
            fix = "download or write the file again; it may be cut short"
            raise UserError(
                f"cannot read the weights in {file}", where="model.path", why=why, fix=fix
            ) from error
    return files


def _read_by_transformers(folder: Path) -> list[Path]:
    """Return the safetensors files of a model's folder that transformers reads: a whole model.safetensors, whatever an
    index beside it says, or else those of the index (modeling_utils.py, `_get_resolved_checkpoint_files`, 5.10).
    Without either, return all: other names are told by the one who loads them."""
    whole = folder / WHOLE
    if whole.is_file():
        return [whole]
    names = {file.name for file in folder.glob("*.safetensors")}
    if (folder / INDEX).is_file():
        names = _listed(folder, names)
    return [folder / name for name in sorted(names)]


def _listed(folder: Path, names: Collection[str]) -> set[str]:
    """Return the files that the folder's index lists. Raise UserError if one is not among `names`, or the index cannot
    be read."""
    path = str(folder)
    try:
        text = (folder / INDEX).read_text(encoding="utf-8")
        listed = set(json.loads(text)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise cannot_load(path, f"{INDEX} is damaged ({type(error).__name__}: {error})") from error
    if missing := sorted(listed - set(names)):
        raise UserError(
            f"{len(missing)} of {len(listed)} weight files are missing",
            where=f"model.path: {path}",
            why=f"{INDEX} lists {', '.join(missing[:4])}",
            fix="download or copy the missing files",
        )
    return listed
