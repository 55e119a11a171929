"""Small model configurations for tests, as config.json would hold them.

configs.json has one entry for each family of MLA models in vLLM; `_common` holds what all
share, and `_llama` is a model without MLA.
"""

import json
from pathlib import Path

from mla_fusion.cli import child
from mla_fusion.cli.demo import tiny_models

_TABLE = json.loads(Path(__file__).with_name("configs.json").read_text())
NAMES = tuple(name for name in _TABLE if not name.startswith("_"))


def config_of(name, **changes):
    """The config.json of one of `NAMES`, with `changes`."""
    return {**_TABLE["_common"], **_TABLE[name], **changes}


def write(folder, config):
    """Write config.json into `folder`, which is made, and return the folder as vLLM takes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return str(folder)


def register_configs():
    """Let transformers read the types whose configuration class would be remote code."""
    for name in NAMES:
        child.register_type(config_of(name)["model_type"])


DEEPSEEK_V2 = {**tiny_models.MODELS["deepseek-v2-shaped"], "num_hidden_layers": 2}
LLAMA = _TABLE["_llama"]
