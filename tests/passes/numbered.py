"""The passes one by one, by their number, and graphs between them."""

from mla_fusion.passes.canonicalize import CanonicalizeMLARoPEPass
from mla_fusion.passes.fix_functionalization import MLAFixFunctionalizationPass
from mla_fusion.passes.fuse import MLAAiterQkRopeKVCacheFusionPass
from mla_fusion.passes.lift import MLADecodeQPrepLiftPass
from mla_fusion.passes.output import MLADecodeOutputFusionPass
from tests.passes import graphs
from tests.passes.fake_engine import Engine


def passes(spec, quantized_query=False):
    """Passes 2 to 6, by their number, for the layers of a graph."""
    facts_of = Engine(spec, quantized_query).facts_of()
    return {
        2: CanonicalizeMLARoPEPass(facts_of),
        3: MLADecodeQPrepLiftPass(facts_of),
        4: MLAAiterQkRopeKVCacheFusionPass("reference"),
        5: MLAFixFunctionalizationPass(),
        6: MLADecodeOutputFusionPass(facts_of),
    }


def after_pass(last, spec):
    """A graph after passes 2 to `last`, before anything is dropped."""
    module = graphs.build(spec)
    for number in range(2, last + 1):
        passes(spec)[number](module.graph)
    return module
