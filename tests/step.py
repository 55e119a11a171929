"""A forward pass of vLLM, as the layers in it see it."""


def forward_pass(layers=(), metadata=None, slots=None):
    """vLLM's context of a pass in which all `layers`, by name, have this metadata and these slots.

    Imports vLLM late: see tests/rocm/imitation.py.
    """
    from vllm.forward_context import ForwardContext, override_forward_context

    context = ForwardContext(
        no_compile_layers=dict(layers),
        attn_metadata=dict.fromkeys(layers, metadata),
        slot_mapping=dict.fromkeys(layers, slots),
    )
    return override_forward_context(context)
