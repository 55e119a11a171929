"""mla-fusion: graph passes that fuse the MLA decode query preparation in vLLM."""

__version__ = "0.1.0"


def register() -> None:
    """Make the flag known to the vLLM of this process.

    vLLM does this itself, through its plugin entry point, when it parses a command line. Code
    that builds `CompilationConfig` or `LLM` calls it first, because vLLM checks their arguments
    before it loads plugins.
    """
    from mla_fusion.plugin import register as register_plugin

    register_plugin()
