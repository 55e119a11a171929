"""What vLLM would run on sm_100 and sm_103, as a candidate of `decode_peers`."""

from collections.abc import Callable
from typing import Any

import torch

WORKSPACE = 128 * 2**20  # bytes, as in vLLM


def flashinfer_mla(inputs: Any) -> tuple[Callable[[int], object], torch.Tensor]:
    """FlashInfer's decode, as vLLM's FLASHINFER_MLA calls it; `inputs` are a decode's `Inputs`.

    From 0.32 on vLLM keeps the counters that the kernel would clear at every call.
    """
    if torch.cuda.get_device_capability()[0] != 10:
        raise RuntimeError("vLLM runs it on sm_100 and sm_103 alone")
    from flashinfer import utils
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache_mla

    case, device = inputs.case, inputs.q.device
    scale = float(inputs.scale) if case.dtype.itemsize == 1 else 1.0
    out = inputs.result(inputs.latents())
    shared: dict[str, Any] = {"query": inputs.q.unflatten(0, (case.batch, case.queries))}
    shared |= {"block_tables": inputs.table, "seq_lens": inputs.lens}
    shared |= {"max_seq_len": max(case.lengths()), "qk_nope_head_dim": 128}
    shared |= {"kv_lora_rank": case.latent, "qk_rope_head_dim": case.rope}
    shared |= {"bmm1_scale": case.scale * scale * scale, "bmm2_scale": scale}
    shared["workspace_buffer"] = torch.zeros(WORKSPACE, dtype=torch.int8, device=device)
    if size := getattr(utils, "get_trtllm_gen_multi_ctas_kv_counter_bytes", None):
        count = size(case.batch, case.heads, utils.get_device_sm_count(device))
        counters = torch.zeros(count, dtype=torch.uint8, device=device)
        shared["multi_ctas_kv_counter_buffer"] = counters

    def call(i: int) -> None:
        result = trtllm_batch_decode_with_kv_cache_mla(
            kv_cache=inputs.caches[i].unsqueeze(1), **shared
        )
        inputs.follow(i, result.flatten(0, 1), out)

    return call, out
