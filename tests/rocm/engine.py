"""`tests/engine/work.py` on vLLM's ROCm backend: the same job, on the imitated platform."""

import dataclasses
from pathlib import Path

from tests import aiter_double
from tests.engine import work
from tests.rocm import imitation
from tests.rocm.watch import Watch

MODEL = "deepseek-v3-shaped"


def serve(job, progress):
    """Serve, and count the calls of AITER's ops.

    Further options: architecture; heads and vocab_size (of the model, which has two layers and
    weights of unit gain). What `watch` saw of the plans of attention=aiter is added; what it
    refuses ends the job.
    """
    with aiter_double.installed(job.options["architecture"]) as double:
        # Before anything of vLLM's layers is imported.
        imitation.imitate(job.options["architecture"])
        from mla_fusion.cli.demo import tiny_models

        heads = job.options["heads"]
        sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": 2}
        sizes |= {name: job.options[name] for name in ("vocab_size",) if name in job.options}
        model = tiny_models.write(MODEL, Path(job.workdir, "model"), **sizes)
        engine = {**job.engine, "model": str(model)}
        with Watch(double) as watch:
            served = work.serve(dataclasses.replace(job, engine=engine), progress)
        found = {"calls": double.counts(), "watched": watch.found()}
        return served["engines"][0] | found
