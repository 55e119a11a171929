"""Products of up to 16 tokens with weights.

It knows torch and Triton, and no vLLM. `plan_for` says whether a product was measured faster here
than `torch.mm`, and `triton.launch` computes it."""

from mla_fusion.projections.measured import plan_for as plan_for
from mla_fusion.projections.plans import GROUP as GROUP
from mla_fusion.projections.plans import MAX_TOKENS as MAX_TOKENS
