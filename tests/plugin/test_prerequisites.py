"""What the flag switches on in vLLM's configuration, also in that of a draft model."""

import copy
import logging
from unittest.mock import MagicMock

import pytest
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.config import PassConfig, set_current_vllm_config
from vllm.config.utils import Range, replace

from mla_fusion import config, ops
from mla_fusion.config import vllm_compat
from mla_fusion.plugin import compilation, decision, decode_graph
from tests.plugin.configs import CHARGED, FLAG_ON, REFERENCE, drafted, warnings


class TestWhatItSwitchesOn:
    def test_vllms_graph_stays_as_it_is_beside_one_for_decode_steps(
        self, make, caplog, monkeypatch
    ):
        # A logger of its own: vLLM sets the levels of those below it anew while it starts.
        caplog.set_level(logging.DEBUG, logger="apart")
        monkeypatch.setattr(decision, "logger", logging.getLogger("apart"))
        made, alone = make(FLAG_ON), make(options={})
        for name in ("compile_ranges_endpoints", "use_inductor_graph_partition"):
            asked = [getattr(each.compilation_config, name) for each in (made, alone)]
            assert asked[0] == asked[1]
        assert not {*ops.RUNTIME_OPS} & {*made.compilation_config.splitting_ops}
        said = [(r.levelno, r.getMessage()) for r in caplog.records if r.name == "apart"]
        for word in ("VLLM_COMPILE", "up to 4 tokens"):
            assert [word in line for _, line in said].count(True) == 1, (word, said)
        assert {level for level, _ in said} == {logging.DEBUG}
        decode = decode_graph.config_of(made).compilation_config
        assert decode.use_inductor_graph_partition and decode.compile_ranges_endpoints == [4]
        assert decode.splitting_ops == [*made.compilation_config.splitting_ops, *ops.RUNTIME_OPS]

    @pytest.mark.parametrize(
        "asked", [{"use_inductor_graph_partition": True}, {"splitting_ops": []}]
    )
    def test_the_passes_run_in_one_graph_that_an_operator_asked_for(self, make, asked):
        made = make(FLAG_ON, asked)
        assert not decode_graph.applies(made)
        assert made.compilation_config.compile_ranges_endpoints == [4, 2048]
        ours = {*ops.RUNTIME_OPS} <= {*made.compilation_config.splitting_ops}
        assert ours is ("splitting_ops" not in asked)

    @pytest.mark.parametrize(
        ("gpu", "flag", "last", "given", "became"),
        [
            (True, FLAG_ON, 4, {}, {config.REALIZE: 1}),
            (True, FLAG_ON, 4, {config.REALIZE: 4}, {config.REALIZE: 4}),
            (True, FLAG_ON, 5, {}, {}),
            (True, None, 4, {}, {}),
            (False, FLAG_ON, 4, {}, {}),  # log-probabilities are vLLM's to the bit there
        ],
    )
    def test_sums_of_the_residual_stream_are_stored_in_the_bucket_on_gpus(
        self, make, monkeypatch, gpu, flag, last, given, became
    ):
        made = make(flag, {"inductor_compile_config": given})
        options = made.compilation_config.inductor_compile_config
        before = dict(options)
        monkeypatch.setattr(vllm_compat, "is_gpu", lambda: gpu)
        decode = decode_graph.config_of(made).compilation_config
        for_range = compilation.for_range(options, decode, Range(1, last))
        assert for_range == {**before, **became} and options == before
        alone = compilation.for_range(options, made.compilation_config, Range(1, last))
        assert alone == before

    @pytest.mark.parametrize(
        "seqs, drafts, override, bucket",
        [(4, 0, None, 4), (1, 0, None, 2), (4, 0, 64, 64), (4, 3, None, 16), (4, 0, 10**6, 2048)],
    )
    def test_decode_bucket(self, make, seqs, drafts, override, bucket):
        pass_config = {**FLAG_ON, config.THRESHOLD: override}
        made = make(pass_config, max_num_seqs=seqs, speculative_config=drafted(drafts))
        assert config.decode_bucket(made) == bucket
        decode = decode_graph.config_of(made).compilation_config
        assert decode.get_compile_ranges() == [Range(1, bucket)]

    @pytest.mark.parametrize(
        "seqs, drafts, sizes, bucket",
        [
            (100, 0, [96, 104, 112], 104),
            (100, 0, [96, 100, 104], 100),
            (100, 0, [64], 100),  # larger batches run without a CUDA graph
            (33, 2, [96, 104], 105),  # whole queries of three tokens
        ],
    )
    def test_the_bucket_holds_the_graph_a_full_batch_is_padded_to(
        self, make, seqs, drafts, sizes, bucket
    ):
        made = make(max_num_seqs=seqs, speculative_config=drafted(drafts))
        made.compilation_config.cudagraph_capture_sizes = sizes
        assert config.decode_bucket(made) == bucket
        decided = make(FLAG_ON)  # vLLM may change its graphs later: this one keeps its bucket
        decided.compilation_config.cudagraph_capture_sizes = sizes
        assert config.decode_bucket(decided) == 4

    @pytest.mark.parametrize(
        "hopper, given, pages", [(True, {}, 64), (True, {"block_size": 16}, 16), (False, {}, 16)]
    )
    def test_a_page_holds_a_tile_of_the_portable_decode(
        self, make, monkeypatch, hopper, given, pages
    ):
        monkeypatch.setattr(vllm_compat, "gpu_arch", lambda: "sm_90" if hopper else "sm_100")
        options = {"mla_fusion": {"provider": "reference", "attention": "portable"}}
        cache = make(FLAG_ON, options=options, **given).cache_config
        assert cache.block_size == pages
        # What vLLM asks before it lets the backend choose.
        assert cache.user_specified_block_size == (hopper or bool(given))

    @pytest.mark.parametrize(
        "passes, given, said",
        [
            (FLAG_ON | {config.THRESHOLD: 1}, {}, "=1 becomes 2"),
            (FLAG_ON | {config.THRESHOLD: 10**6}, {}, "=1000000 becomes 2048"),
            (FLAG_ON | {config.THRESHOLD: 64}, {}, ""),
            ({config.FLAG: False, config.THRESHOLD: 64}, {"options": {}}, "has no effect"),
            ({}, {}, 'additional_config["mla_fusion"] has no effect without pass_config.'),
            (FLAG_ON, {}, ""),
            ({}, {"attention_backend": "CUSTOM"}, ""),  # the sparse decode reads the options
            ({}, {"options": {"mla_fuson": {"attention": "vllm"}}}, '["mla_fuson"] is not read'),
            ({}, {"options": {"mla_fuson": "triton"}}, '["mla_fuson"] is not read'),
            ({}, {"options": {"MLA-Fusion": {"provder": "triton"}}}, '["MLA-Fusion"] is not read'),
            (FLAG_ON, {"options": {**REFERENCE, "attention": "vllm"}}, '["attention"] is not read'),
            ({}, {"options": {"max_split_per_batch": 4}}, '["max_split_per_batch"] is not read'),
            ({}, {"options": {"layers": "0-3"}}, '["layers"] is not read'),
            ({}, {"options": {"mha_fusion": {"level": 1}, "provider": "s3", "fusion": {}}}, ""),
            (FLAG_ON, {"model": "llama"}, f"mla-fusion: {config.FLAG} is switched off: "),
        ],
    )
    def test_what_is_not_taken_as_it_is_is_named_once(self, make, log, passes, given, said):
        """A draft model's config is made from the engine's."""
        made = make(passes, speculative_config=drafted(3), **given)
        replace(made, attention_config=replace(made.attention_config, backend=None))
        assert len(warnings(log)) == bool(said)
        assert said in "".join(warnings(log))

    @pytest.mark.parametrize(
        "compilation",
        [
            {"splitting_ops": []},
            {"use_inductor_graph_partition": True},
            *({"custom_ops": [op]} for op in ("all", "+quant_fp8", "+rms_norm", "+silu_and_mul")),
            *({"pass_config": {name: True}} for name in sorted(vars(PassConfig()))
              if name.startswith(("fuse_", "enable_"))),
        ],
        ids=str,
    )  # fmt: skip
    def test_vllms_own_fusions_stay_off_on_a_cpu(self, make, compilation):
        """Its defaults switch some on; its pass manager then raises NameError on a CPU."""
        passes = compilation.pop("pass_config", {})
        made = make(FLAG_ON | passes, compilation)
        assert config.is_on(made)
        with set_current_vllm_config(made):
            PostGradPassManager().configure(made)

    @pytest.mark.parametrize("given", [True, False])
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_vllms_own_fusion_is_left_as_it_is_on_gpus(self, make, log, monkeypatch, given, ranks):
        """It would change prefill too. Under decode context parallelism its kernel leaves a query
        and a key with slot -1, another rank's token, unrotated."""
        made = make(FLAG_ON, {"use_inductor_graph_partition": True})
        made.parallel_config.decode_context_parallel_size = ranks
        passes = made.compilation_config.pass_config
        passes.fuse_rope_kvcache_cat_mla = given
        monkeypatch.setattr(vllm_compat, "is_gpu", lambda: True)
        log.clear()
        decision.apply(made)
        assert config.is_on(made)
        assert passes.fuse_rope_kvcache_cat_mla is (given and ranks == 1)
        said = ["fuse_rope_kvcache_cat_mla is switched off" in line for line in log.messages]
        assert said == [True] * (given and ranks == 2)

    def test_endpoints_of_the_operator_stay(self, make):
        asked = {"compile_ranges_endpoints": [32], "use_inductor_graph_partition": True}
        made = make(FLAG_ON, asked)
        assert {4, 32} <= set(made.compilation_config.compile_ranges_endpoints)


def test_a_draft_without_mla_does_not_switch_the_flag_off(make, log):
    """vLLM makes a draft model's config by `replace`; both share one compilation config."""
    made = make(FLAG_ON, speculative_config=drafted(3))
    before = copy.deepcopy(made.compilation_config)
    replace(made, model_config=make(model="llama", options={}).model_config)
    assert config.is_on(made) and not warnings(log)
    for name in ("backend", *CHARGED):
        assert getattr(made.compilation_config, name) == getattr(before, name)


def test_a_config_of_mocks_is_not_on():
    assert not config.is_on(MagicMock())


def test_a_model_with_mla_that_is_not_in_vllms_list_of_types(make, log):
    assert config.is_on(make(FLAG_ON, model="sarvam"))
    assert not warnings(log)
