"""A double of AMD's `aiter` module for CPU tensors, written from its contract in words.

It replaces the ops that this library and vLLM's ROCM_AITER_MLA backend call, computes what they are
documented to compute, and refuses the calls that the real ones refuse or silently misread. It is no
port: nothing here was read from, or run beside, AITER's kernels. docs/aiter.md is the contract.

    with aiter_double.installed("gfx942", "v0.1.20") as double:
        ...                       # `import aiter` gives the double
        double.calls("fused_qk_rope_concat_and_cache_mla")
"""

from tests.aiter_double.faults import Aborted, Fault, SilentlyWrong
from tests.aiter_double.module import Double, installed
from tests.aiter_double.versions import ARCHITECTURES, RELEASES

__all__ = ["ARCHITECTURES", "RELEASES", "Aborted", "Double", "Fault", "SilentlyWrong", "installed"]
