"""What the tests of this folder set, and how they read what became of it."""

from mla_fusion import config
from mla_fusion.config import eligibility

FLAG_ON = {config.FLAG: True}
# Fields of the compilation config that the flag sets.
CHARGED = ("mode", "compile_ranges_endpoints", "splitting_ops")
REFERENCE = {"mla_fusion": {"provider": "reference"}}


def warnings(log):
    """This library's."""
    records = [r for r in log.records if (r.name, r.levelname) == ("vllm.mla_fusion", "WARNING")]
    return [r.getMessage() for r in records]


def decided(made):
    """The code that the config is declined for, or an empty string."""
    decline = eligibility.why_not(made)
    return decline.code if decline else ""


def drafted(tokens):
    return {"method": "ngram", "num_speculative_tokens": tokens} if tokens else None
