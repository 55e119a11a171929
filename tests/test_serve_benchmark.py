"""benchmarks/serve.py without its servers: their command line."""

import engine_model
import pytest
import serve
from engine_jobs import job

from mla_fusion import plugin

plugin.register()

from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402


@pytest.mark.parametrize("arm", ["default", "portable"])
def test_vllm_reads_the_flags_as_the_arguments_they_were(tmp_path, arm):
    arguments = engine_model.arguments(job(model="deepseek-v2-lite", arm=arm), tmp_path)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    read = AsyncEngineArgs.from_cli_args(parser.parse_args(serve.flags(arguments)))
    compilation = read.compilation_config
    flag = getattr(compilation.pass_config, "fuse_aiter_qk_rope_kvcache_mla", False)
    assert flag == (arm == "portable")
    assert compilation.cudagraph_capture_sizes == job()["capture"]
    assert read.kernel_config.enable_flashinfer_autotune is False
    for name in arguments.keys() - {"compilation_config", "kernel_config"}:
        assert getattr(read, name) == arguments[name], name
