"""A VllmConfig of a sparse model."""

import logging

import pytest
import torch

from tests.models import DEEPSEEK_V2, write
from tests.sparse.layers import TOPK, kept_environment


@pytest.fixture(scope="package")
def config(tmp_path_factory):
    """A VllmConfig of a sparse model, in a process group of one."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker import workspace

    folder = tmp_path_factory.mktemp("sparse")
    changes = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
               "index_topk": TOPK, "q_lora_rank": 96, "first_k_dense_replace": 2}  # fmt: skip
    model = write(folder / "model", {**DEEPSEEK_V2, **changes})
    arguments = EngineArgs(
        model=model, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=16
    )
    with kept_environment():
        made = arguments.create_engine_config()
    with set_current_vllm_config(made):
        meeting = f"file://{folder}/processes"
        parallel_state.init_distributed_environment(1, 0, meeting, 0, backend="gloo")
        parallel_state.initialize_model_parallel(1, 1)
    workspace.init_workspace_manager(torch.device("cpu"))
    yield made
    workspace.reset_workspace_manager()
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.fixture
def said(vllm_loggers, caplog):
    """`caplog` of this library's messages."""
    caplog.set_level(logging.INFO, logger="vllm.mla_fusion")
    return caplog
