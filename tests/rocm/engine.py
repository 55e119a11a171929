"""`tests/engine/harness.py` on vLLM's ROCm backend: the same job, on the imitated platform.

    python -m tests.rocm.engine '{"architecture": "gfx942", "heads": 12, "flag": true, ...}'

Further keys: architecture; heads (of the model, which has two layers and weights
of unit gain). The line CALLS counts the calls of AITER's ops.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests import aiter_double
from tests.engine import harness
from tests.rocm import imitation


def main(job: dict[str, Any]) -> None:
    """Run the engine; prints what the harness prints, then the line CALLS."""
    os.environ["VLLM_PLUGINS"] = ""  # nothing of vLLM may be imported before the platform is made
    architecture = job.pop("architecture")
    with (
        aiter_double.installed(architecture) as double,
        tempfile.TemporaryDirectory() as folder,
    ):
        imitation.imitate(architecture)
        from mla_fusion.cli import tiny_models

        model = tiny_models.MODELS["deepseek-v3-shaped"]
        model["num_attention_heads"] = model["num_key_value_heads"] = job.pop("heads")
        model["num_hidden_layers"] = 2
        tiny_models.write("deepseek-v3-shaped", Path(folder))
        harness.main({**job, "model": folder, "load_format": "auto"})
        print("CALLS " + json.dumps(double.counts()))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
