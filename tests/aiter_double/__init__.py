"""A double of AMD's `aiter` module for CPU tensors, written from its contract in words.

It replaces the ops that this library and vLLM's ROCM_AITER_MLA backend call, computes what they are
documented to compute, and refuses the calls that the real ones refuse or silently misread. It is no
port: nothing here was read from, or run beside, AITER's kernels. docs/aiter.md is the contract.

    with aiter_double.installed("gfx942", "v0.1.20") as double:
        ...                       # `import aiter` gives the double
        double.calls("fused_qk_rope_concat_and_cache_mla")

    versions.py   the architectures and releases, and the arguments of each op
    faults.py     how AITER fails: it aborts, or is silently wrong
    numbers.py    roundings: fp8 by architecture, truncation, fp4 and grouped fp8
    qk_rope.py    fused_qk_rope_concat_and_cache_mla
    metadata.py   get_mla_metadata_info_v1 and get_mla_metadata_v1, with a plan of contiguous cuts
    heads.py      which kernels exist for a head count, query length and type
    decode.py     mla_decode_fwd and the small-head Gluon decode
    products.py   the batched products of Triton for fp4 and fp8 weights
    module.py     the module tree with the schemas of compiled ops, and putting it into sys.modules
    *_rules.py    uses of the library that would break a rule
"""

from tests.aiter_double.faults import Aborted, Fault, SilentlyWrong
from tests.aiter_double.module import Double, installed
from tests.aiter_double.versions import ARCHITECTURES, RELEASES

__all__ = ["ARCHITECTURES", "RELEASES", "Aborted", "Double", "Fault", "SilentlyWrong", "installed"]
