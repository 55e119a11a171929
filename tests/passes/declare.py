"""Ops that the tests need and a CPU build of vLLM lacks."""

import torch

_libraries = []


def op(namespace, schema, body=None, fake=lambda *args: None):
    """Declare an op for the rest of the process, with a body for a CPU if it is run.

    One that vLLM's GPU library declares keeps its schema. The CPU build declares some without
    arguments.
    """
    library, name = torch.library.Library(namespace, "FRAGMENT"), schema.partition("(")[0]
    known = getattr(getattr(torch.ops, namespace), name.partition(".")[0], None)
    if known is not None and known.default._schema.arguments:
        name = known.__name__
    else:
        library.define(schema)
    if body is not None:
        library.impl(name, body, "CPU")
    library._register_fake(name, fake)
    _libraries.append(library)
