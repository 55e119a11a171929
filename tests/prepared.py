"""Layers of a test with the state that a worker gives them when its model is loaded."""

from mla_fusion.plugin import workers
from mla_fusion.runtime.engine import Engine


def attach(layers, options, dtype, sequences=4, drafts=0, **facts):
    """Give `layers` their states, as in an engine for so many sequences; the engine."""
    rows = 1 + drafts
    engine = Engine(options, sequences * rows, rows, sequences, dtype, layers, **facts)
    workers.attach(engine)
    return engine
