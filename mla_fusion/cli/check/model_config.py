"""Read a model's config.json, or Mistral's params.json, and refuse values that no model has."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_fusion.cli import UserError, require, short
from mla_fusion.report.files import read_bounded


@dataclass(frozen=True)
class Model:
    """The language model's part of the config at `path`, in the words of config.json.

    `architecture` is the class that vLLM runs for it, and `name` the class that the config names,
    with the former in brackets if it is another. `kinds` are the model types of the whole and of
    the part; vLLM may know the whole's alone.
    """

    path: Path
    config: dict[str, Any]
    architecture: str
    name: str
    kinds: tuple[str, ...]


def read(model: Path) -> Model:
    """Read a config; `model` is the file or its folder.

    Raises:
        UserError: there is no such file, it is none of a model, or a value is one of no model.
    """
    require("pydantic", purpose="reading a config")
    path = model
    if model.is_dir():
        path = next((p for p in (model / "config.json", model / "params.json") if p.exists()), path)
    content = _load(path)
    if "model_type" not in content and {"dim", "n_layers"} <= set(content):
        content = _translate(content, path)
    # Imported here: it needs pydantic, and other commands do not.
    from mla_fusion.cli.check import schema

    schema.check(content, path)
    part = content
    if "kv_lora_rank" not in content and content.get("text_config"):
        # A multimodal model: its language part. The code of both is named once.
        shared = {"auto_map": content["auto_map"]} if "auto_map" in content else {}
        part = {**shared, **content["text_config"]}
        schema.check(part, path)
    kind = part.get("model_type")
    if not isinstance(kind, str) or not kind:
        says = "has no" if kind is None else f"has {short(json.dumps(kind))} as"
        raise UserError(f'{path} {says} "model_type", which names the kind of a model')
    whole, *_ = content.get("architectures") or [""]
    architecture, *_ = part.get("architectures") or [whole or kind]
    whole = short(whole, 40)
    name = architecture if whole in ("", architecture) else f"{whole} ({architecture})"
    kinds = tuple({kind, str(content.get("model_type", kind))})
    return Model(path, part, architecture, name, kinds)


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_bounded(path))
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(
            f"no config.json or params.json at {path}: give the folder of a downloaded Hugging "
            "Face model (its config.json is enough)"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} describes no model: it holds no JSON object")
    return content


def _translate(params: dict[str, Any], path: Path) -> dict[str, Any]:
    """The content of a config.json that says what `params`, Mistral's params.json, says."""
    require("vllm", purpose="a params.json")
    from vllm.transformers_utils.configs.mistral import adapt_config_dict

    try:
        read = adapt_config_dict(params, defaults={})
    except Exception as error:  # noqa: BLE001  (it asserts, indexes and converts)
        why = short(f"{type(error).__name__}: {error}")
        raise UserError(f"vLLM's reader of params.json refuses {path}: {why}") from None
    language = getattr(read, "text_config", read)
    # `to_dict` takes the type from the class, which has none.
    return {**language.to_dict(), "model_type": language.model_type}
